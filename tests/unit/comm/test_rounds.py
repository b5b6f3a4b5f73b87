"""Rounds in which the communicators of links are made."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ext.comm.rounds import divide_into_rounds, links_per_rank, queue_shortage
from ds_ext.parallel.layout import ParallelLayout, links_of
from ds_ext.pipe_schedules import SCHEDULES, timetable
from ds_ext.pipe_schedules.lowering import lower

RANKS = st.integers(0, 11)


@given(st.lists(st.tuples(RANKS, RANKS).filter(lambda link: link[0] != link[1])))
def test_no_rank_occurs_twice_in_a_round(links: list[tuple[int, int]]) -> None:
    found = divide_into_rounds(links)
    assert Counter(link for each in found for link in each) == Counter(set(links))
    assert all(len({rank for link in each for rank in link}) == 2 * len(each) for each in found)
    assert len(found) <= max(0, 2 * links_per_rank(links) - 1)


@pytest.mark.parametrize("schedule", ["1f1b", "bitpipe", "zb_v", "interleaved"])
def test_eight_pipelines_of_eight_devices(schedule: str) -> None:
    """112 groups of 64 ranks, one after the other, become a few rounds whatever the number of pipelines."""
    assert schedule in SCHEDULES
    program = lower(timetable(schedule, 8, 16))
    found = {}
    for pipelines in (1, 8):
        links = links_of(ParallelLayout(program.timetable.placement, 1, pipelines), [program])
        found[pipelines] = len(divide_into_rounds(links)), links_per_rank(links)
        if schedule == "1f1b":
            assert len(links) == 14 * pipelines
    assert found[1] == found[8] and found[1][1] == 4
    assert found[1][0] == 4 if schedule == "1f1b" else found[1][0] <= 6


@pytest.mark.parametrize(
    ("setting", "links", "short"), [(None, 4, False), (None, 6, True), ("32", 24, False), ("1", 2, True)]
)
def test_streams_need_separate_hardware_queues(setting: str | None, links: int, short: bool) -> None:
    assert (queue_shortage(setting, links) is not None) is short
