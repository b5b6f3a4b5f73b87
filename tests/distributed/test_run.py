"""Restarts of ranks in own scripts without snapshots: what load_checkpoint() may load."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

import ds_ext
from ds_ext.engine import PipelineEngine
from tests.ranks import Ranks

pytestmark = pytest.mark.quick


def engine_of() -> PipelineEngine:
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "ds_ext": {"print_plan": False},
    }
    layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(2)]
    model = ds_ext.PipelineModule(layers, config, num_stages=2, loss_fn=nn.functional.mse_loss)
    data = torch.utils.data.TensorDataset(torch.ones(16, 4), torch.ones(16, 4))
    parameters = model.parameters()
    return ds_ext.initialize(model=model, model_parameters=parameters, training_data=data)[0]


def start(rank: int, agent: str, folder: str, steps: int, again: bool, saves: bool = True) -> str | None:
    """Start a script that loads what is there, and saves after every step, as torchrun does.

    Args:
        agent: folder of torchrun.
        again: the processes differ from those of the first start.

    Returns the name of the loaded checkpoint.
    """
    if again and rank == 0:
        edit(Path(agent), process=None)
    torch.distributed.barrier()
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{agent}/attempt_{int(again)}/{rank}/error.json"
    try:
        engine = engine_of()
        path, _ = engine.load_checkpoint(folder)
        for _ in range(steps):
            engine.train_batch()
            if saves:
                engine.save_checkpoint(folder)
        engine.transport.close()
    finally:
        del os.environ["TORCHELASTIC_ERROR_FILE"]
    return path and Path(path).name


def edit(agent: Path, **changes: Any) -> None:
    """Change what a start of the ranks leaves to the next one. All runs in one pool of ranks have the same id."""
    memory = agent / "ds_ext_run.json"
    memory.write_text(json.dumps(json.loads(memory.read_text()) | changes))


def test_a_restart_loads_only_what_its_run_has_written_or_loaded(ranks: Ranks, tmp_path: Path) -> None:
    pool, saved = ranks(2), tmp_path / "saved"
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for agent in (first, second, third):
        agent.mkdir()
    assert pool.run(start, str(first), str(saved), 2, False) == [None] * 2
    assert pool.run(start, str(first), str(saved), 1, True) == ["global_step2"] * 2
    # This run began without a checkpoint, and finds those of another run after its restart.
    pool.run(start, str(second), str(tmp_path / "empty"), 1, False)
    edit(second, id="second")
    assert pool.run(start, str(second), str(saved), 0, True) == [None] * 2
    # This run has loaded a checkpoint and saved none, when another run changes the file `latest`.
    assert pool.run(start, str(third), str(saved), 1, False, False) == ["global_step3"] * 2
    edit(third, id="third")
    (saved / "latest").write_text("global_step1")
    assert pool.run(start, str(third), str(saved), 0, True) == ["global_step3"] * 2


def test_a_run_that_did_not_begin_loads_any_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """As at its first start, because its launcher restarted the ranks while they were set up."""
    pool, folder = ranks(2), str(tmp_path / "saved")
    for agent in ("first", "second"):
        (tmp_path / agent).mkdir()
    pool.run(start, str(tmp_path / "first"), folder, 1, False)
    assert pool.run(start, str(tmp_path / "second"), folder, 0, False) == ["global_step1"] * 2
