"""Ranks that read one micro-batch get the same samples, or refuse to train with them."""

from __future__ import annotations

from pathlib import Path
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


def chain_of() -> nn.Sequential:
    state = torch.get_rng_state()
    torch.manual_seed(0)
    layers = nn.Sequential(*[Carried(4, 4) for _ in range(4)])
    torch.set_rng_state(state)
    return layers


def build(schedule: str, pairs: list[Tensor], data: Any = None, loss_fn: Any = None, **arguments: Any) -> Any:
    """Build an engine whose loss function appends the (input, label) pairs of its samples to ``pairs``."""

    def with_pairs(outputs: Tensor, labels: Tensor) -> Tensor:
        pairs.append(torch.stack([outputs[:, 0], labels[:, 0]], 1).detach())
        return (outputs - labels).square().mean()

    config = {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": 1 if loss_fn is None else 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "steps_per_print": 10**9,
        "ds_ext": {
            "schedule": schedule,
            "pipeline_parallel_size": dist.get_world_size(),
            "print_plan": False,
        },
    }
    layers = list(chain_of())
    model = ds_ext.PipelineModule(layers, config, loss_fn=loss_fn or with_pairs, partition_method="uniform")
    if data is not None and not arguments:
        arguments = {"collate_fn": masked}
    engine, *_ = ds_ext.initialize(model=model, config=config, training_data=data, **arguments)
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


def epochs(rank: int, schedule: str, folder: str) -> tuple[list[list[float]], str]:
    """Train one and a half passes over shuffled samples, go on from the checkpoint of the first step, and then without
    repeating. Returns the sorted samples of every step here, and the key of the error at the end of the samples."""
    torch.manual_seed(3 + rank)
    steps: list[list[float]] = []

    def train(engine: Any, pairs: list[Tensor]) -> None:
        del pairs[:]
        engine.train_batch()
        steps.append(torch.cat(pairs)[:, 0].tolist() if pairs else [])

    pairs: list[Tensor] = []
    engine = build(schedule, pairs, Numbered(), shuffle=True)
    for step in range(3):
        train(engine, pairs)
        if step == 0:
            engine.save_checkpoint(folder)
    engine.transport.close()
    torch.manual_seed(99)
    engine = build(schedule, pairs, Numbered(), shuffle=True)
    engine.load_checkpoint(folder)
    train(engine, pairs)
    engine.transport.close()
    engine = build(schedule, pairs, Numbered(), repeat=False)
    engine.train_batch()
    try:
        engine.train_batch()
    except ConfigError as error:
        key = str(error).partition(":")[0]
    else:
        key = ""
    engine.eval_batch(Numbered())  # nothing had begun
    engine.transport.close()
    return steps, key


@pytest.mark.parametrize("schedule", ["1f1b", "bitpipe"])
def test_shuffled_and_unrepeated_samples(ranks: Ranks, schedule: str, tmp_path: Path) -> None:
    results = ranks(2).run(epochs, schedule, str(tmp_path))
    assert {key for _, key in results} == {"dataset"}
    by_step = [sorted(number for steps, _ in results for number in steps[step]) for step in range(4)]
    assert by_step == [[float(number) for number in range(SAMPLES)]] * 4  # a step is a pass
    orders = [tuple(tuple(steps[step]) for steps, _ in results) for step in range(4)]
    assert len(set(orders[:3])) == 3 and orders[3] == orders[1]


def evaluate_all(rank: int, schedule: str, samples: int) -> list[float]:
    """Evaluations of a whole set with a mean, a sum and a count, and their means over the samples in one process."""
    found = []
    for loss_fn in (nn.functional.mse_loss, summed):
        engine = build(schedule, [], loss_fn=loss_fn)
        data = torch.utils.data.Subset(Numbered(), range(samples))
        found.append(float(engine.eval_batch(data, num_micro_batches="all")))
        losses = engine.eval_batch(data, num_micro_batches="all", reduce_output=None, bcast_loss=False)
        assert losses is None or len(losses) <= -(-samples // 2)
        with pytest.raises(ConfigError, match=r"^num_micro_batches: "):
            engine.eval_batch(iter([]), num_micro_batches="all")
        engine.transport.close()
    layers, (inputs, labels) = chain_of(), zip(*[Numbered()[n] for n in range(samples)], strict=True)
    outputs = layers(torch.stack(inputs))
    found.append(float(nn.functional.mse_loss(outputs, torch.stack(labels))))
    return found


def summed(outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return (outputs - labels).square().sum(), labels.numel()


@pytest.mark.parametrize("schedule", ["1f1b", "bitpipe"])
@pytest.mark.parametrize("samples", [1, 7, 8])
def test_an_evaluation_of_a_whole_set(ranks: Ranks, schedule: str, samples: int) -> None:
    for mean, total, expected in ranks(2).run(evaluate_all, schedule, samples):
        assert mean == pytest.approx(expected) and total == pytest.approx(expected)
