"""The transport in the engine's words: activations and gradients of a (stage, micro-batch), by device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


class Kind(IntEnum):
    """What a message holds; together with the receiving stage it is the transport's channel."""

    ACTIVATION = 0
    GRADIENT = 1


class StageMessages:
    """Sends and receives of one rank.

    Args:
        transport: moves tensors by (global rank, tag).
        layout: maps devices of this rank's pipeline to global ranks.
        rank: this global rank.
    """

    dynamic: StageMessages | None = (
        None  # those of an order that is decided at run time, on the same transport
    )

    def __init__(self, transport: Transport, layout: ParallelLayout, rank: int) -> None:
        assert layout.placement.stages <= GPU_CONTROL
        self.transport, self.layout, self.rank = transport, layout, rank
        _, self._data, self._tensor = layout.coordinates(rank)
        self._tickets: dict[int, Ticket] = {}
        self._peers: dict[int, tuple[int, ...]] = {}

    def post(self, kind: Kind, stage: int, micro_batch: int, device: int) -> None:
        """Ask for a message early, so that it can travel while this rank computes."""
        tag = _tag(kind, stage, micro_batch)
        self._tickets[tag] = self.transport.recv(self.global_rank(device), tag)

    def receive(self, kind: Kind, stage: int, micro_batch: int) -> tuple[Tensor, ...]:
        """Wait for a message that was posted."""
        return self._tickets.pop(_tag(kind, stage, micro_batch)).wait()

    def send(self, kind: Kind, tensors: Sequence[Tensor], stage: int, micro_batch: int, device: int) -> None:
        """Send to ``stage`` on ``device``, without waiting."""
        peers = self._peers.get(device)
        if peers is None:
            peers = self._peers[device] = self.layout.peers(self.rank, device)
        tag = _tag(kind, stage, micro_batch)
        tensors = [tensor.detach() for tensor in tensors]
        for rank in peers:
            self.transport.send(tensors, rank, tag)

    def global_rank(self, device: int) -> int:
        """The rank of ``device`` that this one exchanges messages with."""
        return self.layout.rank(device, self._data, self._tensor)


def _tag(kind: Kind, stage: int, micro_batch: int) -> int:
    return kind * MAX_STAGES + stage << ITEM_BITS | micro_batch & (1 << ITEM_BITS) - 1


def directed_pairs(layout: ParallelLayout, programs: Iterable[Program]) -> list[tuple[int, int]]:
    """(sender, receiver) global ranks of every link that the programs use; the same list on all ranks."""
    links = {
        (device, instruction.peer)
        for program in programs
        for device, instructions in enumerate(program.ranks)
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


def pack(value: Any, giver: str) -> tuple[Tensor, ...]:
    """What a layer gives, a tensor or a tuple of tensors, as the tensors of a message.

    A tuple of one tensor is told from a bare tensor by an empty one behind it. Raises ConfigError for anything else.
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
    """The reverse of pack: layers take one tensor bare, and several as a tuple."""
    tensors = tuple(tensors)
    if len(tensors) == 2 and tensors[1].shape == _ONE_TUPLE:
        return tensors[:1]
    return tensors[0] if len(tensors) == 1 else tensors
