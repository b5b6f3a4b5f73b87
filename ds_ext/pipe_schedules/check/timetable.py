"""Check of a timetable: every op exists once, on the device that holds its stage."""

from __future__ import annotations

from ...errors import ScheduleError
from ..draw.order import order_grid
from ..ops import ALL_KINDS, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, Op
from ..timetables import Timetable

_BIT = {kind: 1 << i for i, kind in enumerate(ALL_KINDS)}


def check_timetable(timetable: Timetable) -> None:
    """Raise ScheduleError unless every computation exists once, on the device that holds its stage."""
    placement, pipes = timetable.placement, timetable.dependencies.pipes
    stages, micro_batches = placement.stages, timetable.micro_batches
    if timetable.trains:
        placement.check_replicas(timetable.schedule)
    if len(timetable.orders) != placement.num_devices:
        raise ScheduleError(
            f"{timetable.schedule}: there are {len(timetable.orders)} orders for {placement.num_devices} devices."
        )
    bits = {kind: _BIT[kind] for kind in placement.kinds}
    seen = bytearray(stages * micro_batches)  # the kinds that (stage, m) has, at m * stages + stage
    for device, order in enumerate(timetable.orders):
        for op in order:
            kind, m, stage = op
            bit = bits.get(kind, 0)
            if not (bit and 0 <= stage < stages and 0 <= m < micro_batches):
                raise _no_such_op(timetable, device, op)
            if placement.device(kind, stage, pipes[m]) != device:
                raise _elsewhere(timetable, device, op)
            if seen[m * stages + stage] & bit:
                raise fail(timetable, f"rank {device} runs {op} twice.", device, op)
            seen[m * stages + stage] |= bit
    for stage in range(stages):
        complete = _complete(timetable, stage)
        if not complete.issuperset(seen[stage::stages]):
            m = next(m for m, have in enumerate(seen[stage::stages]) if have not in complete)
            raise _incomplete(timetable, stage, m, seen[m * stages + stage])


def _complete(timetable: Timetable, stage: int) -> set[int]:
    """Return the sets of kinds that a micro-batch may have at ``stage``, as bits."""
    forwards = sum(_BIT[kind] for kind in timetable.dependencies.forward_kinds(stage))
    if not timetable.trains:
        return {forwards}
    return {forwards | _BIT[BACKWARD], forwards | _BIT[BACKWARD_INPUT] | _BIT[BACKWARD_WEIGHT]}


def fail(timetable: Timetable, sentence: str, device: int, op: Op | None) -> ScheduleError:
    """Return the error for ``op`` of ``device``: the sentence, then the grid with the arrow."""
    order = timetable.orders[device]
    # The last one: of an op that is there twice, the second is wrong.
    step = max((i for i, other in enumerate(order) if other == op), default=None)
    return ScheduleError(f"{timetable.schedule}: {sentence}\n{order_grid(timetable, rank=device, step=step)}")


def _no_such_op(timetable: Timetable, device: int, op: Op) -> ScheduleError:
    kinds = timetable.placement.kinds
    if op.kind not in kinds:
        wrong = f"{op.kind!r} is none of {', '.join(kinds)}."
    else:
        sizes = f"{timetable.placement.stages} stages and {timetable.micro_batches} micro-batches"
        wrong = f"there are {sizes}, both counted from 0.{_swapped(timetable)}"
    return fail(timetable, f"rank {device} runs {op}, but {wrong}", device, op)


def _elsewhere(timetable: Timetable, device: int, op: Op) -> ScheduleError:
    owner, pipe = timetable.dependencies.device(op), timetable.pipe(op.micro_batch)
    sentence = f"rank {device} runs {op}, but stage {op.stage} of pipe {pipe} lives on rank {owner}."
    return fail(timetable, f"{sentence}{_swapped(timetable)}", device, op)


def _swapped(timetable: Timetable) -> str:
    """Return the hint for a generator that swaps the arguments of Op, if that explains every op."""
    placement, pipes = timetable.placement, timetable.dependencies.pipes
    fits = all(
        0 <= op.micro_batch < placement.stages
        and 0 <= op.stage < timetable.micro_batches
        and placement.device(op.kind, op.micro_batch, pipes[op.stage]) == device
        for device, order in enumerate(timetable.orders)
        for op in order
    )
    return " Its arguments are swapped: use Op(kind, micro_batch, stage)." if fits else ""


def _incomplete(timetable: Timetable, stage: int, m: int, seen: int) -> ScheduleError:
    have = ", ".join(kind for kind, bit in _BIT.items() if seen & bit) or "nothing"
    needed = ", ".join(timetable.dependencies.forward_kinds(stage))
    backward = " and either B or both I and W" if timetable.trains else ""
    device = timetable.placement.device(BACKWARD, stage, timetable.pipe(m))
    # The last one that is there: what is missing comes after it.
    near = next(
        (op for op in reversed(timetable.orders[device]) if (op.stage, op.micro_batch) == (stage, m)), None
    )
    sentence = f"micro-batch {m} at stage {stage} (rank {device}) has {have}; it needs {needed}{backward}."
    return fail(timetable, sentence, device, near)
