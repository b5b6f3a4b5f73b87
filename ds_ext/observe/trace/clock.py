"""How the clock of one rank is carried over to that of another: offset and drift from exchanged timestamps.

A rank sends, rank 0 answers with its time, the rank receives: sent before, received after. So the difference of the
clocks is at least ``answered - received`` and at most ``answered - sent``. Each exchange gives such a range, the
shortest round trip the narrowest (Cristian 1989; NTP); all of them together give what they have in common.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_ENOUGH_S = 5.0  # between two comparisons, for their difference to be drift and not error
_MUCH_WORSE = 4.0


@dataclass(frozen=True)
class Comparison:
    """At ``at_s`` of this rank's clock rank 0's is ``at_s + offset_s``, with an error of ``error_s`` at most."""

    at_s: float
    offset_s: float
    error_s: float


def compare(exchanges: Iterable[tuple[float, float, float]]) -> Comparison:
    """What exchanges of (sent, answered, received) tell, in seconds; the middle one is of rank 0's clock.

    Clocks that ran apart, or jumped, while they were compared can leave nothing in common: then the shortest counts.
    """
    found = sorted(exchanges, key=lambda exchange: exchange[2] - exchange[0])
    least = max(answered - received for _, answered, received in found)
    most = min(answered - sent for sent, answered, _ in found)
    if least > most:
        sent, answered, received = found[0]
        least, most = answered - received, answered - sent
    return Comparison(found[0][2], (least + most) / 2, (most - least) / 2)


class Alignment:
    """Times of a rank on rank 0's clock: between two comparisons on the line that joins them.

    Before the first and after the last the clocks keep the drift of all, if these are far enough apart to tell it. One
    whose error is much larger than the least, from a busy moment, does not count. Without any, times stay as they are.
    """

    def __init__(self, comparisons: Sequence[Comparison]) -> None:
        least = min((c.error_s for c in comparisons), default=0.0)
        good = [c for c in comparisons if c.error_s <= _MUCH_WORSE * least]
        self.comparisons = sorted(good, key=lambda c: c.at_s)
        self._at = [c.at_s for c in self.comparisons]
        self.error_s = max((c.error_s for c in self.comparisons), default=0.0)
        span = self._at[-1] - self._at[0] if self._at else 0.0
        self.drift = 0.0
        if span >= _ENOUGH_S:
            self.drift = (self.comparisons[-1].offset_s - self.comparisons[0].offset_s) / span

    def __call__(self, at_s: float) -> float:
        """The time on rank 0's clock."""
        return at_s + self.offset(at_s)

    def offset(self, at_s: float) -> float:
        """What rank 0's clock is ahead."""
        if not self._at:
            return 0.0
        after = bisect_right(self._at, at_s)
        if 0 < after < len(self._at):
            one, two = self.comparisons[after - 1 : after + 1]
            share = (at_s - one.at_s) / (two.at_s - one.at_s)
            return one.offset_s + share * (two.offset_s - one.offset_s)
        nearest = self.comparisons[0 if after == 0 else -1]
        return nearest.offset_s + self.drift * (at_s - nearest.at_s)
