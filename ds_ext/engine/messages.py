"""Messages between stages: sends and receives, limits of links, and packing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.channels import MAX_STAGES, MESSAGE_KINDS, stage_channel
from ..comm.transport import Ticket, Transport, make_tag
from ..errors import ConfigError
from ..parallel.layout import ParallelLayout, links_of
from ..pipe_schedules import Program
from ..pipe_schedules.ops import MessageKind

_MARKER = torch.Size([0] * 8)  # a shape that no layer returns
SPARE = 1  # a message may arrive before the tensors of the previous one are freed


class StageMessages:
    """Sends and receives of one rank, in the order of a static schedule.

    ``count`` is called with the tensors of every message that is sent or received.
    """

    def __init__(
        self,
        transport: Transport,
        layout: ParallelLayout,
        rank: int,
        count: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> None:
        assert layout.placement.op_stages <= MAX_STAGES and len(MessageKind) <= MESSAGE_KINDS
        self.transport, self.layout, self.rank = transport, layout, rank
        self._count = count
        _, self._data_index, self._tensor_index = layout.coordinates(rank)
        self._tickets: dict[tuple[int, int], Ticket] = {}  # by sending stage and tag
        # By device: the ranks that this rank sends to, and the one it receives from.
        self._peers: dict[int, tuple[int, ...]] = {}
        self._source_ranks: dict[int, int] = {}

    def post(self, kind: MessageKind, stage: int, item: int, device: int, sending_stage: int) -> None:
        """Post the receive of a message from ``sending_stage`` early: its transfer overlaps with computation."""
        tag = _tag(kind, stage, item)
        self._tickets[sending_stage, tag] = self.transport.recv(self.global_rank(device), tag)

    def receive(
        self, kind: MessageKind, stage: int, item: int, device: int, sending_stage: int
    ) -> tuple[Tensor, ...]:
        """Wait for a message whose receive was posted. Returns its tensors."""
        tensors = self._tickets.pop((sending_stage, _tag(kind, stage, item))).wait()
        if self._count is not None:
            self._count(tensors)
        return tensors

    def send(self, kind: MessageKind, tensors: Sequence[Tensor], stage: int, item: int, device: int) -> None:
        """Send tensors to ``stage`` on ``device``, without waiting."""
        peers = self._peers.get(device)
        if peers is None:
            peers = self._peers[device] = self.layout.peers(self.rank, device)
        if self._count is not None:
            self._count(tensors)
        tag = _tag(kind, stage, item)
        tensors = [tensor.detach() for tensor in tensors]
        for rank in peers:
            self.transport.send(tensors, rank, tag)

    def global_rank(self, device: int) -> int:
        """Return the rank on ``device`` that this rank exchanges messages with."""
        if device not in self._source_ranks:
            self._source_ranks[device] = self.layout.rank(device, self._data_index, self._tensor_index)
        return self._source_ranks[device]


def _tag(kind: MessageKind, stage: int, item: int) -> int:
    return make_tag(stage_channel(kind, stage), item)


# --- links ---


def max_held(layout: ParallelLayout, programs: Iterable[Program]) -> dict[tuple[int, int], int]:
    """Return how many messages the receiver of every link may hold, by (sender, receiver) global ranks.

    The numbers are the same on all ranks. A receiver holds activations and gradients until the last op of their slice
    at a stage, and one more may be on its way.
    """
    programs = list(programs)
    peak: Counter[tuple[int, int]] = Counter()
    for program in programs:
        for device in range(len(program.instructions)):
            for sender, messages in _peak_messages(program, device).items():
                peak[sender, device] = max(peak[sender, device], messages)
    held: dict[tuple[int, int], int] = {}
    for source, target in links_of(layout, programs):
        source_device, _, _ = layout.coordinates(source)
        target_device, _, _ = layout.coordinates(target)
        held[source, target] = peak[source_device, target_device] + SPARE
    return held


def _peak_messages(program: Program, device: int) -> Counter[int]:
    """Return a dict of sending device -> maximum number of its messages that are live on ``device``."""
    instructions = program.instructions[device]
    last_op = {
        (i.stage, i.micro_batch, i.slice): index for index, i in enumerate(instructions) if i.op is not None
    }
    senders: dict[tuple[int | None, int | None, int], list[int]] = {}
    live: Counter[int] = Counter()
    peak: Counter[int] = Counter()
    for index, instruction in enumerate(instructions):
        key = instruction.stage, instruction.micro_batch, instruction.slice
        if instruction.name.startswith("Recv"):
            assert instruction.peer is not None
            senders.setdefault(key, []).append(instruction.peer)
            live[instruction.peer] += 1
            peak[instruction.peer] = max(peak[instruction.peer], live[instruction.peer])
        elif last_op.get(key) == index:
            for sender in senders.pop(key, ()):
                live[sender] -= 1
    return peak


# --- packing ---


def marker(like: Tensor) -> Tensor:
    """Return an empty tensor on the device of ``like``, which no layer returns."""
    return like.new_empty(_MARKER, dtype=torch.bool)


def is_marker(tensor: Tensor) -> bool:
    return tensor.shape == _MARKER


def pack(value: Any, source: str) -> tuple[Tensor, ...]:
    """Return a layer's output, which is a tensor or a tuple of tensors, as the tensors of a message.

    A marker at the end marks a tuple of one tensor.
    """
    if torch.is_tensor(value):
        return (value,)
    if not isinstance(value, (tuple, list)) or not value or not all(map(torch.is_tensor, value)):
        elements = value if isinstance(value, (tuple, list)) else ()
        types = ", ".join(type(element).__name__ for element in elements)
        raise ConfigError(
            f"{source}: must return a tensor or a tuple of tensors (got a {type(value).__name__}"
            f"{types and f' of {types}'}). Return only tensors, and rebuild other values in the next layer."
        )
    return (*value, marker(value[0])) if len(value) == 1 else (*value,)


def join_outputs(earlier: Any, outputs: Any, tokens: int) -> Any:
    """Return the outputs of a layer for a sequence, joined in dimension 1. Those of whole samples are the last ones.

    ``outputs`` are those of the last slice, of ``tokens`` tokens, and ``earlier`` those of the slices before it.
    """
    if torch.is_tensor(outputs):
        has_tokens = outputs.dim() > 1 and outputs.size(1) == tokens
        return torch.cat((earlier, outputs), 1) if has_tokens else outputs
    return tuple(join_outputs(*pair, tokens) for pair in zip(earlier, outputs, strict=True))


def unpack(tensors: Iterable[Tensor]) -> Any:
    """Invert :func:`pack`."""
    tensors = tuple(tensors)
    if len(tensors) == 2 and is_marker(tensors[1]):
        return tensors[:1]
    return tensors[0] if len(tensors) == 1 else tensors
