"""What a device does when nobody has told it the order: of what has arrived and is admitted, which op is next.

One object per device, without clocks, threads or messages: it is told of arrivals and ends, and asked for the next op.
The simulator (:func:`..list_scheduling.dispatch.dispatch`) and the live engine run the same objects.

**Admission.** The device of a pipe's first stage lets its micro-batches in, in their order, while fewer than the pipe's
credits are in flight: a credit is taken with a micro-batch's first forward and comes back with its last input gradient,
which that device computes itself. So a credit holds for the whole pipeline group, and nobody is asked.

**Room.** A device may keep less than the admitted micro-batches would take together: it always leaves a place for every
stage that it keeps nothing of. A device without room computes a weight gradient, which nobody waits for, or waits.
Room is counted in stages of micro-batches, and in bytes where these are given.

Neither can make devices wait for each other, whatever arrives when: docs/dpp.md has the proof.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush

from ..ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Op
from ..placement import Placement

POLICIES = ("group", "breadth", "depth")
_GRADIENTS = (BACKWARD, BACKWARD_INPUT)


@dataclass(frozen=True)
class Rules:
    """What all devices of a pipeline group agree on before the first op.

    Args:
        placement: where the stages live.
        micro_batches: N, of all pipes together.
        split: whether a backward is an input gradient and a weight gradient.
        policy: which of several ready ops is taken: ``breadth`` runs all admitted micro-batches through a device's
            first chunk before its second, ``depth`` takes what is furthest, ``group`` is breadth-first among D
            micro-batches (shared by the pipes).
        credits: per pipe how many of its micro-batches are in flight at most.
        rooms: per device how many stages of micro-batches it keeps activations of at most.
        sizes: bytes of a micro-batch's activations at every stage.
        max_bytes: of them a device keeps at most so many; 0: no such limit.
        sequences: per device the (stage, micro-batch) in whose order it computes gradients, in lists that are
            independent of each other; a stage that is in none has no order.
    """

    placement: Placement
    micro_batches: int
    split: bool
    policy: str
    credits: tuple[int, ...]
    rooms: tuple[int, ...]
    sizes: tuple[float, ...]
    max_bytes: int = 0
    sequences: tuple[tuple[tuple[tuple[int, int], ...], ...], ...] = field(default=(), repr=False)

    @cached_property
    def pipes(self) -> tuple[int, ...]:
        """The pipe of every micro-batch, as :attr:`.Timetable.pipes` has it."""
        return tuple(m * self.placement.replicas // self.micro_batches for m in range(self.micro_batches))

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The place of every micro-batch in its pipe, from 0."""
        first: dict[int, int] = {}
        return tuple(m - first.setdefault(pipe, m) for m, pipe in enumerate(self.pipes))

    @cached_property
    def visits(self) -> Mapping[tuple[int, int], int]:
        """(pipe, stage) -> how often the pipe has been on that device before."""
        found: dict[tuple[int, int], int] = {}
        for pipe, devices in enumerate(self.placement.pipes):
            seen = [0] * self.placement.ranks
            for stage, device in enumerate(devices):
                found[pipe, stage] = seen[device]
                seen[device] += 1
        return found

    @cached_property
    def gradient(self) -> str:
        """The kind of op whose result the previous stage waits for."""
        return BACKWARD_INPUT if self.split else BACKWARD

    def entering(self, device: int) -> list[Op]:
        """The first forwards of the micro-batches that enter at ``device``."""
        starts = [devices[0] for devices in self.placement.pipes]
        return [Op(FORWARD, 0, m) for m, pipe in enumerate(self.pipes) if starts[pipe] == device]

    def count(self, device: int) -> int:
        """How many ops ``device`` computes in a step."""
        stages = [devices.count(device) for devices in self.placement.pipes]
        return sum(stages[pipe] for pipe in self.pipes) * (3 if self.split else 2)

    def room(self, device: int) -> int:
        """Stages of micro-batches whose activations ``device`` keeps at most."""
        return self.rooms[device]

    def key(self, op: Op) -> tuple[int, ...]:
        """Of ready ops of the same direction the one with the least key is taken."""
        kind, stage, m = op
        pipe, k = self.pipes[m], self.places[m]
        # Gradients come back the other way: the last visit first.
        visit = self.visits[pipe, stage] if kind == FORWARD else -self.visits[pipe, stage]
        if self.policy == "depth":
            return (-visit, k, pipe) if kind == FORWARD else (k, visit, pipe)
        if self.policy == "breadth":
            return visit, k, pipe
        return k // max(1, self.placement.ranks // self.placement.replicas), visit, k, pipe

    def device(self, device: int) -> Greedy:
        """The policy object of a device for one step."""
        return Greedy(self, device)


class Greedy:
    """One device in one step: forwards and backwards in turn as long as both are ready, weight gradients in waits.

    ``live`` counts for every (pipe, stage) the micro-batches whose activations it keeps.
    """

    def __init__(self, rules: Rules, device: int) -> None:
        self.rules, self.device = rules, device
        self.live = dict.fromkeys(((c.pipe, c.stage) for c in rules.placement.chunks[device]), 0)
        # Places and bytes that are taken, or kept free for a stage that nothing is kept of.
        self._taken, self._room = len(self.live), rules.room(device)
        self._bytes = sum(rules.sizes[stage] for _, stage in self.live)
        self._most_bytes = rules.max_bytes or math.inf
        self._credits = list(rules.credits)
        self._entries: list[deque[Op]] = [deque() for _ in rules.credits]
        self._forwards: list[tuple[tuple[int, ...], Op]] = []
        self._backwards: list[tuple[tuple[int, ...], Op]] = []
        self._weights: deque[Op] = deque()
        self._forward_was_last = True
        self._sequence = _Sequences(rules.sequences[device] if rules.sequences else ())

    def arrive(self, op: Op) -> None:
        """The inputs of ``op`` are here; of a first stage: the micro-batch may enter when there is a credit."""
        if op.kind == FORWARD and op.stage == 0:
            self._entries[self.rules.pipes[op.micro_batch]].append(op)
            self._admit(self.rules.pipes[op.micro_batch])
        elif op.kind == FORWARD:
            heappush(self._forwards, (self.rules.key(op), op))
        elif self._sequence.may_run(op):
            heappush(self._backwards, (self.rules.key(op), op))

    def choose(self) -> Op | None:
        """The op to compute now; None to wait for an arrival."""
        if self._backwards and (self._forward_was_last or not self._forwards):
            return self._backward()
        op = self._forward()
        if op is not None or self._weights:
            return op or self._weights.popleft()
        return self._backward() if self._backwards else None

    def _forward(self) -> Op | None:
        """The first of the ready forwards that there is room for."""
        refused, found = [], None
        while self._forwards and found is None:
            entry = heappop(self._forwards)
            if not self._has_room(self._stage(entry[1])):
                refused.append(entry)
                continue
            found = entry[1]
            self._keep(self._stage(found), 1)
            self._forward_was_last = True
        for entry in refused:
            heappush(self._forwards, entry)
        return found

    def _has_room(self, stage: tuple[int, int]) -> bool:
        """Whether another micro-batch of (pipe, stage) may be kept: always, if nothing of it is."""
        more = self._bytes + self.rules.sizes[stage[1]]
        return not self.live[stage] or (self._taken < self._room and more <= self._most_bytes)

    def _keep(self, stage: tuple[int, int], more: int) -> None:
        """One micro-batch of (pipe, stage) more or, with -1, less; the first one's place was kept free."""
        before, self.live[stage] = self.live[stage], self.live[stage] + more
        if min(before, self.live[stage]):
            self._taken += more
            self._bytes += more * self.rules.sizes[stage[1]]

    def _stage(self, op: Op) -> tuple[int, int]:
        return self.rules.pipes[op.micro_batch], op.stage

    def _backward(self) -> Op:
        self._forward_was_last = False
        op = heappop(self._backwards)[1]
        freed = self._sequence.go_on(op)
        if freed is not None:
            heappush(self._backwards, (self.rules.key(freed), freed))
        return op

    def done(self, op: Op) -> None:
        """``op`` has been computed."""
        if op.kind == BACKWARD_INPUT:
            self._weights.append(Op(BACKWARD_WEIGHT, op.stage, op.micro_batch))
        elif op.kind != FORWARD:
            self._keep(self._stage(op), -1)
        if op.kind in _GRADIENTS and op.stage == 0:
            pipe = self.rules.pipes[op.micro_batch]
            self._credits[pipe] += 1
            self._admit(pipe)

    def _admit(self, pipe: int) -> None:
        entries = self._entries[pipe]
        while entries and self._credits[pipe]:
            self._credits[pipe] -= 1
            op = entries.popleft()
            heappush(self._forwards, (self.rules.key(op), op))


class _Sequences:
    """Holds gradients back until it is their turn in the lists that prescribe an order."""

    def __init__(self, lists: Sequence[Sequence[tuple[int, int]]]) -> None:
        self._turns = [deque(turns) for turns in lists]
        self._list_of = {stage: turns for turns in self._turns for stage, _ in turns}
        self._held: dict[tuple[int, int], Op] = {}

    def may_run(self, op: Op) -> bool:
        """Whether it is the turn of ``op``; if not it is held."""
        turns = self._list_of.get(op.stage)
        if turns is None or turns[0] == (op.stage, op.micro_batch):
            return True
        self._held[op.stage, op.micro_batch] = op
        return False

    def go_on(self, op: Op) -> Op | None:
        """``op`` is being computed; the next in its list, if it was held."""
        turns = self._list_of.get(op.stage)
        if turns is None:
            return None
        turns.popleft()
        return self._held.pop(turns[0], None) if turns else None


def in_micro_batch_order(
    placement: Placement, pipes: Sequence[int], device: int
) -> list[list[tuple[int, int]]]:
    """For every stage of ``device`` its gradients in the order of their micro-batches."""
    found: dict[int, list[tuple[int, int]]] = {}
    for m, pipe in enumerate(pipes):
        for stage, at in enumerate(placement.pipes[pipe]):
            if at == device:
                found.setdefault(stage, []).append((stage, m))
    return list(found.values())


def join_ends(
    placement: Placement, order: Sequence[Op], lists: Sequence[Sequence[tuple[int, int]]]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The lists, with those of the first and the last stage joined in the order that ``order`` has.

    A model may tie these two stages' weights, and then a device that holds both adds them to one gradient.
    """
    ends = {0, placement.stages - 1}
    apart = [tuple(turns) for turns in lists if turns[0][0] not in ends]
    joined = tuple((op.stage, op.micro_batch) for op in order if op.kind in _GRADIENTS and op.stage in ends)
    return (*apart, joined) if joined else tuple(apart)
