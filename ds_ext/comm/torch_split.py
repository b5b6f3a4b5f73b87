"""Transport between GPUs over torch.distributed: descriptors over gloo, contents over a communicator per directed pair.

NCCL has no tags and matches by order alone. So the contents of a pair are received in the order of the descriptors and
assigned by tag. A receive starts on the GPU at the next call to the transport after its descriptors have arrived, on a
stream that does not wait for computations. The host waits for the GPU only in settle().
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import TransportError
from . import wire
from .channels import SPLIT_HEADERS
from .failure_state import FailureState
from .groups import new_pair_groups
from .rounds import Link, divide_into_rounds, queue_shortage
from .torch_p2p import TorchTransport
from .transfers import Transfer, Transfers
from .transport import ITEM_BITS, Ticket, Transport, check_address, describe_tag, make_tag

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _SendTicket:
    transport: SplitTransport
    header: Ticket
    transfer: Transfer | None

    def done(self) -> bool:
        return self.transfer is None or self.transfer.work.is_completed()

    def wait(self, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        self.header.wait(timeout_s)
        if self.transfer is not None:
            self.transport.transfers.finish(self.transfer, timeout_s)
            self.transfer = None
        return ()


@dataclass(eq=False)
class _RecvTicket:
    transport: SplitTransport
    peer: int
    tag: int
    tensors: tuple[Tensor, ...] | None = None
    transfer: Transfer | None = None

    def done(self) -> bool:
        self.transport.take_headers(self.peer)
        return self.tensors is not None and (self.transfer is None or self.transfer.work.is_completed())

    def wait(self, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        return self.transport.finish_recv(self, timeout_s)


_Contents = tuple[tuple[Tensor, ...], Transfer | None]


class SplitTransport:
    """Transport (see transport.py) whose contents do not pass through the host.

    On CUDA, a ticket's wait() makes the current stream wait for the transfer, as with every NCCL operation. Its time
    limit covers the descriptors. settle() applies the limit to the contents.
    """

    name = "torch"

    def __init__(
        self, headers: TorchTransport, groups: dict[Link, dist.ProcessGroup], device: torch.device
    ) -> None:
        """Use ``headers`` for descriptors, and ``groups`` (one per directed pair of this rank) for contents."""
        self._headers = headers
        self._groups = groups
        self._device = device
        self._state = FailureState(headers.rank)
        self.transfers = Transfers(self._state, device, headers.timeout_s)
        self._sent: dict[int, int] = defaultdict(int)
        self._requested: dict[int, int] = defaultdict(int)
        self._awaited_headers: dict[int, deque[Ticket]] = defaultdict(deque)
        self._seqs: dict[tuple[int, int, int], int] = defaultdict(int)
        self._tickets: dict[tuple[int, int], deque[_RecvTicket]] = defaultdict(deque)
        self._early: dict[tuple[int, int], deque[_Contents]] = defaultdict(deque)
        self._arrived: dict[_RecvTicket, None] = {}

    @classmethod
    def create(
        cls, timeout_s: float, device: torch.device, pairs: Iterable[Link], backend: str = "nccl"
    ) -> SplitTransport:
        """Create the groups and do a first transfer on each; a collective call, with the same ``pairs`` on all ranks.

        NCCL connects two ranks at their first transfer, which blocks both. In a schedule, two ranks that both send
        first would deadlock. In a round, every rank connects to at most one other rank.
        """
        transport = cls(TorchTransport.create(timeout_s), {}, device)
        rank = transport._headers.rank
        for links in divide_into_rounds(pairs):
            for (source, destination), group in new_pair_groups(links, backend, timeout_s).items():
                transport._groups[source, destination] = group
                if rank == source:
                    token = torch.zeros(1, dtype=torch.uint8, device=device)
                    transport.transfers.send(token, destination, 0, group)
                else:
                    transport.transfers.recv(1, source, 0, group)
        transport.transfers.await_all()
        shortage = queue_shortage(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"), len(transport._groups))
        if shortage is not None and device.type == "cuda":
            logger.warning("rank %d: %s", rank, shortage)
        return transport

    @property
    def timeout_s(self) -> float:
        return self._headers.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self._headers.timeout_s = self.transfers.timeout_s = value

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> _SendTicket:
        self._check(peer, tag)
        group = self._group(self._headers.rank, peer)
        sequence = (self._headers.rank, peer, tag >> ITEM_BITS)
        descriptors = wire.describe(
            tensors, tag=tag, seq=self._seqs[sequence], link_seq=self._sent[peer], acknowledged=0
        )
        header_tag = make_tag(SPLIT_HEADERS, self._sent[peer])
        header = self._headers.send([wire.pack_all(descriptors)], peer, header_tag)
        self._seqs[sequence] += 1
        self._sent[peer] += 1
        transfer = None
        if descriptors[0].body_bytes:
            body = torch.empty(descriptors[0].body_bytes, dtype=torch.uint8, device=self._device)
            wire.fill(tensors, descriptors, body)
            transfer = self.transfers.send(body, peer, tag, group)
        return _SendTicket(self, header, transfer)

    def recv(self, peer: int, tag: int) -> _RecvTicket:
        self._check(peer, tag)
        self._group(peer, self._headers.rank)  # raises an error if the pair has no communicator
        header_tag = make_tag(SPLIT_HEADERS, self._requested[peer])
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
        self._take_all_headers()
        return [(ticket.peer, ticket.tag) for ticket in self._arrived if ticket.done()]

    def settle(self) -> None:
        """Wait until all started receives are complete; TransportTimeout if none completes within the limit.

        Their senders have queued the contents, so they need no further call of any rank. A send may need one.
        """
        self.transfers.await_receives()

    def abort(self, cause: str) -> None:
        """Do nothing: torch.distributed cannot send a cause."""

    def close(self) -> None:
        """Wait for unfinished transfers, except after a failure, and close.

        Requested messages that have arrived are received, because their senders wait for that.
        """
        if self._state.reason is None:
            self.transfers.await_all(self._take_all_headers)
        self._headers.close()

    def finish_recv(self, ticket: _RecvTicket, timeout_s: float | None) -> tuple[Tensor, ...]:
        """Take the peer's messages in order until the ticket's contents are in flight, then wait for them."""
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        while ticket.tensors is None:
            headers = self._awaited_headers[ticket.peer]
            if not headers:
                raise TransportError(
                    f"rank {self._headers.rank}: recv from rank {ticket.peer}: no requested message has "
                    f"{describe_tag(ticket.tag)}. Use the same tags on both ranks."
                )
            self._take_message(ticket.peer, headers.popleft().wait(max(0.0, deadline - time.monotonic()))[0])
        if ticket.transfer is not None:
            self.transfers.finish(ticket.transfer, max(0.0, deadline - time.monotonic()))
            ticket.transfer = None
        self._arrived.pop(ticket, None)
        return ticket.tensors

    def take_headers(self, peer: int) -> None:
        """Start the receives whose descriptors have arrived, without waiting."""
        headers = self._awaited_headers[peer]
        while headers and headers[0].done():
            self._take_message(peer, headers.popleft().wait()[0])

    def _take_all_headers(self) -> None:
        for peer in list(self._awaited_headers):
            self.take_headers(peer)

    def _take_message(self, peer: int, header: Tensor) -> None:
        """Start the receive of the contents that ``header`` describes, and assign them to a ticket."""
        try:
            descriptors = wire.unpack_all(header)
            first = descriptors[0]
            self._count_message(peer, first)
            transfer = self._start_receive(peer, first) if first.body_bytes else None
            body = (
                torch.empty(0, dtype=torch.uint8, device=self._device) if transfer is None else transfer.body
            )
            tensors = wire.view(descriptors, body)
        except wire.DescriptorError as error:
            raise TransportError(f"rank {self._headers.rank}: recv from rank {peer}: {error}") from error
        self._assign(peer, first.tag, tensors, transfer)

    def _count_message(self, peer: int, first: wire.Descriptor) -> None:
        sequence = (peer, self._headers.rank, first.tag >> ITEM_BITS)
        if first.seq != self._seqs[sequence]:
            raise TransportError(
                f"rank {self._headers.rank}: recv from rank {peer} of {describe_tag(first.tag)}: expected message "
                f"{self._seqs[sequence]} of the channel (got message {first.seq})."
            )
        self._seqs[sequence] += 1

    def _start_receive(self, peer: int, first: wire.Descriptor) -> Transfer:
        self._check(peer, first.tag)
        group = self._group(peer, self._headers.rank)
        return self.transfers.recv(first.body_bytes, peer, first.tag, group)

    def _assign(self, peer: int, tag: int, tensors: tuple[Tensor, ...], transfer: Transfer | None) -> None:
        """Pass the contents to the oldest ticket for ``tag``, or keep them for the next recv()."""
        tickets = self._tickets[peer, tag]
        if not tickets:
            self._early[peer, tag].append((tensors, transfer))
            return
        ticket = tickets.popleft()
        ticket.tensors = tensors
        ticket.transfer = transfer
        self._arrived[ticket] = None

    def _check(self, peer: int, tag: int) -> None:
        self._state.check()
        check_address(self._headers.rank, self._headers.world_size, peer, tag)

    def _group(self, source: int, destination: int) -> dist.ProcessGroup:
        if (source, destination) not in self._groups:
            raise TransportError(
                f"rank {self._headers.rank}: no communicator from rank {source} to rank {destination}. "
                "Add the pair to create_transport(pairs=...) on every rank."
            )
        return self._groups[source, destination]


def create(
    *,
    timeout_s: float,
    device: torch.device,
    pairs: Sequence[Link] = (),
    node_ips: Sequence[str] | None = None,
) -> Transport:
    """Create the transport "torch"; see create_transport(). torch.distributed ignores ``node_ips``."""
    if device.type == "cpu":
        return TorchTransport.create(timeout_s)
    return SplitTransport.create(timeout_s, device, pairs)
