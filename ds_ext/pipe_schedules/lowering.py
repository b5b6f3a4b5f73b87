"""Lowering of a timetable to the instructions of every device.

Lowering adds loads of inputs and labels, messages between devices, copies between stages of one device, buffers,
reductions, the optimizer step and the end of the step.

**Receives.** A link delivers messages in the order of the sends, so a device receives them in that order. It receives a
message right before the op that needs it, preceded by all earlier messages on the link. These occupy a buffer from then
on. The earlier receives add no waiting time, because their messages were sent first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import replace

from .checks.timetable import check_timetable
from .ops import (
    AUDIT,
    COMPUTE_NAME,
    FORWARD,
    OPTIMIZER_STEP,
    RECEIVED,
    RECOMPUTE,
    REDUCE_STAGE,
    Instruction,
    Op,
)
from .placement import Placement
from .timetables import Program, Timetable

_Message = tuple[Op, int]  # op that receives it, stage that sends it


def lower(timetable: Timetable) -> Program:
    """Return the program of a training step, or of an evaluation if the timetable has no backwards.

    Raises ScheduleError if an op is missing, repeated or on the wrong device.
    """
    check_timetable(timetable)
    instructions, num_buffers = [], []
    for device, messages in enumerate(_messages_by_link(timetable)):
        lowering = Lowering(device, timetable, messages)
        program = [instruction for op in timetable.orders[device] for instruction in lowering.add(op)]
        if timetable.trains:
            program += _end_of_step(timetable.placement, device)
        instructions.append(tuple(program))
        num_buffers.append(lowering.buffers.count)
    return Program(timetable, tuple(instructions), tuple(num_buffers))


def _messages_by_link(timetable: Timetable) -> list[dict[int, list[_Message]]]:
    """Return the messages of each link in the order of the sends, by receiver and sender.

    Activations and gradients share a link.
    """
    messages: list[dict[int, list[_Message]]] = [{} for _ in timetable.orders]
    for device, order in enumerate(timetable.orders):
        for op in order:
            for consumer, to in timetable.dependencies.consumers(op):
                if to != device:
                    messages[to].setdefault(device, []).append((consumer, op.stage))
    return messages


def _end_of_step(placement: Placement, device: int) -> Iterator[Instruction]:
    if device not in placement.forward_devices:
        yield from map(Instruction, ("ReduceTiedGrads", "ReduceGrads", OPTIMIZER_STEP))
    for stage, source, target in placement.weight_transfers:
        if device in (source, target):
            peer = target if device == source else source
            yield Instruction("SyncWeights", stage=stage, pipe=0, peer=peer)
    yield Instruction("EndOfStep")


def with_audit(program: Program) -> Program:
    """Return the program with an audit before the optimizer step."""
    instructions = [
        tuple(each for i in order for each in ((Instruction(AUDIT), i) if i.name == OPTIMIZER_STEP else (i,)))
        for order in program.instructions
    ]
    return replace(program, instructions=tuple(instructions))


def after_the_ops(program: Program, device: int) -> list[Instruction]:
    """Return the instructions of a device after its last op and the messages of that op."""
    instructions = program.instructions[device]
    last = max((i for i, each in enumerate(instructions) if each.micro_batch is not None), default=-1)
    return [i for i in instructions[last + 1 :] if i.name != REDUCE_STAGE]


class Lowering:
    """Program of one device, built op by op.

    Args:
        timetable: the order; for a dynamic schedule, any order of the same schedule and sizes.
        messages: messages of every link in order, by sender. None for a dynamic schedule, which receives each message
            right before its op.
    """

    def __init__(
        self, device: int, timetable: Timetable, messages: dict[int, list[_Message]] | None = None
    ) -> None:
        self.device = device
        self.timetable = timetable
        self.buffers = _Buffers()
        self._messages = None if messages is None else {peer: iter(ops) for peer, ops in messages.items()}
        self._early: set[_Message] = set()  # received before an earlier op

    def add(self, op: Op) -> list[Instruction]:
        """Append ``op``: return its load or receives, computation, and sends or copies, and update the buffers."""
        instructions: list[Instruction] = []
        dependencies, placement = self.timetable.dependencies, self.timetable.placement
        if op.kind in (FORWARD, RECOMPUTE) and placement.loads(op.stage):
            instructions.append(self._instruction("LoadMicroBatch", op))
        for need, sender in dependencies.needs(op):
            if sender != self.device:
                instructions += self._receive((op, need.stage), sender)
        chunk = None
        if placement.has_weights(op.stage):
            chunk = placement.chunk_index(self.device, op.stage, self.timetable.pipe(op.micro_batch))
        instructions.append(self._instruction(COMPUTE_NAME[op.kind], op, chunk=chunk))
        still_needed = False
        for consumer, device in dependencies.consumers(op):
            other, kind = consumer.stage, RECEIVED[consumer.kind].suffix
            if device != self.device:
                instructions.append(self._instruction(f"Send{kind}", op, peer=device, other=other))
            elif other != op.stage:
                target = self.buffers.buffer(consumer)
                instructions.append(self._instruction(f"Copy{kind}", op, to_buffer=target, other=other))
            elif consumer.slice == op.slice:
                still_needed = True
        if not still_needed:
            self.buffers.free(op)
        return instructions

    def _receive(self, message: _Message, sender: int) -> Iterator[Instruction]:
        """Yield the receive of a message, preceded by the earlier ones on its link."""
        if message in self._early:
            self._early.remove(message)
            return
        for received in iter((message,)) if self._messages is None else self._messages[sender]:
            receiver, source = received
            yield self._instruction(
                f"Recv{RECEIVED[receiver.kind].suffix}", receiver, peer=sender, other=source
            )
            if received == message:
                return
            self._early.add(received)

    def _instruction(
        self,
        name: str,
        op: Op,
        *,
        chunk: int | None = None,
        peer: int | None = None,
        to_buffer: int | None = None,
        other: int | None = None,
    ) -> Instruction:
        """Return an instruction for ``op``, whose slice gets a buffer if it has none."""
        pipe, buffer = self.timetable.pipe(op.micro_batch), self.buffers.buffer(op)
        return Instruction(
            name, op.micro_batch, op.stage, pipe, chunk, peer, buffer, to_buffer, op.slice, other
        )


class _Buffers:
    """Allocator of buffers: each live slice of a micro-batch at a stage gets the lowest free buffer."""

    def __init__(self) -> None:
        self.count = 0
        self._live: dict[tuple[int, int, int], int] = {}
        self._free: list[int] = []

    def buffer(self, op: Op) -> int:
        key = op.stage, op.micro_batch, op.slice
        buffer = self._live.get(key)
        if buffer is None:
            if self._free:
                buffer = heapq.heappop(self._free)
            else:
                buffer = self.count
                self.count += 1
            self._live[key] = buffer
        return buffer

    def free(self, op: Op) -> None:
        heapq.heappush(self._free, self._live.pop((op.stage, op.micro_batch, op.slice)))
