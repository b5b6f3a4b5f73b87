"""Says random things to a rank that waits for its peers over tcp, for so many seconds; the ranks meet all the same.

python -m tests.native.fuzz_meeting SECONDS
"""

from __future__ import annotations

import contextlib
import random
import socket
import sys
import threading
import time

from ds_ext.comm.tcp.meeting import Met, TcpCard, TcpListener, meet
from tests.unit.comm.test_tcp_meeting import hello, proof


def intrude(card: TcpCard, draw: random.Random) -> None:
    """One guest: a good beginning with changes, or noise; in pieces, or closed too early."""
    words = bytearray(draw.choice([hello(0, 1), hello(0, 1) + proof(bytes(48)), draw.randbytes(60)]))
    for _ in range(draw.randrange(4)):
        words[draw.randrange(len(words))] = draw.randrange(256)
    with contextlib.suppress(OSError), socket.create_connection((card.address, card.port), 5) as guest:
        cut = draw.randrange(len(words))
        for part in (words[:cut], words[cut:]):
            guest.sendall(part)
        if draw.random() < 0.5:
            guest.settimeout(0.05)
            guest.recv(4096)


def one_meeting(draw: random.Random, guests: int) -> bool:
    """Rank 1 waits, the guests come, and then rank 0; whether the two have met."""
    listeners = [TcpListener("127.0.0.1") for _ in range(2)]
    cards = {rank: listener.card() for rank, listener in enumerate(listeners)}
    found: list[dict[int, Met]] = []
    waiting = threading.Thread(target=lambda: found.append(meet(listeners[1], 1, cards, {0: b"one"}, 30)))
    waiting.start()
    for _ in range(guests):
        intrude(cards[1], draw)
    found.append(meet(listeners[0], 0, cards, {1: b"zero"}, 30))
    waiting.join(40)
    notes = {peer: met.note for one in found for peer, met in one.items()}
    for one in found:
        for met in one.values():
            met.socket.close()
    for listener in listeners:
        listener.close()
    return notes == {0: b"zero", 1: b"one"}


def main(seconds: float) -> None:
    """Meetings of two ranks while guests come, until the time is over."""
    seed = random.randrange(1 << 30)
    draw, end, meetings = random.Random(seed), time.monotonic() + seconds, 0
    while time.monotonic() < end:
        assert one_meeting(draw, 20), f"seed {seed}, meeting {meetings}"
        meetings += 1
    print(f"seed {seed}: {meetings} meetings with {20 * meetings} guests")


if __name__ == "__main__":
    main(float(sys.argv[1]))
