"""Helpers for the tests of every kind of link."""

from __future__ import annotations

import ctypes
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import torch

from ds_ext.comm import _native
from ds_ext.comm.endpoints import Endpoints
from ds_ext.comm.native_transport import NativeTransport
from ds_ext.comm.transport import make_tag


def connected_by_shm(ranks: int, timeout_s: float = 5.0) -> list[NativeTransport]:
    """Return the transports of all ranks of a job, in this process, linked through shared memory."""
    job, ports = bytes(16), [_native.Port() for _ in range(ranks)]
    ends = [Endpoints() for _ in range(ranks)]
    for source in range(ranks):
        for target in range(ranks):
            if source != target:
                link = ends[target].incoming[source] = _native.ShmIncoming(source, target, job)
                files = os.dup(link.fileno()), os.dup(ports[target].fileno())
                ends[source].outgoing[target] = _native.ShmOutgoing(*files, source, target, job, 64 << 20)
                link.connect(os.dup(ports[source].fileno()))
                ports[target].add(link)
    return [
        NativeTransport(port, end, dict.fromkeys(end.incoming, 4), "shm", rank, ranks, timeout_s)
        for rank, (port, end) in enumerate(zip(ports, ends, strict=True))
    ]


def held(transport: NativeTransport) -> dict[int, int]:
    """Return peer -> number of its messages whose memory tensors use."""
    return {peer: link.held() for peer, link in transport._links.incoming.items()}


def pack(descriptor: _native.Descriptor) -> bytes:
    """Return a descriptor as 256 bytes."""
    buffer = ctypes.create_string_buffer(_native.DESCRIPTOR_BYTES)
    _native.pack_at(descriptor, ctypes.addressof(buffer))
    return buffer.raw


def unpack(data: bytes) -> _native.Descriptor:
    """Return the descriptor in 256 bytes."""
    buffer = ctypes.create_string_buffer(data, _native.DESCRIPTOR_BYTES)
    return _native.unpack_at(ctypes.addressof(buffer))


def in_child(function: Callable[[], Any]) -> Any:
    """Return the result of a function that runs in a forked child.

    The child must not run large tensor operations, because OpenMP's threads do not survive a fork.
    """
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        with os.fdopen(writer, "wb") as file:
            try:
                pickle.dump(function(), file)
            except BaseException as error:
                pickle.dump(f"{type(error).__name__}: {error}", file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    return pickle.loads(data)


def both_send_first(left: NativeTransport, right: NativeTransport, messages: int) -> dict[int, int]:
    """Let ranks 0 and 1 send all messages before they receive. Returns peer -> sum of its messages.

    Fewer than 100 messages have 2 MiB each; more have 4 bytes each.
    """
    value = torch.ones((2 << 20) // 4 if messages < 100 else 1)
    sums: dict[int, int] = {}

    def talk(transport: NativeTransport, peer: int) -> None:
        for item in range(messages):
            transport.send([value * item], peer, make_tag(1, item))
        received = (transport.recv(peer, make_tag(1, item)).wait()[0] for item in range(messages))
        sums[peer] = sum(int(tensor[-1]) for tensor in received)

    threads = [threading.Thread(target=talk, args=end) for end in ((left, 1), (right, 0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return sums
