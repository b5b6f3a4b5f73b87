"""List scheduling: orders found by running, as devices take what a policy chooses from what has arrived.

:class:`EarliestDueDate` is list scheduling by due dates: the due date of an op is when it would start if its
micro-batch entered at a given time and never waited. :class:`WeightsInWaits` keeps a given order of forwards and
backwards. Both compute weight gradients, which no device waits for, when nothing else can be computed, or when the
device has no room for another activation.

**Deadlock.** A micro-batch is admitted as a whole, when every device has room for all its stages. What is admitted can
then always proceed: the furthest op of the oldest admitted micro-batch has all that it needs, and its room. A planner
may admit more than there is room for, as a device rarely holds all stages of a micro-batch at once; the orders are
often better, but the devices can come to wait for each other, full of micro-batches that have yet to come back. Then
there is no order, and :func:`dispatch` returns None.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush

from ..events import Admission, Policy, Run, Work, run
from ..ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Op

_Due = tuple[float, str, int, int]  # due date of an op, and what decides between equal ones
_SAME_TIME = 1e-12  # of the time; sums of the same times in another order differ by rounding


class _Device:
    """State of a device in both policies: live activations, and weight gradients that may run at any time."""

    def __init__(self, room: int) -> None:
        self.room, self.live = room, 0
        self.weights: deque[Op] = deque()

    def done(self, op: Op) -> None:
        if op.kind == FORWARD:
            self.live += 1
        elif op.kind != BACKWARD_INPUT:
            self.live -= 1

    def _weight(self) -> Op | None:
        return self.weights.popleft() if self.weights else None


class EarliestDueDate(_Device):
    """Takes the op with the earliest due date; without room for a forward, makes it or goes on with a backward."""

    def __init__(self, work: Work, entries: Sequence[float], room: int) -> None:
        super().__init__(room)
        self.work, self.entries = work, entries
        self.forwards: list[tuple[_Due, Op]] = []
        self.backwards: list[tuple[_Due, Op]] = []

    def arrive(self, op: Op) -> None:
        if op.kind == BACKWARD_WEIGHT:
            self.weights.append(op)
            return
        walk = self.work.walks[self.work.pipes[op.micro_batch]]
        ready = self.forwards if op.kind == FORWARD else self.backwards
        due = self.entries[op.micro_batch] + walk[op.kind][op.stage]
        heappush(ready, ((due, op.kind, op.stage, op.micro_batch), op))

    def choose(self) -> Op | None:
        forwards, backwards = self.forwards, self.backwards
        if forwards and (not backwards or forwards[0] < backwards[0]):
            if self.live < self.room:
                return heappop(forwards)[1]
            if self.weights:
                return self.weights.popleft()
        return heappop(backwards)[1] if backwards else self._weight()


class WeightsInWaits(_Device):
    """Takes forwards and backwards in a given order, and weight gradients where it would wait."""

    def __init__(self, order: Iterable[Op], room: int) -> None:
        super().__init__(room)
        self.order = deque(op for op in order if op.kind != BACKWARD_WEIGHT)
        self.arrived: set[Op] = set()

    def arrive(self, op: Op) -> None:
        if op.kind == BACKWARD_WEIGHT:
            self.weights.append(op)
        else:
            self.arrived.add(op)

    def choose(self) -> Op | None:
        if not self.order or self.order[0] not in self.arrived or self._full(self.order[0]):
            return self._weight()
        self.arrived.remove(self.order[0])
        return self.order.popleft()

    def _full(self, op: Op) -> bool:
        """Return whether a weight gradient has to make room before ``op``."""
        return op.kind == FORWARD and self.live >= self.room and bool(self.weights)


class RoomAdmission:
    """Lets micro-batches in, by their entry times, as soon as every device may hold all their stages.

    Args:
        room: stages of admitted micro-batches that a device may hold.
    """

    def __init__(self, work: Work, entries: Sequence[float], room: int) -> None:
        first = [work.pipes.index(pipe) for pipe in range(work.placement.replicas) if pipe in work.pipes]
        order = sorted(
            range(work.micro_batches),
            key=lambda m: (entries[m], m - first[work.pipes[m]], m),
        )
        self.work, self.room, self.waiting = work, room, deque(order)
        self.open = [0] * work.placement.num_devices
        self.needs = [[devices.count(d) for d in range(len(self.open))] for devices in work.placement.pipes]
        self._blocked_on: int | None = None

    def admit(self) -> Iterator[Op]:
        """Yield the first ops of the micro-batches that may enter now."""
        while self.waiting:
            needs = self.needs[self.work.pipes[self.waiting[0]]]
            for device, need in enumerate(needs):
                if self.open[device] + need > self.room:
                    self._blocked_on = device
                    return
            self.open = [taken + need for taken, need in zip(self.open, needs, strict=True)]
            yield from self.work.dependencies.entries(self.waiting.popleft())

    def done(self, device: int, op: Op) -> Iterator[Op]:
        """Yield the same after ``device`` has computed ``op``."""
        # What waits for its weight gradient alone can be freed at any time, and so does not count.
        if op.kind in (BACKWARD, BACKWARD_INPUT):
            self.open[device] -= 1
            if device == self._blocked_on:
                yield from self.admit()


def dispatch(work: Work, devices: Sequence[Policy], admission: Admission) -> Run | None:
    """Run the step; None when the devices come to wait for each other."""
    done = run(work, devices, admission, same_time=_SAME_TIME)
    return done if sum(map(len, done.orders)) == work.ops else None


def by_due_date(work: Work, entries: Sequence[float], room: int, admitted: int) -> Run | None:
    """List scheduling. None when the devices come to wait for each other, which ``admitted`` <= ``room`` excludes.

    Args:
        entries: when each micro-batch should enter.
        room: stages that a device may keep for their backward.
        admitted: stages of admitted micro-batches that a device may hold.
    """
    devices = [EarliestDueDate(work, entries, room) for _ in range(work.placement.num_devices)]
    return dispatch(work, devices, RoomAdmission(work, entries, admitted))


def fill_waits(work: Work, orders: Sequence[Iterable[Op]], room: int) -> Run | None:
    """The given orders of forwards and backwards, with the weight gradients where a device would wait."""
    everything = work.micro_batches * work.placement.stages
    devices = [WeightsInWaits(order, room) for order in orders]
    return dispatch(work, devices, RoomAdmission(work, [0.0] * work.micro_batches, everything))
