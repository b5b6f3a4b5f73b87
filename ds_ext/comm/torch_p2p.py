"""Transport of CPU tensors over gloo. torch_split.py sends between GPUs.

Both sides of a channel know the size of its next frame: the size of the channel's previous message. While shapes stay
the same, a message is one transfer. A larger message, such as the first of a channel, is announced by a frame that
contains only its seal and follows in a second transfer. A smaller one is padded. gloo reports the completion of a send
only to a rank that waits for it, so each message acknowledges the peer's messages that have arrived.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import TransportError
from . import wire
from .endpoints import SEND_WINDOW_BYTES
from .failure_state import FailureState
from .groups import explain, new_group, wait_time
from .transport import ITEM_BITS, check_address, describe_tag


@dataclass(eq=False)
class _SendTicket:
    """Ticket of send(), which keeps the frames until they have been sent."""

    transport: TorchTransport
    peer: int
    tag: int
    link_seq: int
    num_bytes: int
    transfers: list[tuple[dist.Work, Tensor]]

    def done(self) -> bool:
        return not self.transfers

    def wait(self, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        self.transport.finish_send(self, timeout_s)
        return ()


@dataclass(eq=False)
class _RecvTicket:
    transport: TorchTransport
    channel: _Incoming
    tag: int
    tensors: tuple[Tensor, ...] | None = None

    def done(self) -> bool:
        if self.tensors is None:
            self.transport.advance(self.channel)
        return self.tensors is not None

    def wait(self, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        return self.transport.finish_recv(self, timeout_s)


@dataclass(eq=False)
class _Outgoing:
    frame_bytes: int = wire.SEAL_BYTES
    seq: int = 0


@dataclass(eq=False)
class _Incoming:
    """Receiving endpoint of a channel; ``transfer`` is the frame requested from gloo."""

    peer: int
    number: int
    frame_bytes: int = wire.SEAL_BYTES
    seq: int = 0
    tickets: deque[_RecvTicket] = field(default_factory=deque)
    transfer: tuple[dist.Work, Tensor] | None = None


@dataclass(eq=False)
class _Link:
    sent: int = 0
    unfinished: dict[int, _SendTicket] = field(default_factory=dict)  # by link_seq, oldest first
    unfinished_bytes: int = 0
    arrived: int = 0  # all messages from the peer with a lower link_seq have arrived
    arrived_ahead: set[int] = field(default_factory=set)


class TorchTransport:
    """Transport (see transport.py) for CPU tensors over a separate gloo group."""

    name = "torch"

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        """Use ``group``, a gloo group of all ranks for this transport only."""
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.timeout_s = timeout_s
        self._group = group
        self._outgoing: dict[tuple[int, int], _Outgoing] = {}
        self._incoming: dict[tuple[int, int], _Incoming] = {}
        self._links: dict[int, _Link] = {}
        self._arrived: dict[_RecvTicket, None] = {}
        self._state = FailureState(self.rank)

    @classmethod
    def create(cls, timeout_s: float) -> TorchTransport:
        """Create the group and the transport; a collective call of all ranks."""
        group = new_group(None, "gloo", timeout_s)
        assert group is not None
        return cls(group, timeout_s)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> _SendTicket:
        self._check(peer, tag)
        channel = self._outgoing.setdefault((peer, tag >> ITEM_BITS), _Outgoing())
        link = self._links.setdefault(peer, _Link())
        descriptors = wire.describe(
            tensors, tag=tag, seq=channel.seq, link_seq=link.sent, acknowledged=link.arrived
        )
        frames = _frames(tensors, descriptors, channel.frame_bytes)
        ticket = _SendTicket(self, peer, tag, link.sent, sum(map(len, frames)), [])
        self._start_transfers(ticket, frames)
        channel.frame_bytes = wire.frame_bytes(descriptors[0])
        channel.seq += 1
        link.sent += 1
        link.unfinished[ticket.link_seq] = ticket
        link.unfinished_bytes += ticket.num_bytes
        # Only reached on one-way links, whose peer sends no acknowledgements.
        while link.unfinished_bytes > SEND_WINDOW_BYTES and len(link.unfinished) > 1:
            next(iter(link.unfinished.values())).wait()
        return ticket

    def recv(self, peer: int, tag: int) -> _RecvTicket:
        """Request the channel's next frame from gloo, unless an earlier one is outstanding."""
        self._check(peer, tag)
        number = tag >> ITEM_BITS
        channel = self._incoming.setdefault((peer, number), _Incoming(peer, number))
        ticket = _RecvTicket(self, channel, tag)
        channel.tickets.append(ticket)
        if channel.transfer is None:
            self._post(channel, channel.frame_bytes)
        return ticket

    def ready(self) -> list[tuple[int, int]]:
        for channel in self._incoming.values():
            self.advance(channel)
        return [(ticket.channel.peer, ticket.tag) for ticket in self._arrived]

    def settle(self) -> None:
        """Do nothing: the contents are in host memory."""

    def abort(self, cause: str) -> None:
        """Do nothing: torch.distributed cannot send a cause."""

    def close(self) -> None:
        """Wait up to ``timeout_s`` for unfinished sends, except after a failure, and close."""
        deadline = time.monotonic() + self.timeout_s
        if self._state.reason is None:
            for link in self._links.values():
                for ticket in list(link.unfinished.values()):
                    ticket.wait(deadline - time.monotonic())
        self._state.reason = self._state.reason or "it is closed"
        self._links.clear()
        self._incoming.clear()
        self._arrived.clear()

    def finish_send(self, ticket: _SendTicket, timeout_s: float | None = None) -> None:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        start = time.monotonic()
        while ticket.transfers:
            self._state.check()
            try:
                ticket.transfers[0][0].wait(wait_time(start + limit_s))
            except RuntimeError as error:
                waited_s = time.monotonic() - start
                raise self._failure("send to", ticket.peer, ticket.tag, waited_s, limit_s, error) from error
            ticket.transfers.pop(0)
        link = self._links.get(ticket.peer)
        if link is not None and link.unfinished.pop(ticket.link_seq, None) is not None:
            link.unfinished_bytes -= ticket.num_bytes

    def finish_recv(self, ticket: _RecvTicket, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        """Take the channel's messages in order up to the ticket's."""
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        while ticket.tensors is None:
            self._state.check()
            self._take_frame(ticket.channel, deadline)
        self._arrived.pop(ticket, None)
        return ticket.tensors

    def advance(self, channel: _Incoming) -> None:
        """Take the frames of the channel that have arrived, without waiting."""
        while channel.transfer is not None and wire.is_sealed(channel.transfer[1]):
            self._state.check()
            self._take_frame(channel, time.monotonic() + self.timeout_s)

    def _start_transfers(self, ticket: _SendTicket, frames: Sequence[Tensor]) -> None:
        try:
            for frame in frames:
                work = dist.isend(frame, ticket.peer, group=self._group, tag=ticket.tag >> ITEM_BITS)
                assert work is not None
                ticket.transfers.append((work, frame))
        except RuntimeError as error:
            raise self._failure("send to", ticket.peer, ticket.tag, 0.0, self.timeout_s, error) from error

    def _post(self, channel: _Incoming, num_bytes: int) -> None:
        """Request a frame of ``num_bytes`` from gloo, for the channel's first ticket."""
        frame = wire.blank_frame(num_bytes)
        try:
            work = dist.irecv(frame, channel.peer, group=self._group, tag=channel.number)
        except RuntimeError as error:
            tag = channel.tickets[0].tag
            raise self._failure("recv from", channel.peer, tag, 0.0, self.timeout_s, error) from error
        assert work is not None
        channel.transfer = work, frame

    def _take_frame(self, channel: _Incoming, deadline: float) -> None:
        """Wait for the requested frame, then request the next frame of this message or the next one."""
        frame = self._await_frame(channel, deadline)
        tag = channel.tickets[0].tag
        try:
            first = wire.read_seal(frame)
            self._check_order(channel, first, tag)
            if wire.frame_bytes(first) > len(frame):
                self._post(channel, wire.frame_bytes(first))
                return
            tensors = wire.read(first, frame)
        except wire.DescriptorError as error:
            what = f"recv from rank {channel.peer} of {describe_tag(tag)}: {error}"
            raise self._state.failure(what) from error
        ticket = channel.tickets.popleft()
        ticket.tensors = tensors
        self._arrived[ticket] = None
        channel.frame_bytes = wire.frame_bytes(first)
        channel.seq += 1
        channel.transfer = None
        self._note_arrival(channel.peer, first)
        if channel.tickets:
            self._post(channel, channel.frame_bytes)

    def _await_frame(self, channel: _Incoming, deadline: float) -> Tensor:
        assert channel.transfer is not None
        work, frame = channel.transfer
        start = time.monotonic()
        try:
            work.wait(wait_time(deadline))
        except RuntimeError as error:
            waited_s, limit_s = time.monotonic() - start, max(0.0, deadline - start)
            tag = channel.tickets[0].tag
            raise self._failure("recv from", channel.peer, tag, waited_s, limit_s, error) from error
        return frame

    def _check_order(self, channel: _Incoming, first: wire.Descriptor, tag: int) -> None:
        if first.tag != tag or first.seq != channel.seq:
            raise self._state.failure(
                f"recv from rank {channel.peer}: expected {describe_tag(tag)} as message {channel.seq} of the "
                f"channel (got {describe_tag(first.tag)} as message {first.seq}). Use the channel in the same order "
                "on both ranks."
            )

    def _note_arrival(self, peer: int, first: wire.Descriptor) -> None:
        """Count the message, and finish the sends that its descriptor ``first`` acknowledges."""
        link = self._links.setdefault(peer, _Link())
        link.arrived_ahead.add(first.link_seq)
        while link.arrived in link.arrived_ahead:
            link.arrived_ahead.remove(link.arrived)
            link.arrived += 1
        for link_seq in list(link.unfinished):
            if link_seq >= first.acknowledged:
                break
            self.finish_send(link.unfinished[link_seq])

    def _check(self, peer: int, tag: int) -> None:
        self._state.check()
        check_address(self.rank, self.world_size, peer, tag)

    def _failure(
        self, action: str, peer: int, tag: int, waited_s: float, limit_s: float, error: RuntimeError
    ) -> TransportError:
        what = f"{action} rank {peer} of {describe_tag(tag)}"
        failure = self._state.failure(f"{what}: {explain(error, peer, waited_s, limit_s)}")
        failure.peer = peer
        return failure


def _frames(
    tensors: Sequence[Tensor], descriptors: Sequence[wire.Descriptor], expected_bytes: int
) -> list[Tensor]:
    """Return the frames of a message: one of the expected size, and a second one if the message is larger."""
    frames = [torch.empty(expected_bytes, dtype=torch.uint8)]
    needed_bytes = wire.frame_bytes(descriptors[0])
    if needed_bytes > expected_bytes:
        wire.seal(descriptors[0], frames[0])
        frames.append(torch.empty(needed_bytes, dtype=torch.uint8))
    wire.write(tensors, descriptors, frames[-1])
    return frames
