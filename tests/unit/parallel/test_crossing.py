"""Traffic between hosts, against a count over every message and every connection of every ring."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from ds_ext import pipe_schedules
from ds_ext.errors import ConfigError
from ds_ext.parallel.crossing import (
    Traffic,
    messages_between,
    rank_orders,
    ranked_orders,
    traffic_between_hosts,
)
from ds_ext.parallel.fbd import make_layout
from ds_ext.parallel.hosts import Hosts, parse_hosts
from ds_ext.parallel.layout import ParallelLayout
from ds_ext.parallel.rank_order import parse_rank_order
from ds_ext.pipe_schedules.lowering import lower
from ds_ext.pipe_schedules.placement import Placement, bidirectional_linear, bidirectional_v, linear, v

BITPIPE = bidirectional_v(2)
TRAFFIC = Traffic(
    message=10.0, gradients=(600.0, 600.0), weights=(300.0, 300.0), tensor=(40.0, 40.0), zero_stage=1
)


def connections(ranks: list[int], hosts: Hosts) -> int:
    """Connections between hosts of a ring through ``ranks``."""
    ring = sorted(ranks)
    return sum(hosts.host(a) != hosts.host(b) for a, b in pairwise([*ring, ring[0]])) if len(ring) > 1 else 0


@pytest.mark.parametrize(
    "order", ["tp-dp-pp", "tp-pp-dp", "tp-mirror-dp-pp", "tp-mirror-pp-dp", "tp-dp-mirror-pp"]
)
@pytest.mark.parametrize("slots", ["2x4", "4x2", "3,5", "8x1", "8"])
def test_bytes_are_those_of_every_message_and_ring(order: str, slots: str) -> None:
    layout, hosts = ParallelLayout(BITPIPE, 2, 2, parse_rank_order(order)), parse_hosts(slots)
    found = traffic_between_hosts(layout, hosts, TRAFFIC, 4)
    messages = reductions = tensors = 0.0
    for data in range(2):
        for tensor in range(2):
            for (sender, receiver), count in messages_between(BITPIPE, 4).items():
                ends = layout.rank(sender, data, tensor), layout.rank(receiver, data, tensor)
                messages += 10 * count * hosts.cross(ends)
    for tensor in range(2):
        averaging = [layout.rank(device, data, tensor) for device in range(2) for data in range(2)]
        # All-reduce of the gradients and all-gather of the weights, over 4 ranks.
        reductions += connections(averaging, hosts) * (2 * 600 + 300) * 3 / 4
    for group in layout.groups()["tensor"]:
        tensors += connections(group, hosts) * 2 * 40 * 1 / 2
    table = {kind.name: kind for kind in found.kinds}
    assert [*table] == ["tensor", "neighbors", "mirror", "data", "gradients"]
    assert table["neighbors"].bytes == pytest.approx(messages)
    assert table["gradients"].bytes == pytest.approx(reductions)
    assert table["tensor"].bytes == pytest.approx(tensors)
    assert found.bytes == pytest.approx(messages + reductions + tensors)
    for name in ("tensor", "mirror", "data"):
        groups = layout.groups()[name]
        assert table[name].crossing == sum(connections(group, hosts) > 0 for group in groups)
        assert table[name].groups == len(groups)


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "interleaved", "chimera", "bitpipe", "zb_v", "bitpipe_zb", "fbd"]
)
def test_messages_are_those_of_the_program(schedule: str) -> None:
    timetable = pipe_schedules.timetable(schedule, 4, 8)
    sends = Counter(
        (device, instruction.peer)
        for device, instructions in enumerate(lower(timetable).instructions)
        for instruction in instructions
        if instruction.name.startswith("Send")
    )
    assert messages_between(timetable.placement, 8) == sends


def test_orders_that_number_the_ranks_alike_are_listed_once() -> None:
    assert [str(order) for order in rank_orders(ParallelLayout(linear(4), 2, 1))] == ["tp-dp-pp"]
    assert [str(order) for order in rank_orders(ParallelLayout(linear(4), 2, 2))] == ["tp-dp-pp", "tp-pp-dp"]
    bitpipe = {str(order) for order in rank_orders(ParallelLayout(bidirectional_v(4), 1, 2))}
    assert bitpipe >= {"tp-dp-pp", "tp-pp-dp", "tp-mirror-dp-pp", "tp-mirror-pp-dp"}


def test_partners_share_a_host_if_gradients_are_large_and_neighbors_if_messages_are() -> None:
    layout, hosts = ParallelLayout(bidirectional_v(4), 1, 1), parse_hosts("2x2")
    small, large = (8.0,) * 4, (8000.0,) * 4
    by_gradients = ranked_orders(layout, hosts, Traffic(1.0, large, large), 8)
    assert by_gradients[0].rank_order.pairs_mirrors
    assert by_gradients[0].kinds[-1].crossing == 0
    by_messages = ranked_orders(layout, hosts, Traffic(100.0, small, small), 8)
    assert str(by_messages[0].rank_order) == "tp-dp-pp"
    assert [found.bytes for found in by_messages] == sorted(found.bytes for found in by_messages)


@pytest.mark.parametrize(
    ("placement", "groups"),
    [
        (linear(2), 4),
        (v(2), 0),
        (bidirectional_v(2), 0),
        (bidirectional_linear(2), 0),  # both devices have both stages
        (linear(2).with_head_parts("1f1b"), 4),
        (v(2).with_head_parts("zb_v"), 4),
        (bidirectional_v(2).with_head_parts("bitpipe"), 0),
    ],
)
def test_a_weight_of_the_first_and_the_last_stage_is_summed_over_its_devices(
    placement: Placement, groups: int
) -> None:
    """One all-reduce for each data-parallel group and tensor-parallel rank."""
    layout, hosts = ParallelLayout(placement, 2, 2), parse_hosts("2x4")
    untied = traffic_between_hosts(layout, hosts, TRAFFIC, 4)
    tied = traffic_between_hosts(layout, hosts, replace(TRAFFIC, tied=100.0), 4)
    found = tied.kind("tied")
    assert untied.kind("tied") is None
    assert (0 if found is None else found.groups) == groups
    # Two ranks send 100 bytes each.
    assert tied.bytes - untied.bytes == pytest.approx(2 * 100 * groups)


def test_one_host_sends_nothing_between_hosts() -> None:
    layout = ParallelLayout(v(2), 2, 2)
    assert all(found.bytes == 0 for found in ranked_orders(layout, parse_hosts("1x8"), TRAFFIC, 4))


def test_disaggregation_has_one_order_and_counts_copies_of_weights() -> None:
    placement = pipe_schedules.timetable("fbd", 2, 4).placement
    layout = make_layout(placement, 1, 1)
    traffic = Traffic(10.0, (600.0,) * 4, (300.0,) * 4)
    (found,) = ranked_orders(layout, parse_hosts("4x1"), traffic, 4)
    table = {kind.name: kind for kind in found.kinds}
    assert table["weights"].crossing == 2
    assert table["weights"].bytes == 600


def test_slots_that_do_not_add_up_to_the_world_are_refused() -> None:
    layout = ParallelLayout(BITPIPE, 2, 2)
    with pytest.raises(ConfigError, match=r"hosts: .* 6 .* 8 "):
        traffic_between_hosts(layout, parse_hosts("2x3"), TRAFFIC, 4)


def test_the_order_of_a_layout_is_the_one_that_counts() -> None:
    layout, hosts = ParallelLayout(BITPIPE, 2, 2), parse_hosts("2x4")
    default = traffic_between_hosts(layout, hosts, TRAFFIC, 4)
    other = traffic_between_hosts(replace(layout, rank_order=parse_rank_order("tp-pp-dp")), hosts, TRAFFIC, 4)
    assert default.bytes > other.bytes
    assert (default.kind("mirror"), other.kind("mirror")) != (None, None)
    assert [kind.crossing for kind in default.kinds] == [0, 8, 4, 0, 2]
    assert [kind.crossing for kind in other.kinds] == [0, 0, 0, 4, 2]
