"""The staged route between GPUs, through the memory of their hosts: in pieces, so that the copies of a message overlap.

A piece is sent when its copy to the host is over, which only the host can see. The rank polls for that whenever it uses
the transport; meanwhile a thread does.
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
_PIECE = struct.Struct("<QQQ")  # number of the body, its bytes, where the piece begins


def pieces(device: Device, body: Tensor, number: int) -> Iterator[tuple[Event, tuple[Tensor, Tensor]]]:
    """Copy a body, which the current stream makes, to the host: each piece, as a message, and when it is there."""
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
    """Bytes as a tensor."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@dataclass
class _Body:
    memory: Tensor
    arrived: int = 0
    event: Event = None  # once all of it is under way to the GPU


class StagedReceiver:
    """Bodies of one peer on their way from the host to the GPU."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._bodies: dict[int, _Body] = {}

    def add(self, header: Tensor, piece: Tensor) -> None:
        """Copy a piece that has arrived. LinkError: it does not continue its body."""
        if header.nbytes != _PIECE.size or piece.dtype != torch.uint8 or piece.dim() != 1:
            raise _native.LinkError("a piece of a message is invalid")
        number, total, begin = _PIECE.unpack(header.numpy().tobytes())
        device = self._device
        body = self._bodies.get(number)
        if body is None:
            body = self._bodies[number] = _Body(device.empty(total, device.inward))
        if begin != body.arrived or begin + len(piece) > len(body.memory):
            raise _native.LinkError("a piece of a message is missing or comes twice")
        pinned = device.pinned(len(piece))
        pinned.copy_(piece)
        device.copy(body.memory[begin : begin + len(piece)], pinned, device.inward)
        body.arrived += len(piece)
        if body.arrived == total:
            body.event = device.new_event(shared=False)
            device.record(body.event, device.inward)

    def take(self, number: int) -> Tensor:
        """A whole body, for the work of the current stream. LinkError: it is not here."""
        body = self._bodies.pop(number, None)
        if body is None or body.event is None:
            raise _native.LinkError("a message comes before its contents")
        stream = self._device.current()
        self._device.wait(stream, body.event)
        # The memory is that of the inward stream, and will be dropped while the current one still reads it.
        self._device.keep(body.memory, stream)
        return body.memory


class Publisher:
    """The thread that sends pieces while the rank does something else; it begins with the first of them.

    Args:
        device: makes the thread wait for an event.
        publish: sends what can be sent; it may raise, and ``error`` is what it raised.
    """

    def __init__(self, device: Device, publish: Callable[[], None]) -> None:
        self._device, self._publish = device, publish
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.error: Exception | None = None

    def watch(self, event: Event) -> None:
        """Publish when the event is over."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ds_ext-gpu", daemon=True)
            self._thread.start()
        self._events.put(event)

    def close(self) -> None:
        """End the thread, whose events are over or do not matter any more."""
        if self._thread is not None:
            self._events.put(None)
            self._thread.join(1.0)

    def _run(self) -> None:
        try:
            for event in iter(self._events.get, None):
                self._device.finish(event)
                self._publish()
        except Exception as error:  # the rank raises it at its next call
            self.error = error
