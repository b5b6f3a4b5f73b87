"""Staged route between GPUs, through host memory, in pieces so that the copies of a message overlap.

A piece is sent after it has been copied to the host. The rank checks for finished copies whenever it uses the
transport, and a thread checks at other times.
"""

from __future__ import annotations

import queue
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_ext.comm import _native
from ds_ext.comm.cuda.device import Device, Event

PIECE_BYTES = 4 << 20
_PIECE = struct.Struct("<QQQ")  # number of the body, bytes of the body, offset of the piece


def pieces(device: Device, body: Tensor, number: int) -> Iterator[tuple[Event, tuple[Tensor, Tensor]]]:
    """Copy a body on the current stream to the host. Yields (event after the copy, message) for each piece."""
    pinned = device.pinned(len(body))
    device.follow(device.outward, device.current())
    for begin in range(0, len(body), PIECE_BYTES):
        piece = pinned[begin : begin + PIECE_BYTES]
        device.copy(piece, body[begin : begin + PIECE_BYTES], device.outward)
        event = device.new_event(shared=False)
        device.record(event, device.outward)
        yield event, (packed(_PIECE.pack(number, len(body), begin)), piece)
    device.keep(body, device.outward)


def packed(data: bytes) -> Tensor:
    """Return bytes as a tensor."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@dataclass
class _Body:
    memory: Tensor
    arrived: int = 0
    event: Event = None  # recorded after the copy of the last piece


class StagedReceiver:
    """Bodies from one peer that are being copied from the host to the GPU."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._bodies: dict[int, _Body] = {}

    def add(self, header: Tensor, piece: Tensor) -> None:
        """Copy a received piece to the GPU; LinkError if it is invalid or not the next one of its body."""
        if header.nbytes != _PIECE.size or piece.dtype != torch.uint8 or piece.dim() != 1:
            raise _native.LinkError("invalid piece of a message")
        number, total, begin = _PIECE.unpack(header.numpy().tobytes())
        device = self._device
        body = self._bodies.get(number)
        if body is None:
            body = self._bodies[number] = _Body(device.empty(total, device.inward))
        if begin != body.arrived or begin + len(piece) > len(body.memory):
            raise _native.LinkError("piece of a message is missing or repeated")
        pinned = device.pinned(len(piece))
        pinned.copy_(piece)
        device.copy(body.memory[begin : begin + len(piece)], pinned, device.inward)
        body.arrived += len(piece)
        if body.arrived == total:
            body.event = device.new_event(shared=False)
            device.record(body.event, device.inward)

    def take(self, number: int) -> Tensor:
        """Return the body, ready for use on the current stream; raise LinkError if it is incomplete."""
        body = self._bodies.pop(number, None)
        if body is None or body.event is None:
            raise _native.LinkError("message arrived before its contents")
        stream = self._device.current()
        self._device.wait(stream, body.event)
        # The memory belongs to the inward stream and may be dropped while the current stream still reads it.
        self._device.keep(body.memory, stream)
        return body.memory


class Publisher:
    """Thread that sends pieces while the rank does other work. It starts with the first piece.

    Args:
        device: GPU of this rank.
        publish: function that sends all messages that are ready.

    Attributes:
        error: the error that ended the thread, for the next call of the rank.
    """

    def __init__(self, device: Device, publish: Callable[[], None]) -> None:
        self._device, self._publish = device, publish
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.error: Exception | None = None

    def watch(self, event: Event) -> None:
        """Call ``publish`` after the event."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ds_ext-gpu", daemon=True)
            self._thread.start()
        self._events.put(event)

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._events.put(None)
            self._thread.join(1.0)

    def _run(self) -> None:
        try:
            for event in iter(self._events.get, None):
                self._device.finish(event)
                self._publish()
        except Exception as error:
            self.error = error
