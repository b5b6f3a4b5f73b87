"""What shared memory takes from the host and gives back, and what happens where the host refuses it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.unit.comm.test_shm import LARGE, Pair


def resident_bytes() -> int:
    """Of this process; shared memory that it has touched included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_opening_and_closing_leaves_nothing() -> None:
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

    for _ in range(20):
        cycle()
    before, resident = state(), resident_bytes()
    for _ in range(200):
        cycle()
    assert state() == before
    assert resident_bytes() - resident < 8 << 20


# Refuses system calls with an error number, as containers and full hosts do: {number: error}.
REFUSING = """
import ctypes, errno, struct, sys
def refuse(calls):
    code = [(0x20, 0, 0, 0)]  # load the number of the system call
    for number, error in calls.items():
        code += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | error)]
    code.append((0x06, 0, 0, 0x7FFF0000))
    rules = b"".join(struct.pack("<HBBI", *rule) for rule in code)
    buffer = ctypes.create_string_buffer(rules)
    program = struct.pack("<HxxxxxxQ", len(code), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, program, 0, 0) == 0, errno.errorcode[ctypes.get_errno()]
MEMFD, FALLOCATE = 319, 285
import torch
from ds_ext.errors import ProtocolError, TransportError
from tests.unit.comm.test_shm import Pair
"""


def run_refused(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", REFUSING + script],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are those of x86-64")
def test_refused_memory() -> None:
    """Without memfd_create a file without a name serves; memory that runs out is an error, never a signal."""
    assert run_refused(
        """
refuse({MEMFD: errno.EPERM})
pair = Pair()
assert "/dev/shm/#" in open("/proc/self/maps").read()
pair.left.send([torch.arange(5000.0)], 1, 3)
print(int(pair.right.recv(0, 3).wait()[0].sum()))
pair.close()
pair = Pair()
refuse({FALLOCATE: errno.ENOSPC})
try:
    pair.left.send([torch.zeros(3 << 20)], 1, 4)
except TransportError as error:
    print(error)
try:
    Pair()
except OSError as error:
    print(error.errno == errno.ENOSPC)
"""
    ).splitlines() == [
        "12497500",
        "rank 0: send to rank 1 of tag 4 (channel 0, item 4): [Errno 28] no memory for 12582912 bytes of a segment: "
        'No space left on device. Give the host or the container more memory, or use "transport": "torch"',
        "True",
    ]
