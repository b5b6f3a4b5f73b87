"""Custom placements: the devices of the pipes must be replicas of each other."""

from __future__ import annotations

import pytest

from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import Op, Placement, Timetable
from ds_ext.pipe_schedules.checks.program import check
from ds_ext.pipe_schedules.definition import Schedule
from ds_ext.pipe_schedules.lowering import lower
from ds_ext.pipe_schedules.methods.one_f_one_b import one_f_one_b
from ds_ext.pipe_schedules.placement import bidirectional_v, linear, looped

PARALLEL = Placement(((0, 1), (0, 1)))
REASON = r"mine: .* 2 devices.*\(got stages \[0\] on 1: 0\)"


def order_of(rank: int) -> tuple[Op, ...]:
    return tuple(Op(kind, m, rank) for m in (0, 1) for kind in "FB")


def test_two_pipes_over_the_same_devices_are_refused() -> None:
    made = Timetable("mine", PARALLEL, 2, (order_of(0), order_of(1)))
    with pytest.raises(ScheduleError, match=REASON):
        lower(made)
    with pytest.raises(ScheduleError, match=REASON):
        Schedule("mine", one_f_one_b, lambda num_devices: PARALLEL).placement(2)


def test_opposite_pipes_are_fine() -> None:
    opposite = Placement(((0, 1), (1, 0)))
    orders = tuple(tuple(Op(k, m, s) for m, s in ((0, r), (1, 1 - r)) for k in "FB") for r in (0, 1))
    assert opposite.replica_groups == ((0, 1),)
    assert check(lower(Timetable("mine", opposite, 2, orders))).messages == 4
    assert bidirectional_v(4).replica_groups == ((0, 3), (1, 2))


def test_visits_count_per_pipe() -> None:
    assert linear(2).visits == {(0, 0): 0, (1, 0): 0}
    assert [looped(2, 3).visits[stage, 0] for stage in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [bidirectional_v(2).visits[stage, 1] for stage in range(4)] == [0, 0, 1, 1]
