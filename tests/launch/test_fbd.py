"""A forward rank is killed: the job says which one and ends, and goes on as it was, and without forward ranks."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch.forked import ForkedJob
from tests.launch.jobs import ROOT, Job, command, tiny_config, write_json
from tests.selection import extensive

LIMIT_S = 60.0  # on one core; an idle host needs 2
STEPS = "2000"  # more than are reached; the order of the samples depends on it
AT = 4  # the step of the checkpoint


@extensive
def test_a_killed_forward_rank(corpus: Path, tmp_path: Path, free_port: Callable[[], int]) -> None:
    saved = tmp_path / "saved"

    def command_of(schedule: str, *flags: str) -> tuple[list[str], Path]:
        """Script and flags, and the file of the metrics."""
        config = write_json(tmp_path / f"{schedule}.json", tiny_config(corpus, schedule=schedule))
        metrics = tmp_path / f"{schedule}_{len(flags)}.jsonl"
        words = [str(ROOT / "train_gpt.py"), "--deepspeed_config", config.name, "--train-iters", STEPS]
        words += ["--eval-iters", "0", "--metrics-file", str(metrics), *flags]
        return words, metrics

    words, straight = command_of("fbd", "--save", str(saved), "--save-interval", str(AT))
    with Job(command("deepspeed", 4, free_port(), *words), tmp_path) as job:
        job.wait_for(f"step {2 * AT}: saved ")
        os.kill(job.ranks()[0], signal.SIGKILL)
        job.seconds_until_gone(LIMIT_S)
        assert job.wait(5) != 0
    told = next(line for line in job.lines if "TransportError" in line)
    assert re.match(r"rank \d stopped: rank 0 .* TransportError: ", told), job.text
    roles = "rank 0 is the forward rank of stage 0|forward ranks 0 2, backward ranks 1 3"
    where = re.search(rf"\((.*, )?(step \d+|saving the checkpoint step_(\d+)); .*({roles})", told)
    assert where is not None, job.text
    # The kill may come during any checkpoint from the one that the test waited for.
    assert where[3] is None or (int(where[3]) >= 2 * AT and int(where[3]) % AT == 0), told

    (saved / "latest").write_text(f"step_{AT}")
    expected = losses(straight)
    assert len(expected) >= 2 * AT
    for schedule, ranks in (("fbd", 4), ("1f1b", 2)):
        words, metrics = command_of(schedule, "--load", str(saved))
        with ForkedJob([words] * ranks, tmp_path, port=free_port()) as job:
            job.wait_for(f"resumed from {saved / f'step_{AT}'} at step {AT},")
            job.wait_for(f"step {2 * AT + 1:>4}/{STEPS} | ")
        went_on = losses(metrics)
        steps = range(AT + 1, 2 * AT + 1)
        assert [went_on[s] for s in steps] == pytest.approx([expected[s] for s in steps], rel=1e-5), schedule


def losses(metrics: Path) -> dict[int, float]:
    """Loss by step."""
    records: list[dict[str, Any]] = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records}
