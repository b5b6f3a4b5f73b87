"""Tick rule: one closed form for 1F1B, Chimera, BitPipe, and their zero-bubble forms with split backwards.

**The rule.** A tick is the time of one stage's computation. Micro-batch k of a pipe enters at tick
``e = 2S (k div n) + 2 (k mod n)``, with S stages and n = D / replicas, and never waits: its forward at stage s has
tick ``e + s``, its backward tick ``e + 2S-1 - s``. A device computes its ops in the order of their ticks.

The rule applies to placements whose pipes cross all devices back and forth: ``linear`` once, ``v`` twice,
``bidirectional_v`` 2 x waves times. Two pipes start at opposite ends, and then D is even.

**No two ops of a device share a tick.** The forwards and backwards of a micro-batch are 2S consecutive steps, which
form 2S/D crossings of D steps. Crossing j runs to the right if j is even, else to the left; in the opposite pipe it is
the other way around. Device d is step d of a crossing to the right and step D-1-d of a crossing to the left. Its
right-going ops have ticks ``e + jD + d`` and its left-going ops ``e + jD + D-1-d``. All e are even. With one pipe, j is
even for right and odd for left; with two pipes, D is even. In both cases right-going ticks have the parity of d, and
left-going ticks have the other parity. Right-going crossings are 2n ticks apart (2D with one pipe, D with two), and so
are left-going crossings. The entries 0, 2, .. 2n-2 of a unit fill each gap exactly once.

**No gaps.** A unit is n micro-batches per pipe. It has 2S ops on every device, and by the same argument their ticks
differ modulo 2S. Units enter 2S ticks apart, so together they use every tick except at the start and the end.

**Messages keep their order.** On every link, a result is used in the tick after the one that computes it.

**At most D activations**, in units of 1/D of the model, i.e. S stages. The pattern repeats every 2S ticks, so any 2S
consecutive ticks contain at most S forwards of a device. An activation lives for less than 2S ticks.

**Split backward.** The rule places the backwards for the input (I). Backwards for the weights (W) fill the empty ticks,
oldest first, and the rest follow at the end. An activation now lives until its W. A device with S live activations
therefore computes a W before its next forward. There is always one: at most S - 1 of the S still lack their I. Only
the n - 1 empty ticks before the first I of a device stay empty: if F = I = W, a step takes n - 1 ticks longer than its
work. No order on the placement is shorter, because the first micro-batch needs that long to reach the device farthest
from the start of a pipe.

**Slices.** With k slices of the sequence on a linear pipe, slices enter where micro-batches would. The backwards begin
with the last slice of a micro-batch, whose forward is k - 1 slices later, so all of them are 2(k - 1) ticks later. This
number is even: ops still do not share a tick, and at most S + k - 1 slices are live.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import product

from .ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Op
from .placement import Placement


def ticks(
    device: int, placement: Placement, micro_batches: int, backward: str = BACKWARD, slices: int = 1
) -> list[tuple[int, Op]]:
    """Return (tick, op) of the forwards and backwards of ``device``, by tick.

    Args:
        micro_batches: N; there are gaps unless it is a multiple of D.
        backward: kind of the backwards, BACKWARD or BACKWARD_INPUT.
        slices: k; more than one only on a linear pipe.
    """
    stages, replicas = placement.stages, placement.replicas
    n = placement.num_devices // replicas
    pipes, timed_ops = placement.pipes_of(micro_batches), []
    for pipe, devices in enumerate(placement.pipes):
        stages_here = [stage for stage, at in enumerate(devices) if at == device]
        in_pipe = (m for m, its_pipe in enumerate(pipes) if its_pipe == pipe)
        for k, (m, j) in enumerate(product(in_pipe, range(slices))):
            entry = 2 * stages * (k // n) + 2 * (k % n)
            for stage in stages_here:
                timed_ops.append((entry + stage, Op(FORWARD, m, stage, j)))
                back = entry + 2 * (slices - 1) + 2 * stages - 1 - stage
                timed_ops.append((back, Op(backward, m, stage, slices - 1 - j)))
    return sorted(timed_ops, key=_sort_key)


def _sort_key(entry: tuple[int, Op]) -> tuple[int, str, int, int, int]:
    """Return the sort key. Two ops share a tick only on placements to which the rule does not apply."""
    tick, op = entry
    return tick, op.kind, op.stage, op.micro_batch, op.slice


def whole_order(device: int, placement: Placement, micro_batches: int) -> Iterator[Op]:
    return (op for _, op in ticks(device, placement, micro_batches))


def split_order(device: int, placement: Placement, micro_batches: int, slices: int = 1) -> Iterator[Op]:
    """Yield the ops of ``device`` with split backwards. At most D activations are live, (D-1+k)/k with k slices."""
    waiting: deque[Op] = deque()
    live = next_tick = 0
    for tick, op in ticks(device, placement, micro_batches, BACKWARD_INPUT, slices):
        count = tick - next_tick  # empty ticks
        if op.kind == FORWARD and live == placement.stages + slices - 1:
            count = max(count, 1)
        for _ in range(min(count, len(waiting))):
            yield waiting.popleft()
            live -= 1
        yield op
        next_tick = tick + 1
        if op.kind == FORWARD:
            live += 1
        else:
            waiting.append(op._replace(kind=BACKWARD_WEIGHT))
    yield from waiting
