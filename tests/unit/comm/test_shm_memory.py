"""Memory of shm links: release at close, and errors of a host that refuses memory."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import struct
from pathlib import Path

import pytest
import torch

from ds_ext.errors import TransportError
from tests.links import in_child
from tests.selection import EVERYTHING
from tests.unit.comm.test_shm import LARGE, Pair

CYCLES = 200 if EVERYTHING else 40
LEAK_BYTES = CYCLES * 50_000  # a cycle leaks less


def resident_bytes() -> int:
    """Return the resident memory of this process, including shared memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_open_and_close_leak_nothing() -> None:
    def cycle() -> None:
        pair = Pair()
        for transport, peer in ((pair.left, 1), (pair.right, 0)):
            transport.send([torch.ones(LARGE)], peer, 0)
        kept = [pair.left.recv(1, 0).wait(), pair.right.recv(0, 0).wait()]
        pair.close()
        pair.memory.close()
        del kept

    def state() -> tuple[int, int, list[str]]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("memfd:ds_ext")
        return len(os.listdir("/proc/self/fd")), maps, [n for n in os.listdir("/dev/shm") if "ds_ext" in n]

    for _ in range(10):
        cycle()
    before, resident = state(), resident_bytes()
    for _ in range(CYCLES):
        cycle()
    assert state() == before
    assert resident_bytes() - resident < LEAK_BYTES


MEMFD, FALLOCATE = 319, 285  # system calls of x86-64


def refuse(number: int, error: int) -> None:
    """Make a system call of this process fail with an error number, as in containers and on full hosts (seccomp)."""
    load_number, allow = (0x20, 0, 0, 0), (0x06, 0, 0, 0x7FFF0000)
    code = [load_number, (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | error), allow]
    rules = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *rule) for rule in code))
    program = struct.pack("<HxxxxxxQ", len(code), ctypes.addressof(rules))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, program, 0, 0) == 0, errno.errorcode[ctypes.get_errno()]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="needs the system call numbers of x86-64")
def test_refused_memory() -> None:
    """Without memfd_create an unnamed file is used. A lack of memory is an error and not a signal."""

    def send() -> int:
        refuse(MEMFD, errno.EPERM)
        pair = Pair()
        assert "/dev/shm/#" in Path("/proc/self/maps").read_text()
        pair.left.send([torch.arange(5000.0)], 1, 3)
        total = int(pair.right.recv(0, 3).wait()[0].sum())
        pair.close()
        pair = Pair()
        refuse(FALLOCATE, errno.ENOSPC)
        with pytest.raises(TransportError, match=r"tag 4 .*Errno 28.* 12582912 bytes"):
            pair.left.send([torch.empty(3 << 20)], 1, 4)
        with pytest.raises(OSError) as caught:
            Pair()
        assert caught.value.errno == errno.ENOSPC
        return total

    assert in_child(send) == 12497500
