"""Alignment of one clock with another."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ext.observe.trace.clock import Alignment, Comparison, compare

SECONDS = st.floats(0, 1e-2)


@given(st.floats(-1e5, 1e5), st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=20))
def test_the_true_offset_is_within_the_error(offset: float, delays: list[tuple[float, float]]) -> None:
    """The error is at most half the shortest round trip, for any delays."""
    exchanges, now = [], 0.0
    for request, answer in delays:
        exchanges.append((now, now + request + offset, now + request + answer))
        now += request + answer
    comparison = compare(exchanges)
    assert abs(comparison.offset_s - offset) <= comparison.error_s + 1e-9
    assert comparison.error_s <= min(map(sum, delays)) / 2 + 1e-9


def test_the_shortest_exchange_counts_if_ranges_do_not_intersect() -> None:
    comparison = compare([(0.0, 5.0, 0.2), (1.0, 9.05, 1.1)])
    assert (comparison.offset_s, comparison.error_s) == pytest.approx((8.0, 0.05))


@given(st.floats(-1e-4, 1e-4), st.floats(-1e3, 1e3))
def test_drift_is_followed_between_comparisons_and_beyond(drift: float, offset: float) -> None:
    exact = [Comparison(at, offset + drift * at, 1e-5) for at in (0.0, 30.0, 60.0)]
    align = Alignment(exact)
    for at in (-5.0, 0.0, 12.5, 60.0, 100.0):
        assert align(at) == pytest.approx(at + offset + drift * at, abs=1e-9)
    assert align.drift == pytest.approx(drift, abs=1e-12)


def test_close_comparisons_give_no_drift() -> None:
    align = Alignment([Comparison(0.0, 1.0, 1e-5), Comparison(0.1, 1.00002, 1e-5)])
    assert align.drift == 0 and align(1000.0) == pytest.approx(1001.00002)


def test_a_comparison_with_a_large_error_is_ignored() -> None:
    good = [Comparison(10.0 * i, 2.0, 3e-5) for i in range(5)]
    align = Alignment([*good, Comparison(25.0, 2.0007, 8e-4)])
    assert align(25.0) == pytest.approx(27.0) and align.error_s == 3e-5


def test_without_comparisons_the_offset_is_zero() -> None:
    assert Alignment([])(3.25) == 3.25 and Alignment([]).error_s == 0


def test_exchanges_with_noise_find_the_offset() -> None:
    """Delays of a busy host: mostly 50 us in each direction, sometimes milliseconds."""
    source, worst = random.Random(1), 0.0
    for _ in range(200):
        exchanges, now = [], 0.0
        for _ in range(12):
            delays = [
                5e-5 * source.uniform(0.8, 1.5) + (source.random() < 0.3) * source.expovariate(500)
                for _ in "ab"
            ]
            exchanges.append((now, now + delays[0] + 7.0, now + sum(delays)))
            now += sum(delays)
        worst = max(worst, abs(compare(exchanges).offset_s - 7.0))
    assert worst < 1e-4
