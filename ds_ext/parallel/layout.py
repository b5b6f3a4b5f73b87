"""Layout of the world: ranks, coordinates and groups. Pure arithmetic.

Ranks are numbered as in DeepSpeed: the tensor-parallel index varies fastest, then data, then pipeline:
``rank = tp + TP * (dp + DP * device)``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..pipe_schedules import Placement


@dataclass(frozen=True)
class ParallelLayout:
    """World of DP pipeline groups, each with the placement's D devices of TP ranks each.

    Args:
        placement: device of every stage of one pipeline group.
        tensor_parallel_size: TP, the number of ranks per device.
        data_parallel_size: DP, the number of pipeline groups; replicas inside a placement do not count.
    """

    placement: Placement
    tensor_parallel_size: int
    data_parallel_size: int

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.placement.num_devices * self.tensor_parallel_size * self.data_parallel_size

    def rank(self, device: int, data: int, tensor: int) -> int:
        """Return the global rank of a device of pipeline group ``data``."""
        return tensor + self.tensor_parallel_size * (data + self.data_parallel_size * device)

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return the coordinates (device, data, tensor) of a global rank."""
        rest, tensor = divmod(rank, self.tensor_parallel_size)
        device, data = divmod(rest, self.data_parallel_size)
        return device, data, tensor

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
    """Return world size / (pipeline x tensor-parallel size). Raises ConfigError if it is not a positive integer."""
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
