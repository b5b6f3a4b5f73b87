"""Processors that do not sleep while something is measured.

On a virtual machine a processor that idles is given to somebody else, and comes back with cold caches: after 20 ms of
sleep, 50 us of work can take 1000. Devices that compute never let it come to that, so a benchmark whose layers wait
would add to every pass what no real training pays. A process of the lowest scheduling class on every processor
prevents it: it runs only when nothing else wants to.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SPIN = """
import os
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, [{cpu}])
while os.getppid() == {parent}:  # it ends with the benchmark, however that ends
    for _ in range(100_000):
        pass
"""


@contextmanager
def processors_awake() -> Iterator[None]:
    """Keep every processor that this process may use from idling; does nothing where the system has no idle class."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "SCHED_IDLE") else []
    spinners = [
        subprocess.Popen([sys.executable, "-I", "-S", "-c", _SPIN.format(cpu=cpu, parent=os.getpid())])
        for cpu in usable
    ]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
        for spinner in spinners:
            spinner.wait()
