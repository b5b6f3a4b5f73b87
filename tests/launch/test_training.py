"""Whole trainings by the script: what a person reads, what programs read, and resuming."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch.jobs import ROOT, Job, command

SCRIPT = str(ROOT / "train_gpt.py")
KEYS = [
    *("step", "loss", "grad_norm", "lr", "iter_time_s", "tokens_per_s", "consumed_samples", "schedule"),
    *("transport", "peak_memory_bytes", "bubble_measured", "bubble_simulated"),
]


@pytest.fixture
def train(config: Path, tmp_path: Path, free_port: Callable[[], int]) -> Callable[..., Job]:
    """Run train_gpt.py on two ranks to its end: train(launcher, flags...)."""

    def run(launcher: str, *flags: str) -> Job:
        words = command(launcher, 2, free_port(), SCRIPT, "--deepspeed_config", config.name, *flags)
        with Job(words, tmp_path) as job:
            job.seconds_until_gone(240)
            assert job.wait(5) == 0, job.text
        return job

    return run


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def launcher_free(lines: list[str]) -> list[str]:
    """The lines that are not the launcher's own."""
    return [line for line in lines if not re.search(r"\[(runner|launch)\.py|torch/distributed/run\.py", line)]


def test_training_shows_its_own_lines_only_and_resumes_where_it_was(
    train: Callable[..., Job], tmp_path: Path
) -> None:
    whole, halves, saved = tmp_path / "whole.jsonl", tmp_path / "metrics" / "halves.jsonl", tmp_path / "saved"
    once = train("deepspeed", "--train-iters", "6", "--metrics-file", str(whole), "--eval-iters", "0")
    first = train(
        *("torchrun", "--train-iters", "3", "--metrics-file", str(halves), "--save", str(saved)),
    )
    again = next(line for line in first.lines if "train on" in line).split("train on", 1)[1].split()
    assert again[:3] == ["torchrun", "--nproc_per_node", "2"]
    assert again[-4:] == ["--load", str(saved), "--train-iters", "6"]
    second = train("torchrun", *again[again.index(SCRIPT) + 3 :])

    at_once, in_two = records(whole), records(halves)
    assert (
        [record["step"] for record in at_once] == [record["step"] for record in in_two] == [1, 2, 3, 4, 5, 6]
    )
    for one, other in zip(at_once, in_two, strict=True):
        assert list(one) == list(other) == KEYS
        for key in ("loss", "grad_norm", "lr", "consumed_samples"):
            assert one[key] == pytest.approx(other[key], rel=1e-6), (key, one["step"])
    for record in at_once:
        numbers = [value for value in record.values() if not isinstance(value, str)]
        assert all(math.isfinite(value) for value in numbers), record
        assert record["schedule"] == "bitpipe" and record["transport"] == "torch"
        assert record["consumed_samples"] == record["step"] * 8
    assert "at step 3, 24 samples consumed" in second.text

    for job, recorded in ((once, at_once), (first, in_two[:3]), (second, in_two[3:])):
        printed = [line for line in job.lines if re.match(r"step +\d+/\d+ \| loss", line)]
        assert [line.split(" | ")[1] for line in printed] == [f"loss {r['loss']:.4f}" for r in recorded]
        lines = launcher_free(job.lines)
        plan_end = next(number for number, line in enumerate(lines) if "its backward" in line)
        assert lines[0].startswith("schedule  bitpipe")
        known = re.compile(
            r"step |resumed from |(final|validation) loss |next: |      (see the order|train on) "
        )
        assert all(known.match(line) for line in lines[plan_end + 1 :]), job.text
        assert re.search(
            r"(final|validation) loss [\d.]+, (not )?below the unigram entropy of [\d.]+ nats", job.text
        )
        assert "python -m ds_ext show bitpipe --stages 2 --micro-batches 4" in job.text


def test_everything_is_logged_on_demand(config: Path, tmp_path: Path, free_port: Callable[[], int]) -> None:
    words = command(
        "torchrun", 2, free_port(), SCRIPT, "--deepspeed_config", config.name, "--train-iters", "1"
    )
    with Job(words, tmp_path, DS_EXT_LOG_LEVEL="info") as job:
        job.seconds_until_gone(240)
        assert job.wait(5) == 0, job.text
    assert "[INFO]" in job.text and "before it has started" in job.text
    assert "FutureWarning" in job.text
