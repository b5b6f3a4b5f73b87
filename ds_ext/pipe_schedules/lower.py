"""Lowering: from a timetable of computations to the instructions that every rank executes.

Inserted here and nowhere else: loads of inputs and labels, sends and receives between devices, hand-overs
between two stages on one device, buffer slots, reductions and the optimizer step.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from .check import check_timetable
from .ops import BACKWARD_INPUT, BACKWARD_WEIGHT, COMPUTE_NAME, FORWARD, Instruction, Op, Program, Timetable

_AFTER_BACKWARDS = ("ReduceTiedGrads", "ReduceGrads", "OptimizerStep")


def lower(timetable: Timetable) -> Program:
    """The whole program of a training step, or of an evaluation when the timetable has no backwards.

    Raises ScheduleError when a computation is missing, doubled or on the wrong device.
    """
    check_timetable(timetable)
    ranks, num_slots = [], []
    for rank, order in enumerate(timetable.ranks):
        slots = _Slots()
        program = [i for op in order for i in _lower_op(op, rank, timetable, slots)]
        if timetable.trains:
            program += [Instruction(name) for name in _AFTER_BACKWARDS]
        ranks.append(tuple(program))
        num_slots.append(slots.count)
    return Program(timetable, tuple(ranks), tuple(num_slots))


def _lower_op(op: Op, rank: int, timetable: Timetable, slots: _Slots) -> Iterator[Instruction]:
    """One computation with what it needs before and what it hands over after."""
    make = _Maker(op, rank, timetable, slots)
    last = timetable.placement.stages - 1
    if op.kind == FORWARD:
        if op.stage in (0, last):
            # The first stage needs the inputs, the last one the labels of the same micro-batch.
            yield make.here("LoadMicroBatch")
        yield from make.receive("RecvActivation", op.stage - 1)
        yield make.compute()
        yield from make.hand_over("CopyActivation", "SendActivation", op.stage + 1)
    elif op.kind == BACKWARD_WEIGHT:
        yield make.compute()
    else:
        yield from make.receive("RecvGrad", op.stage + 1)
        yield make.compute()
        yield from make.hand_over("CopyGrad", "SendGrad", op.stage - 1)
    # What a forward keeps is needed until the last part of its backward; evaluation keeps nothing.
    if (op.kind != FORWARD or not timetable.trains) and op.kind != BACKWARD_INPUT:
        slots.free(op.stage, op.micro_batch)


class _Maker:
    """Makes the instructions around one computation of ``rank``."""

    def __init__(self, op: Op, rank: int, timetable: Timetable, slots: _Slots) -> None:
        self.op, self.rank, self.timetable, self.slots = op, rank, timetable, slots
        self.pipe, self.slot = timetable.pipe(op.micro_batch), slots.of(op.stage, op.micro_batch)

    def here(
        self, name: str, *, chunk: int | None = None, peer: int | None = None, to_slot: int | None = None
    ) -> Instruction:
        """An instruction on this computation's stage, micro-batch and buffer."""
        op = self.op
        return Instruction(name, op.micro_batch, op.stage, self.pipe, chunk, peer, self.slot, to_slot)

    def compute(self) -> Instruction:
        """The computation itself."""
        chunk = self.timetable.placement.chunk_index[self.op.stage, self.pipe]
        return self.here(COMPUTE_NAME[self.op.kind], chunk=chunk)

    def receive(self, name: str, stage: int) -> Iterator[Instruction]:
        """The message from ``stage``, if there is such a stage and it is on another device."""
        if self._exists(stage):
            peer = self.timetable.rank(stage, self.op.micro_batch)
            if peer != self.rank:
                yield self.here(name, peer=peer)

    def hand_over(self, copy: str, send: str, stage: int) -> Iterator[Instruction]:
        """The result goes to ``stage``, if there is such a stage: a copy on the same device, else a message."""
        if self._exists(stage):
            peer = self.timetable.rank(stage, self.op.micro_batch)
            if peer == self.rank:
                yield self.here(copy, to_slot=self.slots.of(stage, self.op.micro_batch))
            else:
                yield self.here(send, peer=peer)

    def _exists(self, stage: int) -> bool:
        return 0 <= stage < self.timetable.placement.stages


class _Slots:
    """Gives every live (stage, micro-batch) of a rank the lowest free buffer."""

    def __init__(self) -> None:
        self.count = 0
        self._live: dict[tuple[int, int], int] = {}
        self._free: list[int] = []

    def of(self, stage: int, micro_batch: int) -> int:
        key = (stage, micro_batch)
        if key not in self._live:
            if self._free:
                self._live[key] = heapq.heappop(self._free)
            else:
                self._live[key] = self.count
                self.count += 1
        return self._live[key]

    def free(self, stage: int, micro_batch: int) -> None:
        heapq.heappush(self._free, self._live.pop((stage, micro_batch)))


def dump(program: Program) -> dict[str, object]:
    """The timetable as plain data for JSON; docs/architecture.md, "Timetable dump", has the keys."""
    timetable, placement = program.timetable, program.timetable.placement
    return {
        "schedule": timetable.schedule,
        "stages": placement.ranks,
        "micro_batches": timetable.micro_batches,
        "model_stages": placement.stages,
        "chunks": [
            {"rank": rank, "chunk": index, "stage": chunk.stage, "pipe": chunk.pipe}
            for rank, chunks in enumerate(placement.chunks)
            for index, chunk in enumerate(chunks)
        ],
        "ranks": [[_dump_instruction(i) for i in instructions] for instructions in program.ranks],
    }


def _dump_instruction(instruction: Instruction) -> dict[str, object]:
    fields: dict[str, object] = {"op": instruction.name}
    for key in ("micro_batch", "stage", "pipe", "chunk", "peer"):
        value = getattr(instruction, key)
        if value is not None:
            fields[key] = value
    return fields
