"""Transport between GPUs over torch.distributed: descriptors over gloo, contents over a communicator per directed pair.

NCCL has no tags and matches by order alone. So the contents of a pair are received in the order of the descriptors and
assigned by tag. The receive starts on the GPU at the next call to the transport after the descriptors have arrived.
The host never waits for it.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ext.comm import wire
from ds_ext.comm.groups import explain, new_group
from ds_ext.comm.torch_p2p import TorchTransport
from ds_ext.comm.transport import ITEM_BITS, Ticket, Transport, check_address, describe_tag, make_tag
from ds_ext.errors import TransportError

HEADER_CHANNEL = 0

_Contents = tuple[tuple[Tensor, ...], dist.Work | None]
_Operation = Callable[..., dist.Work | None]


@dataclass(eq=False)
class _SendTicket:
    """Ticket of send(), which keeps the contents until they have been sent."""

    header: Ticket
    transfer: tuple[dist.Work, Tensor] | None

    def done(self) -> bool:
        if self.transfer is not None and self.transfer[0].is_completed():
            self.transfer = None
        return self.transfer is None

    def wait(self, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        self.header.wait(timeout_s)
        if self.transfer is not None:
            self.transfer[0].wait()
            self.transfer = None
        return ()


@dataclass(eq=False)
class _RecvTicket:
    transport: SplitTransport
    peer: int
    tag: int
    tensors: tuple[Tensor, ...] | None = None
    work: dist.Work | None = None

    def done(self) -> bool:
        self.transport.take_headers(self.peer)
        return self.tensors is not None and (self.work is None or self.work.is_completed())

    def wait(self, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        return self.transport.finish_recv(self, timeout_s)


class SplitTransport:
    """Transport (see transport.py) whose contents do not pass through the host.

    On CUDA, a ticket's wait() makes the current stream wait for the transfer, as with every NCCL operation. The time
    limit of wait() covers the descriptors; the communicator's limit covers the contents.
    """

    name = "torch"

    def __init__(
        self,
        headers: TorchTransport,
        groups: dict[tuple[int, int], dist.ProcessGroup],
        device: torch.device,
    ) -> None:
        """Use `headers` for descriptors, and `groups` (one per directed pair of this rank) for contents."""
        self._headers = headers
        self._groups = groups
        self._device = device
        self._sent: dict[int, int] = defaultdict(int)
        self._requested: dict[int, int] = defaultdict(int)
        self._awaited_headers: dict[int, deque[Ticket]] = defaultdict(deque)
        self._seqs: dict[tuple[int, int, int], int] = defaultdict(int)
        self._tickets: dict[tuple[int, int], deque[_RecvTicket]] = defaultdict(deque)
        self._early: dict[tuple[int, int], deque[_Contents]] = defaultdict(deque)
        self._unfinished: deque[_SendTicket] = deque()
        self._arrived: dict[_RecvTicket, None] = {}

    @classmethod
    def create(
        cls,
        timeout_s: float,
        device: torch.device,
        pairs: Iterable[tuple[int, int]],
        backend: str = "nccl",
    ) -> SplitTransport:
        """Create the groups and do a first transfer on each; a collective call, with the same `pairs` on all ranks."""
        headers = TorchTransport.create(timeout_s)
        rank = headers.rank
        groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        for source, destination in dict.fromkeys(pairs):
            group = new_group([source, destination], backend, timeout_s)
            if group is None:
                continue
            groups[source, destination] = group
            # NCCL connects two ranks on their first transfer, which blocks both. In a schedule, two ranks that both
            # send first would deadlock.
            token = torch.zeros(1, dtype=torch.uint8, device=device)
            if rank == source:
                dist.send(token, destination, group=group)
            else:
                dist.recv(token, source, group=group)
        return cls(headers, groups, device)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> _SendTicket:
        """Send the descriptors over gloo and the contents over the pair's communicator; see Transport.send."""
        group = self._group(self._headers.rank, peer, peer, tag)
        sequence = (self._headers.rank, peer, tag >> ITEM_BITS)
        descriptors = wire.describe(
            tensors, tag=tag, seq=self._seqs[sequence], link_seq=self._sent[peer], acknowledged=0
        )
        header_tag = make_tag(HEADER_CHANNEL, self._sent[peer])
        header = self._headers.send([wire.pack_all(descriptors)], peer, header_tag)
        self._seqs[sequence] += 1
        self._sent[peer] += 1
        transfer = None
        if descriptors[0].body_bytes:
            body = torch.empty(descriptors[0].body_bytes, dtype=torch.uint8, device=self._device)
            wire.fill(tensors, descriptors, body)
            transfer = self._start(dist.isend, body, peer, tag, group), body
        ticket = _SendTicket(header, transfer)
        self._unfinished.append(ticket)
        while self._unfinished and self._unfinished[0].done():
            self._unfinished.popleft()
        return ticket

    def recv(self, peer: int, tag: int) -> _RecvTicket:
        """Receive one more message from the peer; see Transport.recv."""
        self._group(peer, self._headers.rank, peer, tag)
        header_tag = make_tag(HEADER_CHANNEL, self._requested[peer])
        self._awaited_headers[peer].append(self._headers.recv(peer, header_tag))
        self._requested[peer] += 1
        ticket = _RecvTicket(self, peer, tag)
        self._tickets[peer, tag].append(ticket)
        early = self._early[peer, tag]
        if early:
            self._assign(peer, tag, *early.popleft())
        self.take_headers(peer)
        return ticket

    def ready(self) -> list[tuple[int, int]]:
        """Return (peer, tag) of requested messages that have arrived but have not been waited for."""
        for peer in list(self._awaited_headers):
            self.take_headers(peer)
        return [(ticket.peer, ticket.tag) for ticket in self._arrived if ticket.done()]

    def abort(self, cause: str) -> None:
        """Do nothing: torch.distributed cannot send a cause."""

    def close(self) -> None:
        """Wait for unfinished sends and close."""
        while self._unfinished:
            self._unfinished.popleft().wait()
        self._headers.close()

    def finish_recv(self, ticket: _RecvTicket, timeout_s: float | None) -> tuple[Tensor, ...]:
        """Take the peer's messages in order until the ticket's contents are in flight, then wait for them.

        Raises:
            TransportError: the peer has sent no message for the ticket, or cannot be reached.
        """
        deadline = time.monotonic() + (self._headers.timeout_s if timeout_s is None else timeout_s)
        while ticket.tensors is None:
            headers = self._awaited_headers[ticket.peer]
            if not headers:
                raise TransportError(
                    f"rank {self._headers.rank}: recv from rank {ticket.peer}: no requested message has "
                    f"{describe_tag(ticket.tag)}. Use the same tags on both ranks."
                )
            self._take_message(ticket.peer, headers.popleft().wait(max(0.0, deadline - time.monotonic()))[0])
        if ticket.work is not None:
            ticket.work.wait()
            ticket.work = None
        self._arrived.pop(ticket, None)
        return ticket.tensors

    def take_headers(self, peer: int) -> None:
        """Start the receives whose descriptors have arrived, without waiting."""
        headers = self._awaited_headers[peer]
        while headers and headers[0].done():
            self._take_message(peer, headers.popleft().wait()[0])

    def _take_message(self, peer: int, header: Tensor) -> None:
        try:
            descriptors = wire.unpack_all(header)
            first = descriptors[0]
            body = torch.empty(first.body_bytes, dtype=torch.uint8, device=self._device)
            tensors = wire.view(descriptors, body)
        except wire.DescriptorError as error:
            raise TransportError(f"rank {self._headers.rank}: recv from rank {peer}: {error}") from error
        sequence = (peer, self._headers.rank, first.tag >> ITEM_BITS)
        if first.seq != self._seqs[sequence]:
            raise TransportError(
                f"rank {self._headers.rank}: recv from rank {peer} of {describe_tag(first.tag)}: expected message "
                f"{self._seqs[sequence]} of the channel (got message {first.seq})."
            )
        self._seqs[sequence] += 1
        work = None
        if first.body_bytes:
            group = self._group(peer, self._headers.rank, peer, first.tag)
            work = self._start(dist.irecv, body, peer, first.tag, group)
        self._assign(peer, first.tag, tensors, work)

    def _assign(self, peer: int, tag: int, tensors: tuple[Tensor, ...], work: dist.Work | None) -> None:
        tickets = self._tickets[peer, tag]
        if not tickets:
            self._early[peer, tag].append((tensors, work))
            return
        ticket = tickets.popleft()
        ticket.tensors, ticket.work = tensors, work
        self._arrived[ticket] = None

    def _group(self, source: int, destination: int, peer: int, tag: int) -> dist.ProcessGroup:
        check_address(self._headers.rank, self._headers.world_size, peer, tag)
        if (source, destination) not in self._groups:
            raise TransportError(
                f"rank {self._headers.rank}: no communicator from rank {source} to rank {destination}. "
                "Add the pair to create_transport(pairs=...) on every rank."
            )
        return self._groups[source, destination]

    def _start(
        self, operation: _Operation, body: Tensor, peer: int, tag: int, group: dist.ProcessGroup
    ) -> dist.Work:
        try:
            work = operation(body, peer, group=group)
        except RuntimeError as error:
            raise TransportError(
                f"rank {self._headers.rank}: {operation.__name__} with rank {peer} of {describe_tag(tag)}: "
                f"{explain(error, peer, 0.0, self._headers.timeout_s)}",
                peer,
            ) from error
        assert work is not None
        return work


def create(
    *,
    timeout_s: float,
    device: torch.device,
    pairs: Sequence[tuple[int, int]] = (),
    node_ips: Sequence[str] | None = None,
) -> Transport:
    """Create the transport "torch"; see create_transport(). torch.distributed ignores `node_ips`."""
    if device.type == "cpu":
        return TorchTransport.create(timeout_s)
    return SplitTransport.create(timeout_s, device, pairs)
