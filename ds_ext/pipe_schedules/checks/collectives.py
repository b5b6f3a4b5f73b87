"""Check the collectives of a program.

Eager reductions come after the last backward of their stage, in one order on all replicas. So do gathers of weights
after the optimizer step. Waits for gathered weights come before the first op of their stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ..gathers import order_of_gathers
from ..ops import BACKWARD, BACKWARD_WEIGHT, REDUCE_STAGE, WAIT_STAGE, Op
from ..timetables import Program
from .timetable import error_at


def check_reductions(program: Program) -> None:
    """Check that replicas start the same reductions in the same order, each after the last backward of its stage.

    Collectives of one process group wait for each other, so ranks that start them in different orders never finish.
    Programs without reductions average all gradients at their end.
    """
    _require_same_orders(program, "reduce", _order)


def check_gathers(program: Program) -> None:
    """Check that replicas gather the same stages in the same order, and that no op uses a stage without a wait."""
    _require_same_orders(program, "gather", order_of_gathers)
    placement = program.timetable.placement
    for device, instructions in enumerate(program.instructions):
        gathered, waited = order_of_gathers(program, device), set[int]()
        for instruction in instructions:
            op = instruction.op
            if instruction.name == WAIT_STAGE and instruction.stage in gathered:
                waited.add(instruction.stage)
            elif op is not None and op.stage not in waited and placement.has_weights(op.stage):
                raise error_at(
                    program.timetable,
                    f"device {device} uses the weights of stage {op.stage} without gathering and a wait for it.",
                    device,
                    op,
                )


def _require_same_orders(program: Program, verb: str, order: Callable[[Program, int], list[int]]) -> None:
    orders = [order(program, device) for device in range(len(program.instructions))]
    if not any(orders):
        return
    for first, *others in program.timetable.placement.replica_groups:
        for device in others:
            if orders[device] != orders[first]:
                raise error_at(
                    program.timetable,
                    f"device {device} {verb}s the stages {orders[device]}, its replica {first} {verb}s "
                    f"{orders[first]}. Both must {verb} the same stages in the same order.",
                    device,
                    None,
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
