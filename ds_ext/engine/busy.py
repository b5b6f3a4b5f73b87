"""How much of a step a rank computed: the measured side of the bubble."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class BusyClock:
    """Sums the time of computations in a step and the time from its start to the last of them.

    On CUDA the times are events on the current stream, read once after the step, so that nothing waits in the
    loop.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._start: Any = None
        self._spans: list[tuple[Any, Any]] = []

    def start_step(self) -> None:
        """A step begins now."""
        self._start, self._spans = self._now(), []

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Everything inside is computation."""
        begin = self._now()
        yield
        self._spans.append((begin, self._now()))

    def read(self) -> tuple[float, float]:
        """(seconds computed, seconds from the start of the step to the end of the last computation)."""
        if not self._spans:
            return 0.0, 0.0
        if self._cuda:
            torch.cuda.synchronize()
        busy = sum(self._seconds(begin, end) for begin, end in self._spans)
        return busy, self._seconds(self._start, self._spans[-1][1])

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1000 if self._cuda else end - begin
