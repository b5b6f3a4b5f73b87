"""Transport between GPUs: descriptors over native links, contents past the host where possible.

Ranks of one host whose GPUs reach each other write into each other's memory (slabs.py). Other ranks, and messages
without a free slot, copy through the memory of the hosts (staging.py). The host never waits for a stream, and work
queued right after a message's arrival can use it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ds_ext.comm import _native, wire
from ds_ext.comm.cuda.device import Device
from ds_ext.comm.cuda.header import Header, Route, unpack
from ds_ext.comm.cuda.peer import Peer
from ds_ext.comm.cuda.slabs import Control
from ds_ext.comm.cuda.staging import Publisher, pieces
from ds_ext.comm.endpoints import Pairs
from ds_ext.comm.native_transport import SENT, NativeTransport, RecvTicket, Sent
from ds_ext.comm.transport import GPU_CONTROL, GPU_PIECES, ITEM_BITS, describe_tag, make_tag
from ds_ext.errors import ProtocolError, TransportError, TransportTimeout

logger = logging.getLogger(__name__)

_POLL_S = 0.0002  # between two polls of copies to the host
_ERRORS = (_native.LinkError, _native.DescriptorError, KeyError, IndexError, TypeError, AttributeError)


@dataclass(eq=False)
class GpuTicket:
    """Ticket of recv(); see transport.Ticket. The current stream may use the tensors; the host has not waited."""

    transport: GpuTransport
    host: RecvTicket
    tensors: tuple[Tensor, ...] | None = None

    def done(self) -> bool:
        """See transport.Ticket."""
        self.transport.progress()
        return self.tensors is not None or self.host.arrived

    def wait(self, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        """See transport.Ticket."""
        return self.transport.finish_recv(self, timeout_s)


class GpuTransport:
    """Transport (see transport.py) for GPU tensors. A message may also hold CPU tensors, which stay on the CPU.

    Args:
        host: between the same ranks, for CPU tensors; taken over.
        device: this rank's GPU.
        peers: the ranks that this one has links with, in both directions.
        direct: for the peers on the same host, how many messages each may hold at a time.

    Attributes:
        counts: messages sent, by the route of their contents.
    """

    def __init__(
        self, host: NativeTransport, device: Device, peers: Sequence[int], direct: Mapping[int, int]
    ) -> None:
        self.name, self.timeout_s = host.name, host.timeout_s
        self.rank, self.world_size = host.rank, host.world_size
        self._host, self._device = host, device
        self._peers = {peer: Peer(host, peer, device, direct.get(peer)) for peer in peers}
        # Of the rank's thread during every call, and of the publisher between them.
        self._lock = threading.RLock()
        self._publisher = Publisher(device, self._publish)
        self.counts = dict.fromkeys(Route, 0)
        host.must_be_taken = self._must_be_taken

    @classmethod
    def over(
        cls, host: NativeTransport, device: Device, pairs: Pairs, kinds: Mapping[tuple[int, int], str]
    ) -> GpuTransport:
        """Build the transport over links in both directions, of these kinds; ``pairs`` as in transport.py."""
        mine = {peer: held for (rank, peer), held in pairs.items() if rank == host.rank}
        direct = {peer: held for peer, held in mine.items() if kinds[host.rank, peer] == "shm"}
        return cls(host, device, list(mine), direct)

    # --- the interface ---

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Sent:
        """Send tensors as they are behind what the current stream has queued by now; see Transport.send."""
        with self._lock:
            self.progress()
            to = self._peers.get(peer)
            if to is None:
                return self._host.send(tensors, peer, tag)  # which raises
            self._refuse_own(tag)
            on_gpu = [self._device.owns(tensor) for tensor in tensors]
            ours = [tensor for tensor, mine in zip(tensors, on_gpu, strict=True) if mine]
            others = [tensor for tensor, mine in zip(tensors, on_gpu, strict=True) if not mine]
            self._check_host(others, tag, needed=not ours)
            known = wire.describe(ours, tag=tag, seq=0, link_seq=0, acknowledged=0) if ours else []
            route, place = self._start_contents(to, self._device.pack(ours, known))
            if to.waiting:
                others = [tensor.clone() for tensor in others]
            to.waiting.append((None, (*Header(route, place, on_gpu, known).pack(), *others), tag))
            self.counts[route] += 1
            self._publish()
        return SENT

    def recv(self, peer: int, tag: int) -> GpuTicket:
        """Ask for the next message of the tag's channel; see Transport.recv."""
        with self._lock:
            self._refuse_own(tag)
            return GpuTicket(self, self._host.recv(peer, tag))

    def ready(self) -> list[tuple[int, int]]:
        """Return (peer, tag) of all messages that have arrived and were not yet waited for, asked for or not."""
        with self._lock:
            self.progress()
            return [
                (peer, tag)
                for peer, tag in self._host.ready()
                if tag >> ITEM_BITS not in (GPU_CONTROL, GPU_PIECES)
            ]

    def abort(self, cause: str) -> None:
        """Send the cause of this rank's failure to its peers; the transport cannot be used any more."""
        held = self._lock.acquire(timeout=1.0)
        try:
            self._host.abort(cause)
        finally:
            if held:
                self._lock.release()

    def close(self) -> None:
        """Send what is still to be copied, and wait until the peers have taken all; `timeout_s` for each of both."""
        try:
            self._flush()
        finally:
            with self._lock:
                for peer in self._peers.values():
                    peer.waiting.clear()
                self._host.close()
            self._publisher.close()

    # --- more than the interface asks for ---

    def wait_any(self, tickets: Sequence[GpuTicket], timeout_s: float | None = None) -> int:
        """Wait until one of the tickets is done; return its position. TransportError as for a ticket's wait()."""
        with self._lock:
            begin = time.monotonic()
            limit_s = self.timeout_s if timeout_s is None else timeout_s
            peers = [self._peers[rank] for rank in dict.fromkeys(ticket.host.peer for ticket in tickets)]
            while True:
                self.progress()
                for position, ticket in enumerate(tickets):
                    if ticket.tensors is not None or ticket.host.arrived:
                        return position
                # Control messages are answered meanwhile: the peers may wait for that.
                awaited = [ticket.host for ticket in tickets]
                awaited += [ticket for peer in peers for ticket in peer.posted.values()]
                waited_s = time.monotonic() - begin
                if waited_s < limit_s and any(peer.waiting for peer in self._peers.values()):
                    with contextlib.suppress(TransportTimeout):
                        self._host.wait_any(awaited, _POLL_S)
                else:
                    left_s = None if timeout_s is None else max(0.0, timeout_s - waited_s)
                    self._host.wait_any(awaited, left_s)

    # --- what tickets and the thread call ---

    def finish_recv(self, ticket: GpuTicket, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        """Wait for the ticket's message and return its tensors."""
        with self._lock:
            if ticket.tensors is None:
                self.wait_any((ticket,), timeout_s)
                ticket.tensors = self._tensors(ticket.host.peer, ticket.host.wait())
        return ticket.tensors

    def progress(self) -> None:
        """Take and answer what has arrived, and send what can be sent, without waiting."""
        with self._lock:
            if self._publisher.error is not None:
                raise self._publisher.error
            self._host.drain()
            for peer in self._peers.values():
                try:
                    while (piece := peer.take(GPU_PIECES)) is not None:
                        peer.staged.add(*piece)
                    while (control := peer.take(GPU_CONTROL)) is not None:
                        self._on_control(peer, json.loads(control[0].numpy().tobytes()))
                except (*_ERRORS, ValueError) as error:
                    raise self._damaged(peer.rank, error) from error
                freed = peer.slabs.freed()
                if freed is not None:
                    peer.send_control(freed)
            self._publish()

    # --- sending ---

    def _start_contents(self, to: Peer, body: Tensor) -> tuple[Route, tuple[int, int, int]]:
        """Start to send a body. Returns its route and place."""
        if not len(body):
            return Route.NONE, (0, 0, 0)
        if to.direct is not None:
            place = to.direct.send(body)
            if place is not None:
                return Route.DIRECT, place
            request = to.direct.request_slab(len(body))
            if request is not None:
                to.send_control(request)
        for event, piece in pieces(self._device, body, to.bodies):
            to.waiting.append((event, piece, make_tag(GPU_PIECES, to.sent_pieces)))
            to.sent_pieces += 1
            self._publisher.watch(event)
        to.bodies += 1
        return Route.STAGED, (to.bodies - 1, 0, 0)

    def _check_host(self, tensors: Sequence[Tensor], tag: int, needed: bool) -> None:
        """Refuse what the links would refuse, before anything of the message is under way."""
        elsewhere = next((tensor.device for tensor in tensors if not tensor.is_cpu), None)
        if elsewhere is not None:
            raise TransportError(
                f"rank {self.rank} cannot send a tensor that lies on {elsewhere}: move it first"
            )
        if tensors or needed:
            wire.describe(tensors, tag=tag, seq=0, link_seq=0, acknowledged=0)

    def _publish(self) -> None:
        """Send what is on the host by now, to every peer in order."""
        with self._lock:
            for peer in self._peers.values():
                while peer.waiting and (peer.waiting[0][0] is None or self._device.done(peer.waiting[0][0])):
                    _, tensors, tag = peer.waiting.popleft()
                    peer.post(tensors, tag)

    def _flush(self) -> None:
        deadline = time.monotonic() + self.timeout_s
        while True:
            with self._lock:
                self._publish()
                waiting = [peer.rank for peer in self._peers.values() if peer.waiting]
            if not waiting:
                return
            if time.monotonic() > deadline:
                raise TransportTimeout(
                    f"rank {self.rank}: the copies of messages to rank {waiting[0]} did not end within the limit of "
                    f"{self.timeout_s:g} s: the GPU is still busy with what comes before them",
                    waiting[0],
                )
            time.sleep(_POLL_S)

    def _must_be_taken(self, peer: int, in_flight: int) -> bool:
        """Return whether close() waits for the messages in flight to a peer: not for control messages alone."""
        return self._peers[peer].last > self._peers[peer].sent - in_flight

    # --- receiving ---

    def _tensors(self, source: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        peer = self._peers[source]
        try:
            header, host = unpack(tensors)
            if header.route is Route.DIRECT:
                body = peer.slabs.take(*header.place, header.body_bytes)
            elif header.route is Route.STAGED:
                body = peer.staged.take(header.place[0])
            else:
                body = self._device.empty(0, self._device.current())
            return header.join(body, host)
        except _ERRORS as error:
            raise self._damaged(source, error) from error

    def _refuse_own(self, tag: int) -> None:
        if tag >> ITEM_BITS in (GPU_CONTROL, GPU_PIECES):
            raise TransportError(
                f"rank {self.rank}: {describe_tag(tag)}: that channel is the transport's own"
            )

    def _on_control(self, peer: Peer, control: Control) -> None:
        """Handle a control message."""
        if "request" in control:
            peer.send_control(peer.slabs.grant(control))
            return
        if peer.direct is None:
            raise _native.LinkError("an answer without a request")
        if "freed" in control:
            peer.direct.on_freed(control)
            return
        peer.direct.on_answer(control)
        if peer.direct.refused:
            logger.info(
                "rank %d: contents for rank %d go through the host's memory, because %s",
                self.rank,
                peer.rank,
                peer.direct.refused,
            )

    def _damaged(self, source: int, error: Exception) -> TransportError:
        return self._host.fail(
            f"a message of rank {source} is damaged: {type(error).__name__}: {error}", ProtocolError
        )
