"""Eager reductions start after the last backward of a stage, in one order on all replicas."""

from __future__ import annotations

import pytest

from ds_ext.pipe_schedules import SCHEDULES, get_schedule
from ds_ext.pipe_schedules.reductions import eager_reductions
from ds_ext.pipe_schedules.simulation import simulate

SIZES = [(2, 4), (4, 8), (4, 16), (6, 12), (8, 16)]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_stage_once_after_its_last_backward_in_a_common_order(
    name: str, sizes: tuple[int, int]
) -> None:
    made = get_schedule(name).timetable(*sizes)
    starts = eager_reductions(simulate(made))
    for device, order in enumerate(made.orders):
        place = {op: i for i, op in enumerate(order)}
        last = {op.stage: i for i, op in enumerate(order) if op.kind in "BW"}
        begun = {stage: place[op] for op, stages in starts[device].items() for stage in stages}
        trains = any(device in group for group in made.placement.replica_groups)
        assert begun.keys() == last.keys() == set(made.placement.stages_of(device) if trains else ())
        assert all(begun[stage] >= last[stage] for stage in last)
    for group in made.placement.replica_groups:
        orders = {tuple(s for op in made.orders[d] for s in starts[d].get(op, ())) for d in group}
        assert len(orders) == 1


def test_bitpipe_overlaps_what_it_can() -> None:
    """At D = 4 every device starts reductions before its last op, the outer devices earliest."""
    made = get_schedule("bitpipe").timetable(4, 8)
    simulation = simulate(made)
    ends = [{op: end for op, _, end in spans} for spans in simulation.spans]
    early = [
        sum(len(stages) for op, stages in starts.items() if ends[device][op] < simulation.makespan - 1e-9)
        for device, starts in enumerate(eager_reductions(simulate(made)))
    ]
    assert all(count >= 2 for count in early), early
