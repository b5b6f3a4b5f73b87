"""Messages in order of arrival, for schedules that choose ops at run time.

A static schedule receives every message by its tag. Here the next message is unknown. Each link therefore has one
channel with numbered messages, and the first tensor of a message identifies its content. Each link always has one
open ticket, for its next message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...comm.channels import DYNAMIC_CHOICES, DYNAMIC_MESSAGES
from ...comm.transport import ITEM_BITS, Ticket, Transport, make_tag
from ...errors import ConfigError
from ...parallel.layout import ParallelLayout
from ...pipe_schedules import Op
from ...pipe_schedules.dynamic import DynamicRules
from ...pipe_schedules.ops import MessageKind
from ..messages import SPARE, StageMessages


@runtime_checkable
class PolledTransport(Protocol):
    """Transport that reports arrivals without waiting for them."""

    def wait_any(self, tickets: Sequence[Any], timeout_s: float | None = None) -> int:
        """Wait until one of the tickets is done. Returns its index."""
        ...


class Arrival(NamedTuple):
    kind: MessageKind
    stage: int
    micro_batch: int


class DynamicMessages(StageMessages):
    """Sends and receives of one rank in the order of arrival. Use one object per transport for all steps.

    Args:
        devices: devices that send to this rank.

    Attributes:
        choices: ops that the first rank of the tensor-parallel group chooses.
        decides: whether this rank is the first one.
    """

    def __init__(
        self,
        transport: Transport,
        layout: ParallelLayout,
        rank: int,
        devices: Iterable[int],
        count: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> None:
        super().__init__(transport, layout, rank, count)
        if not isinstance(transport, PolledTransport):
            raise ConfigError(
                f"transport: this schedule needs a transport that reports arrivals without waiting (got "
                f'{transport.name}). Use "auto" with ranks that shm, tcp or rdma can link, or a static schedule: '
                f'"python -m ds_ext dump" writes the simulated order.'
            )
        self._polled: PolledTransport = transport
        device, data, tensor = layout.coordinates(rank)
        leader, *followers = (layout.rank(device, data, t) for t in range(layout.tensor_parallel_size))
        self.choices = Choices(transport, leader, followers)
        self.decides = tensor == 0
        # By device: messages so far, and the ticket of the next one.
        self._num_sent: dict[int, int] = {}
        self._num_received = dict.fromkeys(devices, 0)
        self._next_tickets: dict[int, Ticket] = {}
        self._inbox: dict[Arrival, tuple[Tensor, ...]] = {}  # messages that have arrived and are unread

    def post(self, kind: MessageKind, stage: int, item: int, device: int, sending_stage: int) -> None:
        """Do nothing, because messages are received in the order of arrival."""

    def send(self, kind: MessageKind, tensors: Sequence[Tensor], stage: int, item: int, device: int) -> None:
        head = torch.tensor((kind, stage, item))
        if self._count is not None:
            self._count(tensors)
        number = self._num_sent.get(device, 0)
        self._num_sent[device] = number + 1
        tensors = [tensor.detach() for tensor in tensors]
        self.transport.send((head, *tensors), self.global_rank(device), make_tag(DYNAMIC_MESSAGES, number))

    def poll(self) -> list[Arrival]:
        """Return the messages that have arrived since the last call, without waiting."""
        arrivals = []
        for device, ticket in self._tickets_by_device().items():
            while ticket.done():
                head, *tensors = ticket.wait()
                kind, stage, micro_batch = head.tolist()
                arrival = Arrival(MessageKind(kind), stage, micro_batch)
                arrivals.append(arrival)
                self._inbox[arrival] = tuple(tensors)
                self._num_received[device] += 1
                ticket = self._next_tickets[device] = self._post_next(device)
        return arrivals

    def wait(self) -> list[Arrival]:
        self._polled.wait_any(list(self._tickets_by_device().values()))
        return self.poll()

    def receive(
        self, kind: MessageKind, stage: int, item: int, device: int, sending_stage: int
    ) -> tuple[Tensor, ...]:
        """Return the tensors of a message. It may not have arrived yet if another rank chose the op that needs it."""
        message = Arrival(kind, stage, item)
        while message not in self._inbox:
            self.wait()
        tensors = self._inbox.pop(message)
        if self._count is not None:
            self._count(tensors)
        return tensors

    def _tickets_by_device(self) -> dict[int, Ticket]:
        """Return the open ticket of every link. The first step posts the first ones."""
        if not self._next_tickets:
            self._next_tickets = {device: self._post_next(device) for device in self._num_received}
        return self._next_tickets

    def _post_next(self, device: int) -> Ticket:
        tag = make_tag(DYNAMIC_MESSAGES, self._num_received[device])
        return self.transport.recv(self.global_rank(device), tag)


class Choices:
    """Ops that the first rank of a tensor-parallel group chooses and sends to the others, one message per op.

    Unlike a collective, this never makes the first rank wait for the others.
    """

    def __init__(self, transport: Transport, leader: int, followers: Sequence[int]) -> None:
        self._transport, self._leader, self._followers = transport, leader, followers
        self._count = 0

    def send(self, op: Op) -> None:
        if self._followers:
            choice = torch.tensor((ord(op.kind), op.stage, op.micro_batch))
            for rank in self._followers:
                self._transport.send((choice,), rank, self._tag())
        self._count += 1

    def receive(self) -> Op:
        (choice,) = self._transport.recv(self._leader, self._tag()).wait()
        self._count += 1
        kind, stage, micro_batch = choice.tolist()
        return Op(chr(kind), micro_batch, stage)

    def _tag(self) -> int:
        return make_tag(DYNAMIC_CHOICES, self._count)


def is_numbered(tag: int) -> bool:
    """Return whether a message with this tag begins with its kind, stage and micro-batch."""
    return tag >> ITEM_BITS == DYNAMIC_MESSAGES


def senders(rules: DynamicRules, device: int) -> list[int]:
    """Return the devices that send to ``device``: its neighbors in the pipes."""
    senders: set[int] = set()
    for devices in rules.placement.pipes:
        for stage, holder in enumerate(devices):
            if holder == device:
                senders |= set(devices[max(0, stage - 1) : stage + 2])
    return sorted(senders - {device})


def max_held(layout: ParallelLayout, rules: DynamicRules) -> dict[tuple[int, int], int]:
    """Return how many messages the receiver of every link may hold, by (sender, receiver) global ranks.

    Unread inputs and gradients belong to (stage, micro-batch) pairs with live activations on the receiver, at most
    ``max_live``. One more may be on its way, because a message may arrive before the tensors of the previous one are
    freed. The first rank of a tensor-parallel group sends its choices one by one.
    """
    held: dict[tuple[int, int], int] = {}
    for device in range(layout.placement.num_devices):
        peers = senders(rules, device)
        for data in range(layout.data_parallel_size):
            for tensor in range(layout.tensor_parallel_size):
                rank = layout.rank(device, data, tensor)
                for peer in peers:
                    held[layout.rank(peer, data, tensor), rank] = rules.max_live[device] + SPARE
                if tensor > 0:
                    held[layout.rank(device, data, 0), rank] = 1
    return held
