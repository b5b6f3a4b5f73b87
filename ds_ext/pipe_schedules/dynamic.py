"""Order decided at run time: which op a device computes next.

Each device has one :class:`Greedy`. It has no clock, thread or message: its caller passes it the inputs that arrived
and the ops that ended, and asks for the next op. The simulator (:func:`.events.run`) and the
engine run the same objects.

**Admission.** The device of a pipe's first stage starts the micro-batches of that pipe in order, while fewer than the
pipe's credits are in flight. The first forward of a micro-batch takes a credit and its last input gradient returns it.
Both run on that device, so admission needs no message.

**Room.** A device may have room for fewer activations than the admitted micro-batches produce. It reserves a place for
every stage of which it keeps no activation. A device without room computes a weight gradient that is due, or waits.

No order of arrivals makes devices wait for each other; docs/dpp.md has the proof.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

from .ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Op
from .placement import Placement

POLICIES = ("group", "breadth", "depth")
_GRADIENTS = (BACKWARD, BACKWARD_INPUT)


@dataclass(frozen=True)
class Rules:
    """Rules that all devices of a pipeline group share before the first op.

    Args:
        placement: where the stages live.
        micro_batches: N, of all pipes together.
        split: whether a backward is an input gradient and a weight gradient.
        policy: which of several ready ops is taken: ``breadth`` runs all admitted micro-batches through a device's
            first chunk before its second, ``depth`` takes what is furthest, ``group`` is breadth-first among D
            micro-batches (shared by the pipes).
        credits: per pipe how many of its micro-batches are in flight at most.
        rooms: per device how many stages of micro-batches it keeps activations of at most.
    """

    placement: Placement
    micro_batches: int
    split: bool
    policy: str
    credits: tuple[int, ...]
    rooms: tuple[int, ...]

    @cached_property
    def pipes(self) -> tuple[int, ...]:
        """The pipe of every micro-batch."""
        return self.placement.pipes_of(self.micro_batches)

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
            seen = [0] * self.placement.num_devices
            for stage, device in enumerate(devices):
                found[pipe, stage] = seen[device]
                seen[device] += 1
        return found

    def entering(self, device: int) -> list[Op]:
        """The first forwards of the micro-batches that enter at ``device``."""
        starts = [devices[0] for devices in self.placement.pipes]
        return [Op(FORWARD, m, 0) for m, pipe in enumerate(self.pipes) if starts[pipe] == device]

    def count(self, device: int) -> int:
        """Number of ops that ``device`` computes in a step."""
        stages = [devices.count(device) for devices in self.placement.pipes]
        return sum(stages[pipe] for pipe in self.pipes) * (3 if self.split else 2)

    def room(self, device: int) -> int:
        """Stages of micro-batches whose activations ``device`` keeps at most."""
        return self.rooms[device]

    def key(self, op: Op) -> tuple[int, ...]:
        """Return the rank of a ready op among those of its direction: the least is taken."""
        kind, m, stage = op
        pipe, k = self.pipes[m], self.places[m]
        # Gradients come back the other way: the last visit first.
        visit = self.visits[pipe, stage] if kind == FORWARD else -self.visits[pipe, stage]
        if self.policy == "depth":
            return (-visit, k, pipe) if kind == FORWARD else (k, visit, pipe)
        if self.policy == "breadth":
            return visit, k, pipe
        return k // max(1, self.placement.num_devices // self.placement.replicas), visit, k, pipe

    def device(self, device: int) -> Greedy:
        """The policy object of a device for one step."""
        return Greedy(self, device)


class Greedy:
    """Policy of one device in one step: alternate ready forwards and backwards, compute weight gradients in waits.

    ``live`` counts for every (pipe, stage) the micro-batches whose activations it keeps.
    """

    def __init__(self, rules: Rules, device: int) -> None:
        self.rules = rules
        self.live = dict.fromkeys(((c.pipe, c.stage) for c in rules.placement.chunks[device]), 0)
        # Places that are taken, or reserved for a stage of which nothing is kept.
        self._taken, self._room = len(self.live), rules.room(device)
        self._credits = list(rules.credits)
        self._entries: list[deque[Op]] = [deque() for _ in rules.credits]
        self._forwards: list[tuple[tuple[int, ...], Op]] = []
        self._backwards: list[tuple[tuple[int, ...], Op]] = []
        self._weights: deque[Op] = deque()
        self._forward_was_last = True

    def arrive(self, op: Op) -> None:
        """The inputs of ``op`` are here; of a first stage: the micro-batch may enter when there is a credit."""
        if op.kind == FORWARD and op.stage == 0:
            self._entries[self.rules.pipes[op.micro_batch]].append(op)
            self._admit(self.rules.pipes[op.micro_batch])
        elif op.kind == FORWARD:
            heappush(self._forwards, (self.rules.key(op), op))
        elif op.kind == BACKWARD_WEIGHT:
            self._weights.append(op)
        else:
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
        """Return whether there is room for another activation of (pipe, stage); always, for the first one."""
        return not self.live[stage] or self._taken < self._room

    def _keep(self, stage: tuple[int, int], more: int) -> None:
        """One micro-batch of (pipe, stage) more or, with -1, less; the first one's place was kept free."""
        before, self.live[stage] = self.live[stage], self.live[stage] + more
        if min(before, self.live[stage]):
            self._taken += more

    def _stage(self, op: Op) -> tuple[int, int]:
        return self.rules.pipes[op.micro_batch], op.stage

    def _backward(self) -> Op:
        self._forward_was_last = False
        return heappop(self._backwards)[1]

    def done(self, op: Op) -> None:
        """``op`` has been computed."""
        if op.kind in (BACKWARD, BACKWARD_WEIGHT):
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
