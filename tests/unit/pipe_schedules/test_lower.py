"""Lowering: dumps, tested by a checker without code of ds_ext; buffers; early receives; split backwards."""

from __future__ import annotations

import itertools
import json
from graphlib import CycleError
from random import Random
from typing import Any

import pytest

from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import Instruction, Op, Program, Timetable, timetable
from ds_ext.pipe_schedules.checks.program import check
from ds_ext.pipe_schedules.files import dump
from ds_ext.pipe_schedules.inference import forward_timetable
from ds_ext.pipe_schedules.lowering import lower
from ds_ext.pipe_schedules.placement import (
    Placement,
    bidirectional_linear,
    bidirectional_v,
    linear,
    looped,
    v,
)
from ds_ext.pipe_schedules.simulation import simulate
from tests.selection import EVERYTHING, select
from tests.unit.pipe_schedules.dump_checker import DumpChecker


def dumped(program: Program) -> dict[str, Any]:
    return json.loads(json.dumps(dump(program)))


@pytest.mark.parametrize(
    ("devices", "units"),
    select(
        list(itertools.product((2, 4, 6, 8), (1, 2, 4))),
        [(2, 1), (4, 1), (4, 2), (6, 2)],
    ),
)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bitpipe", {}),
        ("chimera", {}),
        ("zb_h1", {}),
        ("zb_v", {}),
        ("bitpipe_zb", {}),
        ("bitpipe_zb", {"waves": 2}),
    ],
)
def test_dumps_of_the_tick_rule(name: str, options: dict[str, int], devices: int, units: int) -> None:
    """A result is used one tick after it is computed, so one credit per link is enough."""
    program = lower(timetable(name, devices, units * devices, **options))
    assert check(program, link_credits=1).link_credits == 1
    DumpChecker(dumped(program)).check(link_credits=1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("units", [1, 3])
@pytest.mark.parametrize(("name", "options"), [("gpipe", {}), ("1f1b", {}), ("interleaved", {"chunks": 3})])
def test_other_dumps(name: str, options: dict[str, int], ranks: int, units: int) -> None:
    DumpChecker(dumped(lower(timetable(name, ranks, units * ranks, **options)))).check(link_credits=2)


def test_the_dump_checker_rejects_broken_dumps() -> None:
    """DumpChecker rejects broken dumps."""
    good = dumped(lower(timetable("interleaved", 2, 4)))
    DumpChecker(good).check(link_credits=2)
    with pytest.raises(CycleError):
        DumpChecker(good).check(link_credits=1)
    for op in ("SendActivation", "RecvGrad", "LoadMicroBatch", "BackwardPass", "CopyActivation"):
        bad = dumped(lower(timetable("bitpipe", 2, 4)))
        first = bad["ranks"][0]
        first.remove(next(x for x in first if x["op"] == op))
        with pytest.raises(AssertionError):
            DumpChecker(bad).check()
    bad = dumped(lower(timetable("zb_h1", 2, 4)))
    kinds = [x["op"] for x in bad["ranks"][0]]
    i, w = kinds.index("BackwardInput"), kinds.index("BackwardWeight")
    bad["ranks"][0][i], bad["ranks"][0][w] = bad["ranks"][0][w], bad["ranks"][0][i]
    with pytest.raises(AssertionError):
        DumpChecker(bad).check()


def test_the_dump_of_two_ranks_in_full() -> None:
    where = {"micro_batch": 0, "stage": 0, "pipe": 0}
    there = {"micro_batch": 0, "stage": 1, "pipe": 0}
    tail = [{"op": name} for name in ("ReduceTiedGrads", "ReduceGrads", "OptimizerStep", "EndOfStep")]
    assert dumped(lower(timetable("1f1b", 2, 1))) == {
        "version": 2,
        "schedule": "1f1b",
        "stages": 2,
        "devices": 2,
        "micro_batches": 1,
        "model_stages": 2,
        "chunks": [
            {"rank": 0, "device": 0, "chunk": 0, "stage": 0, "pipe": 0},
            {"rank": 1, "device": 1, "chunk": 0, "stage": 1, "pipe": 0},
        ],
        "ranks": [
            [
                {"op": "LoadMicroBatch", **where},
                {"op": "ForwardPass", **where, "chunk": 0},
                {"op": "SendActivation", **where, "peer": 1, "other_stage": 1},
                {"op": "RecvGrad", **where, "peer": 1, "other_stage": 1},
                {"op": "BackwardPass", **where, "chunk": 0},
                *tail,
            ],
            [
                {"op": "LoadMicroBatch", **there},
                {"op": "RecvActivation", **there, "peer": 0, "other_stage": 0},
                {"op": "ForwardPass", **there, "chunk": 0},
                {"op": "BackwardPass", **there, "chunk": 0},
                {"op": "SendGrad", **there, "peer": 0, "other_stage": 0},
                *tail,
            ],
        ],
    }


PLACEMENTS = [
    linear(1),
    linear(4),
    looped(1, 2),
    looped(3, 2),
    looped(4, 3),
    v(1),
    v(5),
    bidirectional_linear(2),
    bidirectional_linear(6),
    *map(bidirectional_v, (2, 3, 4, 6, 8)),
    bidirectional_v(4, waves=2),
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: f"{p.replicas}x{p.stages}on{p.num_devices}")
def test_evaluation_of_any_number_of_micro_batches(placement: Placement) -> None:
    hops = {hop for pipe in placement.pipes for hop in itertools.pairwise(pipe) if hop[0] != hop[1]}
    # Neighbours that send in both directions may need more than one credit.
    bound = 3 if any((b, a) in hops for a, b in hops) else 1
    for n in [*range(1, 14), 40] if EVERYTHING else [1, 2, 3, 5, 8, 13]:
        program = lower(forward_timetable(placement, n))
        assert check(program, link_credits=bound).link_credits <= bound
        DumpChecker(dumped(program)).check(link_credits=bound)
        assert not any(
            i.name in ("OptimizerStep", "BackwardPass") for rank in program.instructions for i in rank
        )
        # No activations are kept: one buffer for the running op, and one for a copy to the next stage.
        assert max(program.num_buffers) <= 2 * placement.num_devices
        assert max(simulate(program.timetable).peak_activations) <= 1


@pytest.mark.parametrize(
    ("name", "ranks", "n"), [("bitpipe", 4, 8), ("interleaved", 2, 4), ("1f1b", 3, 6), ("gpipe", 2, 3)]
)
def test_no_buffer_is_shared_by_two_live_pairs(name: str, ranks: int, n: int) -> None:
    """A pair has its buffer from its first use (receive, load or copy) to its backward."""
    program = lower(timetable(name, ranks, n))
    for instructions, num_buffers in zip(program.instructions, program.num_buffers, strict=True):
        used: set[int] = set()
        live: dict[tuple[int, int], int] = {}
        for i in instructions:
            if i.stage is None or i.micro_batch is None:
                continue
            pair, assigned = (i.stage, i.micro_batch), [(i.buffer, (i.stage, i.micro_batch))]
            if i.to_buffer is not None:
                assigned.append(
                    (i.to_buffer, (i.stage + (1 if i.name == "CopyActivation" else -1), i.micro_batch))
                )
            for slot, owner in assigned:
                # A new pair gets the lowest free buffer.
                free = set(range(num_buffers)) - set(live.values())
                assert slot is not None and live.setdefault(owner, min(free, default=-1)) == slot
                used.add(slot)
            assert len(set(live.values())) == len(live), f"{i}: a buffer has two live pairs: {live}"
            if i.name in ("SendGrad", "CopyGrad") or (i.name == "BackwardPass" and i.stage == 0):
                del live[pair]
        assert not live
        assert used == set(range(num_buffers))


def random_order(placement: Placement, micro_batches: int, split: bool, seed: int) -> Timetable:
    """Return a random valid order: repeatedly any op whose inputs are available."""
    random, made = Random(seed), Timetable("random", placement, micro_batches, ())
    backward = "IW" if split else "B"
    left = {
        Op(k, m, s) for k in "F" + backward for s in range(placement.stages) for m in range(micro_batches)
    }
    orders: list[list[Op]] = [[] for _ in range(placement.num_devices)]
    while left:
        possible = [op for op in left if left.isdisjoint(needs(op, backward[0], placement.stages))]
        op = random.choice(sorted(possible))
        left.remove(op)
        orders[made.dependencies.device(op)].append(op)
    return Timetable("random", placement, micro_batches, tuple(map(tuple, orders)))


def needs(op: Op, gradient: str, stages: int) -> list[Op]:
    kind, m, stage, _ = op
    if kind == "F":
        return [Op("F", m, stage - 1)] * (stage > 0)
    if kind == "W":
        return [Op("I", m, stage)]
    return [Op("F", m, stage)] + [Op(gradient, m, stage + 1)] * (stage < stages - 1)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    "placement",
    [linear(3), looped(3, 2), v(3), bidirectional_linear(4), bidirectional_v(4), bidirectional_v(2, 2)],
    ids=["linear", "looped", "v", "bidirectional", "bitpipe", "two waves"],
)
def test_any_order_that_can_be_computed_can_be_lowered(placement: Placement, split: bool) -> None:
    """Messages are received in the order of the sends, early if necessary. Both checkers accept the program."""
    early = 0
    for seed in range(8 if EVERYTHING else 4):
        made = random_order(placement, 6, split, seed)
        program = lower(made)
        report = check(program)
        DumpChecker(dumped(program)).check(link_credits=report.link_credits)
        assert report.messages == simulate(made).messages
        early += sum(
            i.name.startswith("Recv") and (i.stage, i.micro_batch) != (following.stage, following.micro_batch)
            for instructions in program.instructions
            for i, following in itertools.pairwise(instructions)
        )
    assert early > 0, "these orders must need early receives"


def test_buffers_of_early_receives() -> None:
    """Device 1 computes 2, 0, 1. It receives 0 and 1 early, so it needs three buffers."""
    first = (*(Op("F", m, 0) for m in range(3)), *(Op("B", m, 0) for m in (2, 0, 1)))
    second = tuple(Op(kind, m, 1) for m in (2, 0, 1) for kind in "FB")
    program = lower(Timetable("early", linear(2), 3, (first, second)))
    assert [(str(i), i.buffer) for i in program.instructions[1][:6]] == [
        ("LoadMicroBatch 2@1", 0),
        ("RecvActivation 0@1 from device 0", 1),
        ("RecvActivation 1@1 from device 0", 2),
        ("RecvActivation 2@1 from device 0", 0),
        ("F2@1", 0),
        ("B2@1", 0),
    ]
    assert [str(i) for i in program.instructions[1][7:]] == [
        "LoadMicroBatch 0@1",
        "F0@1",
        "B0@1",
        "SendGrad 0@1 to device 0",
        "LoadMicroBatch 1@1",
        "F1@1",
        "B1@1",
        "SendGrad 1@1 to device 0",
        "ReduceTiedGrads",
        "ReduceGrads",
        "OptimizerStep",
        "EndOfStep",
    ]
    assert check(program).num_buffers == (3, 3)


def test_a_split_backward_hands_the_gradient_on_after_its_first_half() -> None:
    order = (
        (Op("F", 0, 0), Op("I", 0, 0), Op("W", 0, 0)),
        (Op("F", 0, 1), Op("I", 0, 1), Op("W", 0, 1)),
    )
    program = lower(Timetable("split", linear(2), 1, order))
    assert [i.name for i in program.instructions[1]][3:6] == ["BackwardInput", "SendGrad", "BackwardWeight"]
    assert check(program).messages == 2
    simulation = simulate(program.timetable)
    assert simulation.makespan == 5
    assert simulation.peak_activations == (1, 1)


def test_whole_and_split_backwards_in_one_timetable() -> None:
    order = (
        (Op("F", 0, 0), Op("F", 1, 0), Op("B", 0, 0), Op("I", 1, 0), Op("W", 1, 0)),
        (Op("F", 0, 1), Op("I", 0, 1), Op("F", 1, 1), Op("B", 1, 1), Op("W", 0, 1)),
    )
    made = Timetable("mixed", linear(2), 2, order)
    assert check(lower(made)).num_buffers == (2, 2)
    assert simulate(made).peak_activations == (2, 2)


def test_a_broken_timetable_is_rejected_by_lower() -> None:
    with pytest.raises(ScheduleError, match="2 stages and 1 micro-batches"):
        lower(Timetable("broken", linear(2), 1, ((Op("F", 0, 7),), (Op("F", 0, 1),))))


def test_instructions_as_text() -> None:
    assert str(Instruction("RecvGrad", 3, 1, 0, peer=2)) == "RecvGrad 3@1 from device 2"
    assert str(Instruction("SendActivation", 3, 1, 0, peer=2)) == "SendActivation 3@1 to device 2"
    assert str(Instruction("ForwardPass", 3, 1, 0, 0)) == "F3@1"
    assert str(Instruction("OptimizerStep")) == "OptimizerStep"
