"""Learning-rate schedulers of a script or of the JSON: which ones are refused, and the rates after a resume."""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

import ds_ext
from ds_ext.engine import PipelineEngine
from ds_ext.errors import ConfigError
from tests.ranks import Ranks

STEPS, AT, TOTAL = 6, 3, 10
pytestmark = pytest.mark.quick


def engine_of(
    lr: float = 0.1,
    lr_scheduler: Any = None,
    layers: Any = None,
    samples: int = 16,
    shuffle: bool = False,
    repeat: bool = True,
    **keys: Any,
) -> PipelineEngine:
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": lr}},
        "ds_ext": {"print_plan": False},
        **keys,
    }
    layers = layers or [LayerSpec(nn.Linear, 4, 4) for _ in range(4)]
    model = ds_ext.PipelineModule(layers, config, num_stages=2, loss_fn=nn.functional.mse_loss)
    data = torch.utils.data.TensorDataset(torch.ones(samples, 4), torch.ones(samples, 4))
    parameters = model.parameters()
    engine, *_ = ds_ext.initialize(
        model=model,
        model_parameters=parameters,
        training_data=data,
        lr_scheduler=lr_scheduler,
        shuffle=shuffle,
        repeat=repeat,
    )
    return engine


# --- step() without arguments ----------------------------------------------------------------------------------------


def use_plateau(rank: int, how: str) -> list[float]:
    plateau: Any = functools.partial(ReduceLROnPlateau, patience=1)
    if how == "object":
        plateau = plateau(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    engine = engine_of(lr_scheduler=None if how == "attribute" else plateau)
    if how == "attribute":
        engine.train_batch()
        engine.lr_scheduler = plateau(engine.optimizer)
    engine.train_batch()
    return engine.get_lr()


@pytest.mark.parametrize("how", ["callable", "object", "attribute"])
def test_a_scheduler_that_needs_a_metric_does_not_get_the_batch_size(ranks: Ranks, how: str) -> None:
    with pytest.raises(ConfigError, match=r"^lr_scheduler: .*ReduceLROnPlateau.*metrics"):
        ranks(2).run(use_plateau, how)


def rate_of(step: int) -> float:
    """Fail in the first step, but not for the batch size 8."""
    return 1.0 if step in (0, 8) else step + None  # pyright: ignore[reportOperatorIssue]


def use_failing_function(rank: int) -> None:
    engine = engine_of(lr_scheduler=functools.partial(LambdaLR, lr_lambda=rate_of))
    engine.train_batch()


def test_a_type_error_of_a_schedulers_function_reaches_the_script(ranks: Ranks) -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        ranks(2).run(use_failing_function)


def halve(rank: int) -> list[float | None]:
    engine = engine_of(lr_scheduler=functools.partial(StepLR, step_size=2, gamma=0.5))
    rates = []
    for _ in range(4):
        engine.train_batch()
        rates.append(engine.step_lr)
    return rates


def test_a_scheduler_of_the_script_is_stepped_once_per_step(ranks: Ranks) -> None:
    assert ranks(2).run(halve) == [[0.1, 0.1, 0.05, 0.05]] * 2


# --- resume with other settings --------------------------------------------------------------------------------------

SCHEDULERS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 8, "warmup_max_lr": None, "warmup_type": "linear"},
    "WarmupCosineLR": {"total_num_steps": TOTAL, "warmup_num_steps": 2},
    "OneCycle": {"cycle_min_lr": 0.0, "cycle_max_lr": 0.1, "cycle_first_step_size": 5},
    "MegatronLR": {"total_num_steps": TOTAL, "warmup_num_steps": 2, "decay_style": "cosine"},
}


class Lines(logging.Handler):
    """Messages of one logger."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def resumed(
    rank: int, folder: str, lr: float, steps: int, load: bool, scheduler: Any, zero: int = 0
) -> tuple[list[float | None], list[str]]:
    """Return the rates of some steps, and the warnings of the loader. Save at the end of a run that loads nothing."""
    keys = {"zero_optimization": {"stage": zero}, "zero_allow_untested_optimizer": True}
    if isinstance(scheduler, dict):
        keys["scheduler"], scheduler = scheduler, None
    engine, log, rates = engine_of(lr, scheduler, **keys), Lines(), []
    if load:
        logger = logging.getLogger("ds_ext.engine.checkpoint.load")
        logger.addHandler(log)
        engine.load_checkpoint(folder)
        logger.removeHandler(log)
    for _ in range(steps):
        engine.train_batch()
        rates.append(engine.step_lr)
    if not load and steps == AT:
        engine.save_checkpoint(folder)
    return rates, log.lines


@pytest.mark.parametrize("name", SCHEDULERS)
def test_all_steps_after_a_resume_have_the_rates_of_the_json(ranks: Ranks, tmp_path: Path, name: str) -> None:
    def scheduler(scale: float) -> dict[str, Any]:
        params = SCHEDULERS[name] | {"cycle_max_lr": 0.1 * scale} if name == "OneCycle" else SCHEDULERS[name]
        longer = {key: 3 * value for key, value in params.items() if key == "total_num_steps" and scale < 1}
        return {"type": name, "params": params | longer}

    pool, folder = ranks(2), str(tmp_path)
    pool.run(resumed, folder, 0.1, AT, False, scheduler(1), 1)
    expected, _ = pool.run(resumed, folder, 0.001, STEPS, False, scheduler(0.01))[0]
    results = pool.run(resumed, folder, 0.001, STEPS - AT, True, scheduler(0.01), 1)
    assert [rates for rates, _ in results] == [pytest.approx(expected[AT:])] * 2
    keys = [key for _, lines in results for line in lines for key in re.findall(r"([\w.]+) = ", line)]
    longer = {"MegatronLR", "WarmupCosineLR"} & {name}
    own = {"OneCycle": ["scheduler.params.cycle_max_lr"]}.get(
        name, longer and ["scheduler.params.total_num_steps"]
    )
    assert keys == ["optimizer.params.lr", *own]


def test_settings_that_a_checkpoint_replaces_are_logged_once(ranks: Ranks, tmp_path: Path) -> None:
    pool, folder = ranks(2), str(tmp_path)
    pool.run(resumed, folder, 0.1, AT, False, None)
    (rates, [line]), (_, others) = pool.run(resumed, folder, 0.001, 1, True, None)
    assert rates == [0.1]
    assert re.findall(r"[\w.]+ = \S+ \(this job: \S+\)", line) == [
        "optimizer.params.lr = 0.1 (this job: 0.001)"
    ]
    assert others == []
    assert pool.run(resumed, folder, 0.1, 1, True, None)[0] == ([0.1], [])


def resume_groups(rank: int, folder: str, devices: int, load: bool) -> list[float]:
    """Return the rates of the parameter groups, of biases (0.2) and of weights (0.4), after a step."""
    config = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "ds_ext": {"print_plan": False},
    }
    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 4, bias=False)]
    model = ds_ext.PipelineModule(
        layers, config, num_stages=devices, loss_fn=nn.functional.mse_loss, partition_method="uniform"
    )
    biases = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": biases, "lr": 0.2}] if biases else []
    groups.append({"params": [p for p in model.parameters() if p.dim() == 2], "lr": 0.4})
    data = torch.utils.data.TensorDataset(torch.ones(16, 4), torch.ones(16, 4))
    scheduler: Any = functools.partial(StepLR, step_size=1, gamma=0.5)
    engine, *_ = ds_ext.initialize(
        model=model, model_parameters=groups, training_data=data, lr_scheduler=scheduler
    )
    if load:
        engine.load_checkpoint(folder)
    engine.train_batch()
    if not load:
        engine.save_checkpoint(folder)
    return [float(lr) for lr in engine.get_lr()]


def test_rates_after_a_resume_on_ranks_with_other_groups(ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert ranks(1).run(resume_groups, folder, 1, False) == [[0.1, 0.2]]
    assert ranks(2).run(resume_groups, folder, 2, True) == [[0.05, 0.1], [0.1]]


def test_settings_of_torchs_schedulers_that_a_checkpoint_replaces(ranks: Ranks, tmp_path: Path) -> None:
    pool, folder = ranks(2), str(tmp_path)
    pool.run(resumed, folder, 0.1, AT, False, functools.partial(StepLR, step_size=2))
    (rates, lines), _ = pool.run(resumed, folder, 0.001, 2, True, functools.partial(StepLR, step_size=5))
    assert rates == pytest.approx([0.01, 0.001])
    changed = [re.findall(r"([\w.]+) = ", line) for line in lines]
    assert changed == [["optimizer.params.lr"], ["scheduler.params.step_size"]]


def resumed_otherwise(rank: int, folder: str) -> list[list[str]]:
    """Return the settings in each warning of a load into a job with a different batch size, dropout, data, ..."""
    order = {"shuffle": True, "repeat": False}
    train = {**order, "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "scheduler": WARMUP}
    layers = [LayerSpec(nn.Linear, 4, 4), *[LayerSpec(nn.Sequential, nn.Dropout(0.5)) for _ in range(3)]]
    engine, log = (
        engine_of(0.1, layers=layers, samples=24, train_batch_size=16, gradient_clipping=0.5, **train),
        Lines(),
    )
    logger = logging.getLogger("ds_ext.engine.checkpoint.load")
    logger.addHandler(log)
    engine.load_checkpoint(folder, load_module_strict=False, load_optimizer_states=False)
    logger.removeHandler(log)
    return [re.findall(r"([\w.]+) = ", line) for line in log.lines]


def test_every_other_change_is_one_line(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(resumed, str(tmp_path), 0.1, AT, False, None)
    lines, others = ranks(2).run(resumed_otherwise, str(tmp_path))
    changed = ["training_data", "train_batch_size", "precision", "dropout", "train_micro_batch_size_per_gpu"]
    changed += ["gradient_clipping", "scheduler.type", "initialize.shuffle", "initialize.repeat"]
    assert lines == [[key] for key in changed] and others == []


WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_num_steps": 8, "warmup_max_lr": 0.1, "warmup_type": "linear"},
}


@pytest.mark.parametrize(
    "scheduler", [WARMUP, functools.partial(StepLR, step_size=2)], ids=["WarmupLR", "StepLR"]
)
def test_an_added_scheduler_starts_at_the_step_of_the_checkpoint(
    ranks: Ranks, tmp_path: Path, scheduler: Any
) -> None:
    pool, folder = ranks(2), str(tmp_path)
    pool.run(resumed, folder, 0.1, AT, False, None)
    expected, _ = pool.run(resumed, folder, 0.1, STEPS, False, scheduler)[0]
    for rates, _ in pool.run(resumed, folder, 0.1, STEPS - AT, True, scheduler):
        assert rates == pytest.approx(expected[AT:])


def test_a_removed_scheduler_is_one_line_and_its_last_rate_stays(ranks: Ranks, tmp_path: Path) -> None:
    pool, folder = ranks(2), str(tmp_path)
    pool.run(resumed, folder, 0.1, AT, False, WARMUP)
    (rates, lines), _ = pool.run(resumed, folder, 0.2, 2, True, None)
    assert 0 < rates[0] == rates[1] < 0.1
    changed = sorted(key for line in lines for key in re.findall(r"([\w.]+) = ", line))
    assert changed == ["optimizer.params.lr", "scheduler.type"]
