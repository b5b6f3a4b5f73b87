"""State of the transport between GPUs for one peer."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from ds_ext.comm.cuda.device import Device, Event
from ds_ext.comm.cuda.slabs import Control, DirectReceiver, DirectSender
from ds_ext.comm.cuda.staging import StagedReceiver, packed
from ds_ext.comm.native_transport import NativeTransport
from ds_ext.comm.transport import GPU_CONTROL, GPU_PIECES, ITEM_BITS, make_tag


class Peer:
    """Messages to and from one peer.

    Args:
        host: transport for descriptors, control messages and staged contents.
        rank: rank of the peer.
        device: GPU of this rank.
        direct_held: number of messages that a peer on the same host may hold at a time; None: it is on another host.

    Attributes:
        posted: tickets for the next control message and the next piece.
        waiting: messages to send, in order: (event to wait for, tensors, tag).
        bodies: number of bodies sent through the host.
        sent_pieces: number of pieces sent through the host.
        sent: number of messages sent.
        last: number of the last message sent that is not a control message.
    """

    def __init__(self, host: NativeTransport, rank: int, device: Device, direct_held: int | None) -> None:
        self.rank, self._host = rank, host
        self._items: dict[int, int] = dict.fromkeys((GPU_CONTROL, GPU_PIECES), 0)
        self.posted = {channel: host.recv(rank, make_tag(channel, 0)) for channel in self._items}
        self._controls = self.bodies = 0
        self.direct = None if direct_held is None else DirectSender(device, direct_held)
        self.slabs, self.staged = DirectReceiver(device), StagedReceiver(device)
        self.waiting: deque[tuple[Event | None, Sequence[Tensor], int]] = deque()
        self.sent_pieces = self.sent = self.last = 0

    def take(self, channel: int) -> tuple[Tensor, ...] | None:
        """Return the next control message or piece; None if it has not arrived."""
        ticket = self.posted[channel]
        if not ticket.arrived:
            return None
        self._items[channel] += 1
        self.posted[channel] = self._host.recv(self.rank, make_tag(channel, self._items[channel]))
        return ticket.wait()

    def post(self, tensors: Sequence[Tensor], tag: int) -> None:
        """Send CPU tensors."""
        self._host.send(tensors, self.rank, tag)
        self.sent += 1
        if tag >> ITEM_BITS != GPU_CONTROL:
            self.last = self.sent

    def send_control(self, control: Control) -> None:
        """Send a control message."""
        self.post((packed(json.dumps(control).encode()),), make_tag(GPU_CONTROL, self._controls))
        self._controls += 1
