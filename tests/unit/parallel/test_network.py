"""Times of messages and collectives, against closed forms."""

from __future__ import annotations

from typing import Any

import pytest

from ds_ext.errors import ConfigError
from ds_ext.parallel.hosts import Hosts
from ds_ext.parallel.network import GLOO, HOST_PORTS, Link, Network

INSIDE, BETWEEN = Link(100e9, 1e-6), Link(10e9, 10e-6)
SIZE = 1e9


def network(slots: int, hosts: int, **changes: Any) -> Network:
    return Network(Hosts((slots,) * hosts), INSIDE, BETWEEN, **changes)


def test_message_time_depends_on_the_hosts() -> None:
    two = network(2, 2)
    assert two.link(0, 1).time(SIZE) == pytest.approx(1e-6 + 0.01)
    assert two.link(1, 2).time(SIZE) == pytest.approx(10e-6 + 0.1)


def test_ring_over_hosts_is_limited_by_the_port() -> None:
    four = network(1, 4)
    assert four.all_gather_time(SIZE, range(4)) == pytest.approx(3 * 10e-6 + 0.75 * 0.1)
    # One ring for each of the two ports of a host.
    assert network(2, 4).all_gather_time(SIZE, range(8)) == pytest.approx(4 * 10e-6 + 3 * 1e-6 + 7 / 8 * 0.05)
    assert network(2, 4, ports=HOST_PORTS).all_gather_time(SIZE, range(8)) == pytest.approx(
        4 * 10e-6 + 3 * 1e-6 + 7 / 8 * 0.1
    )


def test_all_reduce_chooses_the_tree_for_small_data_and_the_ring_for_large() -> None:
    many = network(1, 64)
    assert many.all_reduce_time(1.0, range(64)) == pytest.approx(2 * 6 * 10e-6, rel=1e-3)
    assert many.all_reduce_time(SIZE, range(64)) == pytest.approx(2 * (63 * 10e-6 + 63 / 64 * 0.1))


def test_gloo_takes_a_round_trip_for_every_two_segments() -> None:
    two = network(1, 2, backend=GLOO)
    # Two passes, each with two segments after one round trip.
    assert two.all_reduce_time(4.0, range(2)) == pytest.approx(4 * 10e-6, rel=1e-3)


def test_links_have_positive_rates() -> None:
    with pytest.raises(ConfigError):
        Link(0, 1e-6)
    with pytest.raises(ConfigError):
        Link(1e9, -1.0)
