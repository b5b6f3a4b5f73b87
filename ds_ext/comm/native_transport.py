"""Transport over native links of any kind (kernels/README.md shows their formats).

shm: each directed pair has a memory segment, created by the receiver. A sender copies a message into a slot of the
segment and publishes its descriptor. The receiver's tensors use the memory of the slot, which is released with the last
of them. If a receiver already holds the maximum number of messages of a link, it copies additional ones out. There is
no thread, and no system call unless a rank sleeps.

tcp: each pair has a connection. A sender writes directly from the tensors into the socket and copies only data that the
socket does not accept at once. The receiver's I/O thread reads into memory that the tensors then use.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from torch import Tensor

from ..errors import ProtocolError, TransportError
from . import _native
from .endpoints import Endpoints
from .failure_state import FailureState
from .transport import ITEM_BITS, TAG_LIMIT, check_address, describe_tag
from .wire import copies, pieces_of, views

SLICE_S = 0.035  # maximum sleep, so that signals and a peer's exit are noticed
COPIED_BYTES = 4096  # up to this size, a copy costs less than holding a slot
SEND_ERRORS = (_native.DescriptorError, _native.LinkError, OSError, MemoryError)

_Endpoint = TypeVar("_Endpoint")


class Sent:
    """Ticket of a send, which is done when send() returns."""

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        return ()


SENT = Sent()


@dataclass(eq=False, slots=True)
class RecvTicket:
    transport: NativeTransport
    peer: int
    tag: int
    message: _native.Message | None = None
    tensors: tuple[Tensor, ...] | None = None

    @property
    def arrived(self) -> bool:
        """True if the message has arrived; does not poll for new ones."""
        return self.message is not None or self.tensors is not None

    def done(self) -> bool:
        if not self.arrived:
            self.transport.drain()
        return self.arrived

    def wait(self, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        return self.transport.finish_recv(self, timeout_s)


@dataclass(eq=False)
class _Channel:
    """Messages without a ticket, or tickets without a message."""

    messages: deque[_native.Message] = field(default_factory=deque)
    tickets: deque[RecvTicket] = field(default_factory=deque)


class NativeTransport:
    """Transport (see transport.py) for CPU tensors; native.py connects the ranks.

    Args:
        port: doorbell of this rank; it takes the messages of all incoming links.
        links: endpoints of this rank's links; this object closes them.
        max_held: peer -> how many of its messages this rank may hold at a time.
        name: kinds of links in use, such as "shm" or "shm+tcp".

    Attributes:
        must_be_taken: function (peer, number of messages in flight) -> whether close() waits for them.
    """

    def __init__(
        self,
        port: _native.Port,
        links: Endpoints,
        max_held: Mapping[int, int],
        name: str,
        rank: int,
        world_size: int,
        timeout_s: float,
    ) -> None:
        self.name = name
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._links, self._port, self._max_held = links, port, max_held
        self._channels: dict[tuple[int, int], _Channel] = {}
        self._arrived: dict[_native.Message, tuple[int, int]] = {}
        self._state = FailureState(rank, links.abort)
        self.must_be_taken: Callable[[int, int], bool] = lambda peer, in_flight: in_flight > 0

    # --- the interface ---

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Sent:
        link = self._require_link(self._links.outgoing, self.rank, peer, tag)
        # The native code reads the memory of `_sources`, which may be copies.
        pieces, _sources = pieces_of(tensors)
        attempt = partial(link.send, tag, pieces)
        if not self._try(attempt, peer, tag):
            self._await_credit(link, peer, tag, attempt)
        return SENT

    def recv(self, peer: int, tag: int) -> RecvTicket:
        self._require_link(self._links.incoming, peer, peer, tag)
        ticket = RecvTicket(self, peer, tag)
        channel = self._channel(peer, tag)
        channel.tickets.append(ticket)
        if channel.messages:
            self._match(channel, peer)
        return ticket

    def ready(self) -> list[tuple[int, int]]:
        self._state.check()
        self.drain()
        return list(self._arrived.values())

    def settle(self) -> None:
        """Do nothing: the contents are in host memory."""

    def close(self) -> None:
        """Wait up to ``timeout_s`` until the peers have taken all messages, except after a failure, and close."""
        deadline = time.monotonic() + self.timeout_s
        try:
            if self._state.reason is None:
                for peer, link in self._links.outgoing.items():
                    limit_s = max(0.0, deadline - time.monotonic())
                    taken = partial(self._all_taken, peer, link)
                    self._await_credit(link, peer, link.in_flight()[1], taken, limit_s)
        finally:
            self._state.reason = self._state.reason or "it is closed"
            self._links.close()
            self._channels.clear()
            self._arrived.clear()

    def abort(self, cause: str) -> None:
        if self._state.reason is None:  # otherwise the peers already have an earlier cause
            self._state.reason = f"it was aborted: {cause}"
            self._links.abort(f"rank {self.rank}: {cause}")

    # --- beyond the interface ---

    def wait_any(self, tickets: Sequence[RecvTicket], timeout_s: float | None = None) -> int:
        """Wait until one of the tickets is done, and return its position. TransportError as in Ticket.wait()."""
        if not tickets:
            raise TransportError(f"rank {self.rank}: wait_any() needs at least one ticket.")
        return self._await_arrival(tickets, timeout_s)

    def fail(self, what: str, kind: type[TransportError] = TransportError) -> TransportError:
        """Record a failure that the caller detected and return its error. The transport is unusable afterwards."""
        return self._state.failure(what, kind)

    def timed_out(self, op: str, peer: int, tag: int) -> TransportError:
        """Record a wait of the caller that reached ``timeout_s``, and return its error; see fail()."""
        return self._state.timeout(op, peer, tag, self.timeout_s)

    # --- receiving ---

    def drain(self) -> None:
        """Take all messages that have arrived, without waiting and without a system call."""
        try:
            messages = self._port.take()
        except (_native.DescriptorError, _native.LinkError) as error:
            raise self._protocol_error(f"damaged message: {error}") from error
        for message in messages:
            peer, tag = message.source, message.tag
            self._arrived[message] = peer, tag
            channel = self._channel(peer, tag)
            channel.messages.append(message)
            if channel.tickets:
                self._match(channel, peer)

    def finish_recv(self, ticket: RecvTicket, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        if ticket.tensors is None:
            if ticket.message is None:
                self._await_arrival((ticket,), timeout_s)
            self._state.check()
            message, ticket.message = ticket.message, None
            assert message is not None
            del self._arrived[message]
            ticket.tensors = self._tensors(message, ticket)
        return ticket.tensors

    def _tensors(self, message: _native.Message, ticket: RecvTicket) -> tuple[Tensor, ...]:
        try:
            if message.nbytes > COPIED_BYTES and message.hold(self._max_held[ticket.peer]):
                return views(message)
            return copies(message)
        except _native.DescriptorError as error:
            what = f"recv from rank {ticket.peer} of {describe_tag(ticket.tag)}: {error}"
            raise self._protocol_error(what) from error

    def _channel(self, peer: int, tag: int) -> _Channel:
        key = peer, tag >> ITEM_BITS
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = _Channel()
        return channel

    def _match(self, channel: _Channel, peer: int) -> None:
        while channel.messages and channel.tickets:
            message, ticket = channel.messages[0], channel.tickets[0]
            if message.tag != ticket.tag:
                raise self._state.failure(
                    f"recv from rank {peer}: expected {describe_tag(ticket.tag)} as message {message.seq} of the "
                    f"channel (got {describe_tag(message.tag)}). Use the channel in the same order on both ranks."
                )
            ticket.message = channel.messages.popleft()
            channel.tickets.popleft()

    def _await_arrival(self, tickets: Sequence[RecvTicket], timeout_s: float | None) -> int:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        start = asked = time.monotonic()
        ended: tuple[int, str] | None = None
        while True:
            self._state.check()
            self.drain()
            for position, ticket in enumerate(tickets):
                if ticket.arrived:
                    return position
            waited_s = time.monotonic() - start
            if ended is not None:
                tag = next(ticket.tag for ticket in tickets if ticket.peer == ended[0])
                raise self._state.peer_gone("recv from", ended, tag, waited_s)
            if waited_s >= limit_s:
                first, final = tickets[0], timeout_s is None
                raise self._state.timeout("recv from", first.peer, first.tag, limit_s, final=final)
            arrived = self._port.wait_arrival(min(SLICE_S, limit_s - waited_s))
            # Check even while messages from other peers arrive.
            if not arrived or time.monotonic() - asked > SLICE_S:
                # Drain once more before raising, because messages sent before the end still count.
                ended = self._links.ended_peer(dict.fromkeys(ticket.peer for ticket in tickets))
                asked = time.monotonic()

    # --- sending ---

    def _all_taken(self, peer: int, link: _native.Outgoing) -> bool:
        return not self.must_be_taken(peer, link.in_flight()[0])

    def _send_error(self, peer: int, tag: int, error: Exception) -> TransportError:
        """Return the error for an exception of the native code. Only a DescriptorError leaves the transport usable."""
        reason = "out of memory" if isinstance(error, MemoryError) else error
        what = f"send to rank {peer} of {describe_tag(tag)}: {reason}"
        if isinstance(error, _native.DescriptorError):
            return TransportError(f"rank {self.rank}: {what}.")
        if isinstance(error, _native.LinkError):
            return self._protocol_error(what)
        return self._state.failure(
            f'{what}. Give the host or the container more memory, or use "transport": "torch".'
        )

    def _protocol_error(self, what: str) -> TransportError:
        """Return the error for malformed data from a peer."""
        return self._state.failure(f"{what}. Install the same ds_ext on all hosts.", ProtocolError)

    def _await_credit(
        self,
        link: _native.Outgoing,
        peer: int,
        tag: int,
        attempt: Callable[[], bool],
        limit_s: float | None = None,
    ) -> None:
        """Wait until ``attempt`` succeeds. Take messages meanwhile, so that two ranks that both send make progress."""
        limit_s = self.timeout_s if limit_s is None else limit_s
        start = asked = time.monotonic()
        ended: tuple[int, str] | None = None
        while not self._try(attempt, peer, tag):
            waited_s = time.monotonic() - start
            if ended is not None:
                raise self._state.peer_gone("send to", ended, tag, waited_s)
            if waited_s >= limit_s:
                raise self._state.timeout("send to", peer, tag, limit_s, link.in_flight())
            credit = self._port.wait_credit(link, min(SLICE_S, limit_s - waited_s))
            if not credit or time.monotonic() - asked > SLICE_S:
                ended = self._links.ended_peer((peer,))
                asked = time.monotonic()
            self.drain()

    def _try(self, attempt: Callable[[], bool], peer: int, tag: int) -> bool:
        try:
            return attempt()
        except SEND_ERRORS as error:
            raise self._send_error(peer, tag, error) from error

    # --- checks ---

    def _require_link(self, links: Mapping[int, _Endpoint], source: int, peer: int, tag: int) -> _Endpoint:
        """Return the link of ``peer`` for messages from ``source``, this rank or the peer."""
        self._state.check()
        link = links.get(peer)
        if link is None or not 0 <= tag < TAG_LIMIT:
            check_address(self.rank, self.world_size, peer, tag)
            destination = peer if source == self.rank else self.rank
            raise TransportError(
                f"rank {self.rank}: no link from rank {source} to rank {destination}. "
                "Add the pair to create_transport(pairs=...) on every rank."
            )
        return link
