"""Rank of ``bench recovery``: trains a small model and writes the time of every event.

python -m benchmarks.recovery_ranks FOLDER KIND SCHEDULE MICRO_BATCHES SAVE_INTERVAL STEPS
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_WIDTH, _LAYERS, _ROWS = 256, 16, 16


class Events:
    """Lines of JSON with the time in seconds since 1970, appended with one write each."""

    def __init__(self, path: Path, rank: int, start: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
        self._common = {"rank": rank, "start": start, "pid": os.getpid()}

    def add(self, event: str, at: float | None = None, **values: Any) -> None:
        """Add an event; ``at`` None: now."""
        line = {"event": event, "at": time.time() if at is None else at, **self._common, **values}
        os.write(self._file, (json.dumps(line) + "\n").encode())


def main() -> None:
    """Train until the last step, from memory, from disk or from the beginning."""
    folder, kind, schedule, micro_batches, save_interval, steps = sys.argv[1:]
    path = Path(folder)
    # A second launch writes to the same file.
    start = int(any('"start": 0' in line for line in (path / "events.jsonl").read_text().splitlines()))
    start = max(start if kind != "host memory" else 0, int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    events = Events(path / "events.jsonl", int(os.environ["RANK"]), start)

    import deepspeed  # noqa: F401
    import torch
    from torch import nn

    from ds_ext.engine import PipelineModule, init_distributed, initialize
    from ds_ext.engine.recovery.recovery import started_s

    from .rivals import SameBatches

    events.add("started", at=started_s())
    events.add("imported")
    init_distributed()
    name, _, options = schedule.partition(":")
    section: dict[str, Any] = {
        "schedule": name,
        "schedule_options": dict(option.split("=") for option in options.split(",") if option),
        "pipeline_parallel_size": int(os.environ["WORLD_SIZE"]),
        "print_plan": False,
    }
    if kind == "host memory":
        section["recovery"] = {"every": 1}
    config = {
        "train_micro_batch_size_per_gpu": _ROWS,
        "train_batch_size": _ROWS * int(micro_batches),
        "steps_per_print": 10**9,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "ds_ext": section,
    }
    layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)]
    model = PipelineModule(layers, config, loss_fn=nn.MSELoss(), partition_method="uniform", seed_layers=True)
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    events.add("ready")
    batch = torch.ones(_ROWS, _WIDTH)
    batches = SameBatches([(batch, batch)] * int(micro_batches))
    recovered = engine.recover(batches)
    if recovered is None and start:
        engine.load_checkpoint(folder)
    events.add("loaded", step=engine.global_steps)
    while engine.global_steps < int(steps):
        engine.train_batch(batches)
        events.add("step", step=engine.global_steps)
        if engine.global_steps % int(save_interval) == 0:
            engine.save_checkpoint(folder)


if __name__ == "__main__":
    from ds_ext.launch import process

    process.run(main)
