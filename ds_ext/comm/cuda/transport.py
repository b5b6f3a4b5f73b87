"""Messages between GPUs: their descriptors over native links, their contents past the host where that can be.

Ranks of one host whose GPUs reach each other write into each other's memory (cuda_slabs.py); others, and messages for
which there is no room yet, copy through the memory of the hosts (cuda_staging.py). Whichever it is, no stream and no
device is waited for by the host, and a message that has arrived can be used by work that is queued at once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ds_ext.comm import _native, wire
from ds_ext.comm.cuda import head as cuda_head
from ds_ext.comm.cuda.device import Device
from ds_ext.comm.cuda.head import Head, Way
from ds_ext.comm.cuda.peer import Peer
from ds_ext.comm.cuda.staging import Publisher, pieces
from ds_ext.comm.ends import Pairs
from ds_ext.comm.native_transport import SENT, NativeTransport, RecvTicket, Sent
from ds_ext.comm.transport import GPU_CONTROL, GPU_PIECES, ITEM_BITS, describe_tag, make_tag
from ds_ext.errors import ProtocolError, TransportError, TransportTimeout

logger = logging.getLogger(__name__)

_LOOK_S = 0.0002  # between two looks at copies that only the host can send on
_ERRORS = (_native.LinkError, _native.DescriptorError, KeyError, IndexError, TypeError, AttributeError)


@dataclass(eq=False)
class GpuTicket:
    """What recv() gives; see transport.Ticket. The current stream may use the tensors; the host has not waited."""

    transport: GpuTransport
    host: RecvTicket
    tensors: tuple[Tensor, ...] | None = None

    def done(self) -> bool:
        self.transport.progress()
        return self.tensors is not None or self.host.arrived

    def wait(self, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        return self.transport.finish_recv(self, timeout_s)


class GpuTransport:
    """Transport (see transport.py) for tensors of a GPU; those of the CPU may be among them, and stay there.

    Args:
        host: between the same ranks, for tensors of the CPU; it belongs to this transport from now on.
        device: this rank's GPU.
        peers: the ranks that this one has links with, in both directions.
        direct: of those that are on the same host, how many messages each holds at a time.
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
        self.counts = dict.fromkeys(Way, 0)  # messages sent, by the way of their contents
        host.must_be_taken = self._must_be_taken

    @classmethod
    def over(
        cls, host: NativeTransport, device: Device, pairs: Pairs, kinds: Mapping[tuple[int, int], str]
    ) -> GpuTransport:
        """Over links that go both ways, by their kinds; ``pairs`` say how many messages each receiver holds."""
        mine = {peer: slots for (rank, peer), slots in pairs.items() if rank == host.rank}
        direct = {peer: slots for peer, slots in mine.items() if kinds[host.rank, peer] == "shm"}
        return cls(host, device, list(mine), direct)

    # --- the interface ---

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Sent:
        """Send tensors as they are behind what the current stream has queued by now; see Transport.send."""
        with self._lock:
            self.progress()
            to = self._peers.get(peer)
            if to is None:
                return self._host.send(tensors, peer, tag)  # which says what is wrong
            self._refuse_own(tag)
            on_gpu = [self._device.owns(tensor) for tensor in tensors]
            ours = [tensor for tensor, mine in zip(tensors, on_gpu, strict=True) if mine]
            others = [tensor for tensor, mine in zip(tensors, on_gpu, strict=True) if not mine]
            self._check_host(others, tag, needed=not ours)
            known = wire.describe(ours, tag=tag, seq=0, link_seq=0, acknowledged=0) if ours else []
            way, place = self._move(to, self._device.pack(ours, known))
            if to.waiting:
                others = [tensor.clone() for tensor in others]
            to.waiting.append((None, (*Head(way, place, on_gpu, known).pack(), *others), tag))
            self.counts[way] += 1
            self._publish()
        return SENT

    def recv(self, peer: int, tag: int) -> GpuTicket:
        """Ask for the next message of the tag's channel; see Transport.recv."""
        with self._lock:
            self._refuse_own(tag)
            return GpuTicket(self, self._host.recv(peer, tag))

    def ready(self) -> list[tuple[int, int]]:
        """(peer, tag) of what has arrived and was not yet waited for, asked for or not."""
        with self._lock:
            self.progress()
            return [
                (peer, tag)
                for peer, tag in self._host.ready()
                if tag >> ITEM_BITS not in (GPU_CONTROL, GPU_PIECES)
            ]

    def abort(self, cause: str) -> None:
        """Tell the peers why this rank fails; the transport cannot be used any more."""
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
        """Wait until one of the tickets is done; its position. TransportError as for a ticket's wait()."""
        with self._lock:
            begin = time.monotonic()
            limit_s = self.timeout_s if timeout_s is None else timeout_s
            peers = [self._peers[rank] for rank in dict.fromkeys(ticket.host.peer for ticket in tickets)]
            while True:
                self.progress()
                for position, ticket in enumerate(tickets):
                    if ticket.tensors is not None or ticket.host.arrived:
                        return position
                # What peers tell meanwhile is answered: they may need it to go on.
                awaited = [ticket.host for ticket in tickets]
                awaited += [ticket for peer in peers for ticket in peer.asked.values()]
                waited_s = time.monotonic() - begin
                if waited_s < limit_s and any(peer.waiting for peer in self._peers.values()):
                    with contextlib.suppress(TransportTimeout):
                        self._host.wait_any(awaited, _LOOK_S)
                else:
                    left_s = None if timeout_s is None else max(0.0, timeout_s - waited_s)
                    self._host.wait_any(awaited, left_s)

    # --- what tickets and the thread call ---

    def finish_recv(self, ticket: GpuTicket, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        """Wait for the ticket's message and make its tensors."""
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
                    while (told := peer.take(GPU_CONTROL)) is not None:
                        self._hear(peer, json.loads(told[0].numpy().tobytes()))
                except (*_ERRORS, ValueError) as error:
                    raise self._damaged(peer.rank, error) from error
                freed = peer.slabs.freed()
                if freed is not None:
                    peer.tell(freed)
            self._publish()

    # --- sending ---

    def _move(self, to: Peer, body: Tensor) -> tuple[Way, tuple[int, int, int]]:
        """Set a body on its way."""
        if not len(body):
            return Way.NONE, (0, 0, 0)
        if to.direct is not None:
            place = to.direct.send(body)
            if place is not None:
                return Way.DIRECT, place
            want = to.direct.want(len(body))
            if want is not None:
                to.tell(want)
        for event, piece in pieces(self._device, body, to.bodies):
            to.waiting.append((event, piece, make_tag(GPU_PIECES, to.sent_pieces)))
            to.sent_pieces += 1
            self._publisher.watch(event)
        to.bodies += 1
        return Way.STAGED, (to.bodies - 1, 0, 0)

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
            time.sleep(_LOOK_S)

    def _must_be_taken(self, peer: int, untaken: int) -> bool:
        """Whether close() waits for the last messages to a peer: what is only of control nobody needs any more."""
        return self._peers[peer].last > self._peers[peer].sent - untaken

    # --- receiving ---

    def _tensors(self, source: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        peer = self._peers[source]
        try:
            head, host = cuda_head.unpack(tensors)
            if head.way is Way.DIRECT:
                body = peer.slabs.take(*head.place, head.body_bytes)
            elif head.way is Way.STAGED:
                body = peer.staged.take(head.place[0])
            else:
                body = self._device.empty(0, self._device.current())
            return head.join(body, host)
        except _ERRORS as error:
            raise self._damaged(source, error) from error

    def _refuse_own(self, tag: int) -> None:
        if tag >> ITEM_BITS in (GPU_CONTROL, GPU_PIECES):
            raise TransportError(
                f"rank {self.rank}: {describe_tag(tag)}: that channel is the transport's own"
            )

    def _hear(self, peer: Peer, told: Mapping[str, Any]) -> None:
        """A message of control."""
        if "want" in told:
            peer.tell(peer.slabs.grant(told))
            return
        if peer.direct is None:
            raise _native.LinkError("an answer to nothing")
        if "freed" in told:
            peer.direct.freed(told)
            return
        peer.direct.granted(told)
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
