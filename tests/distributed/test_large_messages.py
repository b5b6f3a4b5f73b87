"""Messages that are copied while their sender computes on: only when nobody can write to them any more."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_ext.comm.transport import ITEM_BITS
from ds_ext.engine import PipelineModule, initialize
from ds_ext.engine.messages import MAX_STAGES, Kind, pack
from ds_ext.engine.ownership import out_of_reach
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
    return losses


def train(rank: int, schedule: str, kinds: list[type[nn.Module]]) -> tuple[list[float], set[Any]]:
    """Losses, and the (kind, stage, whether final) of what this rank sent."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_BATCHES,
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
    sent, send = set(), engine.transport.send

    def noting(tensors: Any, peer: int, tag: int, *, final: bool = False) -> Any:
        kind, stage = divmod(tag >> ITEM_BITS, MAX_STAGES)
        sent.add((Kind(kind).name, stage, final))
        return send(tensors, peer, tag, final=final)

    engine.transport.send = noting
    data = refilled()
    return [float(engine.train_batch(data)) for _ in range(STEPS)], sent


@pytest.mark.parametrize(
    ("kinds", "final"),
    [
        ([Scale, Scale, Scale, Scale], {("ACTIVATION", 1, True), ("GRADIENT", 0, True)}),
        (
            [Scale, Keep, Shift, Scale],
            {("ACTIVATION", 1, False), ("GRADIENT", 0, False), ("GRADIENT", 0, True)},
        ),
    ],
    ids=["nobody-else's", "shared"],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_what_others_may_write_to_is_copied_first(
    ranks: Ranks, schedule: str, kinds: list[type[nn.Module]], final: set[Any]
) -> None:
    results = ranks(2).run(train, schedule, kinds)
    assert set.union(*(sent for _, sent in results)) == final
    for losses, _ in results:
        assert losses == pytest.approx(train_alone(kinds), rel=1e-5)


def test_only_memory_that_nothing_else_leads_to_is_out_of_reach() -> None:
    def fresh() -> Tensor:
        return torch.ones(SHAPE) + 1

    leaf = torch.ones(SHAPE, requires_grad=True)
    parameter = nn.Parameter(torch.zeros(SHAPE).flatten())
    kept, viewed, as_array = fresh(), fresh(), fresh()
    given, storing, weakly = (fresh(), fresh()), fresh(), fresh()
    held = storing.untyped_storage(), weakref.ref(weakly)
    others = {
        "in a storage": (storing,),
        "by a weak reference": (weakly,),
        "in a tuple that its layer keeps": pack(given, "the layer"),
        "sparse": (torch.eye(1200).to_sparse(), fresh()),
        "kept": (kept,),
        "a view": (viewed.detach(),),
        "numpy's view": (as_array,),
        "numpy's own": (torch.from_numpy(fresh().numpy()),),
        "small": (torch.ones(1),),
        "one of them": (fresh(), kept),
        "kept by autograd": (torch.tanh(leaf),),
        "of other processes": (fresh().share_memory_(),),
        "in a buffer": (torch.frombuffer(bytearray(8 << 20), dtype=torch.float32),),
    }
    assert as_array.numpy() is not None
    del as_array, storing, weakly
    assert len(given) == len(held) == 2
    assert [name for name, tensors in others.items() if out_of_reach(tensors)] == []
    (leaf.flatten() + parameter).sum().backward()
    assert leaf.grad is not None and parameter.grad is not None
    assert not out_of_reach((leaf.grad,))
    assert out_of_reach((fresh(),)) and out_of_reach((fresh() * leaf, torch.ones(1)))
