"""Topology that a script passes to PipelineModule instead of ``num_stages``."""

from __future__ import annotations

from dataclasses import replace

from deepspeed.runtime.pipe.topology import ProcessTopology

from ...errors import ConfigError
from ...parallel.crossing import rank_orders
from ...parallel.layout import ParallelLayout


def topology_sizes(topology: ProcessTopology | None) -> list[tuple[str, str, int]]:
    """Return (argument, key of the "ds_ext" section, size) for the pipe and model axes of a caller's topology."""
    if topology is None:
        return []
    axes = topology.get_axis_names()
    if "pipe" not in axes or not {*axes} <= {"pipe", "data", "model"}:
        raise ConfigError(
            f"topology: must have the axes pipe, data and, with tensor parallelism, model (got {', '.join(axes)}). Use "
            f"PipeDataParallelTopology or PipeModelDataParallelTopology, or pass num_stages."
        )
    return [
        ("topology", "pipeline_parallel_size", topology.get_dim("pipe")),
        ("topology", "tensor_parallel_size", max(topology.get_dim("model"), 1)),
    ]


def require_rank_order(topology: ProcessTopology | None, layout: ParallelLayout) -> None:
    """Raise ConfigError unless a caller's topology numbers the ranks of all devices as the layout does."""
    if topology is None:
        return
    if topology.world_size() != layout.world_size:
        raise ConfigError(
            f"topology: must contain all {layout.world_size} ranks (got {topology.world_size()}). Change the size of "
            f"its axis data, or pass num_stages."
        )
    for coordinate, rank in topology.mapping.items():
        data, model = getattr(coordinate, "data", 0), getattr(coordinate, "model", 0)
        expected = layout.rank(coordinate.pipe, data, model)
        if rank != expected:
            raise ConfigError(
                f'topology: must number ranks as ds_ext.rank_order "{layout.rank_order}" does (got rank {rank} instead '
                f"of {expected} at pipe {coordinate.pipe}, data {data}, model {model}). {_fix(topology, layout)}"
            )


def _fix(topology: ProcessTopology, layout: ParallelLayout) -> str:
    for order in rank_orders(layout):
        ordered = replace(layout, rank_order=order)
        if all(
            rank == ordered.rank(at.pipe, getattr(at, "data", 0), getattr(at, "model", 0))
            for at, rank in topology.mapping.items()
        ):
            return f'Set "rank_order": "{order}" in the "ds_ext" section.'
    return "Pass num_stages instead."
