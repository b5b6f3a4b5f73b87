"""Restarts of ranks in own scripts without snapshots: what load_checkpoint() may load."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

import ds_ext
from ds_ext.engine import PipelineEngine
from ds_ext.engine.checkpoint.folder import publish, start_writing
from ds_ext.engine.checkpoint.run import this_run
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


class Warnings(logging.Handler):
    """Arguments of log records."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.args)


def start(
    rank: int, agent: str, folder: str, steps: int, again: bool = False, saves: bool = True
) -> tuple[str | None, list[Any]]:
    """Start a script that loads what is there, and saves after every step, as torchrun does.

    Args:
        agent: folder of torchrun.

    Returns the name of the loaded checkpoint, and the warnings: (folder, names of checkpoints), (first lost step,
    last lost step) or (missing file, name of the loaded checkpoint).
    """
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{agent}/attempt_{int(again)}/{rank}/error.json"
    logger, warnings = logging.getLogger("ds_ext.engine.checkpoint.run"), Warnings()
    logger.addHandler(warnings)
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
        logger.removeHandler(warnings)
    return path and Path(path).name, warnings.found


def test_a_restart_loads_only_what_its_run_has_written_or_loaded(ranks: Ranks, tmp_path: Path) -> None:
    def run(agent: str, folder: str, *args: Any) -> tuple[str | None, list[Any]]:
        (tmp_path / agent).mkdir(exist_ok=True)
        first, second = ranks(2).run(start, str(tmp_path / agent), str(tmp_path / folder), *args)
        assert first[0] == second[0] and second[1] == []
        return first

    assert run("first", "saved", 2) == (None, [])
    assert run("first", "saved", 1, True) == ("global_step2", [])
    # This run began without a checkpoint, and finds those of another run after its restart.
    assert run("second", "empty", 3, False, False) == (None, [])
    assert run("second", "saved", 1, True, False) == (None, [(1, 2)])
    # This run has loaded a checkpoint and saved none, when another run changes the file `latest`.
    assert run("third", "saved", 2, False, False) == ("global_step3", [])
    (tmp_path / "saved" / "latest").write_text("global_step1")
    assert run("third", "saved", 1, True, False) == ("global_step3", [(4, 4)])
    # This run was restarted before its first step, and loads any checkpoint, as a first start does.
    assert run("fourth", "saved", 0) == ("global_step1", [])
    assert run("fourth", "saved", 1, True) == (
        "global_step1",
        [(tmp_path / "saved", "global_step2, global_step3")],
    )
    # The newest checkpoint is loaded if `latest` is missing.
    for change in (lambda latest: latest.unlink(), lambda latest: latest.symlink_to("gone")):
        change(tmp_path / "saved" / "latest")
        loaded = ("global_step2", [(tmp_path / "saved" / "latest", "global_step2")])
        assert run("fifth", "saved", 0) == loaded


def saved_step(rank: int, folder: str) -> int:
    return this_run().saved_step(Path(folder))


def test_the_step_of_the_newest_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    jobs: list[dict[str, Any]] = [{"step": 3}, {}, {"step": 2}]  # the second is that of a converted model
    steps = [ranks(1).run(saved_step, str(tmp_path))]
    for number, job in enumerate(jobs):
        publish(start_writing(tmp_path, str(number)), str(number), {"files": {}, "job": job})
        steps.append(ranks(1).run(saved_step, str(tmp_path)))
    assert steps == [[0], [3], [0], [2]]
