"""One of two ranks in the guest, over native RDMA links. Needs no torch, whose import is slow there."""

from __future__ import annotations

import ctypes
import os
import pickle
import random
import socket
import struct
import time
from array import array
from collections.abc import Sequence
from typing import Any

from ds_ext.comm import _native
from ds_ext.comm.rdma.setup import RdmaSetup

POOL_BYTES = 8 << 20
LIMIT_S = 20.0
UINT8 = next(code for code, (name, _) in enumerate(_native.ELEMENT_TYPES) if name == "uint8")


class Line:
    """Connection over which the two sides of a scenario synchronize."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.settimeout(40.0)

    def put(self, value: Any) -> None:
        data = pickle.dumps(value)
        self.connection.sendall(struct.pack("<I", len(data)) + data)

    def get(self) -> Any:
        (size,) = struct.unpack("<I", self._read(4))
        return pickle.loads(self._read(size))

    def exchange(self, value: Any) -> Any:
        self.put(value)
        return self.get()

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.connection.recv(size - len(data))
            if not part:
                raise EOFError("the other side of the scenario has ended")
            data += part
        return data


class Pool:
    """Random bytes, equal on both sides. A message is a range of them, so the receiver can compare it."""

    def __init__(self) -> None:
        self.memory = bytearray(random.Random(7).randbytes(POOL_BYTES // 8) * 8)
        # Not periodic, so that a wrong offset gives wrong contents.
        self.view = memoryview(self.memory)
        self.view.cast("I")[::16] = memoryview(array("I", range(0, POOL_BYTES, 64)))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


Range = tuple[int, Sequence[int], int]  # tensor: dtype code, shape, offset in the pool


class Peer:
    """Rank 0 or 1, connected to the other one."""

    def __init__(
        self,
        rank: int,
        line: Line,
        pool: Pool,
        addresses: Sequence[str],
        *,
        slab_bytes: int = 1 << 20,
        window_bytes: int = 32 << 20,
        setup: type[RdmaSetup] = RdmaSetup,
        delay_s: float = 0.0,
        timeout_s: float = LIMIT_S,
    ) -> None:
        self.rank, self.other, self.line, self.pool = rank, 1 - rank, line, pool
        self.port = _native.Port()
        self.setup = setup(rank, self.port, addresses, slab_bytes, window_bytes)
        pairs = {(0, 1): 4, (1, 0): 4}
        try:
            offer = self.setup.offer()
            offers = {rank: offer, self.other: line.exchange(offer)}
            self.setup.prepare(pairs)
            time.sleep(delay_s)
            ends = self.setup.connect(offers, pairs, timeout_s)
        finally:
            self.setup.close()
        self.incoming, self.outgoing = ends.incoming[self.other], ends.outgoing[self.other]
        self.port.add(self.incoming)
        self.waiting: list[_native.Message] = []

    def try_send(self, tag: int, tensors: Sequence[Range]) -> bool:
        pieces = [(code, shape, self.pool.address + at) for code, shape, at in tensors]
        return self.outgoing.send(tag, pieces)

    def send(self, tag: int, tensors: Sequence[Range], limit_s: float = LIMIT_S) -> None:
        """Send after waiting for a link credit, and keep messages that arrive meanwhile; PeerGone or TimeoutError."""
        deadline = time.monotonic() + limit_s
        while not self.try_send(tag, tensors):
            self._check(self.outgoing, deadline, "send")
            self.port.wait_credit(self.outgoing, 0.03)
            self.waiting += self.port.take()

    def recv(self, limit_s: float = LIMIT_S) -> _native.Message:
        deadline = time.monotonic() + limit_s
        while not self.waiting:
            self.waiting += self.port.take()
            if self.waiting:
                break
            if not self.port.wait_arrival(0.03):
                self._check(self.incoming, deadline, "recv")
        return self.waiting.pop(0)

    def _check(self, end: _native.Incoming | _native.Outgoing, deadline: float, what: str) -> None:
        if told := end.end_reason():
            raise PeerGone(told)
        if time.monotonic() > deadline:
            raise TimeoutError(what)

    def compare(self, message: _native.Message, tensors: Sequence[Range]) -> None:
        """Assert that the shapes and all bytes are equal."""
        layout = message.layout
        assert len(layout) == len(tensors), (layout, tensors)
        body = memoryview(message)
        for (code, shape, count, offset), (wanted_code, wanted_shape, at) in zip(
            layout, tensors, strict=True
        ):
            assert (code, tuple(shape)) == (wanted_code, tuple(wanted_shape)), (
                code,
                shape,
                wanted_code,
                wanted_shape,
            )
            size = count * _native.ELEMENT_TYPES[code][1]
            assert body[offset : offset + size] == self.pool.view[at : at + size], f"{size} bytes differ"

    def settle(self, limit_s: float = LIMIT_S) -> None:
        """Wait until the other side has taken all messages."""
        deadline = time.monotonic() + limit_s
        while self.outgoing.in_flight()[0]:
            self._check(self.outgoing, deadline, "settle")
            self.port.wait_credit(self.outgoing, 0.03)
            self.waiting += self.port.take()

    def close(self) -> None:
        self.settle()
        self.incoming.close()
        self.outgoing.close()


class Context:
    """Arguments of a scenario: rank, line to the other side, addresses of both, and the pool."""

    def __init__(self, rank: int, line: Line, addresses: Sequence[str], pool: Pool) -> None:
        self.rank, self.line, self.addresses, self.pool = rank, line, addresses, pool

    def peer(self, **options: Any) -> Peer:
        return Peer(self.rank, self.line, self.pool, self.addresses, **options)


class PeerGone(Exception):
    """The peer has ended, with its end_reason()."""


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
