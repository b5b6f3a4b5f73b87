"""Weights are gathered after the optimizer step in one order on all replicas, and awaited before their first ops."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import SCHEDULES, Instruction, Program, get_schedule
from ds_ext.pipe_schedules.bridge import TimetableSchedule
from ds_ext.pipe_schedules.checks.collectives import check_gathers
from ds_ext.pipe_schedules.checks.program import check
from ds_ext.pipe_schedules.gathers import StageWaits, order_of_first_use, order_of_gathers, with_gathers
from ds_ext.pipe_schedules.lowering import lower
from ds_ext.pipe_schedules.ops import GATHER_STAGE, OPTIMIZER_STEP, WAIT_STAGE
from ds_ext.pipe_schedules.simulation import simulate

NAMES = sorted({*SCHEDULES} - {"fbd"})  # its forward ranks gather nothing, so the job plan refuses it
SIZES = [(2, 4), (4, 8), (4, 16), (6, 12)]


def gathering(name: str, devices: int = 4, micro_batches: int = 8) -> Program:
    timetable = get_schedule(name).timetable(devices, micro_batches)
    return with_gathers(lower(timetable), simulate(timetable))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_stage_is_awaited_once_before_its_first_op(name: str, sizes: tuple[int, int]) -> None:
    program = gathering(name, *sizes)
    check_gathers(program)
    assert check(program) == check(lower(program.timetable))
    simulation = simulate(program.timetable)
    assert with_gathers(program, simulation) == program
    for device, order in enumerate(program.timetable.orders):
        awaited = [i.stage for i in program.instructions[device] if i.name == WAIT_STAGE]
        assert awaited == list(dict.fromkeys(op.stage for op in order))
        waits = StageWaits(program, device)
        assert [i.stage for op in order for i in waits.before(op)] == awaited
        names = [i.name for i in program.instructions[device]]
        gathers = order_of_gathers(program, device)
        assert gathers == order_of_first_use(simulation, device)
        first = names.index(OPTIMIZER_STEP) + 1
        assert names[first : first + len(gathers)] == [GATHER_STAGE] * len(gathers)


@pytest.mark.parametrize("name", NAMES)
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
    program = gathering(name)
    for device, instructions in enumerate(program.instructions):
        for wait in [i for i in instructions if i.name == WAIT_STAGE]:
            changed = list(program.instructions)
            changed[device] = tuple(i for i in instructions if i is not wait)
            with pytest.raises(
                ScheduleError, match=f"device {device} uses the weights of stage {wait.stage} "
            ):
                check_gathers(replace(program, instructions=tuple(changed)))


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "bitpipe_zb"])
def test_a_missing_gather_is_found(name: str) -> None:
    program = gathering(name)
    for device, instructions in enumerate(program.instructions):
        for gather in [i for i in instructions if i.name == GATHER_STAGE]:
            changed = list(program.instructions)
            changed[device] = tuple(i for i in instructions if i is not gather)
            with pytest.raises(ScheduleError, match=r"device \d "):
                check_gathers(replace(program, instructions=tuple(changed)))


def test_a_late_wait_is_found() -> None:
    program = gathering("1f1b")

    def moved(instructions: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
        waits = [i for i in instructions if i.name == WAIT_STAGE]
        return (*(i for i in instructions if i not in waits), *waits)

    with pytest.raises(ScheduleError, match="device 0 uses the weights of stage 0 "):
        check_gathers(replace(program, instructions=tuple(map(moved, program.instructions))))


@pytest.mark.parametrize("name", NAMES)
def test_a_wait_belongs_to_the_step_of_its_op(name: str) -> None:
    program = gathering(name)
    for device in range(program.timetable.placement.num_devices):
        with_wait = list(TimetableSchedule(program, device).steps())
        without = list(TimetableSchedule(lower(program.timetable), device).steps())
        assert len(with_wait) == len(without)
