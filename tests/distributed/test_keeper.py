"""Process that keeps snapshots: if it is killed while ranks train, the next snapshot starts it again."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn

import ds_ext
from ds_ext.launch.processes import find_launcher
from tests.ranks import Ranks


class Messages(logging.Handler):
    """Warnings of recovery."""

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


def train(rank: int) -> Any:
    """(steps with snapshots by rank after the end of the first keeper, number of warnings) of each rank."""
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "1"  # as from torchrun; nothing restarts these ranks
    config: dict[str, Any] = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "ds_ext": {
            **{"schedule": "1f1b", "pipeline_parallel_size": 2, "print_plan": False},
            "recovery": {"every": 1},
        },
    }
    layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(4)]
    model = ds_ext.PipelineModule(layers, config, loss_fn=nn.MSELoss())
    data = torch.utils.data.TensorDataset(torch.ones(64, 4), torch.ones(64, 4))
    engine, *_ = ds_ext.initialize(model=model, model_parameters=model.parameters(), training_data=data)
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
    assert [held for held, _ in results] == [{0: [3, 4], 1: [3, 4]}] * 2
    assert sum(warnings for _, warnings in results) == 1
