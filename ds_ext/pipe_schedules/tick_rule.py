"""One rule behind a family: 1F1B, Chimera, BitPipe, and their zero-bubble forms with the backward split.

**The rule.** Cut time into slots, one stage's computation each. Micro-batch k of a pipe enters in slot
``e = 2S (k div n) + 2 (k mod n)``, with S stages and n = D / replicas, and never waits: its forward at stage s is
in slot ``e + s``, its backward in slot ``e + 2S-1 - s``. A device computes its ops in the order of their slots.

A pipe must walk back and forth over the devices: `linear` once, `v` there and back, `bidirectional_v` with waves
several times; two pipes start at opposite ends, and then D is even.

**No two ops of a device share a slot.** Forwards and then backwards make one walk of 2S steps: 2S/D crossings of D
steps, to the right if the crossing's number j is even, else to the left; in the opposite pipe the other way round.
Device d is step d of a crossing to the right and step D-1-d of one to the left, so it meets right-going ops in slots
``e + jD + d`` and left-going ones in ``e + jD + D-1-d``. All e are even. With one pipe, j is even for right and odd for
left; with two, D is even: either way right-going slots have the parity of d, and left-going ones the other. The
right-going crossings are 2n steps apart (2D with one pipe, D with two), as are the left-going ones, and the entries
0, 2, .. 2n-2 of a unit fit in between exactly once.

**No gaps.** A unit, n micro-batches a pipe, has 2S ops on every device, by the same count all different modulo 2S.
Units enter 2S slots apart, so together they tile the slots; only the start and the end have empty ones.

**Messages keep their order.** A result is used in the slot after the one that makes it, on every link.

**Memory is at most D**, in D-ths of the model, that is S stages. The tiling repeats every 2S slots, so any 2S slots
in a row hold at most S forwards of a device. An activation is made and used within 2S slots.

**Split backward.** The rule places the input gradients (I). Weight gradients (W) fill the empty slots, oldest first,
and the rest comes last. An activation now stays until its W, so a device that holds S computes a W before the next
forward; one is waiting, as at most S - 1 of the S still lack their I. Only the n - 1 empty slots before a device's
first I stay empty: if F = I = W a step takes n - 1 slots more than its work. No order on the placement does better:
that long the first micro-batch needs to reach the device farthest from the start of a pipe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from .ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Op
from .placement import Placement


def slots(
    device: int, placement: Placement, micro_batches: int, backward: str = BACKWARD
) -> list[tuple[int, Op]]:
    """(slot, op) of the forwards and backwards of ``device``, by slot.

    Args:
        micro_batches: N; a multiple of D if the tiling is to have no gaps.
        backward: the kind of the backward ops, whole or input gradient.
    """
    stages, replicas = placement.stages, placement.replicas
    n = placement.num_devices // replicas
    pipes, found = placement.pipes_of(micro_batches), []
    for pipe, devices in enumerate(placement.pipes):
        mine = [stage for stage, at in enumerate(devices) if at == device]
        of_pipe = (m for m, its_pipe in enumerate(pipes) if its_pipe == pipe)
        for k, m in enumerate(of_pipe):
            enters = 2 * stages * (k // n) + 2 * (k % n)
            for stage in mine:
                found.append((enters + stage, Op(FORWARD, m, stage)))
                found.append((enters + 2 * stages - 1 - stage, Op(backward, m, stage)))
    return sorted(found, key=_slot_then_op)


def _slot_then_op(one: tuple[int, Op]) -> tuple[int, str, int, int]:
    """Sort key; two ops share a slot only on placements that the rule is not made for."""
    slot, op = one
    return slot, op.kind, op.stage, op.micro_batch


def whole_order(device: int, placement: Placement, micro_batches: int) -> Iterator[Op]:
    """The order of ``device`` with whole backwards."""
    return (op for _, op in slots(device, placement, micro_batches))


def split_order(device: int, placement: Placement, micro_batches: int) -> Iterator[Op]:
    """The order of ``device`` with split backwards: weight gradients fill the empty slots, peak activations D."""
    waiting: deque[Op] = deque()
    live = next_slot = 0
    for slot, op in slots(device, placement, micro_batches, BACKWARD_INPUT):
        full = op.kind == FORWARD and live == placement.stages
        for _ in range(min(max(slot - next_slot, int(full)), len(waiting))):
            yield waiting.popleft()
            live -= 1
        yield op
        next_slot = slot + 1
        if op.kind == FORWARD:
            live += 1
        else:
            waiting.append(op._replace(kind=BACKWARD_WEIGHT))
    yield from waiting
