"""Messages of an order that is decided at run time: taken as they come, whatever they are.

A static schedule asks for every message by its tag. Here nobody knows what comes next, so a link has one channel, on
which messages are only counted; a small tensor in front of the others says what a message is about. One ticket a link
is always out, for its next message.
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
from ..ownership import out_of_reach

# Stage 0 receives no activation and the last one no gradient, so no static message has these channels.
_CHOICES = 0
_COUNTED = 2 * MAX_STAGES - 1


@runtime_checkable
class PolledTransport(Protocol):
    """A transport that tells what has come without waiting for it."""

    def wait_any(self, tickets: Sequence[Any], timeout_s: float | None = None) -> int:
        """Wait until one of the tickets is done; its position."""
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
        devices: those that send to this one.

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
        """Those beside ``static``: one for the whole life of a transport, because messages are counted."""
        known = static.dynamic
        if known is None or known.transport is not static.transport:
            known = static.dynamic = DynamicMessages(static, devices)
        assert isinstance(known, DynamicMessages)
        return known

    def post(self, kind: Kind, stage: int, micro_batch: int, device: int) -> None:
        """Nothing to ask for: messages are taken as they come."""

    def send(self, kind: Kind, tensors: Sequence[Tensor], stage: int, micro_batch: int, device: int) -> None:
        """Send to ``stage`` on ``device``, without waiting."""
        head = torch.tensor((kind, stage, micro_batch))
        self._moved(tensors)
        count = self._sent[device] = self._sent.get(device, -1) + 1
        final, tensors = out_of_reach(tensors), [tensor.detach() for tensor in tensors]
        tag = make_tag(_COUNTED, count)
        self.transport.send((head, *tensors), self.global_rank(device), tag, final=final)

    def poll(self) -> list[Arrival]:
        """What has come since the last look, without waiting."""
        return self._take()

    def wait(self) -> list[Arrival]:
        """The same, but at least one. Raises TransportError when nothing comes in time or a peer is gone."""
        self._polled.wait_any(list(self._asked().values()))
        return self._take()

    def receive(self, kind: Kind, stage: int, micro_batch: int) -> tuple[Tensor, ...]:
        """The tensors of a message, waiting for it where another rank has decided that it is time for them."""
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
    """What the first rank of a tensor-parallel group chooses reaches the others: a small message per op.

    No collective: the one that chooses never waits for the others here.
    """

    def __init__(self, transport: Transport, leader: int, followers: Sequence[int]) -> None:
        self._transport, self._leader, self._followers = transport, leader, followers
        self._count = 0

    def tell(self, op: Op) -> None:
        """The choice of this rank."""
        if self._followers:
            choice = torch.tensor((ord(op.kind), op.stage, op.micro_batch))
            for rank in self._followers:
                self._transport.send((choice,), rank, self._tag())
        self._count += 1

    def hear(self) -> Op:
        """The next choice of the first rank. Raises TransportError when it does not come in time."""
        (choice,) = self._transport.recv(self._leader, self._tag()).wait()
        self._count += 1
        kind, stage, micro_batch = choice.tolist()
        return Op(chr(kind), stage, micro_batch)

    def _tag(self) -> int:
        return make_tag(_CHOICES, self._count)


def is_counted(tag: int) -> bool:
    """Whether a message of that tag says itself what it is about."""
    return tag >> ITEM_BITS == _COUNTED
