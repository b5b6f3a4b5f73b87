"""Orders found by running: devices take, whenever they are free, what a policy chooses from what has arrived.

The loop is a discrete-event simulation with the costs' times. :class:`Urgent` is list scheduling by due dates:
the due date of an op is when it would start if its micro-batch entered at a given time and never waited.
:class:`Fixed` keeps a given order of forwards and backwards. Both compute weight gradients, which nobody waits
for, when nothing else can be computed, or when the device has no room for another activation.

**Deadlock.** A micro-batch is admitted as a whole, when every device has room for all its stages. What is admitted
can then always proceed: the furthest op of the oldest admitted micro-batch has all that it needs, and its room. Who
plans ahead may admit more than there is room for, as a device rarely holds all stages of a micro-batch at once; the
orders are often better, but the devices can come to wait for each other, full of micro-batches that have yet to come
back. Then there is no order, and :func:`dispatch` returns None.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import Protocol

from ..costs import Costs
from ..ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Op
from ..placement import Placement
from ..registry import Orders


@dataclass(frozen=True)
class Work:
    """What is to be computed in a step, and how long each part takes; with its jitter only if that is to count.

    (Who plans ahead does not know the jitter. Who decides on the way meets it.)
    """

    placement: Placement
    micro_batches: int
    costs: Costs
    split: bool
    jittered: bool = False

    @cached_property
    def pipes(self) -> tuple[int, ...]:
        """The pipe of every micro-batch."""
        return tuple(m * self.placement.replicas // self.micro_batches for m in range(self.micro_batches))

    @cached_property
    def times(self) -> dict[str, tuple[float, ...]]:
        """Kind of op -> its time at every stage."""
        return self.costs.durations(self.placement)

    @cached_property
    def ops(self) -> int:
        """Computations of the step, on all devices."""
        return self.micro_batches * self.placement.stages * (3 if self.split else 2)

    @cached_property
    def gradient(self) -> str:
        """The kind of op whose result the previous stage waits for."""
        return BACKWARD_INPUT if self.split else BACKWARD

    @cached_property
    def walks(self) -> tuple[dict[str, tuple[float, ...]], ...]:
        """Per pipe: how long after its entry a micro-batch that never waits reaches each op, by kind and stage."""
        return tuple(self._walk(devices) for devices in self.placement.pipes)

    def _walk(self, devices: tuple[int, ...]) -> dict[str, tuple[float, ...]]:
        now, stages = 0.0, range(len(devices))
        reached: dict[str, list[float]] = {FORWARD: [], self.gradient: []}
        for kind, way in ((FORWARD, stages), (self.gradient, reversed(stages))):
            before = None
            for stage in way:
                now += 0.0 if before is None else self.costs.delay(devices[before], devices[stage])
                reached[kind].append(now)
                now += self.times[kind][stage]
                before = stage
        return {FORWARD: tuple(reached[FORWARD]), self.gradient: tuple(reversed(reached[self.gradient]))}

    def device(self, op: Op) -> int:
        """Where ``op`` is computed."""
        return self.placement.pipes[self.pipes[op.micro_batch]][op.stage]

    def time(self, op: Op) -> float:
        """How long ``op`` takes."""
        time = self.times[op.kind][op.stage]
        return time * self.costs.factor(op) if self.jittered else time

    def delay(self, op: Op, sender: int, receiver: int) -> float:
        """How long the message that ``op`` waits for is under way."""
        delay = self.costs.delay(sender, receiver)
        return delay * self.costs.factor(op, message=True) if self.jittered else delay

    def next(self, op: Op) -> Op | None:
        """The op that waits for the result of ``op``, if there is one."""
        kind, m, stage = op
        if kind == FORWARD:
            last = stage == self.placement.stages - 1
            return Op(self.gradient, m, stage) if last else Op(FORWARD, m, stage + 1)
        return Op(kind, m, stage - 1) if stage and kind != BACKWARD_WEIGHT else None


class Policy(Protocol):
    """What one device does: told of arrivals and ends, asked for its next op."""

    def arrive(self, op: Op) -> None:
        """The inputs of ``op`` are here."""
        ...

    def choose(self) -> Op | None:
        """The op to compute now; None to wait for an arrival."""
        ...

    def done(self, op: Op) -> None:
        """``op`` has been computed."""
        ...


class _Device:
    """What both policies keep of a device: live activations, and weight gradients that are due at leisure."""

    def __init__(self, room: int) -> None:
        self.room, self.live = room, 0
        self.weights: deque[Op] = deque()

    def done(self, op: Op) -> None:
        if op.kind == FORWARD:
            self.live += 1
        elif op.kind == BACKWARD_INPUT:
            self.weights.append(Op(BACKWARD_WEIGHT, op.micro_batch, op.stage))
        else:
            self.live -= 1

    def _weight(self) -> Op | None:
        return self.weights.popleft() if self.weights else None


_Due = tuple[float, str, int, int]  # due date of an op, and what decides between equal ones


class Urgent(_Device):
    """Takes the op with the earliest due date; without room for a forward, makes it or goes on with a backward."""

    def __init__(self, work: Work, entries: Sequence[float], room: int) -> None:
        super().__init__(room)
        self.work, self.entries = work, entries
        self.forwards: list[tuple[_Due, Op]] = []
        self.backwards: list[tuple[_Due, Op]] = []

    def arrive(self, op: Op) -> None:
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


class Fixed(_Device):
    """Takes forwards and backwards in a given order."""

    def __init__(self, order: Iterable[Op], room: int) -> None:
        super().__init__(room)
        self.order = deque(op for op in order if op.kind != BACKWARD_WEIGHT)
        self.here: set[Op] = set()

    def arrive(self, op: Op) -> None:
        self.here.add(op)

    def choose(self) -> Op | None:
        if not self.order or self.order[0] not in self.here or self._full(self.order[0]):
            return self._weight()
        self.here.remove(self.order[0])
        return self.order.popleft()

    def _full(self, op: Op) -> bool:
        """Whether a weight gradient has to make room before ``op``."""
        return op.kind == FORWARD and self.live >= self.room and bool(self.weights)


class Admission:
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
        self.open = [0] * work.placement.ranks
        self.needs = [[devices.count(d) for d in range(len(self.open))] for devices in work.placement.pipes]
        self._blocked_on: int | None = None

    def admit(self) -> Iterator[Op]:
        """The first ops of the micro-batches that may enter now."""
        while self.waiting:
            needs = self.needs[self.work.pipes[self.waiting[0]]]
            for device, need in enumerate(needs):
                if self.open[device] + need > self.room:
                    self._blocked_on = device
                    return
            self.open = [taken + need for taken, need in zip(self.open, needs, strict=True)]
            yield Op(FORWARD, self.waiting.popleft(), 0)

    def done(self, device: int, op: Op) -> Iterator[Op]:
        """The same after ``device`` has computed ``op``."""
        # What waits for its weight gradient alone can be freed at any time, and so does not count.
        if op.kind in (BACKWARD, BACKWARD_INPUT):
            self.open[device] -= 1
            if device == self._blocked_on:
                yield from self.admit()


@dataclass(frozen=True)
class Run:
    """What came out: the time of the step and the order of every device."""

    makespan: float
    orders: Orders


class AllAtOnce:
    """No admission but that of the policies themselves: every micro-batch is at its first device from the start."""

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches

    def admit(self) -> Iterator[Op]:
        """The first ops of all micro-batches."""
        return (Op(FORWARD, m, 0) for m in range(self.micro_batches))

    def done(self, device: int, op: Op) -> Iterator[Op]:
        """Nothing more."""
        return iter(())


def dispatch(work: Work, devices: Sequence[Policy], admission: Admission | AllAtOnce) -> Run | None:
    """Run the step: every device computes what its policy chooses, as soon as it is free.

    None when the devices come to wait for each other.
    """
    orders: list[list[Op]] = [[] for _ in devices]
    busy = [False] * len(devices)
    events: list[tuple[float, bool, int, Op]] = []  # time, whether it is an arrival, device, op
    awake: set[int] = set()

    def enter(ops: Iterator[Op]) -> None:
        for op in ops:
            devices[work.device(op)].arrive(op)
            awake.add(work.device(op))

    now = 0.0
    enter(admission.admit())
    while True:
        for rank in sorted(awake):
            op = None if busy[rank] else devices[rank].choose()
            if op is not None:
                busy[rank] = True
                orders[rank].append(op)
                heappush(events, (now + work.time(op), False, rank, op))
        awake.clear()
        if not events:
            return Run(now, tuple(map(tuple, orders))) if sum(map(len, orders)) == work.ops else None
        now = events[0][0]
        while events and events[0][0] <= now + _SAME_TIME * now:
            _, arrives, rank, op = heappop(events)
            awake.add(rank)
            if arrives:
                devices[rank].arrive(op)
                continue
            busy[rank] = False
            devices[rank].done(op)
            follower = work.next(op)
            if follower is not None:
                to = work.device(follower)
                heappush(events, (now + work.delay(follower, rank, to), True, to, follower))
            enter(admission.done(rank, op))


# Sums of the same times in another order differ by rounding.
_SAME_TIME = 1e-12


def by_due_date(work: Work, entries: Sequence[float], room: int, admitted: int) -> Run | None:
    """List scheduling. None when the devices come to wait for each other, which ``admitted`` <= ``room`` excludes.

    Args:
        entries: when each micro-batch should enter.
        room: stages that a device may keep for their backward.
        admitted: stages of admitted micro-batches that a device may hold.
    """
    devices = [Urgent(work, entries, room) for _ in range(work.placement.ranks)]
    return dispatch(work, devices, Admission(work, entries, admitted))


def fill_waits(work: Work, orders: Sequence[Iterable[Op]], room: int) -> Run | None:
    """The given orders of forwards and backwards, with the weight gradients where a device would wait."""
    everything = work.micro_batches * work.placement.stages
    devices = [Fixed(order, room) for order in orders]
    return dispatch(work, devices, Admission(work, [0.0] * work.micro_batches, everything))
