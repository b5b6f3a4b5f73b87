"""What ends of every kind of link must bear, for the tests of each kind."""

from __future__ import annotations

import os
import threading

import torch

from ds_ext.comm import _native
from ds_ext.comm.endpoints import Endpoints
from ds_ext.comm.links import Links
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
        NativeTransport(Links(port, end, dict.fromkeys(end.incoming, 4)), "shm", rank, ranks, timeout_s)
        for rank, (port, end) in enumerate(zip(ports, ends, strict=True))
    ]


def held(transport: NativeTransport) -> dict[int, int]:
    """Return by peer how many of its messages live on in tensors that lie in them."""
    return {peer: link.held() for peer, link in transport._links.incoming.items()}


def both_send_first(left: NativeTransport, right: NativeTransport, messages: int) -> dict[int, int]:
    """Ranks 0 and 1 send all their messages before they receive any. Returns by peer the sum of what came from it.

    Fewer than 100 messages are large, others small.
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
