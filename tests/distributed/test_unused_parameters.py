"""Parameters that no sample of a step uses: without ZeRO, AdamW does not move them, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ds_ext
from tests.ranks import Ranks

SIZE, SAMPLES, STEPS = 4, 8, 4
LR, DECAY = 0.05, 0.5


class Branch(nn.Module):
    """Layer with a branch that samples with a positive first element use."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.tanh(self.always(x))
        if float(x.detach()[0, 0]) > 0:
            y = y + torch.tanh(self.sometimes(y))
        return torch.cat([x[:, :1].detach(), y[:, 1:]], 1)


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
        layers[0] = TiedLayerSpec("branch", Branch, tied_weight_attr=["sometimes.weight"])
        layers[3] = TiedLayerSpec("branch", Branch, tied_weight_attr=["sometimes.weight"])
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
