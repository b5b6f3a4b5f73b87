"""Parameters without dimensions, such as CLIP's ``logit_scale``: the training equals that of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

import ds_ext
from ds_ext.engine import PipelineEngine
from tests.losses import learned
from tests.precisions import needs
from tests.ranks import Ranks

STEPS, AT = 4, 2


class Scaled(nn.Module):
    """Residual layer with a learned gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.linear(x))


class Gate(nn.Module):
    """Layer whose only parameter has no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x.to(self.scale.dtype)


def specs() -> list[LayerSpec]:
    return [LayerSpec(Gate), *(LayerSpec(Scaled, 4) for _ in range(6)), LayerSpec(Gate)]


def pair(step: int, number: int) -> tuple[Tensor, Tensor]:
    x = torch.sin(torch.arange(8.0).view(2, 4) * (10 * step + number + 1))
    return x, x.square()


class Steps:
    """Eight micro-batches per step, by id."""

    def __init__(self, step: int = 0) -> None:
        self.step = step

    def get(self, micro_batch: int) -> tuple[Tensor, Tensor]:
        return pair(self.step, micro_batch)

    def advance(self, micro_batches: int) -> None:
        self.step += 1


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def plain_run() -> tuple[list[float], list[float]]:
    layers = []
    for index, spec in enumerate(specs()):
        torch.manual_seed(1234 + index)
        layers.append(spec.build())
    model, losses, norms = nn.Sequential(*layers), [], []
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        pairs = [pair(step, number) for number in range(8)]
        loss = torch.stack([nn.functional.mse_loss(model(x), y) for x, y in pairs]).mean()
        loss.backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return learned(losses), norms


def engine_of(schedule: str, devices: int, zero: int, precision: str = "fp32") -> PipelineEngine:
    config = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": zero},
        "ds_ext": {"schedule": schedule, "pipeline_parallel_size": devices, "print_plan": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    model = ds_ext.PipelineModule(specs(), config, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    return ds_ext.initialize(model=model, model_parameters=model.parameters())[0]


def train(rank: int, schedule: str, devices: int, zero: int, folder: str) -> tuple[list[float], list[float]]:
    """Return losses and norms of all steps. Save halfway."""
    engine, batches, losses, norms = engine_of(schedule, devices, zero), Steps(), [], []
    for step in range(STEPS):
        if step == AT:
            engine.save_checkpoint(folder)
        losses.append(float(engine.train_batch(batches)))
        norms.append(float(engine.get_global_grad_norm()))
    assert all(p.dim() == 0 for name, p in engine.module.named_parameters() if "scale" in name)
    return losses, norms


def resume(rank: int, schedule: str, devices: int, zero: int, folder: str) -> list[float]:
    engine, batches = engine_of(schedule, devices, zero), Steps(AT)
    engine.load_checkpoint(folder)
    return [float(engine.train_batch(batches)) for _ in range(STEPS - AT)]


JOBS = [
    ("1f1b", 4, 0, "bitpipe", 4, 1),
    ("zb_v", 4, 0, "1f1b", 2, 1),
    ("bitpipe_zb", 4, 1, "interleaved", 2, 0),
    ("dpp", 4, 0, "dualpipev", 4, 0),
    ("fbd", 2, 1, "1f1b", 4, 0),
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job[0]}-{job[2]}")
def test_training_and_resume(ranks: Ranks, tmp_path: Path, job: tuple[Any, ...]) -> None:
    losses, norms = plain_run()
    pool, folder = ranks(4), str(tmp_path)
    for got_losses, got_norms in pool.run(train, *job[:3], folder):
        assert got_losses == pytest.approx(losses, rel=1e-4)
        assert got_norms == pytest.approx(norms, rel=1e-4)
    for resumed in pool.run(resume, *job[3:], folder):
        assert resumed == pytest.approx(losses[AT:], rel=1e-4)


def train_in_bf16(rank: int) -> list[float]:
    engine, batches = engine_of("1f1b", 2, 1, "bf16"), Steps()
    return [float(engine.train_batch(batches)) for _ in range(STEPS)]


@needs("bf16")
def test_half_precision(ranks: Ranks) -> None:
    losses, _ = plain_run()
    assert ranks(4).run(train_in_bf16)[0] == pytest.approx(losses, rel=0.05)


class Open(nn.Module):
    """Layer with a gate and a weight without elements."""

    def __init__(self, gated: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5), requires_grad=gated)
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x.to(self.scale.dtype) + self.empty.sum()


def train_without_elements(
    rank: int, section: dict[str, Any], form: str, gated: bool, folder: str
) -> tuple[float, float]:
    """Return the gate of this rank after a step, and after loading and another one."""
    config = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "ds_ext": {"schedule": "1f1b", "pipeline_parallel_size": 2, "print_plan": False},
        **section,
    }
    layers = [LayerSpec(Open), LayerSpec(Open, gated)]
    model = ds_ext.PipelineModule(layers, config, loss_fn=lambda y, _: y.float().mean())
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices, gates = (
        [one for one in named if (one[1].dim() > 1) == is_matrix] for is_matrix in (True, False)
    )
    groups: Any = [{"params": matrices, "weight_decay": 0.1}, {"params": gates, "weight_decay": 0.0}]
    if form == "parameters":
        groups = [p for _, p in named]
    elif form == "groups":
        groups = [{**group, "params": [p for _, p in group["params"]]} for group in groups]
    engine, *_ = ds_ext.initialize(model=model, config=config, model_parameters=groups)
    batch = [(torch.ones(2, 4), torch.zeros(2))]
    engine.train_batch(iter(batch))
    gate = next(p for name, p in model.named_parameters() if "scale" in name)
    after = float(gate)
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    engine.train_batch(iter(batch))
    return after, float(gate)


@pytest.mark.parametrize(
    ("section", "form", "gated"),
    [
        ({}, "groups", True),
        ({}, "named groups", True),
        ({}, "groups", False),
        ({"bf16": {"enabled": True}}, "groups", True),
        ({"bf16": {"enabled": True}}, "groups", False),
        ({"bf16": {"enabled": True}}, "parameters", False),
        ({"zero_optimization": {"stage": 1}}, "groups", True),
        ({"zero_optimization": {"stage": 1}}, "groups", False),
    ],
    ids=lambda value: "-".join(value) or "fp32" if isinstance(value, dict) else str(value),
)
def test_parameters_without_elements(
    ranks: Ranks, tmp_path: Path, section: dict[str, Any], form: str, gated: bool
) -> None:
    """The loss is the product of the gates, so the gradient of a gate is the other gate."""
    first, second = ranks(2).run(train_without_elements, section, form, gated, str(tmp_path))
    if gated:
        assert (first, second) == ((0.0, 0.0), (0.0, 0.0))  # 0.5 - 1.0 * 0.5
    else:
        assert (first, second) == ((0.0, -0.5), (0.5, 0.5))
