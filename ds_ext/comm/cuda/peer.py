"""What the transport between GPUs has under way with one other rank."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ds_ext.comm.cuda.device import Device, Event
from ds_ext.comm.cuda.slabs import DirectReceiver, DirectSender
from ds_ext.comm.cuda.staging import StagedReceiver, packed
from ds_ext.comm.native_transport import NativeTransport
from ds_ext.comm.transport import GPU_CONTROL, GPU_PIECES, ITEM_BITS, make_tag


class Peer:
    """Both directions.

    Args:
        host: carries descriptors, control and staged contents.
        rank: the other one.
        device: this rank's GPU.
        direct_slots: how many messages it holds at a time, if it is on the same host.

    Attributes:
        asked: the tickets for its next message of control and its next piece.
        waiting: what is not sent yet, in order: (when it can be, the message, its tag).
        bodies, sent_pieces: how many were sent to it by way of the host.
        sent, last: the messages that were sent to it, and the number of the last one that is not of control.
    """

    def __init__(self, host: NativeTransport, rank: int, device: Device, direct_slots: int | None) -> None:
        self.rank, self._host = rank, host
        self._items: dict[int, int] = dict.fromkeys((GPU_CONTROL, GPU_PIECES), 0)
        self.asked = {channel: host.recv(rank, make_tag(channel, 0)) for channel in self._items}
        self.told = self.bodies = 0  # messages to it: of control, and with staged contents
        self.direct = None if direct_slots is None else DirectSender(device, direct_slots)
        self.slabs, self.staged = DirectReceiver(device), StagedReceiver(device)
        self.waiting: deque[tuple[Event | None, Sequence[Tensor], int]] = deque()
        self.sent_pieces = self.sent = self.last = 0

    def take(self, channel: int) -> tuple[Tensor, ...] | None:
        """The next message of control, or piece."""
        ticket = self.asked[channel]
        if not ticket.arrived:
            return None
        self._items[channel] += 1
        self.asked[channel] = self._host.recv(self.rank, make_tag(channel, self._items[channel]))
        return ticket.wait()

    def post(self, tensors: Sequence[Tensor], tag: int) -> None:
        """Send what is of the host."""
        self._host.send(tensors, self.rank, tag)
        self.sent += 1
        if tag >> ITEM_BITS != GPU_CONTROL:
            self.last = self.sent

    def tell(self, what: Mapping[str, Any]) -> None:
        """Send a message of control."""
        self.post((packed(json.dumps(what).encode()),), make_tag(GPU_CONTROL, self.told))
        self.told += 1
