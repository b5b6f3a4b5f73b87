"""Alignment of a rank's clock with rank 0's: offset and drift from exchanged timestamps.

A rank sends a message, rank 0 answers with its time, and the rank receives the answer. The offset of rank 0's clock is
therefore at least ``answered - received`` and at most ``answered - sent``. The shortest round trip gives the narrowest
range (Cristian 1989; NTP). The estimate is the middle of the intersection of all ranges.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MIN_DRIFT_SPAN_S = 5.0  # between two comparisons; if shorter, their difference is mostly error
_MAX_ERROR_RATIO = 4.0  # maximum error of a comparison, relative to the least error


@dataclass(frozen=True)
class Comparison:
    """Offset of rank 0's clock at time ``at_s`` of this rank's clock, with an error of at most ``error_s``."""

    at_s: float
    offset_s: float
    error_s: float


def compare(exchanges: Iterable[tuple[float, float, float]]) -> Comparison:
    """Estimate the offset from exchanges (sent, answered, received), in seconds; ``answered`` is by rank 0's clock.

    If the clocks drifted or jumped in between, the ranges may not intersect. Then the shortest exchange alone counts.
    """
    by_duration = sorted(exchanges, key=lambda exchange: exchange[2] - exchange[0])
    least = max(answered - received for _, answered, received in by_duration)
    most = min(answered - sent for sent, answered, _ in by_duration)
    if least > most:
        sent, answered, received = by_duration[0]
        least, most = answered - received, answered - sent
    return Comparison(by_duration[0][2], (least + most) / 2, (most - least) / 2)


class Alignment:
    """Conversion of a rank's times to rank 0's clock.

    Offsets are interpolated between comparisons. Outside that range they follow the mean drift, if the comparisons span
    at least 5 s. Comparisons whose error is more than 4 times the smallest one, as on a busy host, are ignored. Without
    comparisons the offset is 0.
    """

    def __init__(self, comparisons: Sequence[Comparison]) -> None:
        least = min((c.error_s for c in comparisons), default=0.0)
        good = [c for c in comparisons if c.error_s <= _MAX_ERROR_RATIO * least]
        self.comparisons = sorted(good, key=lambda c: c.at_s)
        self._at = [c.at_s for c in self.comparisons]
        self.error_s = max((c.error_s for c in self.comparisons), default=0.0)
        span = self._at[-1] - self._at[0] if self._at else 0.0
        self.drift = 0.0
        if span >= _MIN_DRIFT_SPAN_S:
            self.drift = (self.comparisons[-1].offset_s - self.comparisons[0].offset_s) / span

    def __call__(self, at_s: float) -> float:
        """Convert a time, in seconds, to rank 0's clock."""
        return at_s + self.offset(at_s)

    def offset(self, at_s: float) -> float:
        """Return how far rank 0's clock is ahead, in seconds."""
        if not self._at:
            return 0.0
        after = bisect_right(self._at, at_s)
        if 0 < after < len(self._at):
            previous, following = self.comparisons[after - 1 : after + 1]
            share = (at_s - previous.at_s) / (following.at_s - previous.at_s)
            return previous.offset_s + share * (following.offset_s - previous.offset_s)
        nearest = self.comparisons[0 if after == 0 else -1]
        return nearest.offset_s + self.drift * (at_s - nearest.at_s)
