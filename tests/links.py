"""What ends of every kind of link must bear, for the tests of each kind."""

from __future__ import annotations

import threading

import torch

from ds_ext.comm.native_transport import NativeTransport
from ds_ext.comm.transport import make_tag


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
