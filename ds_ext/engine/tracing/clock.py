"""Clocks of a rank: times of computations, conversion of readings to microseconds, and comparison with rank 0."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule as ds
from torch.distributed import ProcessGroup

from ...observe.trace.clock import Comparison, compare
from ...observe.trace.file import CLOCK, metadata
from ...pipe_schedules.bridge import COMPUTATIONS
from ..executor import Observer

_MIN_EXCHANGES, _MAX_EXCHANGES = 8, 64  # with each rank
_MAX_ERROR_S = 40e-6  # if the error is larger, do more exchanges than the minimum
_MIN_INTERVAL_S = 30.0  # between comparisons
_MAX_SHARE = 0.005  # maximum share of the time spent on comparisons

Reading = float | torch.cuda.Event  # seconds of the clock; on CUDA, an event on the current stream


class BusyClock(Observer):
    """Times of the computations in a step.

    On CUDA, the times are events on the current stream. They are read once after the step, so the host never waits
    during it.

    Args:
        clock: monotonic clock of this host, in seconds.

    Attributes:
        started: reading at the start of the step.
        spans: (begin, end) readings of the computations in the step so far.
    """

    kinds = COMPUTATIONS

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.on_cuda, self.clock = device.type == "cuda", clock
        self.started: Reading = 0.0
        self.spans: list[tuple[Reading, Reading]] = []
        self._begin: Reading = 0.0

    def start_step(self) -> None:
        self.started, self.spans = self.now(), []

    def before(self, instruction: ds.PipeInstruction) -> None:
        self._begin = self.now()

    def after(self, instruction: ds.PipeInstruction) -> None:
        self.spans.append((self._begin, self.now()))

    def busy_and_span_s(self) -> tuple[float, float]:
        """Return seconds of computation, and until the end of the last one. On CUDA, wait for the computations."""
        if not self.spans:
            return 0.0, 0.0
        if self.on_cuda:
            torch.cuda.synchronize()
        busy = sum(_seconds(begin, end) for begin, end in self.spans)
        return busy, _seconds(self.started, self.spans[-1][1])

    def now(self) -> Reading:
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


class Times:
    """Conversion of a BusyClock's readings to microseconds since the creation of this object.

    Attributes:
        opened: reading of the host's clock at creation, in seconds.
    """

    def __init__(self, busy: BusyClock) -> None:
        self._busy = busy
        self.opened = busy.clock()
        self._anchor: torch.cuda.Event | None = None
        self._anchor_us = 0.0

    def host_s(self) -> float:
        """Return the seconds since creation."""
        return self._busy.clock() - self.opened

    def settle(self) -> None:
        """Wait for the CUDA events so far, and align the device's time with the host's clock. No effect on CPU."""
        if self._busy.on_cuda:
            torch.cuda.synchronize()
            anchor = self._busy.now()
            assert isinstance(anchor, torch.cuda.Event)
            anchor.synchronize()
            self._anchor = anchor
            self._anchor_us = 1e6 * self.host_s()

    def us(self, reading: Reading, *, settled: bool = True) -> float:
        """Return a reading in microseconds. It must precede the last :meth:`settle`, unless ``settled`` is False."""
        if not isinstance(reading, torch.cuda.Event):
            return 1e6 * (reading - self.opened)
        if not settled:
            self.settle()
        assert self._anchor is not None
        return self._anchor_us - 1e3 * reading.elapsed_time(self._anchor)


class Clocks:
    """Comparisons of the ranks' clocks with rank 0's. ``group`` is used only for them."""

    def __init__(self, group: ProcessGroup, times: Times) -> None:
        self._group, self._times = group, times
        self._steps_left = 1.0  # until the next comparison
        self._duration_s = 0.0  # of the last comparison with all ranks
        self._step_s = 0.0  # of the last step

    def is_due(self, step_s: float) -> bool:
        """Return whether to compare the clocks after a step of ``step_s`` seconds; the same on all ranks."""
        self._step_s = step_s
        self._steps_left -= 1
        return self._steps_left < 1

    def compare(self) -> Comparison | None:
        """Exchange times with rank 0, one rank after the other. Returns None on rank 0, the reference."""
        if dist.get_rank() != 0:
            return self._ask()
        # Rank 0 chooses the steps until the next comparison, and sends their number with its times.
        interval_s = max(_MIN_INTERVAL_S, self._duration_s / _MAX_SHARE)
        steps = float(max(1, math.ceil(interval_s / self._step_s))) if self._step_s else 1.0
        begin_s = self._times.host_s()
        for peer in range(1, dist.get_world_size()):
            self._answer(peer, steps)
        self._steps_left = steps
        self._duration_s = self._times.host_s() - begin_s
        return None

    def _answer(self, peer: int, steps: float) -> None:
        """Send the time and ``steps`` to a rank as often as it asks. It asks with 1 and ends with 0."""
        question, answer = torch.ones(1), torch.empty(2, dtype=torch.float64)
        dist.recv(question, peer, group=self._group)
        while question:
            answer[0], answer[1] = self._times.host_s(), steps
            dist.send(answer, peer, group=self._group)
            dist.recv(question, peer, group=self._group)

    def _ask(self) -> Comparison:
        question, answer = torch.ones(1), torch.empty(2, dtype=torch.float64)
        exchanges: list[tuple[float, float, float]] = []
        while len(exchanges) < _MIN_EXCHANGES or (
            len(exchanges) < _MAX_EXCHANGES and compare(exchanges).error_s > _MAX_ERROR_S
        ):
            sent = self._times.host_s()
            dist.send(question, 0, group=self._group)
            dist.recv(answer, 0, group=self._group)
            exchanges.append((sent, float(answer[0]), self._times.host_s()))
        dist.send(torch.zeros(1), 0, group=self._group)
        self._steps_left = float(answer[1])  # the same on all ranks
        return compare(exchanges)


def clock_event(rank: int, comparison: Comparison) -> str:
    values = {
        "at_us": round(1e6 * comparison.at_s, 3),
        "offset_us": round(1e6 * comparison.offset_s, 3),
        "error_us": round(1e6 * comparison.error_s, 3),
    }
    return metadata(CLOCK, rank, values)
