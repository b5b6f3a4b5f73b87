"""Event loop: devices compute the ops that their policies choose; results arrive after a message delay.

Simulation (:mod:`.simulation`), list scheduling (:mod:`.list_scheduling`) and dynamic schedules (:mod:`.methods.dpp`)
share this loop and differ in their policies. Collectives are the ops of process groups, in the same loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from math import inf
from typing import Generic, Protocol, TypeVar

from .costs import Costs
from .dependencies import Dependencies, Graph, Inputs
from .ops import BACKWARD, BACKWARD_INPUT, FORWARD, Op
from .placement import Placement
from .ports import Collective, Ports, Transfers

T = TypeVar("T")


class Work(Protocol[T]):
    """Ops of a run, with their times. By default, no op starts without a release, and no message takes time."""

    def graph(self) -> Graph[T]: ...

    def time(self, op: T) -> float: ...

    def entries(self) -> Iterable[T]:
        return ()

    def messages(self, op: T, sender: int) -> Sequence[tuple[T, int, float]]:
        """Return the ops that depend on ``op``, each with its device and the time of the message to it."""
        return ()


@dataclass(frozen=True)
class Workload(Work[Op]):
    """Ops of a step, with the times of ops and messages.

    Args:
        split, trains: as for :class:`.Dependencies`.
        jittered: True to apply the jitter of the costs, in simulations; False in planners.
        slices: computations and messages of a slice take their share.
    """

    placement: Placement
    micro_batches: int
    costs: Costs
    split: bool | frozenset[tuple[int, int]]
    jittered: bool = False
    trains: bool = True
    slices: int = 1

    @cached_property
    def dependencies(self) -> Dependencies:
        return Dependencies(
            self.placement, self.micro_batches, split=self.split, trains=self.trains, slices=self.slices
        )

    @property
    def pipes(self) -> tuple[int, ...]:
        return self.dependencies.pipes

    @cached_property
    def times(self) -> dict[str, tuple[float, ...]]:
        """Kind of op -> its time at every stage, for the mean of the slices."""
        return self.costs.durations(self.placement, self.slices)

    @cached_property
    def shortest_slice(self) -> float:
        """Time of the shortest slice of a sequence, relative to their mean."""
        return min(self.costs.slices or (1.0,))

    @cached_property
    def num_ops(self) -> int:
        """Number of ops in a training step of a placement without forward devices."""
        return self.micro_batches * self.slices * self.placement.stages * (3 if self.split else 2)

    @cached_property
    def gradient_kind(self) -> str:
        return BACKWARD_INPUT if self.split else BACKWARD

    @cached_property
    def earliest_starts(self) -> tuple[dict[str, tuple[float, ...]], ...]:
        """Start of each op relative to the entry of its slice, if it never waits: per pipe, by kind and stage."""
        return tuple(self._earliest_starts(devices) for devices in self.placement.pipes)

    def _earliest_starts(self, devices: tuple[int, ...]) -> dict[str, tuple[float, ...]]:
        now = 0.0
        starts: dict[str, dict[int, float]] = {FORWARD: {}, self.gradient_kind: {}}
        previous = 0
        for kind, path in (
            (FORWARD, range(len(devices))),
            (self.gradient_kind, reversed(range(len(devices)))),
        ):
            for stage in path:
                now += self.costs.delay(devices[previous], devices[stage]) / self.slices  # 0 at the turn
                starts[kind][stage] = now
                now += self.times[kind][stage] * self.shortest_slice
                previous = stage
        return {kind: tuple(row[stage] for stage in sorted(row)) for kind, row in starts.items()}

    def graph(self) -> Dependencies:
        return self.dependencies

    def entries(self) -> Iterator[Op]:
        for m in range(self.micro_batches):
            yield from self.dependencies.entries(m)

    @cached_property
    def _times(self) -> dict[Op, float]:
        return {}

    @cached_property
    def _messages(self) -> dict[Op, list[tuple[Op, int, float]]]:
        return {}

    def time(self, op: Op) -> float:
        time = self._times.get(op)
        if time is None:
            time = self.times[op.kind][op.stage]
            if self.costs.slices is not None:
                time *= self.costs.slices[op.slice]
            time *= self.costs.jitter_factor(op) if self.jittered else 1.0
            self._times[op] = time
        return time

    def times_of(self, ops: Sequence[Op]) -> list[float]:
        """Return the time of every op, as :meth:`time` does."""
        if self.jittered:
            return [*map(self.time, ops)]
        by_kind, slices = self.times, self.costs.slices
        if slices is None:
            return [by_kind[kind][stage] for kind, _, stage, _ in ops]
        return [by_kind[kind][stage] * slices[j] for kind, _, stage, j in ops]

    def messages(self, op: Op, sender: int) -> list[tuple[Op, int, float]]:
        messages = self._messages.get(op)
        if messages is None:
            messages = self._messages[op] = [
                (consumer, receiver, self._delay(consumer, sender, receiver))
                for consumer, receiver in self.dependencies.consumers(op)
            ]
        return messages

    def _delay(self, op: Op, sender: int, receiver: int) -> float:
        """Return the time of a message that ``op`` receives."""
        delay = self.costs.delay(sender, receiver) / self.slices
        if delay and self.placement.rows:
            delay *= self.dependencies.tensors(op)
        return delay * self.costs.jitter_factor(op, message=True) if delay and self.jittered else delay


class Policy(Protocol[T]):
    """Scheduling policy of one device."""

    def add_ready(self, op: T) -> None:
        """Record that all inputs of ``op`` have arrived."""
        ...

    def choose(self) -> T | None:
        """Return the op to compute now, or None to wait for an input."""
        ...

    def mark_done(self, op: T) -> None:
        """Record that ``op`` has ended."""
        ...


class FixedOrder(Generic[T]):
    """Policy that computes a given order, each op as soon as its inputs have arrived."""

    def __init__(self, order: Iterable[T]) -> None:
        self._order = iter(order)
        self._next = next(self._order, None)
        self._ready: set[T] = set()

    def add_ready(self, op: T) -> None:
        self._ready.add(op)

    def choose(self) -> T | None:
        op = self._next
        if op not in self._ready:
            return None
        self._ready.remove(op)
        self._next = next(self._order, None)
        return op

    def mark_done(self, op: T) -> None:
        """Do nothing: the order is fixed."""


class Admission(Protocol[T]):
    """Rule for the entry of micro-batches into the pipeline."""

    def admit(self) -> Iterable[T]:
        """Return the first ops of the micro-batches that may enter at the start."""
        ...

    def mark_done(self, device: int, op: T) -> Iterable[T]:
        """Return the first ops of the micro-batches that may enter after ``device`` has computed ``op``."""
        ...


@dataclass(frozen=True)
class Run(Generic[T]):
    """Ops of every device in order, with their starts and ends; ``messages`` counts those between devices."""

    orders: tuple[tuple[T, ...], ...]
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    makespan: float
    messages: int

    @property
    def spans(self) -> tuple[tuple[tuple[T, float, float], ...], ...]:
        """(Op, start, end) of every op, by device."""
        rows = zip(self.orders, self.starts, self.ends, strict=True)
        return tuple(tuple(zip(*row, strict=True)) for row in rows)


class ProcessGroups(Work[Collective], Graph[Collective]):
    """Collectives of process groups. To the event loop, a process group is a device.

    Args:
        queues: collective -> earliest start, in the order in which each group begins them.
    """

    def __init__(self, queues: Sequence[Mapping[Collective, float]]) -> None:
        self.queues = queues
        self._groups = {op: group for group, queue in enumerate(queues) for op in queue}

    def graph(self) -> ProcessGroups:
        return self

    def device(self, op: Collective) -> int:
        return self._groups[op]

    def time(self, op: Collective) -> float:
        return op.latency

    def run(self, lanes: Sequence[int]) -> list[tuple[Collective, float, float]]:
        """Return all collectives with start and end. ``lanes`` are the numbers that run in a group at the same time."""
        releases = {op: time for queue in self.queues for op, time in queue.items()}
        policies = [FixedOrder(queue) for queue in self.queues]
        transfers = Transfers({op: (op.transfer, op.ports) for op in releases if op.transfer})
        result = run(self, policies, releases=releases, lanes=lanes, transfers=transfers)
        spans = {op: (start, end) for row in result.spans for op, start, end in row}
        return [(op, *spans[op]) for op in releases]


def run(
    work: Work[T],
    policies: Sequence[Policy[T]],
    admission: Admission[T] | None = None,
    *,
    tolerance: float = 0.0,
    releases: Mapping[T, float] | None = None,
    ports: Ports | None = None,
    lanes: Sequence[int] | None = None,
    transfers: Transfers[T] | None = None,
) -> Run[T]:
    """Run until no device can continue. A free device computes the op that its policy chooses.

    After a deadlock, the orders are incomplete; callers check this.

    Args:
        admission: None: all micro-batches may enter at the start; only the policies delay them.
        tolerance: relative difference up to which times count as equal. Rounding must not change what a policy sees.
        releases: op -> time of a further input, such as gathered weights.
        ports: None: messages do not wait for each other.
        lanes: number of ops that each device computes at the same time; None: 1.
        transfers: those with which ops begin.
    """
    dependencies, releases = work.graph(), releases or {}
    deliver, time_of, messages_of = Inputs(dependencies, releases).deliver, work.time, work.messages
    orders: list[list[T]] = [[] for _ in policies]
    starts: list[list[float]] = [[] for _ in policies]
    ends: list[list[float]] = [[] for _ in policies]
    idle = list(lanes or [1] * len(policies))
    # Time, True for an arrival, device, op, start of the op.
    events = [(time, True, dependencies.device(op), op, 0.0) for op, time in releases.items()]
    heapify(events)
    awake: set[int] = set()
    now = 0.0
    messages = 0
    free: dict[int, float] = {}

    def add_ready(device: int, op: T) -> None:
        policies[device].add_ready(op)
        awake.add(device)

    def enter(op: T) -> None:
        if op not in releases:
            add_ready(dependencies.device(op), op)

    for op in work.entries() if admission is None else admission.admit():
        enter(op)
    while True:
        for device in sorted(awake):
            while idle[device] and (op := policies[device].choose()) is not None:
                idle[device] -= 1
                if transfers is None or not transfers.begin(now, device, op):
                    heappush(events, (now + time_of(op), False, device, op, now))
        awake.clear()
        while transfers and (ended := transfers.advance(events[0][0] if events else inf)):
            for device, op, start in ended:
                heappush(events, (transfers.now + time_of(op), False, device, op, start))
        if not events:
            return Run(_frozen(orders), _frozen(starts), _frozen(ends), now, messages)
        now = events[0][0]
        while events and events[0][0] <= now + tolerance * now:
            time, arrives, device, op, start = heappop(events)
            if arrives:
                if deliver(op):
                    add_ready(device, op)
                continue
            orders[device].append(op)
            starts[device].append(start)
            ends[device].append(time)
            idle[device] += 1
            awake.add(device)
            policies[device].mark_done(op)
            for consumer, receiver, delay in messages_of(op, device):
                messages += receiver != device
                if delay:
                    arrival = (
                        now + delay if ports is None else ports.arrival(now, (device, receiver), delay, free)
                    )
                    heappush(events, (arrival, True, receiver, consumer, 0.0))
                elif deliver(consumer):
                    add_ready(receiver, consumer)
            if admission is not None:
                for entry in admission.mark_done(device, op):
                    enter(entry)


def _frozen(rows: list[list[T]]) -> tuple[tuple[T, ...], ...]:
    return tuple(map(tuple, rows))
