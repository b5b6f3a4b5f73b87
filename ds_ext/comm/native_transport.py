"""Messages between ranks over native links of any kind (kernels/README.md draws them).

Shared memory: each directed pair has a segment, which the receiver made. A sender copies a message into a slot of the
message's size and publishes 256 bytes that describe it; the receiver gets tensors that lie in the slot, which goes back
with the last of them. A receiver that holds as many slots of a link as the timetable needs copies messages out instead.
Only the two ranks take part: no thread, and no system call unless one sleeps.

tcp: each pair has a connection. A sender writes from the tensors into the socket, and copies what that does not take;
the receiver's I/O thread reads into memory of the message's size, in which the tensors lie.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from torch import Tensor

from ds_ext.comm import _native
from ds_ext.comm.health import Health
from ds_ext.comm.links import Links, copies, pieces_of, views
from ds_ext.comm.transport import ITEM_BITS, TAG_LIMIT, check_address, describe_tag
from ds_ext.errors import ProtocolError, TransportError

SLICE_S = 0.035  # how long a sleep lasts at most, so that signals and the end of a peer are noticed
COPIED_BYTES = 4096  # up to here a copy costs less than to keep a slot
SEND_ERRORS = (_native.DescriptorError, _native.LinkError, OSError, MemoryError)

_End = TypeVar("_End")


class Sent:
    """A message is on its way, and its tensors are the sender's again, when send() returns."""

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        return ()


SENT = Sent()


@dataclass(eq=False, slots=True)
class RecvTicket:
    """What recv() gives; see transport.Ticket."""

    transport: NativeTransport
    peer: int
    tag: int
    message: _native.Message | None = None
    tensors: tuple[Tensor, ...] | None = None

    @property
    def arrived(self) -> bool:
        """What done() is without looking for new messages."""
        return self.message is not None or self.tensors is not None

    def done(self) -> bool:
        if not self.arrived:
            self.transport.drain()
        return self.arrived

    def wait(self, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        return self.transport.finish_recv(self, timeout_s)


@dataclass(eq=False)
class _Channel:
    """What has arrived and was not asked for, or was asked for and has not arrived."""

    messages: deque[_native.Message] = field(default_factory=deque)
    tickets: deque[RecvTicket] = field(default_factory=deque)


class NativeTransport:
    """Transport (see transport.py) for CPU tensors; native.py connects the ranks.

    Args:
        links: of this rank.
        name: the kinds of links in use, as "shm" or "shm+tcp".
        rank, world_size: in the job.
        timeout_s: the longest wait.
    """

    def __init__(self, links: Links, name: str, rank: int, world_size: int, timeout_s: float) -> None:
        self.name = name
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._links = links
        self._port = links.port
        self._channels: dict[tuple[int, int], _Channel] = {}
        self._arrived: dict[_native.Message, tuple[int, int]] = {}
        self._health = Health(rank, links.abort)
        # Whether close() waits for so many last messages to a peer; for who sends some that need not arrive.
        self.must_be_taken: Callable[[int, int], bool] = lambda peer, untaken: untaken > 0

    # --- the interface ---

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Sent:
        """Copy the tensors on their way to the peer; see Transport.send."""
        link = self._link(self._links.outgoing, self.rank, peer, tag)
        pieces, _sources = pieces_of(
            tensors
        )  # the copies among the sources live until the native code has read them
        attempt = partial(link.send, tag, pieces)
        if not self._sent(attempt, peer, tag):
            self._await_room(link, peer, tag, attempt)
        return SENT

    def recv(self, peer: int, tag: int) -> RecvTicket:
        """Ask for the next message of the tag's channel; see Transport.recv."""
        self._link(self._links.incoming, peer, peer, tag)
        ticket = RecvTicket(self, peer, tag)
        channel = self._channel(peer, tag)
        channel.tickets.append(ticket)
        if channel.messages:
            self._match(channel, peer)
        return ticket

    def ready(self) -> list[tuple[int, int]]:
        """(peer, tag) of what has arrived and was not yet waited for, asked for or not."""
        self._health.check()
        self.drain()
        return list(self._arrived.values())

    def close(self) -> None:
        """Wait until the peers have taken what was sent, `timeout_s` in all; one that has failed is just dropped."""
        deadline = time.monotonic() + self.timeout_s
        try:
            if self._health.reason is None:
                for peer, link in self._links.outgoing.items():
                    limit_s = max(0.0, deadline - time.monotonic())
                    taken = partial(self._all_taken, peer, link)
                    self._await_room(link, peer, link.untaken()[1], taken, limit_s)
        finally:
            self._health.reason = self._health.reason or "it is closed"
            self._links.close()
            self._channels.clear()
            self._arrived.clear()

    # --- more than the interface asks for ---

    def wait_any(self, tickets: Sequence[RecvTicket], timeout_s: float | None = None) -> int:
        """Wait until one of the tickets is done; its position. TransportError as for a ticket's wait()."""
        if not tickets:
            raise TransportError(f"rank {self.rank}: wait_any() needs at least one ticket")
        return self._await_arrival(tickets, timeout_s)

    def abort(self, cause: str) -> None:
        """Tell the peers why this rank fails, so that their errors show it; the transport cannot be used any more."""
        if self._health.reason is None:  # a failure of its own was told already
            self._health.reason = f"it was given up: {cause}"
            self._links.abort(f"rank {self.rank}: {cause}")

    def fail(self, what: str, kind: type[TransportError] = TransportError) -> TransportError:
        """The error of something that the user of this transport has found wrong, which ends it as its own would."""
        return self._health.failed(what, kind)

    # --- receiving ---

    def drain(self) -> None:
        """Take every message that has arrived, without waiting and without a system call."""
        try:
            messages = self._port.take()
        except (_native.DescriptorError, _native.LinkError) as error:
            raise self._health.failed(f"a message is damaged: {error}", ProtocolError) from error
        for message in messages:
            peer, tag = message.source, message.tag
            self._arrived[message] = peer, tag
            channel = self._channel(peer, tag)
            channel.messages.append(message)
            if channel.tickets:
                self._match(channel, peer)

    def finish_recv(self, ticket: RecvTicket, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        """Wait for the ticket's message and make its tensors."""
        if ticket.tensors is None:
            if ticket.message is None:
                self._await_arrival((ticket,), timeout_s)
            self._health.check()
            message, ticket.message = ticket.message, None
            assert message is not None
            del self._arrived[message]
            ticket.tensors = self._tensors(message, ticket)
        return ticket.tensors

    def _tensors(self, message: _native.Message, ticket: RecvTicket) -> tuple[Tensor, ...]:
        try:
            if message.nbytes > COPIED_BYTES and message.hold(self._links.slots[ticket.peer]):
                return views(message)
            return copies(message)
        except _native.DescriptorError as error:
            what = f"recv from rank {ticket.peer} of {describe_tag(ticket.tag)}: {error}"
            raise self._health.failed(what, ProtocolError) from error

    def _channel(self, peer: int, tag: int) -> _Channel:
        key = peer, tag >> ITEM_BITS
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = _Channel()
        return channel

    def _match(self, channel: _Channel, peer: int) -> None:
        """Give the channel's messages to its tickets, in order."""
        while channel.messages and channel.tickets:
            message, ticket = channel.messages[0], channel.tickets[0]
            if message.tag != ticket.tag:
                raise self._health.failed(
                    f"expected {describe_tag(ticket.tag)} as message {message.seq} of the channel from rank {peer}, "
                    f"got {describe_tag(message.tag)} as message {message.seq}: the two ranks use the channel in "
                    "different orders"
                )
            ticket.message = channel.messages.popleft()
            channel.tickets.popleft()

    def _await_arrival(self, tickets: Sequence[RecvTicket], timeout_s: float | None) -> int:
        """Wait until one of the tickets has its message; its position."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        start = asked = time.monotonic()
        gone: tuple[int, str] | None = None
        while True:
            self._health.check()
            self.drain()
            for position, ticket in enumerate(tickets):
                if ticket.arrived:
                    return position
            waited_s = time.monotonic() - start
            if gone is not None:
                tag = next(ticket.tag for ticket in tickets if ticket.peer == gone[0])
                raise self._health.lost("recv from", gone, tag, waited_s)
            if waited_s >= limit_s:
                final = timeout_s is None
                raise self._health.timed_out(
                    "recv from", tickets[0].peer, tickets[0].tag, limit_s, final=final
                )
            arrived = self._port.wait_arrival(min(SLICE_S, limit_s - waited_s))
            # Also while others send: a peer may have ended among their messages.
            if not arrived or time.monotonic() - asked > SLICE_S:
                # Asked before the next look for messages: what a peer has sent before its end still counts.
                gone = self._links.gone(dict.fromkeys(ticket.peer for ticket in tickets))
                asked = time.monotonic()

    # --- sending ---

    def _all_taken(self, peer: int, link: _native.Outgoing) -> bool:
        return not self.must_be_taken(peer, link.untaken()[0])

    def _not_sent(self, peer: int, tag: int, error: Exception) -> TransportError:
        """A native error as ours."""
        if isinstance(error, _native.DescriptorError):
            return TransportError(f"rank {self.rank}: this cannot be sent to rank {peer}: {error}")
        why = "there is no memory for it" if isinstance(error, MemoryError) else error
        what = f"send to rank {peer} of {describe_tag(tag)}: {why}"
        if isinstance(error, _native.LinkError):
            return self._health.failed(what, ProtocolError)
        return self._health.failed(
            f'{what}. Give the host or the container more memory, or use "transport": "torch"'
        )

    def _await_room(
        self,
        link: _native.Outgoing,
        peer: int,
        tag: int,
        attempt: Callable[[], bool],
        limit_s: float | None = None,
    ) -> None:
        """Wait until `attempt` succeeds. What arrives meanwhile is taken, so that two ranks that both send get on."""
        limit_s = self.timeout_s if limit_s is None else limit_s
        start = asked = time.monotonic()
        gone: tuple[int, str] | None = None
        while not self._sent(attempt, peer, tag):
            waited_s = time.monotonic() - start
            if gone is not None:
                raise self._health.lost("send to", gone, tag, waited_s)
            if waited_s >= limit_s:
                raise self._health.timed_out("send to", peer, tag, limit_s, link.untaken())
            room = self._port.wait_room(link, min(SLICE_S, limit_s - waited_s))
            if not room or time.monotonic() - asked > SLICE_S:
                gone = self._links.gone((peer,))
                asked = time.monotonic()
            self.drain()

    def _sent(self, attempt: Callable[[], bool], peer: int, tag: int) -> bool:
        try:
            return attempt()
        except SEND_ERRORS as error:
            raise self._not_sent(peer, tag, error) from error

    # --- refusals and failures ---

    def _link(self, links: Mapping[int, _End], source: int, peer: int, tag: int) -> _End:
        """The link to use, after the checks that every call begins with."""
        self._health.check()
        link = links.get(peer)
        if link is None or not 0 <= tag < TAG_LIMIT:
            check_address(self.rank, self.world_size, peer, tag)
            destination = peer if source == self.rank else self.rank
            raise TransportError(
                f"rank {self.rank}: no link from rank {source} to rank {destination}; "
                "give the pair to create_transport(pairs=...), on every rank"
            )
        return link
