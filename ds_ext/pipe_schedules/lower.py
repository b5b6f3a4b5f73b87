"""Lowering: from a timetable of computations to the instructions that every rank executes.

Inserted here and nowhere else: loads of inputs and labels, sends and receives between devices, hand-overs
between two stages on one device, buffer slots, reductions and the optimizer step.

**Receives.** A link delivers in the order in which its sender sends. So a rank receives in that order too: a message
right before the computation that needs it, and before it the earlier ones of the link, whose buffers are taken from
then on. That adds no waiting: they have been sent before.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from .check.program import check_timetable
from .collection import without_collection
from .messages import inboxes
from .ops import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE_NAME,
    FORWARD,
    RECOMPUTE,
    Instruction,
    Op,
    Program,
    Timetable,
)
from .placement import Placement

_AFTER_BACKWARDS = ("ReduceTiedGrads", "ReduceGrads", "OptimizerStep")


@without_collection
def lower(timetable: Timetable) -> Program:
    """The whole program of a training step, or of an evaluation when the timetable has no backwards.

    Raises ScheduleError when a computation is missing, doubled or on the wrong device.
    """
    check_timetable(timetable)
    ranks, num_slots = [], []
    for rank, inbox in enumerate(inboxes(timetable)):
        lowering = Lowering(rank, timetable, inbox)
        for op in timetable.ranks[rank]:
            lowering.add(op)
        if timetable.trains:
            lowering.program += _end_of_step(timetable, rank)
        ranks.append(tuple(lowering.program))
        num_slots.append(lowering.slots.count)
    return Program(timetable, tuple(ranks), tuple(num_slots))


def _end_of_step(timetable: Timetable, rank: int) -> Iterator[Instruction]:
    """Reductions and the step; where forwards have devices of their own, these get the new weights of their stages."""
    forward = timetable.placement.forward
    if forward is not None and rank in forward.devices:
        stage = forward.devices.index(rank)
        yield Instruction("SyncWeights", stage=stage, pipe=0, peer=timetable.placement.pipes[0][stage])
        return
    yield from map(Instruction, _AFTER_BACKWARDS)
    if forward is not None and rank in timetable.placement.pipes[0]:
        stage = timetable.placement.pipes[0].index(rank)
        yield Instruction("SyncWeights", stage=stage, pipe=0, peer=forward.devices[stage])


class Lowering:
    """The program of one rank, made computation by computation."""

    def __init__(self, rank: int, timetable: Timetable, inbox: dict[int, list[int]]) -> None:
        self.rank, self.timetable, self.placement = rank, timetable, timetable.placement
        self.stages, self.last = self.placement.stages, self.placement.stages - 1
        self.pairs = self.stages * timetable.micro_batches
        self.program: list[Instruction] = []
        self.slots = _Slots()
        self._inbox: dict[int, Iterator[int]] = {sender: iter(sent) for sender, sent in inbox.items()}
        self._early: set[int] = set()

    def add(self, op: Op) -> None:
        """One computation with what it needs before and what it hands over after."""
        kind, m, stage = op
        pipe, pair = self.timetable.pipes[m], m * self.stages + stage
        if kind in (FORWARD, RECOMPUTE):
            if stage in (0, self.last):
                # The first stage needs the inputs, the last one the labels of the same micro-batch.
                self._instruct("LoadMicroBatch", m, stage, pipe)
            if stage > 0:
                wanted = pair if kind == FORWARD else 3 * self.pairs + pair
                self._receive(wanted, self.placement.forward_pipes[pipe][stage - 1])
            self._compute(op, pipe)
            if stage < self.last and kind == FORWARD:
                self._hand_on(m, stage, pipe)
        elif kind == BACKWARD_WEIGHT:
            self._compute(op, pipe)
        else:
            if stage < self.last:
                self._receive(self.pairs + pair, self.placement.pipes[pipe][stage + 1])
            self._compute(op, pipe)
            if stage > 0:
                self._hand_over("CopyGrad", "SendGrad", m, stage, pipe, stage - 1)
        # What a forward keeps is needed until the last part of its backward; evaluation keeps nothing.
        kept = FORWARD if self.placement.forward is None else RECOMPUTE
        if (kind != kept or not self.timetable.trains) and kind != BACKWARD_INPUT:
            self.slots.free(pair)

    def _hand_on(self, m: int, stage: int, pipe: int) -> None:
        """An output goes to the next stage: to its forward, and in training to the device that repeats that."""
        if self.placement.forward is None:
            self._hand_over("CopyActivation", "SendActivation", m, stage, pipe, stage + 1)
            return
        if not self.timetable.unused_forward(stage + 1):
            peer = self.placement.forward_pipes[pipe][stage + 1]
            self._instruct("SendActivation", m, stage, pipe, peer=peer)
        if self.timetable.trains:
            self._instruct("SendActivation", m, stage, pipe, peer=self.placement.pipes[pipe][stage + 1])

    def _receive(self, wanted: int, sender: int) -> None:
        """The message that the op with number ``wanted`` needs, after the earlier ones of its link."""
        if sender == self.rank:
            return
        if wanted in self._early:
            self._early.remove(wanted)
            return
        for number in self._inbox[sender]:
            m, stage = divmod(number % self.pairs, self.stages)
            name = "RecvGrad" if self.pairs <= number < 2 * self.pairs else "RecvActivation"
            self._instruct(name, m, stage, self.timetable.pipes[m], peer=sender)
            if number == wanted:
                return
            self._early.add(number)

    def _compute(self, op: Op, pipe: int) -> None:
        kind, m, stage = op
        # A forward device has one stage.
        apart = kind == FORWARD and self.placement.forward is not None
        chunk = 0 if apart else self.placement.chunk_index[stage, pipe]
        self._instruct(COMPUTE_NAME[kind], m, stage, pipe, chunk=chunk)

    def _hand_over(self, copy: str, send: str, m: int, stage: int, pipe: int, to: int) -> None:
        """The result goes to stage ``to``: a copy on the same device, else a message."""
        peer = self.placement.pipes[pipe][to]
        if peer == self.rank:
            self._instruct(copy, m, stage, pipe, to_slot=self.slots.of(m * self.stages + to))
        else:
            self._instruct(send, m, stage, pipe, peer=peer)

    def _instruct(
        self,
        name: str,
        m: int,
        stage: int,
        pipe: int,
        *,
        chunk: int | None = None,
        peer: int | None = None,
        to_slot: int | None = None,
    ) -> None:
        slot = self.slots.of(m * self.stages + stage)
        self.program.append(Instruction(name, m, stage, pipe, chunk, peer, slot, to_slot))


class _Slots:
    """Gives every live pair (stage, micro-batch) of a rank the lowest free buffer. A pair is ``m*S + stage``."""

    def __init__(self) -> None:
        self.count = 0
        self._live: dict[int, int] = {}
        self._free: list[int] = []

    def of(self, pair: int) -> int:
        slot = self._live.get(pair)
        if slot is None:
            if self._free:
                slot = heapq.heappop(self._free)
            else:
                slot, self.count = self.count, self.count + 1
            self._live[pair] = slot
        return slot

    def free(self, pair: int) -> None:
        heapq.heappush(self._free, self._live.pop(pair))


def dump(program: Program) -> dict[str, object]:
    """The timetable as plain data for JSON; docs/architecture.md, "Timetable dump", has the keys."""
    timetable, placement = program.timetable, program.timetable.placement
    return {
        "schedule": timetable.schedule,
        "stages": placement.width,
        "micro_batches": timetable.micro_batches,
        "model_stages": placement.stages,
        "chunks": [
            {
                "rank": rank,
                "chunk": index,
                "stage": chunk.stage,
                "pipe": chunk.pipe,
                **_role(placement, rank),
            }
            for rank, chunks in enumerate(placement.chunks)
            for index, chunk in enumerate(chunks)
        ],
        "ranks": [[_dump_instruction(i) for i in instructions] for instructions in program.ranks],
    }


def _role(placement: Placement, rank: int) -> dict[str, str]:
    """What the device does, where forwards have devices of their own."""
    if placement.forward is None:
        return {}
    return {"role": "forward" if rank in placement.forward.devices else "backward"}


def _dump_instruction(instruction: Instruction) -> dict[str, object]:
    fields: dict[str, object] = {"op": instruction.name}
    for key in ("micro_batch", "stage", "pipe", "chunk", "peer"):
        value = getattr(instruction, key)
        if value is not None:
            fields[key] = value
    return fields
