"""Ranks that read one micro-batch get the same samples, or refuse to train with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import ds_ext
from ds_ext.engine.batches import MicroBatches
from ds_ext.errors import ConfigError, TransportError
from tests.ranks import Ranks

SAMPLES, STEPS = 8, 3


class Numbered(Dataset[Any]):
    """Samples whose inputs and labels contain the number of the sample, and a random number if ``draws``."""

    def __init__(self, draws: bool = False) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        value = index + (float(torch.rand(())) if self.draws else 0.0)
        return torch.full((4,), value), torch.full((4,), value)


class Carried(nn.Linear):
    """Layer that carries the first element of a sample along."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([input[:, :1].detach(), super().forward(input)[:, 1:]], 1)


def masked(samples: Any) -> tuple[Tensor, Tensor]:
    """Collate samples, and add the same random number to inputs and labels."""
    inputs, labels = (torch.stack(parts) for parts in zip(*samples, strict=True))
    drawn = torch.rand(())
    return inputs + drawn, labels + drawn


def build(schedule: str, pairs: list[Tensor], data: Any = None) -> Any:
    """Build an engine whose loss function appends the (input, label) pairs of its samples to ``pairs``."""

    def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
        pairs.append(torch.stack([outputs[:, 0], labels[:, 0]], 1).detach())
        return (outputs - labels).square().mean()

    config = {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "steps_per_print": 10**9,
        "ds_ext": {
            "schedule": schedule,
            "pipeline_parallel_size": dist.get_world_size(),
            "print_plan": False,
        },
    }
    layers = [Carried(4, 4) for _ in range(4)]
    model = ds_ext.PipelineModule(layers, config, loss_fn=loss_fn, partition_method="uniform")
    engine, *_ = ds_ext.initialize(model=model, config=config, training_data=data, collate_fn=data and masked)
    return engine


def weights_of(engine: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in engine.module.parameters()]


def read(rank: int, schedule: str, draws: bool, seed: int) -> tuple[list[Tensor], bool]:
    """Train with ``training_data`` and evaluate. Returns pairs, and whether the script's generator is as it was."""
    torch.manual_seed(seed + rank)
    pairs: list[Tensor] = []
    engine = build(schedule, pairs, Numbered(draws))
    state = torch.get_rng_state()
    for _ in range(STEPS):
        engine.train_batch()
    engine.eval_batch(Numbered(draws))
    engine.transport.close()
    return pairs, torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("schedule", ["1f1b", "chimera", "bitpipe"])
def test_a_dataset_that_draws_gives_all_ranks_the_same_samples(ranks: Ranks, schedule: str) -> None:
    results = ranks(2).run(read, schedule, True, 5)
    for pairs, kept in results:
        assert kept
        for pair in pairs:
            torch.testing.assert_close(pair[:, 0], pair[:, 1])
    values = torch.cat([torch.cat(pairs) for pairs, _ in results if pairs])[:, 0]
    assert len(values.unique()) == STEPS * SAMPLES  # the evaluation reads the samples of the first step


def loaders(rank: int, seeds_differ: bool, trains: bool) -> tuple[str, bool, int]:
    """Use shuffled loaders for three epochs. Returns the key of the error, whether the weights are unchanged by the
    failing step, and the number of samples with the label of another one."""
    torch.manual_seed(7 + rank * seeds_differ)
    pairs: list[Tensor] = []
    engine = build("1f1b", pairs)
    loader: Any = DataLoader(Numbered(), batch_size=1, shuffle=True)
    before, key = weights_of(engine), ""
    try:
        for _ in range(STEPS):
            before = weights_of(engine)
            if trains:
                engine.train_batch(iter(loader))
            else:
                engine.eval_batch(iter(loader))
    except (ConfigError, TransportError) as error:
        key = str(error).partition(":")[0] if isinstance(error, ConfigError) else ""
    same = all(map(torch.equal, before, weights_of(engine)))
    engine.transport.close()
    wrong = sum(int((pair[:, 0] != pair[:, 1]).sum()) for pair in pairs)
    return key, same, wrong


@pytest.mark.parametrize("trains", [True, False])
def test_shuffled_loaders_stay_equal_if_the_seeds_are(ranks: Ranks, trains: bool) -> None:
    results = ranks(2).run(loaders, False, trains)
    assert [(key, wrong) for key, _, wrong in results] == [("", 0)] * 2


@pytest.mark.parametrize("trains", [True, False])
def test_different_samples_are_refused_before_the_weights_change(ranks: Ranks, trains: bool) -> None:
    results = ranks(2).run(loaders, True, trains)
    assert {key for key, _, _ in results} == {"data"}
    assert all(same for _, same, _ in results)


def with_parts(rank: int, last_inputs: bool) -> str:
    """Train with an iterator without labels on the first rank. Returns the key of the error."""
    engine, one = build("1f1b", []), torch.ones(1, 4)
    parts = (one, None) if rank == 0 else (torch.zeros(1, 4) if last_inputs else None, one)
    try:
        engine.train_batch(iter([parts] * SAMPLES))
    except (ConfigError, TransportError) as error:
        return str(error).partition(":")[0] if isinstance(error, ConfigError) else ""
    finally:
        engine.transport.close()
    return ""


def test_a_part_that_is_none_is_not_compared(ranks: Ranks) -> None:
    assert ranks(2).run(with_parts, False) == ["", ""]
    assert "data" in ranks(2).run(with_parts, True)


def test_samples_draw_by_their_number() -> None:
    def numbers(micro_batch_size: int, seed: int | None) -> list[float]:
        batches = MicroBatches(Numbered(draws=True), micro_batch_size)
        batches.seed = seed
        return [float(x) for m in range(4 // micro_batch_size) for x in batches.get(m)[0][:, 0]]

    assert numbers(1, 3) == numbers(2, 3) == numbers(4, 3)
    assert numbers(1, 3) != numbers(1, 4)
