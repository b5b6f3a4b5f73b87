"""Ranks, groups and DeepSpeed's topology."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology

from ds_ext.engine.grid import FoldedTopology
from ds_ext.errors import ConfigError
from ds_ext.parallel.fbd import make_layout
from ds_ext.parallel.layout import ParallelLayout, data_parallel_size
from ds_ext.parallel.rank_order import parse_rank_order
from ds_ext.pipe_schedules import Placement, get_schedule
from ds_ext.pipe_schedules.placement import bidirectional_v, linear


def test_the_group_table_of_two_by_two_by_two() -> None:
    """Ranks are in Megatron's and DeepSpeed's order: tensor fastest, then data, then pipeline."""
    layout = ParallelLayout(linear(2), tensor_parallel_size=2, data_parallel_size=2)
    assert layout.world_size == 8
    assert layout.groups() == {
        "tensor": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "pipeline": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "data": [[0, 2], [1, 3], [4, 6], [5, 7]],
    }
    assert [layout.coordinates(r)[0] for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("sizes", [(4, 1, 1), (2, 3, 2), (1, 2, 4), (4, 2, 2)])
def test_rank_and_coordinates_are_inverse(sizes: tuple[int, int, int]) -> None:
    devices, tp, dp = sizes
    layout = ParallelLayout(linear(devices), tp, dp)
    assert [layout.rank(*layout.coordinates(r)) for r in range(layout.world_size)] == list(
        range(layout.world_size)
    )
    for groups in layout.groups().values():
        assert sorted(r for group in groups for r in group) == list(range(layout.world_size))


@pytest.mark.parametrize(("devices", "tp", "dp"), [(2, 2, 2), (4, 1, 2), (4, 1, 1), (1, 2, 3), (2, 4, 1)])
def test_without_replicas_the_topology_is_deepspeeds(devices: int, tp: int, dp: int) -> None:
    topology = FoldedTopology(ParallelLayout(linear(devices), tp, dp))
    reference = (
        PipeModelDataParallelTopology(devices, tp, dp) if tp > 1 else PipeDataParallelTopology(devices, dp)
    )
    assert topology.mapping == reference.mapping
    assert topology.get_axis_names() == reference.get_axis_names()
    for axis in reference.get_axis_names():
        assert topology.get_axis_comm_lists(axis) == reference.get_axis_comm_lists(axis)
        assert topology.get_dim(axis) == reference.get_dim(axis)


def test_mirror_devices_are_data_parallel_ranks() -> None:
    layout = ParallelLayout(bidirectional_v(4), tensor_parallel_size=1, data_parallel_size=1)
    assert layout.groups()["mirror"] == [[0, 3], [1, 2]]
    topology = FoldedTopology(layout)
    assert (topology.get_dim("pipe"), topology.get_dim("data")) == (2, 2)
    assert topology.get_axis_comm_lists("data") == [[0, 3], [1, 2]]
    assert [topology.folded_stage(d) for d in range(4)] == [0, 1, 1, 0]
    # The home pipe of a device is its data-parallel coordinate.
    assert [topology.get_coord(r).data for r in range(4)] == [0, 0, 1, 1]


def test_mirror_groups_with_tensor_and_data_parallel() -> None:
    layout = ParallelLayout(bidirectional_v(4), tensor_parallel_size=2, data_parallel_size=2)
    groups = layout.groups()
    assert layout.world_size == 16
    assert groups["mirror"] == [[0, 12], [1, 13], [2, 14], [3, 15], [4, 8], [5, 9], [6, 10], [7, 11]]
    topology = FoldedTopology(layout)
    assert sorted(topology.get_axis_comm_lists("model")) == sorted(groups["tensor"])
    # DeepSpeed reduces over a mirror pair and its data-parallel copies at once.
    assert [sorted(group) for group in topology.get_axis_comm_lists("data")] == [
        [0, 2, 12, 14],
        [1, 3, 13, 15],
        [4, 6, 8, 10],
        [5, 7, 9, 11],
    ]
    # Data-parallel coordinate 2 * data + replica selects the samples of a pipe.
    assert [topology.get_coord(layout.rank(d, data, 0)).data for data in (0, 1) for d in (0, 3)] == [
        0,
        1,
        2,
        3,
    ]
    assert sorted(topology.mapping.values()) == list(range(16))


def test_data_parallel_size() -> None:
    assert data_parallel_size(8, linear(2), 2) == 2
    assert data_parallel_size(4, bidirectional_v(4), 1) == 1


@pytest.mark.parametrize(
    ("world", "fitting"),
    [
        (1, r"4 proc.*--num_gpus 4 .*--nproc_per_node 4 "),
        (6, r"4 or 8 proc.*--num_gpus 4 .*--nproc_per_node 4 "),
    ],
)
def test_worlds_that_do_not_fit(world: int, fitting: str) -> None:
    sizes = "4 = pipeline_parallel_size 2 x tensor_parallel_size 2"
    with pytest.raises(ConfigError, match=rf"^world size: .*{sizes} .*{world}\b.*{fitting}"):
        data_parallel_size(world, linear(2), 2)


@pytest.mark.parametrize("placement", [linear(4), bidirectional_v(4)], ids=["linear", "bitpipe"])
@pytest.mark.parametrize("order", ["tp-dp-pp", "tp-pp-dp", "tp-mirror-dp-pp", "tp-pp-mirror-dp"])
def test_every_rank_order_numbers_each_rank_once(placement: Placement, order: str) -> None:
    layout = ParallelLayout(placement, 2, 3, parse_rank_order(order))
    ranks = [layout.rank(*layout.coordinates(r)) for r in range(24)]
    assert ranks == list(range(24))
    assert sorted(layout.groups()["tensor"]) == [[2 * i, 2 * i + 1] for i in range(12)]


def test_mirror_axis_puts_replicas_side_by_side() -> None:
    layout = ParallelLayout(bidirectional_v(4), 1, 2, parse_rank_order("tp-mirror-pp-dp"))
    assert layout.groups()["mirror"] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert [layout.coordinates(r)[0] for r in range(8)] == [0, 3, 1, 2, 0, 3, 1, 2]


@pytest.mark.parametrize(
    "text", ["", "tp", "tp-dp", "dp-tp-pp", "tp-dp-pp-pp", "tp-dp-pp-ep", "tp-mirror-mirror-dp-pp"]
)
def test_invalid_rank_orders_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"ds_ext\.rank_order"):
        parse_rank_order(text)


@pytest.mark.parametrize("order", ["tp-pp-dp", "tp-mirror-dp-pp", "tp-mirror-pp-dp", "tp-dp-pp-mirror"])
def test_coordinates_of_deepspeeds_grid_do_not_depend_on_the_order(order: str) -> None:
    """Samples and shards follow the coordinates: data-parallel rank 2 * data + replica."""
    default = ParallelLayout(bidirectional_v(4), 2, 2)
    ordered = replace(default, rank_order=parse_rank_order(order))
    folded, reference = FoldedTopology(ordered), FoldedTopology(default)
    for device, data, tensor in product(range(4), range(2), range(2)):
        coordinate = folded.get_coord(ordered.rank(device, data, tensor))
        assert coordinate == reference.get_coord(default.rank(device, data, tensor))
    assert folded.mapping != reference.mapping


def test_forward_ranks_have_no_rank_order() -> None:
    placement = get_schedule("fbd").placement(2)
    assert make_layout(placement, 1, 1, parse_rank_order("tp-dp-pp")).world_size == 4
    with pytest.raises(ConfigError, match=r"^ds_ext\.rank_order: .*tp-pp-dp.*forward_hosts"):
        make_layout(placement, 1, 1, parse_rank_order("tp-pp-dp"))
