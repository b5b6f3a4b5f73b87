"""Transport between GPUs over native links.

Ranks on the same host with peer access write into each other's GPU memory (direct.py); the host never waits. Contents
for other ranks, and those without a free slot, are staged: copied to page-locked host memory and sent with the message.
The sender waits until that copy is complete, which needs no other rank.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import ProtocolError, TransportError
from .. import _native, wire
from ..channels import GPU_CONTROL
from ..endpoints import Pairs
from ..native_transport import SENT, NativeTransport, RecvTicket, Sent
from ..transport import ITEM_BITS, describe_tag, make_tag
from .device import Device
from .direct import Control, DirectReceiver, DirectSender
from .header import Header, Route, packed, unpack

logger = logging.getLogger(__name__)

_POLL_S = 0.0002  # interval between polls of a copy to the host
_ERRORS = (_native.LinkError, _native.DescriptorError, KeyError, IndexError, TypeError, AttributeError)


@dataclass(eq=False)
class GpuTicket:
    """Ticket of recv(). Work queued on the current stream may use the tensors."""

    transport: GpuTransport
    host: RecvTicket
    tensors: tuple[Tensor, ...] | None = None

    def done(self) -> bool:
        self.transport.progress()
        return self.tensors is not None or self.host.arrived

    def wait(self, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        return self.transport.finish_recv(self, timeout_s)


@dataclass(eq=False)
class _Peer:
    """State for one peer.

    Args:
        control: ticket for the next control message.
        sender, receiver: endpoints of the direct route; no sender for a peer on another host.
    """

    control: RecvTicket
    sender: DirectSender | None
    receiver: DirectReceiver
    controls_sent: int = 0
    controls_taken: int = 0
    sent: int = 0
    last: int = 0  # number of the last message sent that is not a control message


class GpuTransport:
    """Transport (see transport.py) for GPU tensors. A message may also contain CPU tensors, which stay on the CPU.

    Args:
        host: transport of CPU tensors between the same ranks; this object closes it.
        peers: ranks with links to and from this rank.
        direct: peer on the same host -> number of messages that it may hold at a time.

    Attributes:
        counts: route -> number of messages sent.
    """

    def __init__(
        self, host: NativeTransport, device: Device, peers: Sequence[int], direct: Mapping[int, int]
    ) -> None:
        self.name, self.rank, self.world_size = host.name, host.rank, host.world_size
        self._host, self._device = host, device
        self._peers = {
            peer: _Peer(
                host.recv(peer, make_tag(GPU_CONTROL, 0)),
                DirectSender(device, direct[peer]) if peer in direct else None,
                DirectReceiver(device),
            )
            for peer in peers
        }
        self.counts = dict.fromkeys(Route, 0)
        host.must_be_taken = self._must_be_taken

    @classmethod
    def over(
        cls, host: NativeTransport, device: Device, pairs: Pairs, kinds: Mapping[tuple[int, int], str]
    ) -> GpuTransport:
        """Create the transport over links in both directions; ``kinds`` maps each link to its kind."""
        mine = {peer: credits for (rank, peer), credits in pairs.items() if rank == host.rank}
        direct = {peer: credits for peer, credits in mine.items() if kinds[host.rank, peer] == "shm"}
        return cls(host, device, list(mine), direct)

    @property
    def timeout_s(self) -> float:
        return self._host.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self._host.timeout_s = value

    # --- the interface ---

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Sent:
        """Send tensors after the work queued on the current stream so far."""
        self.progress()
        if peer not in self._peers:
            return self._host.send(tensors, peer, tag)  # raises the error
        self._refuse_reserved(tag)
        on_gpu = [self._device.owns(tensor) for tensor in tensors]
        gpu_tensors = [tensor for tensor, on in zip(tensors, on_gpu, strict=True) if on]
        others = [tensor for tensor, on in zip(tensors, on_gpu, strict=True) if not on]
        self._check_host_tensors(others, tag, needed=not gpu_tensors)
        descriptors: list[wire.Descriptor] = []
        if gpu_tensors:
            descriptors = wire.describe(gpu_tensors, tag=tag, seq=0, link_seq=0, acknowledged=0)
        body = self._device.pack(gpu_tensors, descriptors)
        route, slot, staged = self._send_body(body, peer, tag) if len(body) else (Route.NONE, 0, ())
        header = Header(route, slot, on_gpu, descriptors)
        self._post((*header.pack(), *staged, *others), peer, tag)
        self.counts[route] += 1
        return SENT

    def recv(self, peer: int, tag: int) -> GpuTicket:
        self._refuse_reserved(tag)
        return GpuTicket(self, self._host.recv(peer, tag))

    def ready(self) -> list[tuple[int, int]]:
        self.progress()
        return [(peer, tag) for peer, tag in self._host.ready() if tag >> ITEM_BITS != GPU_CONTROL]

    def settle(self) -> None:
        """Do nothing: every wait for another rank has the limit already."""

    def abort(self, cause: str) -> None:
        self._host.abort(cause)

    def close(self) -> None:
        self._host.close()

    # --- beyond the interface ---

    def wait_any(self, tickets: Sequence[GpuTicket], timeout_s: float | None = None) -> int:
        """Wait until one of the tickets is done, and return its position; errors as in Ticket.wait()."""
        begin = time.monotonic()
        peers = [self._peers[rank] for rank in dict.fromkeys(ticket.host.peer for ticket in tickets)]
        while True:
            self.progress()
            for position, ticket in enumerate(tickets):
                if ticket.tensors is not None or ticket.host.arrived:
                    return position
            # Answer control messages meanwhile.
            awaited = [ticket.host for ticket in tickets] + [peer.control for peer in peers]
            left_s = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - begin))
            self._host.wait_any(awaited, left_s)

    def finish_recv(self, ticket: GpuTicket, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        if ticket.tensors is None:
            self.wait_any((ticket,), timeout_s)
            ticket.tensors = self._tensors(ticket.host.peer, ticket.host.wait())
        return ticket.tensors

    def progress(self) -> None:
        """Take and answer control messages, and report free slots, without waiting."""
        self._host.drain()
        for rank, peer in self._peers.items():
            try:
                while peer.control.arrived:
                    (control,) = peer.control.wait()
                    peer.controls_taken += 1
                    peer.control = self._host.recv(rank, make_tag(GPU_CONTROL, peer.controls_taken))
                    self._on_control(rank, json.loads(control.numpy().tobytes()))
            except (*_ERRORS, ValueError) as error:
                raise self._damaged(rank, error) from error
            freed = peer.receiver.freed()
            if freed is not None:
                self._send_control(freed, rank)

    # --- sending ---

    def _send_body(self, body: Tensor, peer: int, tag: int) -> tuple[Route, int, tuple[Tensor, ...]]:
        """Send a body over the direct route, or stage it. Return route, slot and staged contents."""
        sender = self._peers[peer].sender
        if sender is not None:
            slot = sender.send(body)
            if slot is not None:
                return Route.DIRECT, slot, ()
            request = sender.request(len(body))
            if request is not None:
                self._send_control(request, peer)
        return Route.STAGED, 0, (self._to_host(body, peer, tag),)

    def _to_host(self, body: Tensor, peer: int, tag: int) -> Tensor:
        """Return a copy of a body in page-locked memory, after the work queued on the current stream."""
        device, stream, begin = self._device, self._device.current(), time.monotonic()
        pinned, copied = device.pinned(len(body)), device.new_event(shared=False)
        device.copy(pinned, body, stream)
        device.record(copied, stream)
        while not device.done(copied):
            if time.monotonic() - begin > self.timeout_s:
                raise self._host.timed_out("send to", peer, tag)
            time.sleep(_POLL_S)
        return pinned

    def _post(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        state = self._peers[peer]
        self._host.send(tensors, peer, tag)
        state.sent += 1
        if tag >> ITEM_BITS != GPU_CONTROL:
            state.last = state.sent

    def _send_control(self, control: Control, peer: int) -> None:
        state = self._peers[peer]
        self._post((packed(json.dumps(control).encode()),), peer, make_tag(GPU_CONTROL, state.controls_sent))
        state.controls_sent += 1

    def _check_host_tensors(self, tensors: Sequence[Tensor], tag: int, needed: bool) -> None:
        """Raise link errors before any part of the message is sent."""
        elsewhere = next((tensor.device for tensor in tensors if not tensor.is_cpu), None)
        if elsewhere is not None:
            raise TransportError(
                f"rank {self.rank}: tensors must be on this rank's GPU or the CPU (got {elsewhere}). Move the tensor."
            )
        if tensors or needed:
            wire.describe(tensors, tag=tag, seq=0, link_seq=0, acknowledged=0)  # raises if one is too long

    def _must_be_taken(self, peer: int, in_flight: int) -> bool:
        """Return whether close() waits for the messages in flight to a peer. Control messages alone do not count."""
        return self._peers[peer].last > self._peers[peer].sent - in_flight

    # --- receiving ---

    def _tensors(self, source: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        try:
            header, others = unpack(tensors)
            if header.route is Route.STAGED:
                return header.join(self._to_device(others[0], header.body_bytes), others[1:])
            if header.route is Route.DIRECT:
                return header.join(self._peers[source].receiver.take(header.slot, header.body_bytes), others)
            return header.join(self._device.empty(0, self._device.current()), others)
        except _ERRORS as error:
            raise self._damaged(source, error) from error

    def _to_device(self, contents: Tensor, num_bytes: int) -> Tensor:
        """Return a copy of staged contents on the GPU, for use on the current stream."""
        if contents.dtype != torch.uint8 or contents.shape != (num_bytes,):
            raise _native.LinkError(f"contents of {contents.nbytes} bytes where {num_bytes} were announced")
        device, stream = self._device, self._device.current()
        pinned, body = device.pinned(num_bytes), device.empty(num_bytes, stream)
        pinned.copy_(contents)
        device.copy(body, pinned, stream)
        return body

    def _refuse_reserved(self, tag: int) -> None:
        if tag >> ITEM_BITS == GPU_CONTROL:
            raise TransportError(
                f"rank {self.rank}: channel reserved by the transport (got {describe_tag(tag)})."
            )

    def _on_control(self, rank: int, control: Control) -> None:
        peer = self._peers[rank]
        if "filled" in control:
            self._send_control(peer.receiver.grant(control), rank)
            return
        if peer.sender is None:
            raise _native.LinkError("answer without a request")
        if "freed" in control:
            peer.sender.on_freed(control["freed"])
            return
        peer.sender.on_answer(control)
        if peer.sender.refused:
            text = "rank %d: contents for rank %d are staged in host memory: %s"
            logger.info(text, self.rank, rank, peer.sender.refused)

    def _damaged(self, source: int, error: Exception) -> TransportError:
        return self._host.fail(
            f"damaged message from rank {source}: {type(error).__name__}: {error}", ProtocolError
        )
