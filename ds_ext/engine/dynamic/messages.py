"""Messages of an order decided at run time, received in the order of arrival.

A static schedule asks for every message by its tag. Here the next message is unknown. So each link has one channel on
which messages are counted, and the first tensor of a message names its content. Each link always has one open ticket,
for its next message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...comm.transport import ITEM_BITS, Ticket, Transport, make_tag
from ...errors import ConfigError
from ...parallel.layout import ParallelLayout
from ...pipe_schedules import Op
from ...pipe_schedules.dynamic import DynamicRules
from ..messages import MAX_STAGES, Kind, StageMessages

# Stage 0 receives no activation and the last one no gradient, so no static message has these channels.
_CHOICES = 0
_COUNTED = 2 * MAX_STAGES - 1


@runtime_checkable
class PolledTransport(Protocol):
    """Transport that reports arrivals without waiting for them."""

    def wait_any(self, tickets: Sequence[Any], timeout_s: float | None = None) -> int:
        """Wait until one of the tickets is done. Returns its position."""
        ...


class Arrival(NamedTuple):
    """Content of a message that has arrived."""

    kind: Kind
    stage: int
    micro_batch: int


class DynamicMessages(StageMessages):
    """Sends and receives of one rank, in the order in which they happen; one object for the life of a transport.

    Attributes:
        choices: ops that the tensor-parallel group's first rank chooses.
        decides: whether this rank is that one.

    Args:
        transport, layout, rank, count: as for :class:`StageMessages`.
        devices: senders of messages to this rank.

    Raises:
        ConfigError: the transport cannot be polled.
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
                f'"transport": "{transport.name}" cannot report arrivals without waiting, and this schedule '
                f'decides its order by them. Use "transport": "auto" with ranks that shm, tcp or rdma can link, or a '
                f'static schedule; "python -m ds_ext dump" writes the simulated order as one.'
            )
        self._polled: PolledTransport = transport
        device, data, tensor = layout.coordinates(rank)
        group = [layout.rank(device, data, t) for t in range(layout.tensor_parallel_size)]
        self.choices, self.decides = Choices(transport, group[0], group[1:]), tensor == 0
        self._sent: dict[int, int] = {}
        self._taken = dict.fromkeys(devices, 0)
        self._next: dict[int, Ticket] = {}
        self._inbox: dict[Arrival, tuple[Tensor, ...]] = {}

    def post(self, kind: Kind, stage: int, micro_batch: int, device: int) -> None:
        """Do nothing: messages are taken as they come."""

    def send(self, kind: Kind, tensors: Sequence[Tensor], stage: int, micro_batch: int, device: int) -> None:
        """Send to ``stage`` on ``device``, without waiting."""
        head = torch.tensor((kind, stage, micro_batch))
        if self._count is not None:
            self._count(tensors)
        count = self._sent[device] = self._sent.get(device, -1) + 1
        tensors = [tensor.detach() for tensor in tensors]
        tag = make_tag(_COUNTED, count)
        self.transport.send((head, *tensors), self.global_rank(device), tag)

    def poll(self) -> list[Arrival]:
        """Return the messages that have arrived since the last call, without waiting."""
        return self._take()

    def wait(self) -> list[Arrival]:
        """Wait for at least one message. Raises TransportError when none arrives in time or a peer is gone."""
        self._polled.wait_any(list(self._asked().values()))
        return self._take()

    def receive(self, kind: Kind, stage: int, micro_batch: int) -> tuple[Tensor, ...]:
        """Return the tensors of a message; wait for it where another rank has chosen the op that needs it."""
        wanted = Arrival(kind, stage, micro_batch)
        while wanted not in self._inbox:
            self.wait()
        tensors = self._inbox.pop(wanted)
        if self._count is not None:
            self._count(tensors)
        return tensors

    def _asked(self) -> dict[int, Ticket]:
        """The ticket of every link; the first ones are made when a step begins, not before."""
        if not self._next:
            self._next = {device: self._ask(device) for device in self._taken}
        return self._next

    def _take(self) -> list[Arrival]:
        arrivals = []
        for device, ticket in self._asked().items():
            while ticket.done():
                head, *tensors = ticket.wait()
                kind, stage, micro_batch = head.tolist()
                arrivals.append(Arrival(Kind(kind), stage, micro_batch))
                self._inbox[arrivals[-1]] = tuple(tensors)
                self._taken[device] += 1
                ticket = self._next[device] = self._ask(device)
        return arrivals

    def _ask(self, device: int) -> Ticket:
        return self.transport.recv(self.global_rank(device), make_tag(_COUNTED, self._taken[device]))


class Choices:
    """Ops that the first rank of a tensor-parallel group chooses, sent to the others: a small message per op.

    No collective: the rank that chooses never waits for the others here.
    """

    def __init__(self, transport: Transport, leader: int, followers: Sequence[int]) -> None:
        self._transport, self._leader, self._followers = transport, leader, followers
        self._count = 0

    def send(self, op: Op) -> None:
        """Send a choice of this rank."""
        if self._followers:
            choice = torch.tensor((ord(op.kind), op.stage, op.micro_batch))
            for rank in self._followers:
                self._transport.send((choice,), rank, self._tag())
        self._count += 1

    def receive(self) -> Op:
        """Return the next choice of the first rank. Raises TransportError when it does not come in time."""
        (choice,) = self._transport.recv(self._leader, self._tag()).wait()
        self._count += 1
        kind, stage, micro_batch = choice.tolist()
        return Op(chr(kind), micro_batch, stage)

    def _tag(self) -> int:
        return make_tag(_CHOICES, self._count)


def is_counted(tag: int) -> bool:
    """Return whether a message of that tag begins with its kind, stage and micro-batch."""
    return tag >> ITEM_BITS == _COUNTED


def senders(rules: DynamicRules, device: int) -> list[int]:
    """Return the devices whose messages ``device`` receives: its neighbours in the pipes."""
    found: set[int] = set()
    for devices in rules.placement.pipes:
        for stage, at in enumerate(devices):
            if at == device:
                found |= set(devices[max(0, stage - 1) : stage + 2])
    return sorted(found - {device})


def link_credits(layout: ParallelLayout, rules: DynamicRules) -> dict[tuple[int, int], int]:
    """Return the messages that a receiver holds at most, by link: (sender, receiver) global ranks."""
    found: dict[tuple[int, int], int] = {}
    for device in range(layout.placement.num_devices):
        peers = {peer: rules.max_live[device] + 1 for peer in senders(rules, device)}
        for data in range(layout.data_parallel_size):
            first = layout.rank(device, data, 0)
            for tensor in range(layout.tensor_parallel_size):
                rank = layout.rank(device, data, tensor)
                found |= {(layout.rank(peer, data, tensor), rank): n for peer, n in peers.items()}
                if tensor:
                    found[first, rank] = 1
    return found
