"""Messages between stages, by device and (stage, micro-batch): contents, links, sends and receives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from ..comm.transport import GPU_CONTROL, ITEM_BITS, Ticket, Transport
from ..errors import ConfigError
from ..parallel.layout import ParallelLayout
from ..pipe_schedules import Program

_ONE_TUPLE = torch.Size([0] * 8)  # a shape that no layer gives
MAX_STAGES = 1 << 14  # a tag has 15 bits for the channel, one of them for the kind
_SPARE = 1  # the next message may be there before the tensors of the last one are gone


class Kind(IntEnum):
    """Content of a message; together with the receiving stage it is the transport's channel."""

    ACTIVATION = 0
    GRADIENT = 1


class StageMessages:
    """Sends and receives of one rank, in the order of a static schedule.

    Args:
        transport: moves tensors by (global rank, tag).
        layout: maps devices of this rank's pipeline to global ranks.
        rank: this global rank.
        count: called with the tensors of every message sent or received.
    """

    def __init__(
        self,
        transport: Transport,
        layout: ParallelLayout,
        rank: int,
        count: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> None:
        assert layout.placement.stages <= GPU_CONTROL
        self.transport, self.layout, self.rank = transport, layout, rank
        self._count = count
        _, self._data, self._tensor = layout.coordinates(rank)
        self._tickets: dict[int, Ticket] = {}
        self._peers: dict[int, tuple[int, ...]] = {}

    def post(self, kind: Kind, stage: int, micro_batch: int, device: int) -> None:
        """Ask for a message early, so that it can travel while this rank computes."""
        tag = _tag(kind, stage, micro_batch)
        self._tickets[tag] = self.transport.recv(self.global_rank(device), tag)

    def receive(self, kind: Kind, stage: int, micro_batch: int) -> tuple[Tensor, ...]:
        """Wait for a message that was posted."""
        tensors = self._tickets.pop(_tag(kind, stage, micro_batch)).wait()
        if self._count is not None:
            self._count(tensors)
        return tensors

    def send(self, kind: Kind, tensors: Sequence[Tensor], stage: int, micro_batch: int, device: int) -> None:
        """Send to ``stage`` on ``device``, without waiting."""
        peers = self._peers.get(device)
        if peers is None:
            peers = self._peers[device] = self.layout.peers(self.rank, device)
        if self._count is not None:
            self._count(tensors)
        tag = _tag(kind, stage, micro_batch)
        tensors = [tensor.detach() for tensor in tensors]
        for rank in peers:
            self.transport.send(tensors, rank, tag)

    def global_rank(self, device: int) -> int:
        """Return the rank of ``device`` that this one exchanges messages with."""
        return self.layout.rank(device, self._data, self._tensor)


def _tag(kind: Kind, stage: int, micro_batch: int) -> int:
    return kind * MAX_STAGES + stage << ITEM_BITS | micro_batch & (1 << ITEM_BITS) - 1


# --- links ---


def link_credits(layout: ParallelLayout, programs: Iterable[Program]) -> dict[tuple[int, int], int]:
    """Return the messages that a receiver holds at most, and one more, by link: (sender, receiver) global ranks.

    The same on all ranks. An activation is held until the last backward of its micro-batch, which may be that of the
    weights; a gradient too.
    """
    programs = list(programs)
    most: Counter[tuple[int, int]] = Counter()
    for program in programs:
        for device in range(len(program.instructions)):
            for sender, held in _held(program, device).items():
                most[sender, device] = max(most[sender, device], held)
    device_of = layout.coordinates
    return {
        (source, target): most[device_of(source)[0], device_of(target)[0]] + _SPARE
        for source, target in _pairs(layout, programs)
    }


def _held(program: Program, device: int) -> Counter[int]:
    """Sending device -> most of its messages that live on ``device`` at a time."""
    instructions = program.instructions[device]
    last = {(i.stage, i.micro_batch): at for at, i in enumerate(instructions) if i.op is not None}
    held: dict[tuple[int | None, int | None], list[int]] = {}
    live: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for at, instruction in enumerate(instructions):
        pair = instruction.stage, instruction.micro_batch
        if instruction.name.startswith("Recv"):
            assert instruction.peer is not None
            held.setdefault(pair, []).append(instruction.peer)
            live[instruction.peer] += 1
            most[instruction.peer] = max(most[instruction.peer], live[instruction.peer])
        elif last.get(pair) == at:
            for sender in held.pop(pair, ()):
                live[sender] -= 1
    return most


def _pairs(layout: ParallelLayout, programs: Iterable[Program]) -> list[tuple[int, int]]:
    """Return (sender, receiver) global ranks of every link that the programs use; the same list on all ranks."""
    links = {
        (device, instruction.peer)
        for program in programs
        for device, instructions in enumerate(program.instructions)
        for instruction in instructions
        if instruction.peer is not None and instruction.name.startswith("Send")
    }
    pairs = [
        (layout.rank(source, data, tensor), layout.rank(target, data, tensor))
        for source, target in sorted(links)
        for data in range(layout.data_parallel_size)
        for tensor in range(layout.tensor_parallel_size)
    ]
    return list(dict.fromkeys(pairs))  # a merged forward rank stands for several


# --- contents ---


def pack(value: Any, giver: str) -> tuple[Tensor, ...]:
    """Return the output of a layer, a tensor or a tuple of tensors, as the tensors of a message.

    An empty tensor behind it marks a tuple of one tensor. Raises ConfigError for anything else.
    """
    if torch.is_tensor(value):
        return (value,)
    if not isinstance(value, (tuple, list)) or not value or not all(map(torch.is_tensor, value)):
        inside = (
            f" of {', '.join(type(v).__name__ for v in value)}" if isinstance(value, (tuple, list)) else ""
        )
        raise ConfigError(
            f"{giver} gives a {type(value).__name__}{inside}. What passes between stages must be a tensor or a "
            f"tuple of tensors: return those, and rebuild the rest in the next layer."
        )
    return (*value, value[0].new_empty(_ONE_TUPLE, dtype=torch.bool)) if len(value) == 1 else (*value,)


def unpack(tensors: Iterable[Tensor]) -> Any:
    """Reverse pack(): layers take one tensor bare, and several as a tuple."""
    tensors = tuple(tensors)
    if len(tensors) == 2 and tensors[1].shape == _ONE_TUPLE:
        return tensors[:1]
    return tensors[0] if len(tensors) == 1 else tensors
