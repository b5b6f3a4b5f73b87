"""Hosts that keep the second copies of snapshots, and which losses of hosts the copies survive. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from .layout import ParallelLayout


def copy_hosts(layout: ParallelLayout, hosts: Sequence[int]) -> list[int] | None:
    """Return the host that keeps the second copy of every rank's snapshot; None if all ranks are on one host.

    It is the host of the rank's mirror, which trains the same stages in BitPipe, if that is another host; else of the
    next data-parallel rank on another host; else the next host.

    Args:
        layout: layout of the ranks.
        hosts: number of every rank's host.
    """
    order = sorted(set(hosts))
    if len(order) == 1:
        return None
    table = layout.groups()
    groups = {
        kind: {rank: group for group in table.get(kind, []) for rank in group} for kind in ("mirror", "data")
    }

    def host_of(rank: int) -> int:
        for kind in ("mirror", "data"):
            group = groups[kind].get(rank, [rank])
            first = group.index(rank)
            for other in (*group[first + 1 :], *group[:first]):
                if hosts[other] != hosts[rank]:
                    return hosts[other]
        return order[(order.index(hosts[rank]) + 1) % len(order)]

    return [host_of(rank) for rank in range(len(hosts))]


def fatal_pairs(hosts: Sequence[int], copies: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs of hosts whose loss at the same time takes both copies of some snapshot.

    Args:
        hosts: number of every rank's host.
        copies: from :func:`copy_hosts`.
    """
    both_copies = {frozenset(pair) for pair in zip(hosts, copies, strict=True)}
    return [pair for pair in combinations(sorted(set(hosts)), 2) if frozenset(pair) in both_copies]
