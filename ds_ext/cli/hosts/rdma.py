"""RDMA probe between two hosts: one sends messages to the other over the links that jobs use."""

from __future__ import annotations

import ctypes
import os
import time

from ...comm.rdma.devices import choose_port, device_ports
from ...errors import TransportError

MESSAGE_BYTES, MESSAGES = 1 << 20, 64
_WAIT_S = 5.0


class RdmaProbe:
    """One side of a link between two hosts. ``address`` is that of this host and selects the device as in a job."""

    def __init__(self, address: str, sends: bool) -> None:
        from ...comm import _native

        self._native = _native
        self._sends = sends
        try:
            _native.load_verbs()
            port = choose_port(device_ports(), address)
            self.name = port.name
            self.link_layer = port.link_layer
            self._rank = _native.Port()
            rdma_port = _native.RdmaPort(self._rank, port.device, port.port, port.gid_index)
            rank, peer = (0, 1) if sends else (1, 0)
            room = 8 * MESSAGE_BYTES
            self._link = _native.RdmaLink(rdma_port, rank, peer, sends, not sends, room, room)
        except (_native.VerbsError, _native.LinkError, OSError) as error:
            raise TransportError(str(error)) from error

    def greeting(self, job: bytes) -> bytes:
        """Return the data that the other side needs to connect. ``job`` has 16 bytes, the same on both sides."""
        return self._link.greeting(job)

    def connect(self, greeting: bytes, job: bytes) -> None:
        try:
            self._link.connect(greeting, job)
        except (self._native.VerbsError, self._native.LinkError) as error:
            raise TransportError(str(error)) from error
        if not self._sends:
            assert self._link.incoming is not None
            self._rank.add(self._link.incoming)

    def send(self) -> None:
        """Send all messages. Raises TransportError if the other side ends, or takes no message for 5 s."""
        target = self._link.outgoing
        assert target is not None
        data = bytearray(os.urandom(MESSAGE_BYTES))
        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        for _ in range(MESSAGES):
            deadline = time.monotonic() + _WAIT_S
            while not target.send(0, [(1, [MESSAGE_BYTES], address)]):
                self._require(target.end_reason(), deadline)
                self._rank.wait_credit(target, 0.1)

    def receive(self) -> float:
        """Receive all messages and return the bandwidth after the first ones in Gbit/s."""
        first_messages = self._take()
        start_s = time.perf_counter()
        messages = 0
        while first_messages + messages < MESSAGES:
            messages += self._take()
        return 8e-9 * messages * MESSAGE_BYTES / (time.perf_counter() - start_s)

    def _take(self) -> int:
        """Wait for messages and return their number."""
        source, deadline = self._link.incoming, time.monotonic() + _WAIT_S
        assert source is not None
        while not (messages := self._rank.take()):
            self._require(source.end_reason(), deadline)
            self._rank.wait_arrival(0.1)
        return len(messages)

    def close(self) -> None:
        for side in (self._link.outgoing, self._link.incoming):
            if side is not None:
                side.close()

    def _require(self, end_reason: str, deadline: float) -> None:
        if end_reason or time.monotonic() > deadline:
            problem = end_reason or f"{'took' if self._sends else 'sent'} no message within {_WAIT_S:g} s"
            raise TransportError(f"RDMA: the other side {problem}")
