"""Clock of a rank's computations in a step, by which the bubble is measured."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Reading = float | torch.cuda.Event  # seconds of the clock; on CUDA, an event on the current stream


class BusyClock:
    """Times of the computations in a step. ``with busy: ...`` times one computation.

    On CUDA the times are events on the current stream. They are read once after the step, so that the host never waits
    within it.

    Args:
        device: device of the computations.
        clock: monotonic clock of this host, in seconds.

    Attributes:
        started: reading at the start of the step.
        spans: readings at (begin, end) of the computations of the step so far.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.on_cuda, self.clock = device.type == "cuda", clock
        self.started: Reading = 0.0
        self.spans: list[tuple[Reading, Reading]] = []
        self._begin: Reading = 0.0

    def start_step(self) -> None:
        """Start a step."""
        self.started, self.spans = self.now(), []

    def __enter__(self) -> None:
        self._begin = self.now()

    def __exit__(self, *_: object) -> None:
        self.spans.append((self._begin, self.now()))

    def read(self) -> tuple[float, float]:
        """Return (seconds of computation, seconds from the start of the step to the end of the last computation)."""
        if not self.spans:
            return 0.0, 0.0
        if self.on_cuda:
            torch.cuda.synchronize()
        busy = sum(_seconds(begin, end) for begin, end in self.spans)
        return busy, _seconds(self.started, self.spans[-1][1])

    def now(self) -> Reading:
        """Return a reading of the current time."""
        if not self.on_cuda:
            return self.clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(begin: Reading, end: Reading) -> float:
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return begin.elapsed_time(end) / 1000
    assert not isinstance(end, torch.cuda.Event)
    return end - begin
