"""Helpers for tests of timetables: changed orders, and the times that an order implies."""

from __future__ import annotations

import dataclasses

import pytest

from ds_ext.pipe_schedules import Op, Timetable
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.events import Workload
from ds_ext.pipe_schedules.simulation import simulate


def with_order(made: Timetable, rank: int, order: list[Op]) -> Timetable:
    return dataclasses.replace(made, orders=(*made.orders[:rank], tuple(order), *made.orders[rank + 1 :]))


def followers(work: Workload, op: Op) -> list[tuple[Op, int]]:
    """Return the ops whose last input is the result of ``op``, each with its device."""
    dependencies = work.dependencies
    return [(other, at) for other, at in dependencies.consumers(op) if dependencies.needs(other)[-1][0] == op]


def assert_keeps_time(made: Timetable, costs: Costs) -> None:
    """Check that each op starts as soon as its device is free and its inputs have arrived."""
    simulation = simulate(made, costs)
    times = costs.durations(made.placement, made.slices)
    ends = {op: end for spans in simulation.spans for op, _, end in spans}
    busy = []
    for rank, spans in enumerate(simulation.spans):
        assert tuple(op for op, _, _ in spans) == made.orders[rank]
        free = 0.0
        for op, start, end in spans:
            arrivals = [
                ends[need]
                + costs.delay(owner, rank)
                / made.slices
                * made.dependencies.tensors(op)
                * costs.jitter_factor(op, message=True)
                for need, owner in made.dependencies.needs(op)
            ]
            assert start == pytest.approx(max([free, *arrivals]))
            assert end - start == pytest.approx(times[op.kind][op.stage] * costs.jitter_factor(op))
            free = end
        busy.append(sum(end - start for _, start, end in spans))
    assert simulation.makespan == max(ends.values())
    assert simulation.ideal == pytest.approx(sum(busy) / len(busy))
    assert [share * simulation.makespan for share in simulation.busy] == pytest.approx(busy)
