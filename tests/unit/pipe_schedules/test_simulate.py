"""Prices: costs, message times, what is ideal, and timetables that stand still."""

from __future__ import annotations

import pytest

from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import Op, Timetable, timetable
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.placement import linear
from ds_ext.pipe_schedules.simulate import dependencies, simulate
from tests.timetables import assert_keeps_time


def test_spans_and_price_of_two_ranks() -> None:
    simulation = simulate(timetable("gpipe", 2, 1), Costs(f=2, b=3, w=1, comm=0.5))
    assert simulation.spans == (
        ((Op("F", 0, 0), 0, 2), (Op("B", 0, 0), 9, 13)),
        ((Op("F", 0, 1), 2.5, 4.5), (Op("B", 0, 1), 4.5, 8.5)),
    )
    assert (simulation.makespan, simulation.ideal, simulation.messages) == (13, 6, 2)
    assert simulation.bubble == pytest.approx(7 / 13)
    assert simulation.as_dict() == {
        "makespan": 13,
        "ideal": 6,
        "bubble": simulation.bubble,
        "peak_activations": [1, 1],
        "messages": 2,
    }


def test_costs_are_for_one_dth_of_the_model() -> None:
    """Cutting the model into more stages changes neither the work of a device nor the unit of its memory."""
    for chunks in (1, 2, 4):
        assert simulate(timetable("interleaved", 4, 8, chunks=chunks)).ideal == 24
    assert simulate(timetable("interleaved", 1, 1, chunks=4)).peak_activations == (1,)


def test_a_copy_on_one_device_takes_no_time() -> None:
    """BitPipe's turn: with D = 2 a forward has 3 hand-overs, of which 2 are messages."""
    free, slow = (simulate(timetable("bitpipe", 2, 2), Costs(comm=c)) for c in (0.0, 0.25))
    assert slow.makespan > free.makespan
    path = [span for span in slow.spans[1] if span[0] in (Op("F", 0, 1), Op("F", 0, 2))]
    assert path[0][2] == path[1][1]


def test_dependencies_name_the_device() -> None:
    made = timetable("bitpipe", 2, 2)
    assert dependencies(Op("F", 0, 0), made) == []
    assert dependencies(Op("F", 1, 1), made) == [(Op("F", 1, 0), 1)]
    assert dependencies(Op("B", 0, 1), made) == [(Op("F", 0, 1), 1), (Op("B", 0, 2), 1)]
    assert dependencies(Op("W", 0, 1), made) == [(Op("I", 0, 1), 1)]


def test_ranks_that_wait_for_each_other() -> None:
    order = ((Op("B", 0, 0), Op("F", 0, 0)), (Op("F", 0, 1), Op("B", 0, 1)))
    with pytest.raises(
        ScheduleError, match=r"no rank can move; waiting: rank 0: B0@0 needs F0@0 and B0@1, rank 1: F0@1"
    ):
        simulate(Timetable("mine", linear(2), 1, order))


def test_many_ranks_that_wait_are_not_all_listed() -> None:
    made = timetable("1f1b", 80, 1)
    backwards_first = Timetable("mine", made.placement, 1, tuple(order[::-1] for order in made.ranks))
    with pytest.raises(ScheduleError, match=r"rank 63: \S+ needs [^,]*, and 16 more\.\n") as caught:
        simulate(backwards_first)
    assert next(line for line in str(caught.value).splitlines() if "ERROR HERE" in line).startswith("rank 0 ")


def test_everything_free() -> None:
    simulation = simulate(timetable("1f1b", 2, 2), Costs(0, 0, 0, 0))
    assert (simulation.makespan, simulation.bubble) == (0, 0)


def test_how_busy_every_rank_is() -> None:
    simulation = simulate(timetable("gpipe", 2, 1), Costs(f=2, b=3, w=1, stages=(1, 1.5)))
    assert simulation.makespan == 15
    assert simulation.busy == pytest.approx((6 / 15, 9 / 15))
    assert simulation.ideal == 7.5 and simulation.bubble == 0.5
    assert simulation.costs.stages == (1, 1.5)
    assert simulate(timetable("gpipe", 2, 1), Costs(0, 0, 0, 0)).busy == (0, 0)


def test_a_slow_link() -> None:
    """Only the way back is slow: the gradient leaves at 4 and comes 5 later."""
    simulation = simulate(timetable("gpipe", 2, 1), Costs(comm=0.5, links={(1, 0): 5}))
    assert [(start, end) for _, start, end in simulation.spans[1]] == [(1.5, 2.5), (2.5, 4.5)]
    assert [(start, end) for _, start, end in simulation.spans[0]] == [(0, 1), (9.5, 11.5)]


def test_jitter_moves_ends_and_not_the_order() -> None:
    made = timetable("bitpipe", 4, 8)
    costs = Costs(1, 1.2, 0.8, 0.1, jitter=0.3, seed=5)
    shaken, again = simulate(made, costs), simulate(made, costs)
    assert shaken == again
    # A message is there after its own jittered time, and never earlier.
    assert_keeps_time(made, costs)
    assert simulate(made, Costs(1, 1.2, 0.8, 0.1, jitter=0.3, seed=6)).makespan != shaken.makespan


@pytest.mark.parametrize("op", [Op("F", 0, 2), Op("F", 9, 0), Op("F", 0, -1), Op("X", 0, 0)])
def test_ops_that_the_sizes_do_not_have(op: Op) -> None:
    with pytest.raises(ScheduleError, match="there are 2 stages and 1 micro-batches"):
        simulate(Timetable("mine", linear(2), 1, ((op,), ())))


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "bitpipe", "bitpipe_zb"])
def test_numbers_say_what_dependencies_say(name: str) -> None:
    """The arithmetic of Timetable.numbers against the plain list of what an op needs."""
    made = timetable(name, 4, 8)
    number = {
        op: n
        for order, ns in zip(made.ranks, made.numbers, strict=True)
        for op, n in zip(order, ns, strict=True)
    }
    stages, pairs = made.placement.stages, made.placement.stages * 8
    assert len(set(number.values())) == len(number)
    for op, n in number.items():
        expected = set()
        if op.kind == "F" and op.stage:
            expected = {n - 1}
        elif op.kind == "W":
            expected = {n - pairs}
        elif op.kind in "BI":
            expected = {n - pairs} | ({n + 1} if op.stage < stages - 1 else set())
        assert {number[need] for need, _ in dependencies(op, made)} == expected
