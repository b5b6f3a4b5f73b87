"""Transport between GPUs: descriptors over native links, contents directly between GPUs if possible.

Ranks on the same host with peer access write into each other's GPU memory (slabs.py). Other ranks, and messages without
a free slot, copy through host memory (staging.py). The host never waits for a stream.
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

_POLL_S = 0.0002  # interval between polls of copies to the host
_ERRORS = (_native.LinkError, _native.DescriptorError, KeyError, IndexError, TypeError, AttributeError)


@dataclass(eq=False)
class GpuTicket:
    """Ticket of recv(); see transport.Ticket. Work queued on the current stream may use the tensors."""

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
    """Transport (see transport.py) for GPU tensors. A message may also contain CPU tensors, which stay on the CPU.

    Args:
        host: transport of CPU tensors between the same ranks; this object closes it.
        device: GPU of this rank.
        peers: ranks with links to and from this rank.
        direct: peer on the same host -> number of messages that it may hold at a time.

    Attributes:
        counts: route -> number of messages sent.
    """

    def __init__(
        self, host: NativeTransport, device: Device, peers: Sequence[int], direct: Mapping[int, int]
    ) -> None:
        self.name, self.timeout_s = host.name, host.timeout_s
        self.rank, self.world_size = host.rank, host.world_size
        self._host, self._device = host, device
        self._peers = {peer: Peer(host, peer, device, direct.get(peer)) for peer in peers}
        # Held by the main thread during every call; the publisher takes it between calls.
        self._lock = threading.RLock()
        self._publisher = Publisher(device, self._publish)
        self.counts = dict.fromkeys(Route, 0)
        host.must_be_taken = self._must_be_taken

    @classmethod
    def over(
        cls, host: NativeTransport, device: Device, pairs: Pairs, kinds: Mapping[tuple[int, int], str]
    ) -> GpuTransport:
        """Create the transport over links in both directions; ``kinds`` maps each link to its kind."""
        mine = {peer: held for (rank, peer), held in pairs.items() if rank == host.rank}
        direct = {peer: held for peer, held in mine.items() if kinds[host.rank, peer] == "shm"}
        return cls(host, device, list(mine), direct)

    # --- the interface ---

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Sent:
        """Send tensors after the work queued on the current stream so far; see Transport.send."""
        with self._lock:
            self.progress()
            to = self._peers.get(peer)
            if to is None:
                return self._host.send(tensors, peer, tag)  # raises the error
            self._refuse_reserved(tag)
            on_gpu = [self._device.owns(tensor) for tensor in tensors]
            gpu_tensors = [tensor for tensor, on in zip(tensors, on_gpu, strict=True) if on]
            others = [tensor for tensor, on in zip(tensors, on_gpu, strict=True) if not on]
            self._check_host(others, tag, needed=not gpu_tensors)
            descriptors: list[wire.Descriptor] = []
            if gpu_tensors:
                descriptors = wire.describe(gpu_tensors, tag=tag, seq=0, link_seq=0, acknowledged=0)
            route, place = self._start_contents(to, self._device.pack(gpu_tensors, descriptors))
            if to.waiting:
                others = [tensor.clone() for tensor in others]
            to.waiting.append((None, (*Header(route, place, on_gpu, descriptors).pack(), *others), tag))
            self.counts[route] += 1
            self._publish()
        return SENT

    def recv(self, peer: int, tag: int) -> GpuTicket:
        """Receive the next message of the tag's channel; see Transport.recv."""
        with self._lock:
            self._refuse_reserved(tag)
            return GpuTicket(self, self._host.recv(peer, tag))

    def ready(self) -> list[tuple[int, int]]:
        """Return (peer, tag) of all messages that have arrived but have not been waited for."""
        with self._lock:
            self.progress()
            return [
                (peer, tag)
                for peer, tag in self._host.ready()
                if tag >> ITEM_BITS not in (GPU_CONTROL, GPU_PIECES)
            ]

    def abort(self, cause: str) -> None:
        """Send the cause of this rank's failure to its peers. The transport is unusable afterwards."""
        held = self._lock.acquire(timeout=1.0)
        try:
            self._host.abort(cause)
        finally:
            if held:
                self._lock.release()

    def close(self) -> None:
        """Send all staged messages and wait until the peers have taken them; each step may take up to `timeout_s`."""
        try:
            self._flush()
        finally:
            with self._lock:
                for peer in self._peers.values():
                    peer.waiting.clear()
                self._host.close()
            self._publisher.close()

    # --- beyond the interface ---

    def wait_any(self, tickets: Sequence[GpuTicket], timeout_s: float | None = None) -> int:
        """Wait until one of the tickets is done, and return its position; errors as in Ticket.wait()."""
        with self._lock:
            begin = time.monotonic()
            limit_s = self.timeout_s if timeout_s is None else timeout_s
            peers = [self._peers[rank] for rank in dict.fromkeys(ticket.host.peer for ticket in tickets)]
            while True:
                self.progress()
                for position, ticket in enumerate(tickets):
                    if ticket.tensors is not None or ticket.host.arrived:
                        return position
                # Answer control messages meanwhile, because the peers may wait for the answers.
                awaited = [ticket.host for ticket in tickets]
                awaited += [ticket for peer in peers for ticket in peer.posted.values()]
                waited_s = time.monotonic() - begin
                if waited_s < limit_s and any(peer.waiting for peer in self._peers.values()):
                    with contextlib.suppress(TransportTimeout):
                        self._host.wait_any(awaited, _POLL_S)
                else:
                    left_s = None if timeout_s is None else max(0.0, timeout_s - waited_s)
                    self._host.wait_any(awaited, left_s)

    # --- called by tickets and the thread ---

    def finish_recv(self, ticket: GpuTicket, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        """Wait for the ticket's message and return its tensors."""
        with self._lock:
            if ticket.tensors is None:
                self.wait_any((ticket,), timeout_s)
                ticket.tensors = self._tensors(ticket.host.peer, ticket.host.wait())
        return ticket.tensors

    def progress(self) -> None:
        """Take and answer arrived messages, and send messages that are ready, without waiting."""
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
        """Start sending a body. Returns its route and place."""
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
        """Raise link errors before any part of the message is sent."""
        elsewhere = next((tensor.device for tensor in tensors if not tensor.is_cpu), None)
        if elsewhere is not None:
            raise TransportError(
                f"rank {self.rank}: tensors must be on this rank's GPU or the CPU (got {elsewhere}). Move the tensor."
            )
        if tensors or needed:
            wire.describe(tensors, tag=tag, seq=0, link_seq=0, acknowledged=0)

    def _publish(self) -> None:
        """Send the messages whose copies to the host are finished, in order per peer."""
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
                    f"rank {self.rank}: copies of messages to rank {waiting[0]} were not finished within the limit of "
                    f"{self.timeout_s:g} s. The GPU is busy with earlier work: raise transport_options.timeout_s.",
                    waiting[0],
                )
            time.sleep(_POLL_S)

    def _must_be_taken(self, peer: int, in_flight: int) -> bool:
        """Return whether close() waits for the messages in flight to a peer. Control messages alone do not count."""
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

    def _refuse_reserved(self, tag: int) -> None:
        if tag >> ITEM_BITS in (GPU_CONTROL, GPU_PIECES):
            raise TransportError(
                f"rank {self.rank}: channel reserved by the transport (got {describe_tag(tag)})."
            )

    def _on_control(self, peer: Peer, control: Control) -> None:
        """Handle a control message."""
        if "request" in control:
            peer.send_control(peer.slabs.grant(control))
            return
        if peer.direct is None:
            raise _native.LinkError("answer without a request")
        if "freed" in control:
            peer.direct.on_freed(control)
            return
        peer.direct.on_answer(control)
        if peer.direct.refused:
            logger.info(
                "rank %d: contents for rank %d are staged in host memory: %s",
                self.rank,
                peer.rank,
                peer.direct.refused,
            )

    def _damaged(self, source: int, error: Exception) -> TransportError:
        return self._host.fail(
            f"damaged message from rank {source}: {type(error).__name__}: {error}", ProtocolError
        )
