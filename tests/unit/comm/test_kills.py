"""kill -9 of a peer at random times, while a forked child of the peer keeps its files open."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from ds_ext.comm import _native, shm_setup
from ds_ext.comm.native_transport import NativeTransport
from ds_ext.comm.shm_setup import ShmSetup
from ds_ext.comm.tcp import setup as tcp_setup
from ds_ext.comm.tcp.setup import TcpSetup
from ds_ext.errors import PeerGone
from tests.selection import EVERYTHING
from tests.unit.comm.test_tcp_thread import io_threads, until

MOMENTS = 50 if EVERYTHING else 4
NOTICED_S = 10.0  # half of the transport's own limit; an idle host needs 0.04
SETUPS = {"shm": ShmSetup, "tcp": TcpSetup}


def linked(kind: str, rank: int, line: Connection) -> NativeTransport:
    """Return the transport of rank 0 or 1; the two processes share only a pipe."""
    port, peer = _native.Port(), 1 - rank
    setup = SETUPS[kind](rank, port)
    pairs = {(0, 1): 4, (1, 0): 4}
    try:
        offer = setup.offer()
        line.send(offer)
        offers = {rank: offer, peer: line.recv()}
        setup.prepare(pairs)
        endpoints = setup.connect(offers, pairs, 20.0)
    finally:
        setup.close()
    port.add(endpoints.incoming[peer])
    return NativeTransport(port, endpoints, {peer: 4}, kind, rank, 2, 20.0)


def message(item: int) -> list[torch.Tensor]:
    """Return tensors of up to 1 MiB, filled with the item's number."""
    draw = random.Random(item)
    return [
        torch.full((int(2 ** draw.uniform(0, 18)),), item, dtype=torch.int32)
        for _ in range(draw.choice((1, 1, 3)))
    ]


def talk(transport: NativeTransport, peer: int, sends: bool) -> None:
    """Send messages, or receive and compare them, until an error."""
    for item in range(1 << 16):
        if sends:
            transport.send(message(item), peer, item)
            continue
        for got, sent in zip(transport.recv(peer, item).wait(), message(item), strict=True):
            assert torch.equal(got, sent), f"message {item}"


def victim(kind: str, line: Connection, sends: bool) -> None:
    transport = linked(kind, 1, line)
    if (child := os.fork()) == 0:
        signal.pause()
    line.send(child)
    talk(transport, 0, sends)


def survive(kind: str, sends: bool, delay_s: float) -> float:
    """Talk to a process that is killed after `delay_s`. Returns the seconds until the error."""
    line, theirs = Pipe()
    process = os.fork()
    if process == 0:
        with contextlib.suppress(BaseException):
            victim(kind, theirs, not sends)
        os._exit(1)
    theirs.close()
    killed_at = 0.0

    def kill() -> None:
        nonlocal killed_at
        killed_at = time.monotonic()
        os.kill(process, signal.SIGKILL)

    transport = linked(kind, 0, line)
    child = line.recv()
    killer = threading.Timer(delay_s, kill)
    killer.start()
    try:
        with pytest.raises(PeerGone, match="rank 1 has ended"):
            talk(transport, 1, sends)
        noticed = time.monotonic()
        os.kill(child, 0)  # still running
        with contextlib.suppress(Exception):
            transport.close()
    finally:
        killer.join()
        os.waitpid(process, 0)
        os.kill(child, signal.SIGKILL)
        line.close()
    return noticed - killed_at


def state() -> tuple[int, int]:
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:ds_ext")


@pytest.mark.parametrize("sends", [True, False], ids=["receiver", "sender"])
@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_killed_peer(kind: str, sends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (shm_setup, tcp_setup):
        monkeypatch.setattr(module, "SEND_WINDOW_BYTES", 1 << 20)  # the sender also waits for link credits
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    draw, before = random.Random(f"{kind} {sends}"), state()
    took = [survive(kind, sends, draw.uniform(0, 0.05)) for _ in range(MOMENTS)]
    assert max(took) < NOTICED_S
    assert until(lambda: io_threads() == 0 and state() == before), (state(), before)
