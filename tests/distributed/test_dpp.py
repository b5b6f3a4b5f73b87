"""The order decided at run time: real ranks, whatever arrives when, train to what one process trains to."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import pytest

from ds_ext.errors import TransportError
from tests.engine_runs import (
    MODEL,
    WITH_DROPOUT,
    Job,
    StepBatches,
    batches_of,
    build,
    digest,
    reference,
    weights,
)
from tests.one_process import assert_as_one_process
from tests.ranks import Ranks
from tests.reference import random_batches, train_reference
from tests.reordering import Reordering
from tests.selection import select


def job_of(placement: str, policy: str, backward: str, layout: tuple[int, int, int] = (4, 1, 1)) -> Job:
    options = {"placement": placement, "policy": policy, "backward": backward}
    return Job("dpp", *layout, 8, model=WITH_DROPOUT, steps=3, options=options)


def train_late(rank: int, job: Job, seed: int, longest_s: float = 0.004) -> dict[str, Any]:
    """Train while messages take a random time and overtake each other, in every step others; what every step ran."""
    engine, tp = build(job)
    transport: Any = Reordering(engine.transport, longest_s)
    engine.use_transport(transport)
    batches = StepBatches(batches_of(job))
    losses, norms, orders, digests = [], [], [], []
    for step in range(job.steps):
        transport.random = Random(1000 * (seed + step) + rank)
        losses.append(float(engine.train_batch(batches)))
        norms.append(float(engine.get_global_grad_norm()))
        orders.append(list(getattr(engine.schedule, "executed", [])))
        digests.append(digest(engine))
    transport.close()
    return {
        "losses": losses,
        "norms": norms,
        "weights": weights(engine, tp),
        "orders": orders,
        "digests": digests,
        "overtaken": transport.overtaken,
        "transport": transport.name,
    }


def test_labels_meet_their_activations_whatever_overtakes_whatever(ranks: Ranks) -> None:
    """Every step has a seed of its own, by which the messages of each link change their order."""
    job = dataclasses.replace(job_of("bidirectional_v", "group", "split"), steps=select([20], [3])[0])
    # Held back for longer than a rank waits for a core.
    results = ranks(4).run(train_late, job, 0, 0.02, timeout_s=300)
    assert_as_one_process(results, reference(job))
    assert sum(result["overtaken"] for result in results) > job.steps
    orders = {tuple(result["orders"][step]) for result in results for step in range(job.steps)}
    assert len(orders) > job.steps


@pytest.mark.parametrize(
    ("placement", "backward", "layout", "transport"),
    [
        ("linear", "whole", (2, 2, 1), "tcp"),
        ("bidirectional_v", "split", (2, 1, 2), "shm"),
        *select([("interleaved", "split", (2, 2, 1), "shm"), ("v", "split", (4, 1, 1), "tcp")], []),
    ],
)
def test_tensor_and_data_parallel_ranks(
    ranks: Ranks, placement: str, backward: str, layout: tuple[int, int, int], transport: str
) -> None:
    job = dataclasses.replace(job_of(placement, "group", backward, layout), model=MODEL, transport=transport)
    results = ranks(4).run(train_late, job, 0, timeout_s=120)
    assert_as_one_process(results, reference(job))
    assert {result["transport"] for result in results} == {transport}
    if layout[2] > 1:
        assert len({tuple(result["digests"]) for result in results}) == 1


def evaluate_and_train(rank: int, job: Job) -> dict[str, Any]:
    """Steps with evaluations, which have a fixed order, in between."""
    engine, tp = build(job)
    batches, losses, norms, evaluated = StepBatches(batches_of(job)), [], [], []
    for _ in range(job.steps):
        losses.append(float(engine.train_batch(batches)))
        norms.append(float(engine.get_global_grad_norm()))
        evaluated.append(float(engine.eval_batch(StepBatches(batches_of(job)))))
    engine.transport.close()
    return {"losses": losses, "norms": norms, "weights": weights(engine, tp), "evaluated": evaluated}


class ImpatientJob(Job):
    """Waits for three seconds at most."""

    def config(self) -> dict[str, Any]:
        config = super().config()
        config["ds_ext"]["transport_options"]["timeout_s"] = 3
        return config


class Tripwire(Exception):
    """A layer breaks."""


def fail_in_a_forward(rank: int, job: Job) -> tuple[str, list[str]]:
    engine, _ = build(job)
    forward = engine.module.forward_stage

    def break_down(stage: int, inputs: Any, step: int, micro_batch: int) -> Any:
        if (stage, micro_batch) == (2, 3):
            raise Tripwire("the layer broke")
        return forward(stage, inputs, step, micro_batch)

    engine.module.forward_stage = break_down
    with pytest.raises((Tripwire, TransportError)) as caught:
        engine.train_batch(StepBatches(batches_of(job)))
    return str(caught.value), caught.value.__notes__


def test_a_failed_step_says_what_had_been_decided(ranks: Ranks) -> None:
    job = ImpatientJob("dpp", 4, 1, 1, 8, model=MODEL)
    pool = ranks(4)
    results = pool.run(fail_in_a_forward, job, timeout_s=60)
    pool.close()  # its messages are left half-way
    broken, notes = results[2]
    assert broken == "the layer broke"
    assert "failed in F3@2, step 1" in notes[0] and "F3@2   <-- ERROR HERE" in notes[0]
    for said, notes in (results[0], results[3]):
        assert "rank" in said and "3" in said
        assert any("decided)" in note for note in notes)


def growing_batches(job: Job) -> list[list[Any]]:
    first, *others = random_batches(job.model, job.steps, 2 * job.micro_batches)
    return [first[: job.micro_batches], *others]


def change_the_batch_size(rank: int, job: Job) -> list[float]:
    engine, _ = build(job)
    batches = StepBatches(growing_batches(job))
    losses = [float(engine.train_batch(batches))]
    engine.set_train_batch_size(2 * 2 * job.micro_batches)
    losses += [float(engine.train_batch(batches)) for _ in range(2)]
    engine.transport.close()
    return losses


def test_another_number_of_micro_batches_between_steps(ranks: Ranks) -> None:
    """The order starts anew, the count of messages goes on."""
    job = dataclasses.replace(job_of("v", "group", "split"), micro_batches=4)
    results = ranks(4).run(change_the_batch_size, job, timeout_s=120)
    batches = growing_batches(job)
    expected = train_reference(job.model, batches, job.steps, lr=0.1, momentum=0.9, clip=1.0).losses
    assert all(losses == pytest.approx(expected, rel=1e-5) for losses in results)


@pytest.mark.quick
def test_evaluation_in_between(ranks: Ranks) -> None:
    job = job_of("bidirectional_v", "depth", "whole")
    results = ranks(4).run(evaluate_and_train, job, timeout_s=120)
    assert_as_one_process(results, reference(job))
    assert len({tuple(result["evaluated"]) for result in results}) == 1
    assert len(set(results[0]["evaluated"])) == job.steps
