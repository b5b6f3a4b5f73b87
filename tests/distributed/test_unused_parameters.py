"""Parameters that no sample of a step uses.

Without ZeRO, AdamW does not move them, as in one process. With ZeRO and half precision, their gradients are zeros.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ds_ext
from tests.losses import learned
from tests.precisions import needs
from tests.ranks import Ranks

SIZE, SAMPLES, STEPS = 4, 8, 4
LR, DECAY = 0.05, 0.5


class Branch(nn.Module):
    """Layer with a branch that samples with a positive first element use."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.always.weight.dtype)
        y = x + torch.tanh(self.always(x))
        if float(x.detach()[0, 0]) > 0:
            y = y + torch.tanh(self.sometimes(y))
        return torch.cat([x[:, :1].detach(), y[:, 1:]], 1)


class Gate(nn.Module):
    """Layer that samples with a positive first element use; it can be tied."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.to(x.dtype) if float(x.detach()[0, 0]) > 0 else x


def samples(used_by: dict[int, list[int]]) -> TensorDataset:
    """Return samples; in step s, those in ``used_by[s]`` use the branches."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES * STEPS, SIZE, generator=generator)
    inputs[:, 0] = -1.0
    for step, numbers in used_by.items():
        inputs[[step * SAMPLES + number for number in numbers], 0] = 1.0
    return TensorDataset(inputs, torch.randn(SAMPLES * STEPS, SIZE, generator=generator))


# All samples, none, only the first data-parallel rank's, none.
DATA = samples({0: list(range(SAMPLES)), 2: [1]})


def layers_of(tied: bool) -> list[Any]:
    layers: list[Any] = [LayerSpec(Branch) for _ in range(4)]
    if tied:
        layers[0] = TiedLayerSpec("gate", Gate)
        layers[3] = TiedLayerSpec("gate", Gate)
    return layers


def train(rank: int, schedule: str, pp: int, options: dict[str, Any], zero: int) -> list[tuple[float, float]]:
    config = {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY, "torch_adam": True}},
        "zero_optimization": {"stage": zero},
        "steps_per_print": 10**9,
        "ds_ext": {"schedule": schedule, "pipeline_parallel_size": pp, "print_plan": False, **options},
    }
    model = ds_ext.PipelineModule(
        layers_of(tied=False), config, loss_fn=nn.functional.mse_loss, partition_method="uniform"
    )
    engine, *_ = ds_ext.initialize(model=model, config=config, training_data=DATA)
    losses = [(float(engine.train_batch()), float(engine.get_global_grad_norm())) for _ in range(STEPS)]
    engine.transport.close()
    return losses


def reference(zeros: bool) -> list[tuple[float, float]]:
    """Train in one process; with ``zeros``, missing gradients are zero, as in ZeRO."""
    modules = []
    for index in range(4):
        torch.manual_seed(1234 + index)
        modules.append(Branch())
    model, losses = nn.Sequential(*modules), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    for step in range(STEPS):
        total = 0.0
        for number in range(step * SAMPLES, (step + 1) * SAMPLES):
            x, y = (part[None] for part in DATA[number])
            loss = nn.functional.mse_loss(model(x), y) / SAMPLES
            loss.backward()
            total += loss.item()
        if zeros:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        losses.append((total, float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))))
        optimizer.step()
        optimizer.zero_grad()
    learned([loss for loss, _ in losses])
    return losses


JOBS = [
    ("1f1b", 2, {}, 1),
    ("1f1b", 2, {}, 2),
    ("bitpipe", 2, {}, 1),
    ("bitpipe", 2, {"eager_gradient_sync": False}, 1),
    ("zb_v", 2, {}, 2),
    ("1f1b", 1, {}, 2),
]


@pytest.mark.parametrize(("schedule", "pp", "options", "dp"), JOBS)
def test_unused_parameters_do_not_move(
    ranks: Ranks, schedule: str, pp: int, options: dict[str, Any], dp: int
) -> None:
    for losses in ranks(pp * dp).run(train, schedule, pp, options, 0):
        for found, expected in zip(losses, reference(zeros=False), strict=True):
            assert found == pytest.approx(expected, rel=1e-5)
    assert reference(zeros=True)[-1] != pytest.approx(reference(zeros=False)[-1], rel=1e-4)


@pytest.mark.parametrize(("schedule", "dp"), [("1f1b", 2), ("bitpipe", 1)])
def test_zero_takes_missing_gradients_as_zeros(ranks: Ranks, schedule: str, dp: int) -> None:
    """A branch that only some data-parallel ranks use does not hang them (DeepSpeed#5792)."""
    for losses in ranks(2 * dp).run(train, schedule, 2, {}, 1):
        for found, expected in zip(losses, reference(zeros=True), strict=True):
            assert found == pytest.approx(expected, rel=1e-5)


# --- half precision, and the warning ---

FIRST = samples({0: [1], 1: [1]})  # of the first data-parallel rank


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.float() - labels.float()).square().mean()


class Detached(nn.Linear):
    """Layer that stops the gradient, so that the layers before it are not trained."""

    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.detach())


def train_detached(rank: int, schedule: str, zero: int) -> dict[int, bool]:
    """Return layer -> whether the weight changed."""
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY, "torch_adam": True}},
        "zero_optimization": {"stage": zero},
        "steps_per_print": 10**9,
        "ds_ext": {"schedule": schedule, "pipeline_parallel_size": 2, "print_plan": False},
    }
    layers = [LayerSpec(nn.Linear, SIZE, SIZE) for _ in range(2)] + [
        LayerSpec(Detached),
        LayerSpec(nn.Linear, SIZE, SIZE),
    ]
    model = ds_ext.PipelineModule(layers, config, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    engine, *_ = ds_ext.initialize(model=model, config=config, training_data=DATA)
    weights = {index: w for s in model.stages for index, w in _weights(model, s).items()}
    before = {index: weight.clone() for index, weight in weights.items()}
    for _ in range(2):
        engine.train_batch()
    engine.transport.close()
    return {index: not torch.equal(weight, before[index]) for index, weight in weights.items()}


def _weights(model: ds_ext.PipelineModule, stage: int) -> dict[int, Tensor]:
    return {index: layer.weight.detach() for index, layer in model.stage_modules(stage).items()}  # pyright: ignore[reportReturnType, reportCallIssue]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_v", "bitpipe"])
def test_layers_before_a_detached_input_do_not_move(ranks: Ranks, schedule: str) -> None:
    moved = {
        index: moves
        for of_rank in ranks(2).run(train_detached, schedule, 0)
        for index, moves in of_rank.items()
    }
    assert moved == {0: False, 1: False, 2: True, 3: True}


def test_zero_moves_the_layers_before_a_detached_input(ranks: Ranks) -> None:
    assert all(all(of_rank.values()) for of_rank in ranks(2).run(train_detached, "1f1b", 1))


def partly_used(
    rank: int, schedule: str, precision: str, eager: bool, tied: bool
) -> tuple[list[tuple[float, float]], dict[str, Tensor], list[str]]:
    """Train, with ties that no sample uses if ``tied``. Returns losses and norms, weights, and names in warnings."""
    names: list[str] = []
    logger, handler = logging.getLogger("ds_ext.engine.weights.gradients"), logging.Handler()
    handler.emit = lambda record: names.append(str(next(iter(record.args or ()))))
    logger.addHandler(handler)
    config = {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10**9,
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
        "ds_ext": {
            **{"schedule": schedule, "pipeline_parallel_size": 2},
            **{"print_plan": False, "eager_gradient_sync": eager},
        },
    }
    model = ds_ext.PipelineModule(layers_of(tied), config, loss_fn=squared_error, partition_method="uniform")
    data = samples({}) if tied else FIRST
    engine, *_ = ds_ext.initialize(model=model, config=config, training_data=data)
    losses = [(float(engine.train_batch()), float(engine.get_global_grad_norm())) for _ in range(2)]
    weights = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    engine.transport.close()
    logger.removeHandler(handler)
    return losses, weights, names


@needs("bf16")
@pytest.mark.parametrize(("schedule", "dp"), [("1f1b", 2), ("bitpipe", 1)])
@pytest.mark.parametrize("eager", [True, False])
def test_bf16_takes_the_gradients_of_one_replica(ranks: Ranks, schedule: str, dp: int, eager: bool) -> None:
    results = ranks(2 * dp).run(partly_used, schedule, "bf16", eager, False)
    expected = ranks(2 * dp).run(partly_used, schedule, "fp32", eager, False)
    for (losses, _, _), (of_fp32, _, _) in zip(results, expected, strict=True):
        for found, other in zip(losses, of_fp32, strict=True):
            assert found == pytest.approx(other, rel=0.03)
    assert len({str(losses) for losses, _, _ in results}) == 1
    first, second = (weights for _, weights, _ in results[:2])  # ranks 0 and 1 hold the same stages
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@needs("bf16")
def test_bf16_ties_of_unused_parameters(ranks: Ranks) -> None:
    results = ranks(2).run(partly_used, "1f1b", "bf16", True, True)
    assert len({str(losses) for losses, _, _ in results}) == 1


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=needs("bf16"))])
@pytest.mark.parametrize(("schedule", "dp"), [("1f1b", 2), ("bitpipe", 1)])
def test_one_warning_names_the_parameter(ranks: Ranks, precision: str, schedule: str, dp: int) -> None:
    named = [names for _, _, names in ranks(2 * dp).run(partly_used, schedule, precision, True, False)]
    assert max(map(len, named)) == 1
    found = {name for names in named for name in names}
    assert found and all(re.match(r"\d+\.sometimes\.\w+ of Branch", name) for name in found)
