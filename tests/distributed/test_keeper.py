"""Process that keeps snapshots: a new one after its end, and the snapshots that restarted ranks load from it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import signal
import subprocess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn

import ds_ext
from ds_ext.engine import PipelineEngine
from ds_ext.engine.checkpoint.run import this_run
from ds_ext.environment import find_launcher
from tests.ranks import Ranks


class Messages(logging.Handler):
    """Warnings of a module."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def end_keeper() -> None:
    """Kill the keeper, and wait for its end."""
    launcher = find_launcher()
    assert launcher is not None
    words = ["pgrep", "-f", f"keeper_process.py {launcher[1]}$"]
    for process in subprocess.run(words, capture_output=True, check=False).stdout.split():
        with contextlib.suppress(ProcessLookupError):  # one that found another keeper exits
            descriptor = os.pidfd_open(int(process))
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            assert poll.poll(60_000)
            os.close(descriptor)


def engine_of(every: int) -> PipelineEngine:
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "1"  # as from torchrun; nothing restarts these ranks
    config: dict[str, Any] = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "ds_ext": {
            **{"schedule": "1f1b", "pipeline_parallel_size": 2, "print_plan": False},
            "recovery": {"every": every},
        },
    }
    layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(4)]
    model = ds_ext.PipelineModule(layers, config, loss_fn=nn.MSELoss())
    data = torch.utils.data.TensorDataset(torch.ones(64, 4), torch.ones(64, 4))
    return ds_ext.initialize(model=model, model_parameters=model.parameters(), training_data=data)[0]


def train(rank: int) -> Any:
    """(steps with snapshots by rank after the end of the first keeper, number of warnings) of each rank."""
    engine = engine_of(every=1)
    messages = Messages()
    logger = logging.getLogger("ds_ext.engine.recovery.recovery")
    logger.addHandler(messages)
    try:
        engine.recover()
        for step in range(4):
            if step == 2:
                dist.barrier()
                if rank == 0:
                    end_keeper()
                dist.barrier()
            engine.train_batch()
        dist.barrier()
        recovery: Any = engine.recovery
        held = recovery._keeper.snapshots()
        dist.barrier()
        return {rank: sorted(found.steps) for rank, found in held.items()}, len(messages.texts)
    finally:
        logger.removeHandler(messages)
        engine.transport.close()
        if rank == 0:
            end_keeper()


def test_a_killed_keeper_is_reported_and_started_again(ranks: Ranks) -> None:
    results = ranks(2).run(train)
    assert [held for held, _ in results] == [{0: [2, 3], 1: [2, 3]}] * 2
    assert sum(warnings for _, warnings in results) == 1


Start = tuple[int, int | None, int, list[float], list[str]]


def restarted(rank: int, folder: str) -> list[Start]:
    """Start the ranks five times, as torchrun does, with a snapshot every three steps.

    Returns for each start: first step, steps lost by a recovery (None: a checkpoint, or nothing), last complete step,
    losses, and numbers in warnings, with those of the restart first.
    """
    starts: list[Start] = []
    messages = Messages()
    loggers = [logging.getLogger(f"ds_ext.engine.{name}") for name in ("checkpoint.run", "recovery.recovery")]
    for logger in loggers:
        logger.addHandler(messages)
    try:
        for restart, last in enumerate((2, 4, 5, 7, 8)):
            variables = {
                "TORCHELASTIC_ERROR_FILE": f"{folder}/attempt_{restart}/{rank}/error.json",
                "TORCHELASTIC_RESTART_COUNT": str(restart),
            }
            os.environ.update(variables)
            this_run.cache_clear()
            engine = engine_of(every=3)
            recovered = engine.recover(save_dir=f"{folder}/saved")
            if recovered is None:
                engine.load_checkpoint(f"{folder}/saved")
            first, losses = engine.global_steps, []
            while engine.global_steps < last:
                losses.append(float(engine.train_batch()))
                if engine.global_steps == 4:
                    engine.save_checkpoint(f"{folder}/saved")
            engine.transport.close()
            dist.barrier()
            lost = None if recovered is None else recovered.lost_steps
            numbers = [number for text in messages.texts for number in re.findall(r"\d+", text)]
            starts.append((first, lost, engine.global_steps, losses, numbers))
            messages.texts.clear()
        return starts
    finally:
        for logger in loggers:
            logger.removeHandler(messages)
        for name in ("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RESTART_COUNT"):
            os.environ.pop(name, None)
        if rank == 0:
            end_keeper()


def test_restarted_ranks_continue_from_the_newest_snapshot_or_checkpoint(
    ranks: Ranks, tmp_path: Path
) -> None:
    one, other = ranks(2).run(restarted, str(tmp_path))
    assert [start[:3] for start in one] == [(0, None, 2), (0, None, 4), (4, None, 5), (4, None, 7), (6, 0, 8)]
    assert [start[:4] for start in one[2:]] == [start[:4] for start in other[2:]]
    # The first snapshot was due in step 3, and step 1 is lost. Later, a checkpoint is newer than the last snapshot.
    assert [numbers for *_, numbers in one] == [
        [],
        ["1", "0", "3", "1", "1"],
        ["2", "4", "3"],
        ["3", "4", "3"],
        [],
    ]
    losses: dict[int, float] = {}
    for first, _, _, found, _ in one:
        for step, loss in enumerate(found, first + 1):
            assert losses.setdefault(step, loss) == loss
