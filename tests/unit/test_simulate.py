"""Prices: costs, message times, what is ideal, and timetables that stand still."""

from __future__ import annotations

import pytest

from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import Op, Timetable, timetable
from ds_ext.pipe_schedules.costs import Costs, parse_costs
from ds_ext.pipe_schedules.placement import linear
from ds_ext.pipe_schedules.simulate import dependencies, simulate


def test_spans_and_price_of_two_ranks() -> None:
    simulation = simulate(timetable("gpipe", 2, 1), Costs(f=2, b=3, w=1, comm=0.5))
    assert simulation.spans == (
        ((Op("F", 0, 0), 0, 2), (Op("B", 0, 0), 9, 13)),
        ((Op("F", 1, 0), 2.5, 4.5), (Op("B", 1, 0), 4.5, 8.5)),
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
    path = [span for span in slow.spans[1] if span[0] in (Op("F", 1, 0), Op("F", 2, 0))]
    assert path[0][2] == path[1][1]


def test_dependencies_name_the_device() -> None:
    made = timetable("bitpipe", 2, 2)
    assert dependencies(Op("F", 0, 0), made) == []
    assert dependencies(Op("F", 1, 1), made) == [(Op("F", 0, 1), 1)]
    assert dependencies(Op("B", 1, 0), made) == [(Op("F", 1, 0), 1), (Op("B", 2, 0), 1)]
    assert dependencies(Op("W", 1, 0), made) == [(Op("I", 1, 0), 1)]


def test_ranks_that_wait_for_each_other() -> None:
    order = ((Op("B", 0, 0), Op("F", 0, 0)), (Op("F", 1, 0), Op("B", 1, 0)))
    with pytest.raises(
        ScheduleError, match=r"no rank can move; waiting: rank 0: B0@0 needs F0@0 and B0@1, rank 1: F0@1"
    ):
        simulate(Timetable("mine", linear(2), 1, order))


def test_everything_free() -> None:
    simulation = simulate(timetable("1f1b", 2, 2), Costs(0, 0, 0, 0))
    assert (simulation.makespan, simulation.bubble) == (0, 0)


def test_costs_from_text() -> None:
    assert parse_costs("f=1.5, w=0,comm=.25") == Costs(f=1.5, b=1, w=0, comm=0.25)
    assert parse_costs("") == Costs()


@pytest.mark.parametrize("text", ["f", "f=x", "g=1", "f=-1", "f=nan", "comm=inf"])
def test_costs_that_make_no_sense(text: str) -> None:
    with pytest.raises(ScheduleError, match="costs"):
        parse_costs(text)
