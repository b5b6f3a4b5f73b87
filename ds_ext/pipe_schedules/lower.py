"""Lowering: from a timetable of computations to the instructions that every device executes.

Inserted here and nowhere else: loads of inputs and labels, sends and receives between devices, hand-overs between two
stages on one device, buffers, reductions and the optimizer step.

**Receives.** A link delivers in the order in which its sender sends. So a device receives in that order too: a message
right before the computation that needs it, and before it the earlier ones of the link, whose buffers are taken from
then on. That adds no waiting: they have been sent before.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from .check.timetable import check_timetable
from .ops import BACKWARD, BACKWARD_INPUT, COMPUTE_NAME, FORWARD, RECOMPUTE, Instruction, Op
from .placement import Placement
from .timetables import Program, Timetable

AFTER_BACKWARDS = ("ReduceTiedGrads", "ReduceGrads", "OptimizerStep")


def lower(timetable: Timetable) -> Program:
    """Return the whole program of a training step, or of an evaluation when the timetable has no backwards.

    Raises ScheduleError when a computation is missing, doubled or on the wrong device.
    """
    check_timetable(timetable)
    instructions, num_buffers = [], []
    for device, inbox in enumerate(_inboxes(timetable)):
        lowering = Lowering(device, timetable, inbox)
        program = [instruction for op in timetable.orders[device] for instruction in lowering.add(op)]
        if timetable.trains:
            program += _end_of_step(timetable.placement, device)
        instructions.append(tuple(program))
        num_buffers.append(lowering.buffers.count)
    return Program(timetable, tuple(instructions), tuple(num_buffers))


def _inboxes(timetable: Timetable) -> list[dict[int, list[Op]]]:
    """Return per receiver and sender the messages of their link in the order in which they are sent.

    A message is named by the op that needs it. Activations and gradients share a link.
    """
    found: list[dict[int, list[Op]]] = [{} for _ in timetable.orders]
    for device, order in enumerate(timetable.orders):
        for op in order:
            for consumer, to in timetable.dependencies.consumers(op):
                if to != device:
                    found[to].setdefault(device, []).append(consumer)
    return found


def _end_of_step(placement: Placement, device: int) -> Iterator[Instruction]:
    """Yield reductions and the step; devices that only compute forwards get the new weights instead."""
    if device not in placement.forward_devices:
        yield from map(Instruction, AFTER_BACKWARDS)
    for stage, source, target in placement.weight_copies:
        if device in (source, target):
            peer = target if device == source else source
            yield Instruction("SyncWeights", stage=stage, pipe=0, peer=peer)


class Lowering:
    """The program of one device, made op by op.

    Args:
        device: its number.
        timetable: the order; if it is decided at run time, any other order of the same schedule and sizes.
        inbox: the messages of every link in order, by sender. None for an order that is decided at run time: a message
            is received right before the op that needs it, as it has arrived when the op is chosen.
    """

    def __init__(self, device: int, timetable: Timetable, inbox: dict[int, list[Op]] | None = None) -> None:
        self.device, self.timetable = device, timetable
        self._program: list[Instruction] = []
        self.buffers = _Buffers()
        self._inbox = None if inbox is None else {sender: iter(sent) for sender, sent in inbox.items()}
        self._early: set[Op] = set()

    def add(self, op: Op) -> list[Instruction]:
        """Return the instructions of ``op``: what it needs before, the computation, what it hands over after."""
        self._program = []
        dependencies, placement = self.timetable.dependencies, self.timetable.placement
        if op.kind in (FORWARD, RECOMPUTE) and op.stage in (0, placement.stages - 1):
            # The first stage needs the inputs, the last one the labels of the same micro-batch.
            self._instruct("LoadMicroBatch", op)
        for _, sender in dependencies.of(op):
            if sender != self.device:
                self._receive(op, sender)
        chunk = placement.chunk_index(self.device, op.stage, self.timetable.pipe(op.micro_batch))
        self._instruct(COMPUTE_NAME[op.kind], op, chunk=chunk)
        kept = False
        for consumer, device in dependencies.consumers(op):
            if device != self.device:
                self._instruct(f"Send{_message(consumer)}", op, peer=device)
            elif consumer.stage != op.stage:
                self._instruct(f"Copy{_message(consumer)}", op, to_buffer=self.buffers.of(consumer))
            else:
                kept = True
        if not kept:
            self.buffers.free(op)
        return self._program

    def _receive(self, op: Op, sender: int) -> None:
        """Receive the message that ``op`` needs, after the earlier ones of its link."""
        if op in self._early:
            self._early.remove(op)
            return
        for wanted in (op,) if self._inbox is None else self._inbox[sender]:
            self._instruct(f"Recv{_message(wanted)}", wanted, peer=sender)
            if wanted == op:
                return
            self._early.add(wanted)

    def _instruct(
        self,
        name: str,
        op: Op,
        *,
        chunk: int | None = None,
        peer: int | None = None,
        to_buffer: int | None = None,
    ) -> None:
        pipe, buffer = self.timetable.pipe(op.micro_batch), self.buffers.of(op)
        self._program.append(
            Instruction(name, op.micro_batch, op.stage, pipe, chunk, peer, buffer, to_buffer)
        )


def _message(consumer: Op) -> str:
    """Return what ``consumer`` is sent, as the names of instructions have it."""
    return "Grad" if consumer.kind in (BACKWARD, BACKWARD_INPUT) else "Activation"


class _Buffers:
    """Gives every live pair (stage, micro-batch) of a device the lowest free buffer."""

    def __init__(self) -> None:
        self.count = 0
        self._live: dict[tuple[int, int], int] = {}
        self._free: list[int] = []

    def of(self, op: Op) -> int:
        pair = op.stage, op.micro_batch
        buffer = self._live.get(pair)
        if buffer is None:
            if self._free:
                buffer = heapq.heappop(self._free)
            else:
                buffer, self.count = self.count, self.count + 1
            self._live[pair] = buffer
        return buffer

    def free(self, op: Op) -> None:
        heapq.heappush(self._free, self._live.pop((op.stage, op.micro_batch)))


def dump(program: Program) -> dict[str, object]:
    """The timetable as plain data for JSON; docs/architecture.md, "Timetable dump", has the keys."""
    timetable, placement = program.timetable, program.timetable.placement
    return {
        "schedule": timetable.schedule,
        "stages": placement.devices_per_pipe,
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
        "ranks": [[_dump_instruction(i) for i in instructions] for instructions in program.instructions],
    }


def _role(placement: Placement, rank: int) -> dict[str, str]:
    """What the device does, where forwards have devices of their own."""
    if not placement.forward_devices:
        return {}
    return {"role": "forward" if rank in placement.forward_devices else "backward"}


def _dump_instruction(instruction: Instruction) -> dict[str, object]:
    fields: dict[str, object] = {"op": instruction.name}
    for key in ("micro_batch", "stage", "pipe", "chunk", "peer"):
        value = getattr(instruction, key)
        if value is not None:
            fields[key] = value
    return fields
