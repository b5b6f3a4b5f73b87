"""Dynamic schedules: policies that choose the next op of a device at run time.

Each device has one :class:`Greedy`, which needs no clock, thread or message. Its caller reports ready and finished ops
and asks for the next op. The event loop (:func:`.events.run`) and the engine use the same class.

**Admission.** The device of a pipe's first stage starts the micro-batches of that pipe in order. The number in flight
is limited by the pipe's credits: the first forward of a micro-batch takes a credit, and its last input gradient
returns it. Both ops run on the same device, so admission needs no message.

**Activation limit.** The limit of a device may be lower than what the admitted micro-batches need. The device reserves
one activation for every stage without live activations. At the limit, it computes a ready backward for the weights, or
waits.

These rules cannot deadlock, whatever the order of arrivals; docs/dpp.md contains the proof.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

from .ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Op
from .placement import Placement

POLICIES = ("group", "breadth", "depth")
_GRADIENTS = (BACKWARD, BACKWARD_INPUT)


@dataclass(frozen=True)
class DynamicRules:
    """Rules of a dynamic schedule for one step, shared by all devices of a pipeline group.

    Args:
        policy: choice among ready forwards, and among ready backwards. ``breadth`` runs all admitted micro-batches
            through the chunk of a device that they visit first, before the next one. ``depth`` prefers forwards of the
            chunk visited last, and backwards of the oldest micro-batch. ``group`` is breadth-first within groups of D
            micro-batches, summed over the pipes.
        credits: maximum number of micro-batches in flight, per pipe.
        max_live: maximum number of (stage, micro-batch) pairs with live activations, per device.
    """

    placement: Placement
    micro_batches: int
    split: bool
    policy: str
    credits: tuple[int, ...]
    max_live: tuple[int, ...]

    @cached_property
    def pipes(self) -> tuple[int, ...]:
        return self.placement.pipes_of(self.micro_batches)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Position of every micro-batch in its pipe, from 0."""
        first: dict[int, int] = {}
        return tuple(m - first.setdefault(pipe, m) for m, pipe in enumerate(self.pipes))

    def entry_ops(self, device: int) -> list[Op]:
        starts = [devices[0] for devices in self.placement.pipes]
        return [Op(FORWARD, m, 0) for m, pipe in enumerate(self.pipes) if starts[pipe] == device]

    def num_ops(self, device: int) -> int:
        stages = [devices.count(device) for devices in self.placement.pipes]
        return sum(stages[pipe] for pipe in self.pipes) * (3 if self.split else 2)

    def priority(self, op: Op) -> tuple[int, ...]:
        """Return the sort key of a ready op; the smallest goes first. Forwards and backwards have separate keys."""
        pipe, position = self.pipes[op.micro_batch], self.positions[op.micro_batch]
        is_forward = op.kind == FORWARD
        # Backwards visit the chunks in reverse order.
        visit = self.placement.visits[op.stage, pipe] * (1 if is_forward else -1)
        if self.policy == "breadth":
            return visit, position, pipe
        if self.policy == "group":
            group_size = max(1, self.placement.num_devices // self.placement.replicas)
            return position // group_size, visit, position, pipe
        if is_forward:
            return -visit, position, pipe
        return position, visit, pipe  # the oldest micro-batch frees its activations first

    def device(self, device: int) -> Greedy:
        return Greedy(self, device)


class Greedy:
    """Policy of one device in one step: alternate ready forwards and backwards, else compute a backward for weights.

    ``live`` counts the micro-batches with live activations for every (stage, pipe) pair of the device.
    """

    def __init__(self, rules: DynamicRules, device: int) -> None:
        self.rules = rules
        self.live = dict.fromkeys(((c.stage, c.pipe) for c in rules.placement.chunks[device]), 0)
        # Activations that are live, or reserved for a stage that has none.
        self._reserved = len(self.live)
        self._limit = rules.max_live[device]
        self._credits = list(rules.credits)
        self._entries: list[deque[Op]] = [deque() for _ in rules.credits]
        self._forwards: list[tuple[tuple[int, ...], Op]] = []
        self._backwards: list[tuple[tuple[int, ...], Op]] = []
        self._weights: deque[Op] = deque()
        self._last_was_forward = True

    def add_ready(self, op: Op) -> None:
        """Record that the inputs of ``op`` have arrived. An entry op also waits for a credit."""
        if op.kind == FORWARD and op.stage == 0:
            self._entries[self.rules.pipes[op.micro_batch]].append(op)
            self._admit(self.rules.pipes[op.micro_batch])
        elif op.kind == FORWARD:
            heappush(self._forwards, (self.rules.priority(op), op))
        elif op.kind == BACKWARD_WEIGHT:
            self._weights.append(op)
        else:
            heappush(self._backwards, (self.rules.priority(op), op))

    def choose(self) -> Op | None:
        if self._backwards and (self._last_was_forward or not self._forwards):
            return self._take_backward()
        op = self._take_forward()
        if op is not None or self._weights:
            return op or self._weights.popleft()
        return self._take_backward() if self._backwards else None

    def _take_forward(self) -> Op | None:
        skipped = []
        chosen_op = None
        while self._forwards and chosen_op is None:
            priority, op = heappop(self._forwards)
            if self._fits(self._stage(op)):
                chosen_op = op
                self._count(self._stage(op), 1)
                self._last_was_forward = True
            else:
                skipped.append((priority, op))
        for entry in skipped:
            heappush(self._forwards, entry)
        return chosen_op

    def _fits(self, stage: tuple[int, int]) -> bool:
        """Return True if another activation of (stage, pipe) fits. The first one always does."""
        return not self.live[stage] or self._reserved < self._limit

    def _count(self, stage: tuple[int, int], change: int) -> None:
        """Add ``change`` to the live activations of (stage, pipe); the first one uses the reservation."""
        previous = self.live[stage]
        self.live[stage] += change
        if min(previous, self.live[stage]):
            self._reserved += change

    def _stage(self, op: Op) -> tuple[int, int]:
        return op.stage, self.rules.pipes[op.micro_batch]

    def _take_backward(self) -> Op:
        self._last_was_forward = False
        return heappop(self._backwards)[1]

    def mark_done(self, op: Op) -> None:
        if op.kind in (BACKWARD, BACKWARD_WEIGHT):
            self._count(self._stage(op), -1)
        if op.kind in _GRADIENTS and op.stage == 0:
            pipe = self.rules.pipes[op.micro_batch]
            self._credits[pipe] += 1
            self._admit(pipe)

    def _admit(self, pipe: int) -> None:
        """Make the waiting entry ops of a pipe ready, as far as it has credits."""
        entries = self._entries[pipe]
        while entries and self._credits[pipe]:
            self._credits[pipe] -= 1
            op = entries.popleft()
            heappush(self._forwards, (self.rules.priority(op), op))
