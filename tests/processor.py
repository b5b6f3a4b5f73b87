"""Bounds on CPU time that hold on a slow processor too."""

from __future__ import annotations

import time
from functools import cache


@cache
def python_s(loops: int = 1_000_000) -> float:
    """Processor seconds of a plain Python loop on this host: the least of three measurements."""

    def measure() -> float:
        start = time.process_time()
        total = 0
        for number in range(loops):
            total += number & 1
        assert total == loops // 2
        return time.process_time() - start

    return min(measure() for _ in range(3))
