"""Hosts that the ranks of a job report, on two network namespaces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from ds_ext.comm.groups import watch_hosts
from ds_ext.engine import hosts_of_job, on_hosts
from ds_ext.parallel.fbd import make_layout
from ds_ext.pipe_schedules import get_schedule
from tests.distributed.test_tcp import on_host
from tests.hosts.network import ADDRESSES, NoHosts, two_hosts
from tests.ranks import Ranks


@pytest.fixture
def hosts(ranks: Ranks) -> Iterator[tuple[str, str]]:
    """Files of two namespaces; the ranks are new, because the watch of a rank keeps its hosts."""
    ranks(4).close()
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(two_hosts())
        except NoHosts as error:
            pytest.skip(f"no network namespaces: {error}")
    ranks(4).close()


def slots(rank: int, hosts: tuple[str, str] | None) -> tuple[int, ...]:
    """Return the slots of the job's hosts."""
    with on_host(rank, hosts) if hosts else contextlib.nullcontext():
        watch_hosts()
        found = hosts_of_job()
    assert found is not None
    return found.slots


def forward_ranks(rank: int, hosts: tuple[str, str]) -> list[int]:
    """Return the forward ranks of `fbd` with the second host's address as forward host."""
    layout = make_layout(get_schedule("fbd").placement(2), 1, 1)
    with on_host(rank, hosts):
        placed = on_hosts(layout, [ADDRESSES[1]])
    return [other for other in range(4) if placed.role(other) == "forward"]


def test_ranks_report_their_hosts(ranks: Ranks, hosts: tuple[str, str]) -> None:
    assert ranks(4).run(slots, hosts) == [(2, 2)] * 4
    assert ranks(4).run(forward_ranks, hosts) == [[2, 3]] * 4


def test_ranks_on_one_host(ranks: Ranks) -> None:
    assert ranks(2).run(slots, None) == [(2,)] * 2
