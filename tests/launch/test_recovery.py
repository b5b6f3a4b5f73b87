"""Ranks killed at any point under torchrun --max-restarts: the job ends with the weights of an undisturbed one."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from ds_ext.engine.checkpoint.file import TensorFile, read_plain
from ds_ext.observe.run_record import read_starts
from tests.launch.forked import ForkedJob
from tests.launch.jobs import ROOT, Job, tiny_config, write_json
from tests.selection import EVERYTHING, extensive, select

STEPS = 7
LIMIT_S = 900.0  # six starts of two ranks; an idle host needs 100
KILLED = str(ROOT / "tests" / "launch" / "killed.py")
Kill = tuple[int, int, str]

# One attempt each, and the step from which the next attempt continues; 0: from the beginning.
KILLS: list[tuple[Kill, int]] = [
    ((1, 2, "snapshot"), 1),
    ((1, 2, "recover"), 1),
    ((1, 7, "save"), 6),  # the checkpoint of the last step is not missing
]
if EVERYTHING:
    KILLS[:0] = [((0, 1, "ForwardPass"), 0)]
    KILLS[-1:-1] = [
        ((0, 4, "OptimizerStep"), 3),
        ((1, 5, "after OptimizerStep"), 4),
        ((0, 6, "ReduceGrads"), 5),
        ((1, 7, "ForwardPass"), 6),
    ]
FORWARD_KILLS: list[tuple[Kill, int]] = [((0, 3, "ForwardPass"), 2), ((1, 5, "OptimizerStep"), 4)]
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "bitpipe fp32 ZeRO 1, overlap": ("bitpipe", {"zero_optimization": {"stage": 1}}),
    **(
        {
            "1f1b bf16 ZeRO 0": ("1f1b", {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}),
            "bitpipe_zb bf16 ZeRO 1": (
                "bitpipe_zb",
                {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
            ),
            "dpp fp32 ZeRO 0": ("dpp", {"zero_optimization": {"stage": 0}}),
            "fbd fp32 ZeRO 0": ("fbd", {"zero_optimization": {"stage": 0}}),
            "1f1b fp32 ZeRO 0": ("1f1b", {"zero_optimization": {"stage": 0}}),
            "bitpipe bf16 ZeRO 0": (
                "bitpipe",
                {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}},
            ),
        }
        if EVERYTHING
        else {}
    ),
}


def same_checkpoints(one: Path, other: Path) -> None:
    """Assert that all weights and optimizer states of two checkpoints are bitwise equal."""
    names = [sorted(path.name for path in folder.iterdir()) for folder in (one, other)]
    assert names[0] == names[1]
    for name in names[0]:
        if name.endswith(".safetensors"):
            files = TensorFile(one / name), TensorFile(other / name)
            assert files[0].names == files[1].names
            pairs = [(files[0].read_all(key), files[1].read_all(key)) for key in files[0].names]
        elif name.startswith("layer_"):
            states = read_plain(one / name), read_plain(other / name)
            assert list(states[0]) == list(states[1])
            pairs = [(states[0][key], states[1][key]) for key in states[0]]
        else:
            continue
        assert all(torch.equal(first, second) for first, second in pairs), name


def flags(config: Path, saved: Path) -> list[str]:
    steps = ["--train-iters", str(STEPS), "--eval-iters", "0"]
    return ["--deepspeed_config", str(config), "--save", str(saved), *steps]


@pytest.mark.parametrize("job", JOBS)
def test_every_kill_ends_with_the_same_weights(
    corpus: Path, tmp_path: Path, free_port: Callable[[], int], job: str
) -> None:
    schedule, more = JOBS[job]
    # Rank 0 only computes forwards, rank 1 only backwards.
    ranks, kills = (4, FORWARD_KILLS) if schedule == "fbd" else (2, KILLS)
    config = {**tiny_config(corpus), **more}
    config["ds_ext"] |= {"schedule": schedule}
    if "overlap" in job:
        config["ds_ext"]["overlap_across_steps"] = True
        kills = sorted([*KILLS, ((0, 3, "gather"), 2)], key=lambda kill: kill[0][1])
    plain = write_json(tmp_path / "plain.json", config)
    config["ds_ext"]["recovery"] = {"every": 1}
    with_recovery = write_json(tmp_path / "recovery.json", config)
    words = [str(ROOT / "train_gpt.py"), *flags(plain, tmp_path / "plain")]
    with ForkedJob([words] * ranks, tmp_path, port=free_port()) as undisturbed:
        assert [rank.returncode for rank in undisturbed.wait()] == [0] * ranks, undisturbed.text

    words = ["torchrun", "--nproc_per_node", str(ranks), "--max-restarts", str(len(kills)), KILLED]
    words += [*flags(with_recovery, tmp_path / "killed"), "--metrics-file", str(tmp_path / "steps.jsonl")]
    with Job(words, tmp_path, DS_EXT_TEST_KILLS=json.dumps([kill for kill, _ in kills])) as killed:
        assert killed.wait(LIMIT_S) == 0, killed.text
        launcher = killed.process.pid
    recovered = [int(step) for step in re.findall(r"^recovered at step (\d+) ", killed.text, re.MULTILINE)]
    # Without a snapshot there is nothing to recover, and the attempt killed in "recover" does not report.
    steps = {
        restart: step
        for restart, (_, step) in enumerate(kills, 1)
        if step and (restart == len(kills) or kills[restart][0][2] != "recover")
    }
    assert recovered == list(steps.values()), killed.text
    assert len(re.findall("^schedule  ", killed.text, re.MULTILINE)) == 1  # not again after a recovery
    lost = re.findall(r"\(restart (\d)\): (\d+) steps? lost", killed.text)
    assert lost == [(str(restart), "0") for restart in steps]
    assert keepers_of(launcher) == []
    same_checkpoints(tmp_path / "plain" / f"step_{STEPS}", tmp_path / "killed" / f"step_{STEPS}")
    events = [event for start in read_starts(tmp_path / "steps.run.json") for event in start["checkpoints"]]
    exited = {event["restart"]: event["exited"] for event in events if event["event"] == "recovered"}
    assert exited == {restart: [kills[restart - 1][0][0]] for restart in steps}
    rows = check_steps(tmp_path / "steps.jsonl", STEPS)
    # These steps had been logged.
    assert len(rows) == STEPS + sum(point in ("save", "snapshot") for (_, _, point), _ in kills)
    recovered_from = {row["step"] - 1 for row in rows if row["recovered_from_step"] is not None}
    assert recovered_from == set(recovered)
    # The first step of a start has no step before it.
    assert all(
        (row["snapshot_s"] is None) == (row["step"] == 1 or row["recovered_from_step"] is not None)
        for row in rows
    )
    assert all(row["recovered_from_step"] in (None, row["step"] - 1) for row in rows)


class Ranks(Protocol):
    """Job whose ranks can be killed."""

    @property
    def text(self) -> str:
        """Output so far."""
        ...

    def ranks(self) -> dict[int, int]:
        """Return rank -> process id."""
        ...


def kill_at_random_moments(
    job: Ranks, ranks: int, metrics: Path, targets: list[int], moments: random.Random
) -> None:
    """Kill one rank per target: after that number of steps, but every third one while the ranks start again."""
    killed: set[int] = set()
    rows = 0
    for number, target in enumerate(targets):
        starting = number % 3 == 2
        deadline = time.monotonic() + LIMIT_S
        while True:
            found = job.ranks()
            if len(found) == ranks and (
                not killed & set(found.values()) if starting else _rows(metrics) >= max(target, rows + 3)
            ):
                break
            assert time.monotonic() < deadline, job.text
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 5 if starting else 0.3))
        killed = set(found.values())
        rank = moments.randrange(ranks)
        try:
            os.kill(found[rank], signal.SIGKILL)
        except ProcessLookupError:
            raise AssertionError(f"rank {rank} had exited:\n{job.text}") from None
        # The other ranks may still finish the step that they are in.
        rows = _rows(metrics)


def _rows(metrics: Path) -> int:
    return metrics.read_text().count("\n") if metrics.exists() else 0


def check_steps(metrics: Path, steps: int) -> list[dict[str, Any]]:
    """Assert that the metrics have every step, twice only if it ran again, with the same loss. Returns their rows."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses: dict[int, float] = {}
    for row in rows:
        again = row["recovered_from_step"] == row["step"] - 1 and row["step"] == len(losses)
        assert row["step"] == len(losses) + 1 or again, row
        assert losses.setdefault(row["step"], row["loss"]) == row["loss"]
    assert len(losses) == steps
    return rows


def check_recoveries(text: str, metrics: Path, restarts: int, steps: int) -> None:
    """Assert that every recovery lost no step, and that the metrics have every step."""
    found = re.findall(r"recovered at step \d+ .*\(restart (\d+)\): (\d+) steps? lost", text)
    assert found and {lost for _, lost in found} == {"0"}, text
    assert int(found[-1][0]) <= restarts
    check_steps(metrics, steps)


@extensive
@pytest.mark.parametrize("job", JOBS)
def test_kills_at_random_moments(
    corpus: Path, tmp_path: Path, free_port: Callable[[], int], job: str
) -> None:
    schedule, more = JOBS[job]
    kills, steps, moments = 8, 800, random.Random(job)
    config = {**tiny_config(corpus), **more}
    config["ds_ext"] |= {"schedule": schedule, "pipeline_parallel_size": 2 if schedule == "fbd" else 4}
    config["ds_ext"]["train"]["num_layers"] = 8
    config["train_batch_size"] = 16
    plain = write_json(tmp_path / "plain.json", config)
    config["ds_ext"]["recovery"] = {"every": 1}
    with_recovery = write_json(tmp_path / "recovery.json", config)

    def script(config: Path, saved: str) -> list[str]:
        words = [
            str(ROOT / "train_gpt.py"),
            "--deepspeed_config",
            str(config),
            "--save",
            str(tmp_path / saved),
        ]
        return [*words, "--train-iters", str(steps), "--eval-iters", "0"]

    with ForkedJob([script(plain, "plain")] * 4, tmp_path, port=free_port()) as undisturbed:
        assert [rank.returncode for rank in undisturbed.wait()] == [0] * 4, undisturbed.text
    metrics = tmp_path / "steps.jsonl"
    words = [
        "torchrun",
        "--nproc_per_node",
        "4",
        "--max-restarts",
        str(kills),
        *script(with_recovery, "killed"),
    ]
    with Job([*words, "--metrics-file", str(metrics)], tmp_path) as killed:
        targets = [steps * number // (kills + 1) for number in range(1, kills + 1)]
        kill_at_random_moments(killed, 4, metrics, targets, moments)
        assert killed.wait(LIMIT_S) == 0, killed.text
        launcher = killed.process.pid
    check_recoveries(killed.text, metrics, kills, steps)
    assert keepers_of(launcher) == []
    same_checkpoints(tmp_path / "plain" / f"step_{steps}", tmp_path / "killed" / f"step_{steps}")


def keepers_of(launcher: int) -> list[str]:
    """Return the keepers of a launcher, after a moment in which they may exit."""
    time.sleep(0.5)
    words = ["pgrep", "-f", f"keeper_process.py {launcher}$"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()


OWN = """
import os, sys, torch, ds_ext
from ds_ext.launch import process
from ds_ext.environment import find_launcher

class Layer(torch.nn.Linear):
    def __init__(self):
        torch.manual_seed(7)
        super().__init__(4, 4)

def main():
    ds_ext.init_distributed()
    config = {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "ds_ext": {"schedule": "1f1b", "pipeline_parallel_size": 2, "print_plan": False, "recovery": {"every": 2}},
    }
    layers = [Layer() for _ in range(4)]
    model = ds_ext.PipelineModule(layers, config, loss_fn=torch.nn.functional.mse_loss)
    samples = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(samples, samples.roll(1, 1))
    engine, *_ = ds_ext.initialize(model=model, model_parameters=model.parameters(), training_data=data)
    recovered = engine.recover() if "recover" in sys.argv else None
    if recovered is not None and engine.global_rank == 0:
        print("result", recovered.step, recovered.restart, recovered.lost_steps, *recovered.exited)
    elif engine.global_rank == 0:
        print("nothing", engine.global_steps)
    while engine.global_steps < 9:
        loss = float(engine.train_batch())
        if engine.global_rank == 0:
            print(engine.global_steps, loss, flush=True)
        if engine.global_steps == 5 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and engine.global_rank == 1:
            if "keeper" in sys.argv:  # the one of this job
                launcher = find_launcher()[1]
                os.system(f"pkill -9 -f 'keeper_process.py {launcher}$'")
            os.kill(os.getpid(), 9)

process.run(main)
"""


@extensive
@pytest.mark.parametrize("calls", [True, False])
def test_an_own_script_recovers_and_one_that_does_not_is_stopped(tmp_path: Path, calls: bool) -> None:
    """With a snapshot every two steps, the fifth step runs again, with the same loss."""
    (tmp_path / "own.py").write_text(OWN)
    words = [
        "torchrun",
        "--nproc_per_node",
        "2",
        "--max-restarts",
        "1",
        "own.py",
        *(["recover"] if calls else []),
    ]
    with Job(words, tmp_path) as job:
        code = job.wait(LIMIT_S)
    if not calls:
        assert code != 0 and any(
            "error: ds_ext.recovery" in line and "engine.recover()" in line for line in job.lines
        )
        return
    assert code == 0 and "result 4 1 1 1" in job.lines, job.text
    assert re.search(r"^recovered at step 4 .*\(restart 1\): 1 step ", job.text, re.MULTILINE)
    found = re.findall(r"^(\d) ([\d.e-]+)$", job.text, re.MULTILINE)
    assert [int(step) for step, _ in found] == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9]
    assert found[4] == found[5]


@pytest.mark.parametrize("loses", select([False, True], [True]))
def test_an_own_script_below_a_wrapper_recovers_or_says_what_it_lost(tmp_path: Path, loses: bool) -> None:
    """A shell script runs each rank as its child. The steps are lost if the keeper ends with a rank."""
    (tmp_path / "own.py").write_text(OWN)
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text(f'#!/bin/sh\n{sys.executable} "$@"\nexit $?\n')
    wrapper.chmod(0o755)
    torchrun = ["torchrun", "--nproc_per_node", "2", "--max-restarts", "1", "--no-python", str(wrapper)]
    with Job([*torchrun, "own.py", "recover", *["keeper"] * loses], tmp_path) as job:
        assert job.wait(LIMIT_S) == 0, job.text
    lost = [line for line in job.lines if "WARNING" in line and "restart 1 " in line]
    assert len(lost) == loses and job.lines.count("nothing 0") == 1 + loses, job.text
    assert ("result 4 1 1 1" in job.lines) == (not loses), job.text
    # Rank 1 is killed after step 5, before or after rank 0 begins the next one.
    assert bool(re.findall(r" steps 1 to [45] are lost", job.text)) == loses, job.text
    assert "stopped: the launcher exited." not in job.lines
