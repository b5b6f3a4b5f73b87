"""Hosts of a job, from sizes and from hostfiles."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ds_ext.errors import ConfigError
from ds_ext.parallel.hosts import Hosts, hosts_in_rank_order, parse_hosts


@pytest.mark.parametrize(
    ("text", "slots"), [("4x8", (8, 8, 8, 8)), ("8,8,4", (8, 8, 4)), ("8", (8,)), ("1x4", (4,))]
)
def test_sizes(text: str, slots: tuple[int, ...]) -> None:
    assert parse_hosts(text).slots == slots


def test_ranks_are_numbered_host_by_host() -> None:
    hosts = parse_hosts("3,1,2")
    assert hosts.world_size == 6
    assert [hosts.host(rank) for rank in range(6)] == [0, 0, 0, 1, 2, 2]
    assert hosts.cross([2, 3]) and not hosts.cross([0, 2])
    with pytest.raises(ConfigError, match="6"):
        hosts.host(6)


def test_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# two hosts\nworker-0 slots=4\n\nworker-1  slots=2 # fewer\n")
    assert parse_hosts(str(path)) == Hosts((4, 2), ("worker-0", "worker-1"))


@pytest.mark.parametrize("text", ["worker-0", "", "a slots=2\na slots=2\n", "a slots=0", "a slots=x"])
def test_invalid_hostfiles(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        parse_hosts(str(path))


@pytest.mark.parametrize("text", ["", "0x8", "4x0", "4x", "a.txt", "8,,8", "２x4"])
def test_invalid_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="hosts"):
        parse_hosts(text)


def test_hosts_of_a_running_job() -> None:
    assert hosts_in_rank_order([("b", [2, 3, 4]), ("a", [1, 0])]) == Hosts((2, 3), ("a", "b"))
    assert hosts_in_rank_order([("a", [0, 2]), ("b", [1, 3])]) is None
