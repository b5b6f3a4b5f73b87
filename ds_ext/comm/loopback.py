"""A transport between endpoints of one process, for tests: the rules that hold between processes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ds_ext.comm.transport import ITEM_BITS, check_address, describe_tag
from ds_ext.errors import TransportError


class LoopbackHub:
    """The queues that `world_size` endpoints share; each endpoint may live in a thread of its own."""

    def __init__(self, world_size: int, timeout_s: float = 10.0) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.arrival = threading.Condition()
        # (source, destination, channel) -> messages in the order they were sent
        self.queues: dict[tuple[int, int, int], deque[tuple[int, tuple[Tensor, ...]]]] = {}

    def endpoint(self, rank: int) -> LoopbackTransport:
        """The transport of one rank."""
        return LoopbackTransport(self, rank)


@dataclass(eq=False)
class _Sent:
    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        return ()


@dataclass(eq=False)
class _Awaited:
    transport: LoopbackTransport
    peer: int
    tag: int
    tensors: tuple[Tensor, ...] | None = None

    def done(self) -> bool:
        with self.transport.hub.arrival:
            self.transport.deliver(self.peer, self.tag >> ITEM_BITS)
        return self.tensors is not None

    def wait(self, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        hub, rank = self.transport.hub, self.transport.rank
        limit_s = hub.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        with hub.arrival:
            self.transport.deliver(self.peer, self.tag >> ITEM_BITS)
            while self.tensors is None:
                if not hub.arrival.wait(deadline - time.monotonic()):
                    raise TransportError(
                        f"rank {rank}: recv from rank {self.peer} of {describe_tag(self.tag)} "
                        f"got nothing within the limit of {limit_s:g} s. Has rank {self.peer} sent it?",
                        self.peer,
                    )
                self.transport.deliver(self.peer, self.tag >> ITEM_BITS)
        self.transport.arrived.pop(self, None)
        return self.tensors


class LoopbackTransport:
    """One rank's endpoint of a LoopbackHub."""

    name = "loopback"

    def __init__(self, hub: LoopbackHub, rank: int) -> None:
        self.hub = hub
        self.rank = rank
        self.arrived: dict[_Awaited, None] = {}
        self._awaited: dict[tuple[int, int], deque[_Awaited]] = {}
        self._closed = False

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> _Sent:
        """Queue copies of the tensors at the peer's endpoint."""
        self._check(peer, tag)
        if not tensors:
            raise TransportError("a message needs at least one tensor; send an empty one as a mere signal")
        copies = tuple(tensor.detach().clone() for tensor in tensors)
        with self.hub.arrival:
            queue = self.hub.queues.setdefault((self.rank, peer, tag >> ITEM_BITS), deque())
            queue.append((tag, copies))
            self.hub.arrival.notify_all()
        return _Sent()

    def recv(self, peer: int, tag: int) -> _Awaited:
        """Ask for the next message of the tag's channel."""
        self._check(peer, tag)
        ticket = _Awaited(self, peer, tag)
        self._awaited.setdefault((peer, tag >> ITEM_BITS), deque()).append(ticket)
        return ticket

    def deliver(self, peer: int, channel: int) -> None:
        """Hand arrived messages of a channel to its tickets, in order; the caller holds the hub's lock."""
        queue = self.hub.queues.get((peer, self.rank, channel), deque())
        tickets = self._awaited.get((peer, channel), deque())
        while queue and tickets:
            if queue[0][0] != tickets[0].tag:
                raise TransportError(
                    f"rank {self.rank}: expected {describe_tag(tickets[0].tag)} from rank {peer}, got "
                    f"{describe_tag(queue[0][0])}: the two ranks use the channel in different orders"
                )
            ticket = tickets.popleft()
            ticket.tensors = queue.popleft()[1]
            self.arrived[ticket] = None

    def ready(self) -> list[tuple[int, int]]:
        """(peer, tag) of what has arrived and was not yet waited for, asked for or not."""
        with self.hub.arrival:
            for peer, channel in list(self._awaited):
                self.deliver(peer, channel)
            unasked = [
                (source, tag)
                for (source, destination, _), queue in self.hub.queues.items()
                if destination == self.rank
                for tag, _ in queue
            ]
        return [(ticket.peer, ticket.tag) for ticket in self.arrived] + unasked

    def abort(self, cause: str) -> None:
        """Refuse further use; endpoints of one process fail together."""
        self._closed = True

    def close(self) -> None:
        """Refuse further use; nothing is ever left to send."""
        self._closed = True

    def _check(self, peer: int, tag: int) -> None:
        if self._closed:
            raise TransportError(f"rank {self.rank}: the transport is closed")
        check_address(self.rank, self.hub.world_size, peer, tag)
