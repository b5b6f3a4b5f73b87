"""Waits for gathered weights come before the first op of every stage, and gathers in one order on all replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import SCHEDULES, Instruction, Program, get_schedule
from ds_ext.pipe_schedules.bridge import TimetableSchedule
from ds_ext.pipe_schedules.checks.collectives import check_waits
from ds_ext.pipe_schedules.checks.program import check
from ds_ext.pipe_schedules.gathers import StageWaits, order_of_first_use, with_waits
from ds_ext.pipe_schedules.lowering import lower
from ds_ext.pipe_schedules.ops import WAIT_STAGE
from ds_ext.pipe_schedules.simulation import simulate

SIZES = [(2, 4), (4, 8), (4, 16), (6, 12)]


def waiting(name: str, devices: int = 4, micro_batches: int = 8) -> Program:
    return with_waits(lower(get_schedule(name).timetable(devices, micro_batches)))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_stage_is_awaited_once_before_its_first_op(name: str, sizes: tuple[int, int]) -> None:
    program = waiting(name, *sizes)
    check_waits(program)
    assert check(program) == check(lower(program.timetable))
    assert with_waits(program) == program
    for device, order in enumerate(program.timetable.orders):
        awaited = [i.stage for i in program.instructions[device] if i.name == WAIT_STAGE]
        assert awaited == list(dict.fromkeys(op.stage for op in order))
        waits = StageWaits(program, device)
        assert [i.stage for op in order for i in waits.before(op)] == awaited


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_replicas_gather_in_one_order(name: str, sizes: tuple[int, int]) -> None:
    simulation = simulate(get_schedule(name).timetable(*sizes))
    placement = simulation.timetable.placement
    for group in placement.replica_groups:
        orders = [order_of_first_use(simulation, device) for device in group]
        assert all(order == orders[0] for order in orders)
        assert sorted(orders[0]) == sorted(placement.stages_of(group[0]))


def test_gathers_follow_the_first_uses() -> None:
    simulation = simulate(get_schedule("zb_v").timetable(4, 8))
    assert [order_of_first_use(simulation, device) for device in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "bitpipe_zb"])
def test_a_missing_wait_is_found(name: str) -> None:
    program = waiting(name)
    for device, instructions in enumerate(program.instructions):
        for wait in [i for i in instructions if i.name == WAIT_STAGE]:
            changed = list(program.instructions)
            changed[device] = tuple(i for i in instructions if i is not wait)
            with pytest.raises(
                ScheduleError, match=f"device {device} uses the weights of stage {wait.stage} "
            ):
                check_waits(replace(program, instructions=tuple(changed)))


def test_a_late_wait_is_found() -> None:
    program = waiting("1f1b")

    def moved(instructions: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
        waits = [i for i in instructions if i.name == WAIT_STAGE]
        return (*(i for i in instructions if i not in waits), *waits)

    with pytest.raises(ScheduleError, match="device 0 uses the weights of stage 0 "):
        check_waits(replace(program, instructions=tuple(map(moved, program.instructions))))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_wait_belongs_to_the_step_of_its_op(name: str) -> None:
    program = waiting(name)
    for device in range(program.timetable.placement.num_devices):
        with_wait = list(TimetableSchedule(program, device).steps())
        without = list(TimetableSchedule(lower(program.timetable), device).steps())
        assert len(with_wait) == len(without)
