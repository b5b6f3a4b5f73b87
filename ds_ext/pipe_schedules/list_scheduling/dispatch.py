"""List scheduling: run the step while each device picks among its ready ops, and record the resulting order.

:class:`EarliestDueDate` picks the op with the earliest due date: its start if its micro-batch entered at a given time
and never waited. :class:`FillIdleTime` keeps a given order of forwards and backwards. :class:`BackwardsFirst` runs
slices of sequences. All compute a backward for the weights, which no other device waits for, when no other op is ready
or when no further activation fits.

**Deadlock.** A micro-batch is admitted if every device has capacity for all its stages. An admitted micro-batch can
then always proceed: the furthest op of the oldest one has its inputs and its capacity. A planner may admit more,
because a device rarely keeps all stages of a micro-batch at once. Its orders are often better, but the devices can
deadlock when they are full of micro-batches whose backwards have not arrived. Then :func:`dispatch` returns None.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush

from ..events import Admission, Policy, Run, Workload, run
from ..ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Op

_Priority = tuple[float, str, int, int]  # due date, then kind, stage and micro-batch to break ties
_TOLERANCE = 1e-12  # relative; sums of the same times in a different order differ by rounding


class _Device:
    """Live activations of a device and its ready backwards for the weights; base class of the policies."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.live = 0
        self.weights: deque[Op] = deque()

    def mark_done(self, op: Op) -> None:
        if op.kind == FORWARD:
            self.live += 1
        elif op.kind != BACKWARD_INPUT:
            self.live -= 1

    def _take_weight(self) -> Op | None:
        return self.weights.popleft() if self.weights else None


class EarliestDueDate(_Device):
    """Policy that computes the ready op with the earliest due date.

    If no activation fits, it computes a backward for the weights first, or the next backward instead of a forward.
    """

    def __init__(self, workload: Workload, entries: Sequence[float], capacity: int) -> None:
        super().__init__(capacity)
        self.workload = workload
        self.entries = entries
        self.forwards: list[tuple[_Priority, Op]] = []
        self.backwards: list[tuple[_Priority, Op]] = []

    def add_ready(self, op: Op) -> None:
        if op.kind == BACKWARD_WEIGHT:
            self.weights.append(op)
            return
        starts = self.workload.earliest_starts[self.workload.pipes[op.micro_batch]]
        ready = self.forwards if op.kind == FORWARD else self.backwards
        due = self.entries[op.micro_batch] + starts[op.kind][op.stage]
        heappush(ready, ((due, op.kind, op.stage, op.micro_batch), op))

    def choose(self) -> Op | None:
        forwards, backwards = self.forwards, self.backwards
        if forwards and (not backwards or forwards[0] < backwards[0]):
            if self.live < self.capacity:
                return heappop(forwards)[1]
            if self.weights:
                return self.weights.popleft()
        return heappop(backwards)[1] if backwards else self._take_weight()


class FillIdleTime(_Device):
    """Policy that keeps an order of forwards and backwards, and computes backwards for the weights in idle time."""

    def __init__(self, order: Iterable[Op], capacity: int) -> None:
        super().__init__(capacity)
        self.order = deque(op for op in order if op.kind != BACKWARD_WEIGHT)
        self.ready: set[Op] = set()

    def add_ready(self, op: Op) -> None:
        if op.kind == BACKWARD_WEIGHT:
            self.weights.append(op)
        else:
            self.ready.add(op)

    def choose(self) -> Op | None:
        if not self.order or self.order[0] not in self.ready or self._is_full(self.order[0]):
            return self._take_weight()
        self.ready.remove(self.order[0])
        return self.order.popleft()

    def _is_full(self, op: Op) -> bool:
        """Return True if a backward for the weights must free an activation before ``op``."""
        return op.kind == FORWARD and self.live >= self.capacity and bool(self.weights)


class BackwardsFirst(_Device):
    """Policy for slices: backwards first, then the forwards that are closest to their backwards.

    The last slice of a micro-batch has the first backward, so a device that admits a slice needs the later ones too.

    Args:
        in_flight: slices of a pipe between their first forward and their last backward; at least those of a
            micro-batch, or the devices deadlock.
        capacity: live activations, in slices of stages, from which on backwards for the weights go first.
    """

    def __init__(self, workload: Workload, in_flight: int, capacity: int) -> None:
        super().__init__(capacity)
        self.pipes = workload.pipes
        first = [
            self.pipes.index(pipe) if pipe in self.pipes else 0 for pipe in range(workload.placement.replicas)
        ]
        self.positions = [m - first[pipe] for m, pipe in enumerate(self.pipes)]
        self.backwards: list[tuple[tuple[int, int, int], Op]] = []
        self.forwards: list[tuple[tuple[int, int, int], Op]] = []
        self.entries: list[list[tuple[tuple[int, int], Op]]] = [[] for _ in first]
        self.may_enter = [in_flight] * len(first)

    def add_ready(self, op: Op) -> None:
        kind, m, stage, j = op
        position = self.positions[m]
        if kind == BACKWARD_WEIGHT:
            self.weights.append(op)
        elif kind != FORWARD:
            heappush(self.backwards, ((position, -j, -stage), op))
        elif stage:
            heappush(self.forwards, ((-stage, position, j), op))
        else:
            heappush(self.entries[self.pipes[m]], ((position, j), op))

    def choose(self) -> Op | None:
        if self.weights and self.live >= self.capacity:
            return self.weights.popleft()
        for ready in (self.backwards, self.forwards):
            if ready:
                return heappop(ready)[1]
        for pipe, entries in enumerate(self.entries):
            if entries and self.may_enter[pipe]:
                self.may_enter[pipe] -= 1
                return heappop(entries)[1]
        return self._take_weight()

    def mark_done(self, op: Op) -> None:
        super().mark_done(op)
        if op.kind in (BACKWARD, BACKWARD_INPUT) and not op.stage:
            self.may_enter[self.pipes[op.micro_batch]] += 1


class CapacityAdmission:
    """Admission of micro-batches in the order of their entry times, while every device has capacity for their stages.

    ``capacity`` is the maximum number of stages of admitted micro-batches per device.
    """

    def __init__(self, workload: Workload, entries: Sequence[float], capacity: int) -> None:
        pipes, placement = workload.pipes, workload.placement
        first_ids = [pipes.index(pipe) for pipe in range(placement.replicas) if pipe in pipes]

        def rank(m: int) -> tuple[float, int, int]:
            return entries[m], m - first_ids[pipes[m]], m

        self.workload = workload
        self.capacity = capacity
        self.waiting = deque(sorted(range(workload.micro_batches), key=rank))
        self.used = [0] * placement.num_devices
        self.needs = [[devices.count(d) for d in range(len(self.used))] for devices in placement.pipes]
        self._full_device: int | None = None

    def admit(self) -> Iterator[Op]:
        while self.waiting:
            needs = self.needs[self.workload.pipes[self.waiting[0]]]
            for device, need in enumerate(needs):
                if self.used[device] + need > self.capacity:
                    self._full_device = device
                    return
            self.used = [used + need for used, need in zip(self.used, needs, strict=True)]
            yield from self.workload.dependencies.entries(self.waiting.popleft())

    def mark_done(self, device: int, op: Op) -> Iterator[Op]:
        # A stage that lacks only its backward for the weights can be freed at any time, so it does not count.
        if op.kind in (BACKWARD, BACKWARD_INPUT):
            self.used[device] -= 1
            if device == self._full_device:
                yield from self.admit()


def dispatch(workload: Workload, devices: Sequence[Policy], admission: Admission | None = None) -> Run | None:
    """Run the step; return None if the devices deadlock."""
    result = run(workload, devices, admission, tolerance=_TOLERANCE)
    is_complete = sum(map(len, result.orders)) == workload.num_ops
    return result if is_complete else None


def by_due_date(workload: Workload, entries: Sequence[float], capacity: int, admitted: int) -> Run | None:
    """Run the step by due dates; return None on a deadlock, which is impossible if ``admitted`` <= ``capacity``.

    Args:
        entries: target entry time of every micro-batch.
        capacity: maximum number of stages with live activations per device.
        admitted: maximum number of stages of admitted micro-batches per device.
    """
    devices = [EarliestDueDate(workload, entries, capacity) for _ in range(workload.placement.num_devices)]
    return dispatch(workload, devices, CapacityAdmission(workload, entries, admitted))


def backwards_first(workload: Workload, in_flight: int, capacity: int) -> Run:
    """Run the step with slices; arguments as for :class:`BackwardsFirst`."""
    devices = [BackwardsFirst(workload, in_flight, capacity) for _ in range(workload.placement.num_devices)]
    result = dispatch(workload, devices)
    assert result is not None, "all slices of a micro-batch may be in flight"
    return result


def fill_idle_time(workload: Workload, orders: Sequence[Iterable[Op]], capacity: int) -> Run | None:
    """Run the given orders, with weight gradients in idle time; return None on a deadlock."""
    no_limit = workload.micro_batches * workload.placement.stages
    entries = [0.0] * workload.micro_batches
    devices = [FillIdleTime(order, capacity) for order in orders]
    return dispatch(workload, devices, CapacityAdmission(workload, entries, no_limit))
