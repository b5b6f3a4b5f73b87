"""Processors that do not sleep while something is measured.

On a virtual machine a processor that idles is given to somebody else, and comes back with cold caches: after 20 ms of
sleep, 50 us of work can take 1000. Devices that compute never let it come to that, so a benchmark whose layers wait
would add to every pass what no real training pays. A process of the lowest scheduling class on every processor
prevents it: it runs only when nothing else wants to. Processes that compete are of the usual class.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_SPIN = """
import os
{prepare}
while os.getppid() == {parent}:  # it ends with the benchmark, however that ends
    for _ in range(100_000):
        pass
"""


@contextmanager
def processors_awake() -> Iterator[None]:
    """Keep every processor that this process may use from idling; does nothing where the system has no idle class."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "SCHED_IDLE") else []
    idle = "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
    with _spinners([f"{idle}; os.sched_setaffinity(0, [{cpu}])" for cpu in usable]):
        yield


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Have so many processes compute beside what is measured, wherever the system puts them."""
    with _spinners([""] * number):
        yield


@contextmanager
def _spinners(prepare: Sequence[str]) -> Iterator[None]:
    spinners = [
        subprocess.Popen([sys.executable, "-I", "-S", "-c", _SPIN.format(prepare=code, parent=os.getpid())])
        for code in prepare
    ]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
        for spinner in spinners:
            spinner.wait()
