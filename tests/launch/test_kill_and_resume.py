"""A rank killed at any moment, also in the middle of a save: the job goes on from its last whole checkpoint.

DS_EXT_TEST_KILLS says how many kills (by default 2, or 20 under DS_EXT_TEST_ALL).
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_ext.engine.checkpoint.folder import check_contents, open_checkpoint
from tests.launch.forked import ForkedJob
from tests.launch.jobs import ROOT
from tests.selection import EVERYTHING, select

KILLS = int(os.environ.get("DS_EXT_TEST_KILLS", "20" if EVERYTHING else "2"))
STEPS = "3000"  # more than are reached; the order of the samples depends on it
LIMIT_S = 60.0  # on one core; an idle host needs 2


@pytest.mark.parametrize("flags", select([[], ["--async-save"]], [["--async-save"]]))
def test_a_rank_killed_at_random_moments(
    config: Path,
    tmp_path: Path,
    free_port: Callable[[], int],
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
) -> None:
    saved, metrics, moments = tmp_path / "saved", tmp_path / "metrics.jsonl", random.Random(KILLS)

    def launch(*flags: str) -> ForkedJob:
        script = [str(ROOT / "train_gpt.py"), "--deepspeed_config", config.name, "--train-iters", STEPS]
        return ForkedJob([[*script, "--eval-iters", "0", *flags]] * 2, tmp_path, port=free_port())

    keep = (*flags, "--save", str(saved), "--save-interval", "1", "--metrics-file", str(metrics))
    resumed_from, in_a_save = None, 0
    for number in range(KILLS):
        with launch(*keep, *(("--load", str(saved)) if resumed_from else ())) as job:
            if resumed_from:
                job.wait_for(
                    f"resumed from {resumed_from} at step {resumed_from.name.removeprefix('step_')},"
                )
            job.wait_for(": saved ")
            time.sleep(moments.random())
            if number % 2:
                _wait_for_a_save(saved)
            os.kill(job.pids[moments.randrange(2)], signal.SIGKILL)
            assert all(rank.returncode != 0 for rank in job.wait(LIMIT_S))
            saved_steps = [int(step) for step in re.findall(r"^step (\d+): saved ", job.text, re.MULTILINE)]
        in_a_save += any(path.name.startswith(".step_") for path in saved.iterdir())
        resumed_from, manifest = open_checkpoint(saved)
        check_contents(resumed_from, manifest)
        # The last reported checkpoint, or the next one, if the rank was killed before its report.
        assert resumed_from.name in (f"step_{saved_steps[-1]}", f"step_{saved_steps[-1] + 1}")
    with capsys.disabled():
        print(f" ({KILLS} kills, {in_a_save} of them in a save)", end="")

    losses: dict[int, list[float]] = {}
    for line in metrics.read_text().splitlines():
        record = json.loads(line)
        losses.setdefault(record["step"], []).append(record["loss"])
    assert sorted(losses) == list(range(1, len(losses) + 1))
    with launch("--metrics-file", str(tmp_path / "straight.jsonl")) as job:
        job.wait_for(f"step {len(losses) + 1:>4}/{STEPS} | ")
    straight = [json.loads(line) for line in (tmp_path / "straight.jsonl").read_text().splitlines()]
    for record in straight[: len(losses)]:
        # Steps that were done again after a kill too.
        assert losses[record["step"]] == pytest.approx(
            [record["loss"]] * len(losses[record["step"]]), rel=1e-6
        )


def _wait_for_a_save(saved: Path) -> None:
    """Until a checkpoint is being written."""
    deadline = time.monotonic() + LIMIT_S
    while not any(path.name.startswith(".step_") for path in saved.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
