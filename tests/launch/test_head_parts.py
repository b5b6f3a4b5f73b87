"""train_gpt.py divides a head over the devices of a pipe, and resumes without parts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.forked import run_forked
from tests.launch.jobs import ROOT, tiny_config, write_json
from tests.selection import select

UNTIED, PARTS = "--untie-embeddings-and-output-weights", "--vocabulary-parallel-head"


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+/\d+ \| loss (\S+)", text, re.MULTILINE)]


@pytest.mark.parametrize("tie", select([[UNTIED], []], [[]]))
def test_a_run_with_parts_resumes_without(
    corpus: Path, tmp_path: Path, free_port: Callable[[], int], tie: list[str]
) -> None:
    config = write_json(tmp_path / "parts.json", tiny_config(corpus, schedule="zb_v"))

    def run(folder: str, iterations: int, *more: str) -> list[float]:
        flags = ["--deepspeed_config", str(config), *tie, "--save", folder, "--eval-iters", "1", *more]
        words = [str(ROOT / "train_gpt.py"), *flags, "--train-iters", str(iterations)]
        results = run_forked([words] * 2, tmp_path, port=free_port())
        assert [result.returncode for result in results] == [0, 0], results
        return losses(results[0].stdout)

    whole = run("whole", 4)
    first = run("parts", 2, PARTS)
    rest = run("parts", 4, "--load", "parts")
    assert len(whole) == 4 and first + rest == whole
    assert len(run("parts", 5, "--load", "parts", PARTS)) == 1
