"""Which sizes change the losses when dropout is on: documented in docs/reference.md, "Sample order and dropout"."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest

from tests import engine_runs
from tests.engine_runs import Job, train
from tests.ranks import Ranks
from tests.selection import select

MODEL = dataclasses.replace(engine_runs.MODEL, num_layers=4)
STEPS, MICRO_BATCHES = 3, 4  # all micro-batches of a step
EQUAL, DIFFERENT = 1e-5, 1e-4  # largest relative difference of a step's loss


@cache
def losses(
    ranks: Ranks,
    sizes: tuple[int, int, int],
    hidden: float,
    attention: float,
    schedule: str = "1f1b",
    **model: Any,
) -> list[float]:
    """Losses of the same samples for (PP, TP, DP) and two dropout probabilities."""
    pp, tp, dp = sizes
    config = dataclasses.replace(MODEL, hidden_dropout=hidden, attention_dropout=attention, **model)
    job = Job(schedule, pp, tp, dp, MICRO_BATCHES // dp, config, steps=STEPS)
    return ranks(job.world_size).run(train, job, timeout_s=120)[0]["losses"]


def difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def test_losses_without_dropout_are_those_of_every_size(ranks: Ranks) -> None:
    plain = losses(ranks, (1, 1, 1), 0.0, 0.0)
    for sequence_parallel in (False, True):
        sharded = losses(ranks, (1, 2, 1), 0.0, 0.0, sequence_parallel=sequence_parallel)
        assert difference(sharded, plain) < EQUAL
    assert difference(losses(ranks, (2, 2, 1), 0.0, 0.0, "bitpipe"), plain) < EQUAL


@pytest.mark.parametrize(
    ("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), *select([(1, True)], [])]
)
def test_losses_with_dropout_at_one_tensor_parallel_size(
    ranks: Ranks, tp: int, sequence_parallel: bool
) -> None:
    first = losses(ranks, (1, tp, 1), 0.1, 0.1, sequence_parallel=sequence_parallel)
    for schedule, pp, dp in (("1f1b", 2, 1), ("bitpipe", 2, 1), ("1f1b", 1, 2)):
        other = losses(ranks, (pp, tp, dp), 0.1, 0.1, schedule, sequence_parallel=sequence_parallel)
        assert difference(other, first) < EQUAL


@pytest.mark.parametrize(
    ("hidden", "attention", "sequence_parallel", "equal"),
    [
        (0.1, 0.0, False, True),  # every rank of the group draws the whole mask
        (0.1, 0.0, True, False),  # each rank draws the mask of its slice of the tokens
        (0.0, 0.1, False, False),  # each rank draws the masks of its heads
        (0.0, 0.1, True, False),
    ],
)
def test_losses_with_dropout_at_two_tensor_parallel_sizes(
    ranks: Ranks, hidden: float, attention: float, sequence_parallel: bool, equal: bool
) -> None:
    plain = losses(ranks, (1, 1, 1), hidden, attention)
    sharded = losses(ranks, (1, 2, 1), hidden, attention, sequence_parallel=sequence_parallel)
    found = difference(sharded, plain)
    assert found < EQUAL if equal else found > DIFFERENT, found


def test_losses_with_attention_dropout_alone_do_not_follow_sequence_parallelism(ranks: Ranks) -> None:
    with_slices, without = (losses(ranks, (1, 2, 1), 0.0, 0.1, sequence_parallel=on) for on in (True, False))
    assert difference(with_slices, without) < EQUAL
