"""Simulation: costs, message times, ideal, busy shares and deadlocks."""

from __future__ import annotations

import dataclasses

import pytest

from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import SCHEDULES, Op, Timetable, timetable
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.dependencies import Dependencies
from ds_ext.pipe_schedules.inference import forward_timetable
from ds_ext.pipe_schedules.placement import linear
from ds_ext.pipe_schedules.simulation import simulate
from tests.timetables import assert_keeps_time


def test_spans_and_price_of_two_ranks() -> None:
    simulation = simulate(
        timetable("gpipe", 2, 1), Costs(forward=2, backward_input=3, backward_weight=1, comm=0.5)
    )
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
    """The number of stages changes neither the work of a device nor the unit of activations."""
    for chunks in (1, 2, 4):
        assert simulate(timetable("interleaved", 4, 8, chunks=chunks)).ideal == 24
    assert simulate(timetable("interleaved", 1, 1, chunks=4)).peak_activations == (1,)


def test_a_copy_on_one_device_takes_no_time() -> None:
    """At the turn of BitPipe: with D = 2, a micro-batch has 3 transfers, of which 2 are messages."""
    free, slow = (simulate(timetable("bitpipe", 2, 2), Costs(comm=c)) for c in (0.0, 0.25))
    assert slow.makespan > free.makespan
    path = [span for span in slow.spans[1] if span[0] in (Op("F", 0, 1), Op("F", 0, 2))]
    assert path[0][2] == path[1][1]


def test_dependencies_name_the_device() -> None:
    made = timetable("bitpipe", 2, 2)
    assert made.dependencies.needs(Op("F", 0, 0)) == []
    assert made.dependencies.needs(Op("F", 1, 1)) == [(Op("F", 1, 0), 1)]
    assert made.dependencies.needs(Op("B", 0, 1)) == [(Op("F", 0, 1), 1), (Op("B", 0, 2), 1)]
    assert made.dependencies.needs(Op("W", 0, 1)) == [(Op("I", 0, 1), 1)]


def test_ranks_that_wait_for_each_other() -> None:
    order = ((Op("B", 0, 0), Op("F", 0, 0)), (Op("F", 0, 1), Op("B", 0, 1)))
    with pytest.raises(ScheduleError, match=r"deadlock .*device 0: B0@0 .*F0@0 and B0@1; device 1: F0@1"):
        simulate(Timetable("mine", linear(2), 1, order))


def test_many_ranks_that_wait_are_not_all_listed() -> None:
    made = timetable("1f1b", 80, 1)
    backwards_first = Timetable("mine", made.placement, 1, tuple(order[::-1] for order in made.orders))
    with pytest.raises(ScheduleError, match=r"device 63: \S+ [^;]*; 16 more") as caught:
        simulate(backwards_first)
    assert next(line for line in str(caught.value).splitlines() if "ERROR HERE" in line).startswith(
        "device 0 "
    )


def test_everything_free() -> None:
    simulation = simulate(timetable("1f1b", 2, 2), Costs(0, 0, 0, 0))
    assert (simulation.makespan, simulation.bubble) == (0, 0)


def test_how_busy_every_rank_is() -> None:
    simulation = simulate(
        timetable("gpipe", 2, 1), Costs(forward=2, backward_input=3, backward_weight=1, stages=(1, 1.5))
    )
    assert simulation.makespan == 15
    assert simulation.busy == pytest.approx((6 / 15, 9 / 15))
    assert simulation.ideal == 7.5 and simulation.bubble == 0.5
    assert simulation.costs.stages == (1, 1.5)
    assert simulate(timetable("gpipe", 2, 1), Costs(0, 0, 0, 0)).busy == (0, 0)


def test_a_slow_link() -> None:
    """Only the link of the gradient is slow: sent at 4.5, received 5 later."""
    simulation = simulate(timetable("gpipe", 2, 1), Costs(comm=0.5, links={(1, 0): 5}))
    assert [(start, end) for _, start, end in simulation.spans[1]] == [(1.5, 2.5), (2.5, 4.5)]
    assert [(start, end) for _, start, end in simulation.spans[0]] == [(0, 1), (9.5, 11.5)]


def test_jitter_moves_ends_and_not_the_order() -> None:
    made = timetable("bitpipe", 4, 8)
    costs = Costs(1, 1.2, 0.8, 0.1, jitter=0.3, seed=5)
    shaken, again = simulate(made, costs), simulate(made, costs)
    assert shaken == again
    assert_keeps_time(made, costs)
    assert simulate(made, Costs(1, 1.2, 0.8, 0.1, jitter=0.3, seed=6)).makespan != shaken.makespan


@pytest.mark.parametrize(
    ("op", "found"),
    [
        (Op("F", 0, 2), "2 stages and 1 micro-batches"),
        (Op("F", 9, 0), "2 stages and 1 micro-batches"),
        (Op("F", 0, -1), "2 stages and 1 micro-batches"),
        (Op("X", 0, 0), "F, B, I, W"),
    ],
)
def test_ops_that_the_sizes_do_not_have(op: Op, found: str) -> None:
    with pytest.raises(ScheduleError, match=found):
        simulate(Timetable("mine", linear(2), 1, ((op,), ())))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("sizes", [(4, 8), (4, 4)])
def test_swapped_arguments_of_ops_are_named(name: str, sizes: tuple[int, int]) -> None:
    made = timetable(name, *sizes) if name != "dualpipev" else timetable(name, 2, 4)
    swapped = tuple(tuple(Op(op.kind, op.stage, op.micro_batch) for op in order) for order in made.orders)
    with pytest.raises(ScheduleError, match=r"Op\(kind, micro_batch, stage\)"):
        simulate(dataclasses.replace(made, orders=swapped))


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_consumers_are_the_inverse_of_dependencies(name: str, evaluation: bool) -> None:
    made = timetable(name, 4, 8)
    if evaluation:
        made = forward_timetable(made.placement, 8)
    devices = {op: device for device, order in enumerate(made.orders) for op in order}
    needs = {(need, op) for op in devices for need, _ in made.dependencies.needs(op)}
    assert needs == {(op, other) for op in devices for other, _ in made.dependencies.consumers(op)}
    assert all(devices[other] == device for op in devices for other, device in made.dependencies.needs(op))
    assert all(
        devices[other] == device for op in devices for other, device in made.dependencies.consumers(op)
    )
    first = {op for m in range(8) for op in made.dependencies.entries(m)}
    assert first == {op for op in devices if not made.dependencies.needs(op)}


def test_whole_and_split_backwards_depend_on_each_other() -> None:
    split = frozenset({(1, 0)})
    dependencies = Dependencies(linear(3), 1, split=split)
    assert dependencies.needs(Op("B", 0, 0)) == [(Op("F", 0, 0), 0), (Op("I", 0, 1), 1)]
    assert dependencies.consumers(Op("I", 0, 1)) == [(Op("W", 0, 1), 1), (Op("B", 0, 0), 0)]
    assert dependencies.consumers(Op("B", 0, 2)) == [(Op("I", 0, 1), 1)]
