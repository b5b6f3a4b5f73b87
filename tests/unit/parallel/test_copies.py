"""Hosts of the second copies of snapshots, and the pairs of hosts that hold both copies of one."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from ds_ext.parallel.hosts import copy_hosts, fatal_pairs
from ds_ext.parallel.layout import ParallelLayout
from ds_ext.pipe_schedules.placement import Placement, bidirectional_v, linear


def test_the_mirror_has_the_copy() -> None:
    """Devices 0 to 3 over two hosts: d and 3-d are on different hosts."""
    hosts = [0, 0, 1, 1]
    assert copy_hosts(ParallelLayout(bidirectional_v(4), 1, 1), hosts) == [1, 1, 0, 0]


def test_the_next_data_parallel_rank_has_it_if_there_is_no_mirror_elsewhere() -> None:
    """A host holds a whole pipeline group, so mirrors share a host."""
    hosts = [rank % 3 for rank in range(12)]  # data-parallel ranks are adjacent
    for placement in (linear(4), bidirectional_v(4)):
        layout = ParallelLayout(placement, 1, 3)
        assert {layout.coordinates(rank)[1] for rank in (0, 3, 6, 9)} == {0}
        assert copy_hosts(layout, hosts) == [(host + 1) % 3 for host in hosts]


def test_the_next_host_has_it_if_there_is_neither() -> None:
    layout = ParallelLayout(linear(6), 1, 1)
    assert copy_hosts(layout, [0, 0, 2, 2, 4, 4]) == [2, 2, 4, 4, 0, 0]
    assert copy_hosts(layout, [3] * 6) is None


@pytest.mark.parametrize("placement", [linear(4), bidirectional_v(4)])
@pytest.mark.parametrize(("tensor", "data", "per_host"), product([1, 2], [1, 2], [1, 2, 4]))
def test_any_lost_host_leaves_a_copy(placement: Placement, tensor: int, data: int, per_host: int) -> None:
    layout = ParallelLayout(placement, tensor, data)
    hosts = [rank // per_host for rank in range(layout.world_size)]
    copies = copy_hosts(layout, hosts)
    if copies is None:
        assert len(set(hosts)) == 1
        return
    assert all(copy != host and copy in hosts for host, copy in zip(hosts, copies, strict=True))
    survived = [
        pair
        for pair in combinations(sorted(set(hosts)), 2)
        if all(host not in pair or copy not in pair for host, copy in zip(hosts, copies, strict=True))
    ]
    assert sorted([*survived, *fatal_pairs(hosts, copies)]) == list(combinations(sorted(set(hosts)), 2))
