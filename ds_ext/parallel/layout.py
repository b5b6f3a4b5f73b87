"""Layout of the world: ranks, coordinates and groups. Pure arithmetic.

By default, ranks are numbered as in DeepSpeed: the tensor-parallel index varies fastest, then data, then pipeline:
``rank = tp + TP * (dp + DP * device)``. :mod:`.rank_order` has the other orders.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ..errors import ConfigError
from ..pipe_schedules import Placement, Program
from .rank_order import DATA, DEEPSPEED_ORDER, MIRROR, PIPELINE, TENSOR, RankOrder


@dataclass(frozen=True)
class ParallelLayout:
    """World of DP pipeline groups, each with the placement's D devices of TP ranks each.

    Args:
        tensor_parallel_size: TP, the number of ranks per device.
        data_parallel_size: DP, the number of pipeline groups; replicas inside a placement do not count.
    """

    placement: Placement
    tensor_parallel_size: int
    data_parallel_size: int
    rank_order: RankOrder = DEEPSPEED_ORDER

    @property
    def world_size(self) -> int:
        return self.placement.num_devices * self.tensor_parallel_size * self.data_parallel_size

    @property
    def copies(self) -> int:
        """Number of copies of the model: data-parallel ranks, replicas inside a placement included."""
        return self.placement.replicas * self.data_parallel_size

    def rank(self, device: int, data: int, tensor: int) -> int:
        """Return the global rank of a device of pipeline group ``data``."""
        index = {TENSOR: tensor, DATA: data, PIPELINE: device}
        if self.rank_order.pairs_mirrors:
            index[PIPELINE], index[MIRROR] = self._mirror_index[device]
        return self.rank_order.rank(index, self._axis_sizes)

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return the coordinates (device, data, tensor) of a global rank."""
        index = self.rank_order.index(rank, self._axis_sizes)
        device = index[PIPELINE]
        if self.rank_order.pairs_mirrors:
            device = self.placement.replica_groups[device][index[MIRROR]]
        return device, index[DATA], index[TENSOR]

    @cached_property
    def _axis_sizes(self) -> dict[str, int]:
        sizes = {
            TENSOR: self.tensor_parallel_size,
            DATA: self.data_parallel_size,
            PIPELINE: self.placement.num_devices,
        }
        if self.rank_order.pairs_mirrors:
            sizes |= {PIPELINE: len(self.placement.replica_groups), MIRROR: self.placement.replicas}
        return sizes

    @cached_property
    def _mirror_index(self) -> dict[int, tuple[int, int]]:
        """(index of its group of replicas, index within the group) of every device."""
        groups = self.placement.replica_groups
        return {
            device: (pair, replica)
            for pair, devices in enumerate(groups)
            for replica, device in enumerate(devices)
        }

    def role(self, rank: int) -> str | None:
        """Return ``"forward"`` or ``"backward"`` under forward/backward disaggregation, else None."""
        return None

    def peers(self, rank: int, device: int) -> tuple[int, ...]:
        """Return the ranks of ``device`` that ``rank`` exchanges messages with."""
        _, data, tensor = self.coordinates(rank)
        return (self.rank(device, data, tensor),)

    def groups(self) -> dict[str, list[list[int]]]:
        """Return the rank lists of every kind of group: tensor, pipeline, data and (with replicas) mirror."""
        devices, tp, dp = self.placement.num_devices, self.tensor_parallel_size, self.data_parallel_size
        table = {
            "tensor": [[self.rank(p, d, t) for t in range(tp)] for p in range(devices) for d in range(dp)],
            "pipeline": [[self.rank(p, d, t) for p in range(devices)] for d in range(dp) for t in range(tp)],
            "data": [[self.rank(p, d, t) for d in range(dp)] for p in range(devices) for t in range(tp)],
        }
        if self.placement.replicas > 1:
            table["mirror"] = [
                [self.rank(p, d, t) for p in pair]
                for pair in self.placement.replica_groups
                for d in range(dp)
                for t in range(tp)
            ]
        return table


def data_parallel_size(world_size: int, placement: Placement, tensor_parallel_size: int) -> int:
    """Return world size / (pipeline x tensor-parallel size), which must be a positive integer."""
    unit = placement.num_devices * tensor_parallel_size
    sizes = f"pipeline_parallel_size {placement.num_devices} x tensor_parallel_size {tensor_parallel_size}"
    if placement.forward_devices:
        merged = tensor_parallel_size // placement.merged
        unit = placement.stages * (merged + placement.replicas * tensor_parallel_size)
        sizes = (
            f"pipeline_parallel_size {placement.stages} x ({merged} forward + {placement.replicas} x "
            f"{tensor_parallel_size} backward ranks per stage)"
        )
    if world_size >= unit and world_size % unit == 0:
        return world_size // unit
    below, above = world_size // unit * unit, (world_size // unit + 1) * unit
    fitting = f"{below} or {above}" if below else str(above)
    raise ConfigError(
        f"world size: must be a multiple of {unit} = {sizes} (got {world_size}). Start {fitting} processes (deepspeed "
        f"--num_gpus {below or above} ..., or torchrun --nproc_per_node {below or above} ...), or change the two sizes "
        'in the "ds_ext" section.'
    )


def links_of(layout: ParallelLayout, programs: Iterable[Program]) -> list[tuple[int, int]]:
    """Return the (sender, receiver) global ranks of every link, each once; the same on all ranks."""
    links = {
        (device, instruction.peer)
        for program in programs
        for device, instructions in enumerate(program.instructions)
        for instruction in instructions
        if instruction.peer is not None and instruction.name.startswith("Send")
    }
    pairs = [
        (layout.rank(source, data, tensor), layout.rank(target, data, tensor))
        for source, target in sorted(links)
        for data in range(layout.data_parallel_size)
        for tensor in range(layout.tensor_parallel_size)
    ]
    return list(dict.fromkeys(pairs))  # a merged forward rank appears once per tensor-parallel index
