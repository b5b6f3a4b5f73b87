"""Eager reductions start after the last backward of a stage, in one order on all replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import SCHEDULES, Instruction, Program, get_schedule
from ds_ext.pipe_schedules.checks.program import check
from ds_ext.pipe_schedules.lowering import lower
from ds_ext.pipe_schedules.ops import REDUCE_STAGE
from ds_ext.pipe_schedules.reductions import (
    StageReductions,
    eager_reductions,
    order_of_reductions,
    with_reductions,
)
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


def reducing(name: str, devices: int = 4, micro_batches: int = 8) -> Program:
    program = lower(get_schedule(name).timetable(devices, micro_batches))
    return with_reductions(program, eager_reductions(simulate(program.timetable)))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_programs_with_reductions_pass_the_check(name: str, sizes: tuple[int, int]) -> None:
    program = reducing(name, *sizes)
    assert check(program) == check(lower(program.timetable))
    again = with_reductions(program, eager_reductions(simulate(program.timetable)))
    assert again == program
    for device, order in enumerate(program.timetable.orders):
        stages = order_of_reductions(program, device)
        starts = StageReductions(program, device)
        decided = [i.stage for op in order for i in starts.after(op)]
        assert decided == stages


def move_first(instructions: list[Instruction]) -> list[Instruction]:
    return [reduction(instructions), *without_first(instructions)]


def repeat(instructions: list[Instruction]) -> list[Instruction]:
    return [*instructions, reduction(instructions)]


def without_first(instructions: list[Instruction]) -> list[Instruction]:
    found = reduction(instructions)
    return [i for i in instructions if i is not found]


def swap(instructions: list[Instruction]) -> list[Instruction]:
    """Start the first reduction last."""
    return [*without_first(instructions), reduction(instructions)]


def without_all(instructions: list[Instruction]) -> list[Instruction]:
    return [i for i in instructions if i.name != REDUCE_STAGE]


def reduction(instructions: list[Instruction]) -> Instruction:
    return next(i for i in instructions if i.name == REDUCE_STAGE)


@pytest.mark.parametrize("name", ["bitpipe", "bitpipe_zb", "chimera"])
@pytest.mark.parametrize("damage", [move_first, repeat, without_first, swap, without_all])
def test_a_damaged_program_is_refused(
    name: str, damage: Callable[[list[Instruction]], list[Instruction]]
) -> None:
    """A replica that starts its reductions in another order, or not at all, would wait forever."""
    program = reducing(name)
    damaged = list(program.instructions)
    damaged[1] = tuple(damage([*damaged[1]]))
    with pytest.raises(ScheduleError, match="device"):
        check(replace(program, instructions=tuple(damaged)))


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
