"""Check the collectives of a program.

Eager reductions come after the last backward of their stage, in one order on all replicas. Waits for gathered weights
come before the first op of their stage.
"""

from __future__ import annotations

from collections import Counter

from ..ops import BACKWARD, BACKWARD_WEIGHT, REDUCE_STAGE, WAIT_STAGE, Op
from ..timetables import Program
from .timetable import error_at


def check_reductions(program: Program) -> None:
    """Check that replicas start the same reductions in the same order, each after the last backward of its stage.

    Collectives of one process group wait for each other, so ranks that start them in different orders never finish.
    Programs without reductions average all gradients at their end.
    """
    orders = [_order(program, device) for device in range(len(program.instructions))]
    if not any(orders):
        return
    for group in program.timetable.placement.replica_groups:
        first = group[0]
        for device in group[1:]:
            if orders[device] != orders[first]:
                raise error_at(
                    program.timetable,
                    f"device {device} reduces the stages {orders[device]}, its replica {first} reduces "
                    f"{orders[first]}. Both must start the same reductions in the same order.",
                    device,
                    None,
                )


def check_waits(program: Program) -> None:
    placement = program.timetable.placement
    for device, instructions in enumerate(program.instructions):
        waited: set[int | None] = set()
        for instruction in instructions:
            op = instruction.op
            if instruction.name == WAIT_STAGE:
                waited.add(instruction.stage)
            elif op is not None and op.stage not in waited and placement.has_weights(op.stage):
                raise error_at(
                    program.timetable,
                    f"device {device} uses the weights of stage {op.stage} without a wait for their gathering.",
                    device,
                    op,
                )


def _order(program: Program, device: int) -> list[int]:
    """Return the stages that a device reduces, in order; see :func:`check_reductions`."""
    timetable = program.timetable
    left = Counter(op.stage for op in timetable.orders[device] if op.kind in (BACKWARD, BACKWARD_WEIGHT))
    order: list[int] = []
    last: Op | None = None
    for instruction in program.instructions[device]:
        op, stage = instruction.op, instruction.stage
        if op is not None:
            last = op
            left[op.stage] -= op.kind in (BACKWARD, BACKWARD_WEIGHT)
        elif instruction.name == REDUCE_STAGE and stage is not None:
            problem = "before its last backward" if left[stage] > 0 else "twice" if stage in order else None
            if problem:
                raise error_at(timetable, f"device {device} reduces stage {stage} {problem}.", device, last)
            order.append(stage)
    missing = sorted({stage for stage, _ in timetable.placement.chunks[device]} - {*order})
    if order and missing:
        raise error_at(timetable, f"device {device} never reduces stage {missing[0]}.", device, last)
    return order
