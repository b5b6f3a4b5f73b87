"""Times of a rank's trace: readings of its BusyClock in microseconds, and its clock compared with rank 0's."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ...observe.trace.clock import Comparison, compare
from ...observe.trace.file import CLOCK, metadata
from ..busy import BusyClock, Reading

_ROUNDS, _MOST_ROUNDS = 8, 64  # exchanges with a rank: more than the first number only until they agree
_AGREED_S = 40e-6
_COMPARE_EVERY_S = 30.0
_COMPARE_SHARE = 0.005  # of the time, at most


class Times:
    """Readings of a BusyClock as microseconds since now, on this rank's clock.

    Attributes:
        opened: seconds of the clock at which they begin.
    """

    def __init__(self, busy: BusyClock) -> None:
        self._busy = busy
        self.opened = busy.clock()
        self._anchor: torch.cuda.Event | None = None
        self._anchor_us = 0.0

    def host_s(self) -> float:
        """Return the seconds since the opening."""
        return self._busy.clock() - self.opened

    def settle(self) -> None:
        """Wait for the events so far and match the device's time with the host's clock; nothing to do on CPU."""
        if self._busy.on_cuda:
            torch.cuda.synchronize()
            anchor = self._busy.now()
            assert isinstance(anchor, torch.cuda.Event)
            anchor.synchronize()
            self._anchor = anchor
            self._anchor_us = 1e6 * self.host_s()

    def us(self, reading: Reading, *, settled: bool = True) -> float:
        """Return the time of a reading from before :meth:`settle`; of a later one with ``settled=False``."""
        if not isinstance(reading, torch.cuda.Event):
            return 1e6 * (reading - self.opened)
        if not settled:
            self.settle()
        assert self._anchor is not None
        return self._anchor_us - 1e3 * reading.elapsed_time(self._anchor)


class Clocks:
    """Comparisons of the ranks' clocks with rank 0's, over a process group for them."""

    def __init__(self, group: ProcessGroup, times: Times) -> None:
        self._group, self._times = group, times
        self._steps_left, self._took_s, self._step_s = 1.0, 0.0, 0.0

    def due(self, step_s: float) -> bool:
        """Return whether to compare the clocks after a step of ``step_s`` seconds; the same on every rank."""
        self._step_s = step_s
        self._steps_left -= 1
        return self._steps_left < 1

    def compare(self) -> Comparison | None:
        """Exchange times with rank 0, one rank after the other. Returns None on rank 0, the reference."""
        interval_s = max(_COMPARE_EVERY_S, self._took_s / _COMPARE_SHARE)
        steps = float(max(1, math.ceil(interval_s / self._step_s))) if self._step_s else 1.0
        began = self._times.host_s()
        if dist.get_rank() != 0:
            return self._ask()
        for peer in range(1, dist.get_world_size()):
            self._answer(peer, steps)
        self._steps_left, self._took_s = steps, self._times.host_s() - began
        return None

    def _answer(self, peer: int, steps: float) -> None:
        more, answer = torch.ones(1), torch.empty(2, dtype=torch.float64)
        while True:
            dist.recv(more, peer, group=self._group)
            if not more:
                break
            answer[0], answer[1] = self._times.host_s(), steps
            dist.send(answer, peer, group=self._group)

    def _ask(self) -> Comparison:
        more, answer = torch.ones(1), torch.empty(2, dtype=torch.float64)
        rounds: list[tuple[float, float, float]] = []
        while len(rounds) < _ROUNDS or (len(rounds) < _MOST_ROUNDS and compare(rounds).error_s > _AGREED_S):
            sent = self._times.host_s()
            dist.send(more, 0, group=self._group)
            dist.recv(answer, 0, group=self._group)
            rounds.append((sent, float(answer[0]), self._times.host_s()))
        dist.send(torch.zeros(1), 0, group=self._group)
        self._steps_left = float(answer[1])  # rank 0 decides for all
        return compare(rounds)


def clock_event(rank: int, found: Comparison) -> str:
    """Return the event that records a comparison, as text."""
    values = {
        "at_us": round(1e6 * found.at_s, 3),
        "offset_us": round(1e6 * found.offset_s, 3),
        "error_us": round(1e6 * found.error_s, 3),
    }
    return metadata(CLOCK, rank, values)
