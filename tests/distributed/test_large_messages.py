"""Large messages whose sender, or one of its layers, writes to the tensors after they were sent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from ds_ext.engine import PipelineModule, initialize
from tests.losses import learned
from tests.plans import batch_of
from tests.ranks import Ranks

SHAPE = (1, 1024, 1025)  # fp32: a little more than 4 MiB
STEPS, MICRO_BATCHES, LR = 3, 4, 0.1


class Scale(nn.Module):
    """Gives and returns memory that nobody else has."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((1,), 0.8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Keep(Scale):
    """Uses its output of one micro-batch as scratch memory in the next."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.last is not None:
            self.last.data.fill_(torch.nan)
        self.last = super().forward(x)
        return self.last


class Shift(nn.Module):
    """Its input's gradient is that of its parameter too, to which the next micro-batch's is added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.full(SHAPE, 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) + self.offset.view(1, -1)


def mean_square(outputs: Tensor, labels: Tensor) -> Tensor:
    return ((outputs.view(labels.shape) - labels) ** 2).mean()


def refilled() -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches in the same memory, one after the other."""
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.empty(SHAPE), torch.empty(SHAPE)
    while True:
        yield inputs.normal_(generator=generator), labels.normal_(generator=generator)


def train_alone(kinds: list[type[nn.Module]]) -> list[float]:
    """Losses of one process."""
    model = nn.Sequential(*(kind() for kind in kinds))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    batches, losses = refilled(), [0.0] * STEPS
    for step in range(STEPS):
        for _ in range(MICRO_BATCHES):
            inputs, labels = next(batches)
            loss = mean_square(model(inputs.clone()), labels) / MICRO_BATCHES
            loss.backward()
            losses[step] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return learned(losses)


def train(rank: int, schedule: str, kinds: list[type[nn.Module]]) -> list[float]:
    """Return the losses of one rank."""
    config = {
        **batch_of(schedule, MICRO_BATCHES, micro_batch=1),
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "ds_ext": {
            "schedule": schedule,
            "pipeline_parallel_size": 2,
            "transport": "shm",
            "transport_options": {"timeout_s": 30},
        },
    }
    module = PipelineModule(
        [kind() for kind in kinds], config, loss_fn=mean_square, partition_method="uniform"
    )
    engine, *_ = initialize(model=module, config=config, model_parameters=module.parameters())
    data = refilled()
    return [float(engine.train_batch(data)) for _ in range(STEPS)]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_sent_tensor_is_the_senders_again(ranks: Ranks, schedule: str) -> None:
    kinds = [Scale, Keep, Shift, Scale]
    expected = pytest.approx(train_alone(kinds), rel=1e-5)
    for losses in ranks(2).run(train, schedule, kinds):
        assert losses == expected
