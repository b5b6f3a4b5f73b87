"""I/O thread of tcp links: load while idle, and release of all resources."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ds_ext.comm import _native
from tests.unit.comm.test_shm_memory import CYCLES, LEAK_BYTES, resident_bytes
from tests.unit.comm.test_tcp import LARGE, WINDOW, Pair, connected


def io_threads() -> int:
    found = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += Path(f"/proc/self/task/{task}/comm").read_text().strip() == "ds_ext-io"
    return found


def until(holds: Callable[[], bool], limit_s: float = 60.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_one_idle_thread_for_all_links_of_a_rank() -> None:
    assert until(lambda: io_threads() == 0)
    port, others = _native.Port(), []
    links = []
    for peer in range(4):
        mine, other = connected()
        connection = _native.TcpConnection(mine.detach(), port, WINDOW, True)
        links.append(_native.TcpIncoming(connection, peer))
        others.append(other)
    assert until(lambda: io_threads() == 1)
    start = time.process_time()
    time.sleep(1.5)
    assert time.process_time() - start < 0.1
    # Each peer has received a heartbeat.
    for other in others:
        assert other.recv(4, socket.MSG_DONTWAIT) == b"DSXC"
        other.close()
    assert until(lambda: all(link.end_reason() for link in links))
    assert until(lambda: io_threads() == 0)


def test_open_and_close_leak_nothing() -> None:
    def cycle() -> None:
        pair = Pair()
        for transport, peer in ((pair.left, 1), (pair.right, 0)):
            transport.send([torch.ones(LARGE)], peer, 0)
        kept = [pair.left.recv(1, 0).wait(), pair.right.recv(0, 0).wait()]
        pair.close()
        del kept

    def state() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    for _ in range(10):
        cycle()
    assert until(lambda: io_threads() == 0)
    before, resident = state(), resident_bytes()
    for _ in range(CYCLES):
        cycle()
    assert until(lambda: state() == before), (state(), before)
    assert resident_bytes() - resident < LEAK_BYTES
