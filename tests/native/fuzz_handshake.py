"""Fuzz the tcp handshake: send random data to a listening rank. The two ranks must still connect.

python -m tests.native.fuzz_handshake SECONDS
"""

from __future__ import annotations

import contextlib
import random
import socket
import sys
import threading
import time

from ds_ext.comm.tcp.connect import PeerConnection, TcpListener, TcpOffer, connect_peers
from tests.unit.comm.test_tcp_handshake import hello, proof


def intrude(offer: TcpOffer, draw: random.Random) -> None:
    """Connect once and send a changed handshake or random data, in two parts."""
    words = bytearray(draw.choice([hello(0, 1), hello(0, 1) + proof(bytes(48)), draw.randbytes(60)]))
    for _ in range(draw.randrange(4)):
        words[draw.randrange(len(words))] = draw.randrange(256)
    with contextlib.suppress(OSError), socket.create_connection((offer.address, offer.port), 5) as connection:
        cut = draw.randrange(len(words))
        for part in (words[:cut], words[cut:]):
            connection.sendall(part)
        if draw.random() < 0.5:
            connection.settimeout(0.05)
            connection.recv(4096)


def one_handshake(draw: random.Random, intruders: int) -> bool:
    """Connect intruders to rank 1, then rank 0. Returns whether the two ranks are connected."""
    listeners = [TcpListener("127.0.0.1") for _ in range(2)]
    offers = {rank: listener.offer() for rank, listener in enumerate(listeners)}
    found: list[dict[int, PeerConnection]] = []

    def wait() -> None:
        found.append(connect_peers(listeners[1], 1, offers, {0: b"one"}, 30))

    waiting = threading.Thread(target=wait)
    waiting.start()
    for _ in range(intruders):
        intrude(offers[1], draw)
    found.append(connect_peers(listeners[0], 0, offers, {1: b"zero"}, 30))
    waiting.join(40)
    notes = {peer: connection.note for one in found for peer, connection in one.items()}
    for one in found:
        for connection in one.values():
            connection.socket.close()
    for listener in listeners:
        listener.close()
    return notes == {0: b"zero", 1: b"one"}


def main(seconds: float) -> None:
    """Repeat handshakes with intruders until the time is over."""
    seed = random.randrange(1 << 30)
    draw, end, handshakes = random.Random(seed), time.monotonic() + seconds, 0
    while time.monotonic() < end:
        assert one_handshake(draw, 20), f"seed {seed}, handshake {handshakes}"
        handshakes += 1
    print(f"seed {seed}: {handshakes} handshakes with {20 * handshakes} intruders")


if __name__ == "__main__":
    main(float(sys.argv[1]))
