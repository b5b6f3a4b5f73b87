"""The event loop: devices compute what their policies choose, and results arrive when the costs say.

One loop prices a fixed order (:mod:`.simulate`), finds orders (:mod:`.list_scheduling`) and runs dynamic rules
(:mod:`.methods.dpp`); they differ in their policies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import Protocol, TypeVar

from .costs import Costs
from .dependencies import Dependencies, Inputs
from .ops import BACKWARD, BACKWARD_INPUT, FORWARD, Op
from .placement import Placement

T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """Ops of a step, and the time of each op and message.

    Args:
        split: whether backwards are two ops; a set of (stage, micro-batch) if only some are.
        jittered: whether the jitter of the costs counts. A planner does not see it; a run does.
        trains: whether there are backwards.
    """

    placement: Placement
    micro_batches: int
    costs: Costs
    split: bool | frozenset[tuple[int, int]]
    jittered: bool = False
    trains: bool = True

    @cached_property
    def dependencies(self) -> Dependencies:
        """Which op waits for which."""
        return Dependencies(self.placement, self.micro_batches, split=self.split, trains=self.trains)

    @property
    def pipes(self) -> tuple[int, ...]:
        """The pipe of every micro-batch."""
        return self.dependencies.pipes

    @cached_property
    def times(self) -> dict[str, tuple[float, ...]]:
        """Kind of op -> its time at every stage."""
        return self.costs.durations(self.placement)

    @cached_property
    def ops(self) -> int:
        """Number of ops of the step when every device computes forwards and backwards."""
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

    def time(self, op: Op) -> float:
        """Return how long ``op`` takes."""
        time = self.times[op.kind][op.stage]
        return time * self.costs.factor(op) if self.jittered else time

    def delay(self, op: Op, sender: int, receiver: int) -> float:
        """Return how long a message that ``op`` waits for takes."""
        delay = self.costs.delay(sender, receiver)
        return delay * self.costs.factor(op, message=True) if delay and self.jittered else delay


class Policy(Protocol):
    """The decisions of one device: it receives arrivals and ends, and chooses the next op."""

    def arrive(self, op: Op) -> None:
        """Take note that all inputs of ``op`` have arrived."""
        ...

    def choose(self) -> Op | None:
        """Return the op to compute now; None to wait for an arrival."""
        ...

    def done(self, op: Op) -> None:
        """Take note that ``op`` has been computed."""
        ...


class FixedOrder:
    """Computes a given order, each op as soon as its inputs have arrived."""

    def __init__(self, order: Iterable[Op]) -> None:
        self._order = iter(order)
        self._next = next(self._order, None)
        self._arrived: set[Op] = set()

    def arrive(self, op: Op) -> None:
        self._arrived.add(op)

    def choose(self) -> Op | None:
        op = self._next
        if op not in self._arrived:
            return None
        self._arrived.remove(op)
        self._next = next(self._order, None)
        return op

    def done(self, op: Op) -> None:
        pass


class Admission(Protocol):
    """When micro-batches enter the pipeline."""

    def admit(self) -> Iterator[Op]:
        """Yield the first ops of the micro-batches that may enter at the start."""
        ...

    def done(self, device: int, op: Op) -> Iterator[Op]:
        """Yield the first ops of the micro-batches that may enter after ``device`` has computed ``op``."""
        ...


class NoAdmission:
    """Every micro-batch may enter at the start; only the policies hold it back."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def admit(self) -> Iterator[Op]:
        for m in range(self._work.micro_batches):
            yield from self._work.dependencies.entries(m)

    def done(self, device: int, op: Op) -> Iterator[Op]:
        return iter(())


@dataclass(frozen=True)
class Run:
    """Result of a run: every device's ops in order with starts and ends, the makespan, the number of messages."""

    orders: tuple[tuple[Op, ...], ...]
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    makespan: float
    messages: int


def run(work: Work, policies: Sequence[Policy], admission: Admission, *, same_time: float = 0.0) -> Run:
    """Let every device compute what its policy chooses, as soon as it is free, until none can go on.

    Args:
        same_time: events no further apart, relative to the time, count as one moment. Sums of the same times in another
            order differ by rounding, which must not decide what a policy sees.
    """
    device_of, consumers = work.dependencies.device, work.dependencies.consumers
    inputs = Inputs(work.dependencies)
    orders: list[list[Op]] = [[] for _ in policies]
    starts: list[list[float]] = [[] for _ in policies]
    ends: list[list[float]] = [[] for _ in policies]
    busy = [False] * len(policies)
    events: list[tuple[float, bool, int, Op]] = []  # time, whether it is an arrival, device, op
    awake: set[int] = set()
    now, messages = 0.0, 0

    def arrive(device: int, op: Op) -> None:
        policies[device].arrive(op)
        awake.add(device)

    for op in admission.admit():
        arrive(device_of(op), op)
    while True:
        for device in sorted(awake):
            op = None if busy[device] else policies[device].choose()
            if op is not None:
                busy[device] = True
                end = now + work.time(op)
                orders[device].append(op)
                starts[device].append(now)
                ends[device].append(end)
                heappush(events, (end, False, device, op))
        awake.clear()
        if not events:
            return Run(_frozen(orders), _frozen(starts), _frozen(ends), now, messages)
        now = events[0][0]
        while events and events[0][0] <= now + same_time * now:
            _, arrives, device, op = heappop(events)
            if arrives:
                if inputs.deliver(op):
                    arrive(device, op)
                continue
            busy[device] = False
            awake.add(device)
            policies[device].done(op)
            for consumer, to in consumers(op):
                messages += to != device
                delay = work.delay(consumer, device, to)
                if delay:
                    heappush(events, (now + delay, True, to, consumer))
                elif inputs.deliver(consumer):
                    arrive(to, consumer)
            for entering in admission.done(device, op):
                arrive(device_of(entering), entering)


def _frozen(rows: list[list[T]]) -> tuple[tuple[T, ...], ...]:
    return tuple(map(tuple, rows))
