"""Event loop: devices compute the ops that their policies choose; results arrive after a message delay.

Simulation (:mod:`.simulation`), list scheduling (:mod:`.list_scheduling`) and dynamic schedules (:mod:`.methods.dpp`)
share this loop and differ in their policies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import Protocol, TypeVar

from .costs import Costs
from .dependencies import Dependencies, Inputs
from .ops import BACKWARD, BACKWARD_INPUT, FORWARD, Op
from .placement import Placement

T = TypeVar("T")


@dataclass(frozen=True)
class Workload:
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

    def time(self, op: Op) -> float:
        time = self.times[op.kind][op.stage]
        if self.costs.slices is not None:
            time *= self.costs.slices[op.slice]
        return time * self.costs.jitter_factor(op) if self.jittered else time

    def delay(self, op: Op, sender: int, receiver: int) -> float:
        """Return the time of a message that ``op`` receives."""
        delay = self.costs.delay(sender, receiver) / self.slices
        if delay and self.placement.rows:
            delay *= self.dependencies.tensors(op)
        return delay * self.costs.jitter_factor(op, message=True) if delay and self.jittered else delay


@dataclass(frozen=True)
class Ports:
    """Network ports of the devices. A message waits for earlier ones, and shares the rate equally with a collective.

    Args:
        links: (sender, receiver) -> latency, the ports that the message uses until then, and the number of pipelines
            that use these ports alike, one after the other; without links that share no port.
        collectives: port -> (start, end) of its collectives.
    """

    links: Mapping[tuple[int, int], tuple[float, tuple[int, ...], int]]
    collectives: Mapping[int, Sequence[tuple[float, float]]]

    def arrival(self, now: float, link: tuple[int, int], delay: float, free: dict[int, float]) -> float:
        """Return the time at which a message arrives that would take ``delay`` alone.

        ``free`` has the end of the last message of every port, and is updated.
        """
        if link not in self.links:
            return now + delay
        latency, ports, users = self.links[link]
        end = max(now, *(free.get(port, 0.0) for port in ports))
        left = transfer = max(0.0, delay - latency)
        for start, stop in sorted(span for port in ports for span in self.collectives.get(port, ())):
            if start >= end + left:
                break
            if stop > end:
                alone = max(0.0, start - end)
                beside = min(stop - max(start, end), 2 * (left - alone))
                end, left = end + alone + beside, left - alone - beside / 2
        end += left
        for port in ports:
            free[port] = end + (users - 1) * transfer
        return end + latency


class Policy(Protocol):
    """Scheduling policy of one device."""

    def add_ready(self, op: Op) -> None:
        """Record that all inputs of ``op`` have arrived."""
        ...

    def choose(self) -> Op | None:
        """Return the op to compute now, or None to wait for an input."""
        ...

    def mark_done(self, op: Op) -> None:
        """Record that ``op`` has ended."""
        ...


class FixedOrder:
    """Policy that computes a given order, each op as soon as its inputs have arrived."""

    def __init__(self, order: Iterable[Op]) -> None:
        self._order = iter(order)
        self._next = next(self._order, None)
        self._ready: set[Op] = set()

    def add_ready(self, op: Op) -> None:
        self._ready.add(op)

    def choose(self) -> Op | None:
        op = self._next
        if op not in self._ready:
            return None
        self._ready.remove(op)
        self._next = next(self._order, None)
        return op

    def mark_done(self, op: Op) -> None:
        """Do nothing: the order is fixed."""


class Admission(Protocol):
    """Rule for the entry of micro-batches into the pipeline."""

    def admit(self) -> Iterator[Op]:
        """Yield the first ops of the micro-batches that may enter at the start."""
        ...

    def mark_done(self, device: int, op: Op) -> Iterator[Op]:
        """Yield the first ops of the micro-batches that may enter after ``device`` has computed ``op``."""
        ...


class NoAdmission:
    """All micro-batches enter at the start; only the policies delay them."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def admit(self) -> Iterator[Op]:
        for m in range(self._workload.micro_batches):
            yield from self._workload.dependencies.entries(m)

    def mark_done(self, device: int, op: Op) -> Iterator[Op]:
        return iter(())


@dataclass(frozen=True)
class Run:
    """Ops of every device in order, with their starts and ends; ``messages`` counts those between devices."""

    orders: tuple[tuple[Op, ...], ...]
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    makespan: float
    messages: int


def run(
    workload: Workload,
    policies: Sequence[Policy],
    admission: Admission,
    *,
    tolerance: float = 0.0,
    weights: Mapping[Op, float] | None = None,
    ports: Ports | None = None,
) -> Run:
    """Run until no device can continue. A free device computes the op that its policy chooses.

    After a deadlock, the orders are incomplete; callers check this.

    Args:
        tolerance: relative difference up to which times count as equal. Rounding must not change what a policy sees.
        weights: op -> time at which its device has the weights, a further input of these ops.
        ports: None: messages do not wait for each other.
    """
    dependencies, weights = workload.dependencies, weights or {}
    inputs = Inputs(dependencies, weights)
    orders: list[list[Op]] = [[] for _ in policies]
    starts: list[list[float]] = [[] for _ in policies]
    ends: list[list[float]] = [[] for _ in policies]
    busy = [False] * len(policies)
    # Time, True for an arrival, device, op.
    events = [(time, True, dependencies.device(op), op) for op, time in weights.items()]
    heapify(events)
    awake: set[int] = set()
    now = 0.0
    messages = 0
    free: dict[int, float] = {}

    def add_ready(device: int, op: Op) -> None:
        policies[device].add_ready(op)
        awake.add(device)

    def enter(op: Op) -> None:
        if op not in weights:
            add_ready(dependencies.device(op), op)

    for op in admission.admit():
        enter(op)
    while True:
        for device in sorted(awake):
            op = None if busy[device] else policies[device].choose()
            if op is not None:
                busy[device] = True
                end = now + workload.time(op)
                orders[device].append(op)
                starts[device].append(now)
                ends[device].append(end)
                heappush(events, (end, False, device, op))
        awake.clear()
        if not events:
            return Run(_frozen(orders), _frozen(starts), _frozen(ends), now, messages)
        now = events[0][0]
        while events and events[0][0] <= now + tolerance * now:
            _, arrives, device, op = heappop(events)
            if arrives:
                if inputs.deliver(op):
                    add_ready(device, op)
                continue
            busy[device] = False
            awake.add(device)
            policies[device].mark_done(op)
            for consumer, receiver in dependencies.consumers(op):
                messages += receiver != device
                delay = workload.delay(consumer, device, receiver)
                if delay:
                    arrival = (
                        now + delay if ports is None else ports.arrival(now, (device, receiver), delay, free)
                    )
                    heappush(events, (arrival, True, receiver, consumer))
                elif inputs.deliver(consumer):
                    add_ready(receiver, consumer)
            for entry in admission.mark_done(device, op):
                enter(entry)


def _frozen(rows: list[list[T]]) -> tuple[tuple[T, ...], ...]:
    return tuple(map(tuple, rows))
