"""Some jobs of the fuzzer, and checks of the fuzzer itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import Ranks
from tests.selection import select

from . import reference
from .compare import differences
from .data import ordered_batch
from .job import SCHEDULES, Job, Layout, draw
from .run import REFUSED, SAME, run
from .zoo import ENDS, STARTS, ZOO

SEEDS = (
    2,
    3,
    4,
    5,
    7,
    9,
    10,
    11,
    12,
    13,
    14,
    15,
    16,
    17,
    19,
    20,
    21,
    22,
    25,
    28,
    29,
    30,
    61,
)  # at most four ranks


@pytest.mark.parametrize("seed", select([*SEEDS], [*SEEDS[::2]]))
def test_a_job_has_the_numbers_of_one_process(ranks: Ranks, seed: int) -> None:
    job = draw(seed)
    outcome = run(job, ranks)
    assert outcome.kind in (SAME, REFUSED), (job, outcome.lines)


@pytest.mark.quick
@pytest.mark.parametrize("precision", ["", "bf16", "double"])
def test_every_kind_trains_in_one_process(precision: str) -> None:
    options: dict[str, Any] = {precision: True} if precision else {}
    for name, kind in ZOO.items():
        job = Job(blocks=(name, "linear"), steps=2, evaluate_after=1, **options)
        if not (job.bf16 and kind.fp32):
            result = reference.train(job)
            assert len(set(result.losses)) == 2, name
            assert result.state.keys() == reference.Model(job).state().keys()


@pytest.mark.quick
def test_every_end_trains_from_every_start() -> None:
    for end, of_end in ENDS.items():
        for start in STARTS:
            if of_end.start in (None, start):
                result = reference.train(Job(start=start, end=end, blocks=("linear", "mlp"), steps=2))
                assert result.norms[0], (start, end)


@pytest.mark.quick
def test_jobs_are_drawn_from_everything() -> None:
    jobs = [draw(seed) for seed in range(800)]
    assert jobs == [draw(seed) for seed in range(800)]
    assert len(ZOO) >= 60
    assert {job.layout.schedule for job in jobs} == set(SCHEDULES)
    deterministic = {name for name, kind in ZOO.items() if not kind.random}
    assert {name for job in jobs for name in job.blocks} >= deterministic
    data = {"dataset", "random_dataset", "batches", "iterator", "loader", "unequal"}
    assert {job.data for job in jobs} == data
    for job in jobs:
        assert eval(repr(job), {"Job": Job, "Layout": Layout}) == job


@pytest.mark.quick
@pytest.mark.parametrize(("bf16", "last"), [(False, "linear"), (True, "linear"), (False, "autocast")])
def test_a_tenth_of_a_norm_or_a_learning_rate_is_a_difference(bf16: bool, last: str) -> None:
    job = Job(blocks=("mlp", "layer_norm", last), bf16=bf16, optimizer="momentum")
    expected, noisy = reference.train(job), reference.train(job, noise_seed=1)
    assert not differences(job, [reference.train(job, noise_seed=2)], expected, noisy)
    wrong = dataclasses.replace(expected, norms=[0.9 * norm for norm in expected.norms if norm is not None])
    assert differences(job, [wrong], expected, noisy)
    larger = {name: value * (1.1 if job.rounds else 1.0001) for name, value in expected.state.items()}
    assert differences(job, [dataclasses.replace(expected, state=larger)], expected, noisy)
    assert differences(job, [dataclasses.replace(expected, state={})], expected, noisy)
    assert not torch.equal(next(iter(larger.values())), next(iter(expected.state.values())))


def test_adam_enlarges_the_rounding_errors_of_bf16_layers(ranks: Ranks) -> None:
    # Tied pairs are scaled before the backward in a pipeline only, which changes how bf16 messages round gradients.
    job = Job(
        layout=Layout("dualpipev", pp=2),
        start="tied_tokens",
        blocks=("bf16_message", "linear", "encoder_layer", "bf16_message"),
        end="tied_pair",
        optimizer="adam",
        micro_batch_size=1,
        micro_batches=8,
        steps=1,
    )
    outcome = run(job, ranks)
    assert outcome.kind == SAME, outcome.lines


@pytest.mark.quick
def test_kinds_that_keep_the_gradient_of_their_input_are_marked() -> None:
    for name, kind in ZOO.items():
        job = Job(blocks=("in_place_backward", name, "linear"), micro_batch_size=1, optimizer="momentum")
        alone, added = (_gradients(job, zero_between) for zero_between in (True, False))
        same = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(alone, added, strict=True))
        assert same != kind.keeps_gradient, name


def _gradients(job: Job, zero_between: bool) -> list[Tensor]:
    """Return the sum of the gradients of two micro-batches, which autograd or this function adds."""
    model = reference.Model(job)
    sums: dict[int, Tensor] = {}
    for number in range(2):
        torch.manual_seed(number)
        model.loss_of(ordered_batch(job, 0, number)).backward()
        for index, p in enumerate(model.parameters):
            if p.grad is not None and (zero_between or number == 1):
                sums[index] = sums.get(index, 0) + p.grad
                p.grad = None
    return [sums[index] for index in sorted(sums)]
