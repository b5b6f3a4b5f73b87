"""Faults of other pipelines (docs/deepspeed_issues.md) that no other file tests; and each row there names a test."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

import ds_ext
from ds_ext.engine import MicroBatches, PipelineEngine
from tests.ranks import Ranks

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs/deepspeed_issues.md").read_text())
LAYERS, SAMPLES, LR = 4, 16, 0.5
pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("file", "name"), sorted(set(ROWS)))
def test_every_row_names_a_test(file: str, name: str) -> None:
    assert f"def {name}(" in (ROOT / file).read_text()


def samples() -> list[tuple[Tensor, Tensor]]:
    x = torch.sin(torch.arange(4.0 * SAMPLES).view(SAMPLES, 4))
    return list(zip(x, 3 * x.square(), strict=True))


class Counting(nn.Linear):
    """Linear layer that counts its forwards."""

    forwards = 0

    def forward(self, input: Tensor) -> Tensor:
        self.forwards += 1
        return super().forward(input)


def engine_of(micro_batch_size: int) -> PipelineEngine:
    config: dict[str, Any] = {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "ds_ext": {"print_plan": False},
    }
    specs = [LayerSpec(Counting, 4, 4) for _ in range(LAYERS)]
    model = ds_ext.PipelineModule(specs, config, num_stages=4, loss_fn=nn.functional.mse_loss)
    return ds_ext.initialize(model=model, model_parameters=model.parameters())[0]


def step(rank: int, micro_batch_size: int) -> tuple[dict[str, Tensor], float]:
    """Return the gradients of this rank by parameter, from the weights before and after a step, and their norm."""
    engine = engine_of(micro_batch_size)
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.train_batch(MicroBatches(samples(), micro_batch_size))
    after = dict(engine.module.named_parameters())
    gradients = {name: (before[name] - after[name].detach()) / LR for name in before}
    return gradients, float(engine.get_global_grad_norm())


def plain_gradients() -> list[Tensor]:
    layers = []
    for index in range(LAYERS):
        torch.manual_seed(1234 + index)
        layers.append(nn.Linear(4, 4))
    model = nn.Sequential(*layers)
    inputs, labels = (torch.stack(parts) for parts in zip(*samples(), strict=True))
    nn.functional.mse_loss(model(inputs), labels).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_every_stage_has_the_gradient_of_one_process(ranks: Ranks) -> None:
    results = ranks(4).run(step, 2)
    found = [gradient for gradients, _ in results for gradient in gradients.values()]
    for gradient, expected in zip(found, plain_gradients(), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_the_norm_does_not_depend_on_the_micro_batch_size(ranks: Ranks) -> None:
    expected = float(torch.stack([g.norm() for g in plain_gradients()]).norm())
    for size in (1, 4):
        assert [norm for _, norm in ranks(4).run(step, size)] == pytest.approx([expected] * 4, rel=1e-4)


def change_interval(rank: int) -> list[int]:
    """Return the forwards of this rank's layer in a step without and in one with recomputation."""
    engine, counts = engine_of(2), []
    layer = next(one for one in engine.module.modules() if isinstance(one, Counting))
    for interval in (0, 1):
        engine.module.set_checkpoint_interval(interval)
        layer.forwards = 0
        engine.train_batch(MicroBatches(samples(), 2))
        counts.append(layer.forwards)
    return counts


def test_the_checkpoint_interval_may_change(ranks: Ranks) -> None:
    assert ranks(4).run(change_interval) == [[8, 16]] * 4
