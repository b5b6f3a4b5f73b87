"""The order decided at run time: real ranks, whatever arrives when, train to what one process trains to."""

from __future__ import annotations

import dataclasses
import logging
import time
from io import StringIO
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ds_ext.bench.slow_links import slow_down
from ds_ext.errors import ConfigError, TransportError
from ds_ext.pipe_schedules.files import read_timetable
from tests.distributed.test_parity import assert_equal, reference
from tests.engine_runs import MODEL, Job, StepBatches, batches_of, build, digest, train, weights
from tests.ranks import Ranks
from tests.reference import random_batches, train_reference
from tests.reordering import Reordering
from tests.selection import select

PLACEMENTS = ["linear", "interleaved", "v", "bidirectional_v"]
POLICIES = ["breadth", "depth", "group"]
WITH_DROPOUT = dataclasses.replace(MODEL, hidden_dropout=0.1, attention_dropout=0.1)


def job_of(
    placement: str, policy: str, backward: str, layout: tuple[int, int, int] = (4, 1, 1), **more: Any
) -> Job:
    options = {"placement": placement, "policy": policy, "backward": backward, **more}
    return Job("dpp", *layout, 8, model=WITH_DROPOUT, steps=3, options=options)


def train_late(rank: int, job: Job, seed: int, longest_s: float = 0.004) -> dict[str, Any]:
    """Train while messages take a random time and overtake each other, in every step others; what every step ran."""
    engine, tp = build(job)
    transport: Any = Reordering(engine.transport, longest_s)
    engine.transport = engine._static_messages.transport = transport
    batches = StepBatches(batches_of(job))
    losses, norms, orders, digests = [], [], [], []
    for step in range(job.steps):
        transport.random = Random(1000 * (seed + step) + rank)
        losses.append(float(engine.train_batch(batches)))
        norms.append(float(engine.get_global_grad_norm()))
        orders.append(list(getattr(engine._schedule, "ran", [])))
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


def train_all(rank: int, jobs: list[Job]) -> list[dict[str, Any]]:
    return [train(rank, job) for job in jobs]


FOLLOWING = [{"plan": "bitpipe_zb", "window": 8, "deterministic": True}, {"plan": "1f1b"}, {"placement": "v"}]


CASES = select(
    [*product(PLACEMENTS, POLICIES, ["whole", "split"])],
    [
        ("linear", "breadth", "whole"),
        ("linear", "group", "split"),
        ("interleaved", "group", "whole"),
        ("interleaved", "breadth", "split"),
        ("v", "depth", "split"),
        ("bidirectional_v", "breadth", "whole"),
    ],
)


def test_every_policy_on_every_placement_trains_as_one_process(ranks: Ranks) -> None:
    jobs = [job_of(*case) for case in CASES]
    every = ranks(4).run(train_all, jobs, timeout_s=60 * len(jobs))
    expected = reference(jobs[0])
    for at, case in enumerate(CASES):
        try:
            assert_equal([results[at] for results in every], expected)
        except AssertionError as error:
            error.add_note(str(case))
            raise


def test_labels_meet_their_activations_whatever_overtakes_whatever(ranks: Ranks) -> None:
    """Every step has a seed of its own, by which the messages of each link change their order."""
    job = dataclasses.replace(job_of("bidirectional_v", "group", "split"), steps=select([20], [3])[0])
    # Held back for longer than a rank waits for a core.
    results = ranks(4).run(train_late, job, 0, 0.02, timeout_s=300)
    assert_equal(results, reference(job))
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
    assert_equal(results, reference(job))
    assert {result["transport"] for result in results} == {transport}
    if layout[2] > 1:
        assert len({tuple(result["digests"]) for result in results}) == 1


def test_late_messages_change_the_order_and_nothing_else(ranks: Ranks) -> None:
    job = job_of("bidirectional_v", "group", "split", deterministic=True)
    expected, runs = reference(job), [ranks(4).run(train_late, job, seed, timeout_s=120) for seed in (1, 2)]
    for results in runs:
        assert_equal(results, expected)
    orders = [[result["orders"] for result in results] for results in runs]
    assert orders[0] != orders[1]
    for rank in range(4):
        assert runs[0][rank]["losses"] == runs[1][rank]["losses"]
        assert runs[0][rank]["digests"] == runs[1][rank]["digests"]


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


@pytest.mark.parametrize("name", ["order.json", "order.txt"])
def test_a_recorded_order_is_replayed_bit_for_bit(ranks: Ranks, tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name)
    job = dataclasses.replace(job_of("v", "group", "split", record=path), steps=1)
    recorded = ranks(4).run(train_late, job, 3, timeout_s=120)
    made = read_timetable(path)
    assert [list(order) for order in made.ranks] == [result["orders"][-1] for result in recorded]
    replayed = ranks(4).run(train_late, dataclasses.replace(job, schedule=path, options={}), 4, timeout_s=120)
    assert [r["digests"] for r in replayed] == [r["digests"] for r in recorded]
    assert [r["losses"] for r in replayed] == [r["losses"] for r in recorded]


def fail_to_record(rank: int, job: Job) -> str:
    engine, _ = build(job)
    with pytest.raises(ConfigError) as caught:
        engine.train_batch(StepBatches(batches_of(job)))
    return str(caught.value)


def test_an_order_that_cannot_be_written_is_an_error_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "nowhere" / "order.json")
    said = ranks(2).run(fail_to_record, Job("dpp", 2, 1, 1, 4, model=MODEL, options={"record": path}))
    assert len(set(said)) == 1 and f"record {path!r} cannot be written: No such file" in said[0]


@pytest.mark.parametrize("options", FOLLOWING, ids=str)
def test_following_a_plan_trains_as_one_process(ranks: Ranks, options: dict[str, Any]) -> None:
    job = Job("dpp", 4, 1, 1, 8, model=WITH_DROPOUT, steps=2, options={"follow": True, **options})
    results = ranks(4).run(train_late, job, 5, timeout_s=120)
    assert_equal(results, reference(job))
    if options.get("deterministic"):
        again = ranks(4).run(train_late, job, 7, timeout_s=120)
        assert [r["orders"] for r in again] != [r["orders"] for r in results]
        assert [(r["losses"], r["digests"]) for r in again] == [(r["losses"], r["digests"]) for r in results]


def train_with_a_slow_stage(rank: int, job: Job) -> tuple[list[Any], str]:
    """Three reports: as usual, with a slow link, and with a slow stage as well; and what was written of them."""
    engine, _ = build(job)
    written = StringIO()
    logging.getLogger("ds_ext").addHandler(handler := logging.StreamHandler(written))
    slow_link = [0.0]
    slow_down(
        engine, lambda source, target, op: 0.003 + (slow_link[0] if (source, target) == (1, 2) else 0.0)
    )
    forward, slow_stage = engine.module.forward_stage, [0.0]

    def wait_in(stage: int, *args: Any) -> Any:
        time.sleep(0.01 + (slow_stage[0] if stage == 2 else 0.0))
        return forward(stage, *args)

    engine.module.forward_stage = wait_in
    batches, found = StepBatches(batches_of(job)), []
    for step in range(3):
        # Long beside the delays of ranks that share a core.
        slow_link[0], slow_stage[0] = (0.2 if step else 0.0), (0.5 if step > 1 else 0.0)
        engine.train_batch(batches)
        found.append(engine._schedule.reporter.last)
    engine.transport.close()
    logging.getLogger("ds_ext").removeHandler(handler)
    return found, written.getvalue()


def test_the_report_names_who_was_slow(ranks: Ranks) -> None:
    options = {"report": 1, "max_in_flight": 4}
    job = Job("dpp", 4, 1, 1, 8, model=MODEL, steps=3, options=options)
    ((first, second, third), written), *others = ranks(4).run(train_with_a_slow_stage, job, timeout_s=120)
    assert all(reports == [None] * 3 and text == "" for reports, text in others)
    head = "report of steps {0} to {0}, as asked for: {1}".format
    assert written.splitlines() == [head(n, r) for n, r in enumerate((first, second, third), 1)]
    assert (1, 2) not in [slow.where for slow in first.slow if slow.past is not None]
    link = next(slow for slow in second.slow if slow.where == (1, 2))
    assert link.past is not None and link.seconds > 2 * link.past and link.seconds > 2 * link.peers
    stage = next(slow for slow in third.slow if slow.where == 2)
    assert stage.past is not None and stage.seconds > 1.5 * stage.past and third.cost_s > 0.1
    assert "stage 2: " in str(third) and "its own past" in str(third)


class ImpatientJob(Job):
    """Waits for three seconds at most."""

    def config(self, replicas: int) -> dict[str, Any]:
        config = super().config(replicas)
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
        assert any("while it waited for work" in note and "decided)" in note for note in notes)


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


def test_evaluation_in_between(ranks: Ranks) -> None:
    job = job_of("bidirectional_v", "depth", "whole")
    results = ranks(4).run(evaluate_and_train, job, timeout_s=120)
    assert_equal(results, reference(job))
    assert len({tuple(result["evaluated"]) for result in results}) == 1
    assert len(set(results[0]["evaluated"])) == job.steps
