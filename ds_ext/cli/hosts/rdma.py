"""RDMA probe: one port sends messages to another, or to itself, over the links that jobs use."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

from ...comm.rdma.devices import PortChoice
from ...errors import TransportError

MESSAGE_BYTES, MESSAGES = 1 << 20, 64
_WAIT_S = 5.0


class RdmaProbe:
    """One side of a link between two ports, with room for ``messages`` in each direction."""

    def __init__(self, choice: PortChoice, sends: bool, messages: int = 8) -> None:
        from ...comm import _native

        self._native = _native
        self._sends = sends
        try:
            _native.load_verbs()
            self._rank = _native.Port()
            rdma_port = _native.RdmaPort(self._rank, choice.device, choice.port, choice.gid_index)
            rank, peer = (0, 1) if sends else (1, 0)
            room = messages * MESSAGE_BYTES
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

    def send(self, messages: int = MESSAGES) -> bytes:
        """Send messages and return the bytes of each.

        Raises TransportError if a message waits for 5 s, or if the other side ends.
        """
        target = self._link.outgoing
        assert target is not None
        data = bytearray(os.urandom(MESSAGE_BYTES))
        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        element_types = [name for name, _ in self._native.ELEMENT_TYPES]
        piece, tag = (element_types.index("uint8"), [MESSAGE_BYTES], address), 0
        for _ in range(messages):
            deadline = time.monotonic() + _WAIT_S
            while not target.send(tag, [piece]):
                self._require(target.end_reason(), deadline)
                self._rank.wait_credit(target, 0.1)
        return bytes(data)

    def receive(self) -> float:
        """Receive all messages and return the bandwidth after the first ones in Gbit/s."""
        first_messages = len(self.take())
        start_s = time.perf_counter()
        messages = 0
        while first_messages + messages < MESSAGES:
            messages += len(self.take())
        return 8e-9 * messages * MESSAGE_BYTES / (time.perf_counter() - start_s)

    def take(self) -> list[Any]:
        """Wait for messages and return them. Raises TransportError as :meth:`send` does."""
        source, deadline = self._link.incoming, time.monotonic() + _WAIT_S
        assert source is not None
        while not (messages := self._rank.take()):
            self._require(source.end_reason(), deadline)
            self._rank.wait_arrival(0.1)
        return messages

    def close(self) -> None:
        for side in (self._link.outgoing, self._link.incoming):
            if side is not None:
                side.close()

    def _require(self, end_reason: str, deadline: float) -> None:
        if end_reason or time.monotonic() > deadline:
            problem = end_reason or f"{'took' if self._sends else 'sent'} no message within {_WAIT_S:g} s"
            raise TransportError(f"RDMA: the other side {problem}")


def try_rdma(choice: PortChoice) -> int:
    """Send one message from a port to itself and return its bytes. Raises TransportError if a part fails."""
    sender, receiver = RdmaProbe(choice, sends=True, messages=2), RdmaProbe(choice, sends=False, messages=2)
    job = os.urandom(16)
    sender.connect(receiver.greeting(job), job)
    receiver.connect(sender.greeting(job), job)
    message = sender.send(1)
    if bytes(memoryview(receiver.take()[0])) != message:
        raise TransportError(f"RDMA: {choice.name}: a message that it sent to itself was corrupted")
    sender.close()
    receiver.close()
    return len(message)
