"""Check a timetable: every op occurs once, on the device that holds its stage."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ScheduleError
from ..draw.order import order_grid
from ..ops import ALL_KINDS, FORWARD, Op, slice_text
from ..timetables import Timetable

_MAX_LISTED = 64  # deadlocked devices in an error
_BIT = {kind: 1 << i for i, kind in enumerate(ALL_KINDS)}


def check_timetable(timetable: Timetable) -> None:
    placement, pipes = timetable.placement, timetable.dependencies.pipes
    stages, micro_batches = placement.op_stages, timetable.micro_batches
    if timetable.trains:
        placement.check_replicas(timetable.schedule)
    if len(timetable.orders) != placement.num_devices:
        raise ScheduleError(
            f"{timetable.schedule}: the timetable needs one order for each of {placement.num_devices} devices "
            f"(got {len(timetable.orders)})."
        )
    bits = {kind: _BIT[kind] for kind in placement.kinds}
    slices = timetable.slices
    # Kinds of the ops of a slice at a stage as bits, at (m * slices + j) * stages + stage.
    seen = bytearray(stages * micro_batches * slices)
    for device, order in enumerate(timetable.orders):
        for op in order:
            kind, m, stage, j = op
            bit = bits.get(kind, 0)
            if not (bit and 0 <= stage < stages and 0 <= m < micro_batches and 0 <= j < slices):
                raise _unknown_op_error(timetable, device, op)
            if placement.device(kind, stage, pipes[m]) != device:
                raise _wrong_device_error(timetable, device, op)
            position = (m * slices + j) * stages + stage
            if seen[position] & bit:
                raise error_at(timetable, f"device {device} computes {op} twice.", device, op)
            seen[position] |= bit
    for stage in range(stages):
        complete_sets = _complete_sets(timetable, stage)
        if not complete_sets.issuperset(seen[stage::stages]):
            part = next(i for i, kinds in enumerate(seen[stage::stages]) if kinds not in complete_sets)
            raise _incomplete_error(timetable, stage, *divmod(part, slices), seen[part * stages + stage])


def _complete_sets(timetable: Timetable, stage: int) -> set[int]:
    """Return the valid sets of op kinds for a micro-batch, as bits."""
    forwards = sum(_BIT[kind] for kind in timetable.dependencies.forward_kinds(stage))
    backwards = timetable.dependencies.backward_kinds(stage)
    return {forwards + sum(_BIT[kind] for kind in kinds) for kinds in backwards}


def error_at(timetable: Timetable, sentence: str, device: int, op: Op | None) -> ScheduleError:
    """Return the error with the sentence, then the grid with an arrow at ``op`` on ``device``."""
    order = timetable.orders[device]
    # The last occurrence: if an op is repeated, the second one is wrong.
    step = max((i for i, entry in enumerate(order) if entry == op), default=None)
    return ScheduleError(
        f"{timetable.schedule}: {sentence}\n{order_grid(timetable, device=device, step=step)}"
    )


def deadlock_at(
    timetable: Timetable, waits: Sequence[str], device: int, op: Op | None, condition: str = ""
) -> ScheduleError:
    """Return the error for devices that wait for each other.

    Args:
        waits: what each waiting device waits for; at most 64 are listed.
        device, op: first of these devices, and the op in which it waits.
        condition: text after the word "deadlock", such as " with link_credits 1".
    """
    more = [f"{len(waits) - _MAX_LISTED} more"] if len(waits) > _MAX_LISTED else []
    text = "; ".join([*waits[:_MAX_LISTED], *more])
    return error_at(timetable, f"deadlock{condition} ({text}).", device, op)


def _unknown_op_error(timetable: Timetable, device: int, op: Op) -> ScheduleError:
    kinds = timetable.placement.kinds
    if op.kind not in kinds:
        problem = f"the kinds are {', '.join(kinds)}."
    else:
        sizes = f"{timetable.placement.op_stages} stages and {timetable.micro_batches} micro-batches"
        sizes += f" of {timetable.slices} slices" if timetable.slices > 1 else ""
        problem = f"the timetable has {sizes}, counted from 0.{_swap_hint(timetable)}"
    return error_at(timetable, f"device {device} computes {op}, but {problem}", device, op)


def _wrong_device_error(timetable: Timetable, device: int, op: Op) -> ScheduleError:
    owner, pipe = timetable.dependencies.device(op), timetable.pipe(op.micro_batch)
    sentence = f"device {device} computes {op}, but stage {op.stage} of pipe {pipe} is on device {owner}."
    return error_at(timetable, f"{sentence}{_swap_hint(timetable)}", device, op)


def _swap_hint(timetable: Timetable) -> str:
    placement, pipes = timetable.placement, timetable.dependencies.pipes
    fits = all(
        0 <= op.micro_batch < placement.stages
        and 0 <= op.stage < timetable.micro_batches
        and placement.device(op.kind, op.micro_batch, pipes[op.stage]) == device
        for device, order in enumerate(timetable.orders)
        for op in order
    )
    return " The arguments are swapped: use Op(kind, micro_batch, stage)." if fits else ""


def _incomplete_error(timetable: Timetable, stage: int, m: int, j: int, seen: int) -> ScheduleError:
    """Return the error for slice ``j`` of a micro-batch with only the kinds of ops in ``seen`` (bits) at a stage."""
    present = ", ".join(kind for kind, bit in _BIT.items() if seen & bit) or "none"
    forwards = timetable.dependencies.forward_kinds(stage)
    backwards = timetable.dependencies.backward_kinds(stage)
    texts = [" and ".join(kinds) for kinds in backwards]
    backward = f" and {'either ' * (len(texts) > 1)}{', or '.join(texts)}" if any(texts) else ""
    missing_kind = next((kind for kind in (*forwards, *backwards[0]) if not seen & _BIT[kind]), FORWARD)
    device = timetable.placement.device(missing_kind, stage, timetable.pipe(m))
    # Point at the last op of the slice on the device that lacks one, or at the end of its row.
    last_op = next((op for op in reversed(timetable.orders[device]) if op[1:] == (m, stage, j)), None)
    where = f"micro-batch {slice_text(m, j)} at stage {stage} (device {device})"
    sentence = f"{where} is incomplete: needs {', '.join(forwards)}{backward} (got {present})."
    return error_at(timetable, sentence, device, last_op)
