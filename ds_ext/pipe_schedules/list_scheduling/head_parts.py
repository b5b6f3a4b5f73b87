"""Head parts in idle time: insert the ops of a vocabulary-parallel head into the orders of a schedule.

Every device holds a part of the head's rows, and computes its part of the loss of every micro-batch between its other
ops (arXiv 2411.05288, algorithm 2). The paper adds the parts to the building block of a schedule. Here the step runs
with a policy per device, and the resulting order is kept, so that the parts fit any schedule and costs: a part goes
first, because the last stage waits for all of them, and its weight gradients, which no op waits for, fill idle time.

The last stage gets its gradient later than without parts. A device that waits for a gradient may therefore compute the
next forward of its order early, which 1F1B needs to lose no time. It costs an activation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice, product

from ..costs import Costs
from ..events import Policy, Workload, run
from ..ops import BACKWARD_WEIGHT, FORWARD, Op
from ..timetables import Timetable

_MAX_WEIGHTS = (2, 1, 3)  # weight gradients of parts that may wait, each with the inputs of its part
_MAX_OPS = 100_000  # in all runs together, about 0.5 s; larger steps try one number of weight gradients
_SLACK = 1e-9  # relative; sums of the same times in a different order differ by rounding
_WORTH = 0.01  # relative gain for which devices keep another activation


class HeadFirst:
    """Policy that computes head parts first, then a given order, and weight gradients of parts in idle time.

    Args:
        order: order of the ops without head parts.
        stages: number of stages of the model; ops of later stages compute head parts or the loss.
        max_weights: weight gradients of parts that may wait; if there are more, the oldest goes first.
    """

    def __init__(self, order: Iterable[Op], stages: int, max_weights: int) -> None:
        self.order = deque(order)
        self.stages = stages
        self.max_weights = max_weights
        self.ready: set[Op] = set()
        self.head: deque[Op] = deque()
        self.weights: deque[Op] = deque()

    def add_ready(self, op: Op) -> None:
        if op.stage < self.stages:
            self.ready.add(op)
        else:
            (self.weights if op.kind == BACKWARD_WEIGHT else self.head).append(op)

    def choose(self) -> Op | None:
        if self.head:
            return self.head.popleft()
        op = self.order[0] if self.order else None
        if op in self.ready and len(self.weights) <= self.max_weights:
            return self.order.popleft()
        return self.weights.popleft() if self.weights else None

    def mark_done(self, op: Op) -> None:
        """Do nothing: only the order of the ops counts."""


def insert_head_parts(timetable: Timetable, costs: Costs, max_ahead: int = 1) -> Timetable:
    """Return the timetable with ops for the head parts of its placement: the shortest one found, with least memory.

    Args:
        timetable: placement with head parts, and orders without.
        max_ahead: activations that a device may keep beyond those of ``timetable``, in units of 1/D of the model.
    """
    placement, dependencies = timetable.placement, timetable.dependencies
    slices = timetable.slices
    workload = Workload(placement, timetable.micro_batches, costs, dependencies.split, slices=slices)
    of_head = timetable.micro_batches * slices * (2 * placement.head_parts + 1)
    num_ops = sum(map(len, timetable.orders)) + of_head
    chunks = placement.stages * slices // placement.devices_per_pipe  # of a micro-batch on a device
    best, best_ahead, busy = None, 0, 0.0
    aheads = range(0, max_ahead * chunks + 1, chunks)
    tried = _MAX_WEIGHTS if num_ops * len(_MAX_WEIGHTS) * len(aheads) <= _MAX_OPS else _MAX_WEIGHTS[:1]
    for ahead, max_weights in product(aheads, tried):
        worth = 1 - (_WORTH if ahead > best_ahead else _SLACK)
        if best is not None and busy >= best.makespan * worth:
            continue  # no order is so much shorter
        policies: list[Policy] = [
            HeadFirst(_forwards_earlier(order, ahead), placement.stages, max_weights)
            for order in timetable.orders
        ]
        result = run(workload, policies)
        if sum(map(len, result.orders)) < num_ops:
            continue  # deadlock
        busy = busy or max(sum(workload.times_of(order)) for order in result.orders)
        if best is None or result.makespan < best.makespan * worth:
            best, best_ahead = result, ahead
    assert best is not None, "the order of the schedule itself does not deadlock"
    return replace(timetable, orders=best.orders)


def _forwards_earlier(order: Sequence[Op], count: int) -> list[Op]:
    """Return an order with ``count`` more forwards before the first backward, and as many fewer later."""
    forwards = iter([op for op in order if op.kind == FORWARD])
    earlier: list[Op] = []
    for op in order:
        if op.kind != FORWARD:
            earlier += islice(forwards, count)
            count = 0
            earlier.append(op)
        else:
            earlier += islice(forwards, 1)
    return earlier
