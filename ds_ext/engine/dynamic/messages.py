"""Messages of an order decided at run time, received in the order of arrival.

A static schedule asks for every message by its tag. Here the next message is unknown. So each link has one channel on
which messages are counted, and the first tensor of a message names its content. Each link always has one open ticket,
for its next message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...comm.transport import ITEM_BITS, Ticket, Transport, make_tag
from ...errors import ConfigError
from ...pipe_schedules import Op
from ..messages import MAX_STAGES, Kind, StageMessages

# Stage 0 receives no activation and the last one no gradient, so no static message has these channels.
_CHOICES = 0
_COUNTED = 2 * MAX_STAGES - 1


@runtime_checkable
class PolledTransport(Protocol):
    """Transport that reports arrivals without waiting."""

    def wait_any(self, tickets: Sequence[Any], timeout_s: float | None = None) -> int:
        """Wait until one of the tickets is done, and return its position."""
        ...


class Arrival(NamedTuple):
    """Content of a message that has arrived."""

    kind: Kind
    stage: int
    micro_batch: int


class DynamicMessages(StageMessages):
    """Sends and receives of one rank, in the order in which they happen.

    Attributes:
        choices: of the tensor-parallel group's first rank, which ``decides``.

    Args:
        static: the messages of a static schedule on the same transport.
        devices: the devices that send to this one.

    Raises:
        ConfigError: the transport cannot be polled.
    """

    def __init__(self, static: StageMessages, devices: Iterable[int]) -> None:
        super().__init__(static.transport, static.layout, static.rank)
        if not isinstance(static.transport, PolledTransport):
            raise ConfigError(
                f'"transport": "{static.transport.name}" cannot report arrivals without waiting, and this schedule '
                f'decides its order by them. Use "transport": "auto" with ranks that shm, tcp or rdma can link, or a '
                f'static schedule; "python -m ds_ext dump" writes the simulated order as one.'
            )
        self._polled = static.transport
        device, data, tensor = self.layout.coordinates(self.rank)
        group = [self.layout.rank(device, data, t) for t in range(self.layout.tensor_parallel_size)]
        self.choices, self.decides = Choices(static.transport, group[0], group[1:]), tensor == 0
        self._tracer = getattr(static, "tracer", None)
        self._sent: dict[int, int] = {}
        self._taken = dict.fromkeys(devices, 0)
        self._next: dict[int, Ticket] = {}
        self._inbox: dict[Arrival, tuple[Tensor, ...]] = {}

    @staticmethod
    def on(static: StageMessages, devices: Iterable[int]) -> DynamicMessages:
        """Return the messages that belong to ``static``: one object per transport, because messages are counted."""
        known = static.dynamic
        if known is None or known.transport is not static.transport:
            known = static.dynamic = DynamicMessages(static, devices)
        assert isinstance(known, DynamicMessages)
        return known

    def post(self, kind: Kind, stage: int, micro_batch: int, device: int) -> None:
        """Do nothing: messages are received in the order of arrival."""

    def send(self, kind: Kind, tensors: Sequence[Tensor], stage: int, micro_batch: int, device: int) -> None:
        """Send to ``stage`` on ``device``, without waiting."""
        head = torch.tensor((kind, stage, micro_batch))
        self._moved(tensors)
        count = self._sent[device] = self._sent.get(device, -1) + 1
        tensors = [tensor.detach() for tensor in tensors]
        tag = make_tag(_COUNTED, count)
        self.transport.send((head, *tensors), self.global_rank(device), tag)

    def poll(self) -> list[Arrival]:
        """Return the arrivals since the last call, without waiting."""
        return self._take()

    def wait(self) -> list[Arrival]:
        """Return at least one arrival. Raises TransportError on a timeout or when a peer is gone."""
        self._polled.wait_any(list(self._asked().values()))
        return self._take()

    def receive(self, kind: Kind, stage: int, micro_batch: int) -> tuple[Tensor, ...]:
        """Return the tensors of a message; wait for it where another rank has chosen its op."""
        wanted = Arrival(kind, stage, micro_batch)
        while wanted not in self._inbox:
            self.wait()
        tensors = self._inbox.pop(wanted)
        self._moved(tensors)
        return tensors

    def _moved(self, tensors: Sequence[Tensor]) -> None:
        if self._tracer is not None:
            self._tracer.moved = sum(tensor.nbytes for tensor in tensors)

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
    """Choices of the first rank of a tensor-parallel group, sent to the others in a small message per op.

    This is no collective: the first rank never waits for the others here.
    """

    def __init__(self, transport: Transport, leader: int, followers: Sequence[int]) -> None:
        self._transport, self._leader, self._followers = transport, leader, followers
        self._count = 0

    def tell(self, op: Op) -> None:
        """Send the choice of this rank."""
        if self._followers:
            choice = torch.tensor((ord(op.kind), op.stage, op.micro_batch))
            for rank in self._followers:
                self._transport.send((choice,), rank, self._tag())
        self._count += 1

    def hear(self) -> Op:
        """Return the next choice of the first rank. Raises TransportError on a timeout."""
        (choice,) = self._transport.recv(self._leader, self._tag()).wait()
        self._count += 1
        kind, stage, micro_batch = choice.tolist()
        return Op(chr(kind), micro_batch, stage)

    def _tag(self) -> int:
        return make_tag(_CHOICES, self._count)


def is_counted(tag: int) -> bool:
    """Return whether a message with this tag names its own content."""
    return tag >> ITEM_BITS == _COUNTED
