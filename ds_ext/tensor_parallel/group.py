"""One rank's place in its tensor-parallel group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_ext.errors import ConfigError


@dataclass(frozen=True)
class TensorParallel:
    """This rank's coordinate in a tensor-parallel group, handed to every layer that shards something.

    Args:
        rank: position in the group, 0 .. size-1.
        size: number of ranks that share each sharded weight; 1 never communicates.
        group: the process group of those ranks; required when ``size`` is above 1.
        merged: how many shards of a larger group this one rank does alone, with whole weights; its random numbers and
            padding are then those of the shards.

    Raises:
        ConfigError: if ``rank`` is outside the group, or a group of several ranks has no process group.
    """

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None
    merged: int = 1

    @property
    def shards(self) -> int:
        """Pieces that the weights of other ranks of the model may be cut into."""
        return self.size * self.merged

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(
                f"tensor-parallel rank must be in 0..size-1; got rank {self.rank} of size {self.size}."
            )
        if self.size > 1 and self.group is None:
            raise ConfigError(
                f"a tensor-parallel size of {self.size} needs the process group of its {self.size} ranks; "
                "pass group=..., or use size 1."
            )

    def shard_size(self, total: int, name: str) -> int:
        """Length of one rank's share of a dimension of ``total`` elements.

        Raises:
            ConfigError: if ``total`` does not divide by the size of the group.
        """
        if total % self.size:
            lower = total - total % self.size
            choices = f"{lower} or {lower + self.size}" if lower else f"{self.size}"
            raise ConfigError(
                f"{name} must be a multiple of {self.size} (tensor-parallel size); got {total}. "
                f"Use {choices}."
            )
        return total // self.size

    def shard(self, full: Tensor, dim: int) -> Tensor:
        """This rank's slice of ``full`` along ``dim``, as a view."""
        length = self.shard_size(full.size(dim), f"dimension {dim}")
        return full.narrow(dim, self.rank * length, length)


def create_tensor_parallel(groups: Sequence[Sequence[int]]) -> TensorParallel:
    """Make the process groups of all tensor-parallel ranks; a collective call of the whole world.

    Args:
        groups: the global ranks of every group, the same list on all ranks; each rank is in one of them. A rank of a
            smaller group than others (a merged forward rank) does the work of several of theirs.

    Returns:
        This rank's place in its group.
    """
    rank, shards = dist.get_rank(), max(map(len, groups), default=1)
    mine = TensorParallel(merged=shards // next((len(ranks) for ranks in groups if rank in ranks), shards))
    for ranks in groups:
        if len(ranks) > 1:
            group = dist.new_group(list(ranks))
            if rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                mine = TensorParallel(list(ranks).index(rank), len(ranks), group)
    return mine
