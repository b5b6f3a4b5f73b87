"""Tensor-parallel group of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_ext.errors import ConfigError


@dataclass(frozen=True)
class TensorParallel:
    """Position of this rank in its tensor-parallel group, an argument of every sharded layer.

    Args:
        size: number of ranks that share each sharded weight; a group of size 1 never communicates.
        group: process group of these ranks; required if ``size`` is above 1.
        merged: number of shards that this rank computes alone with whole weights. Its random numbers and padding match
            those of the shards.
    """

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None
    merged: int = 1

    @property
    def shards(self) -> int:
        """Number of shards of a weight in the largest group of the model."""
        return self.size * self.merged

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(
                f"tensor-parallel rank: must be in 0..{self.size - 1} (got {self.rank} of size {self.size})."
            )
        if self.size > 1 and self.group is None:
            raise ConfigError(
                f"tensor-parallel group: a size above 1 needs a process group (got size {self.size} and group None). "
                "Pass group=..., or use size 1."
            )

    def shard_size(self, total: int, name: str) -> int:
        """Return the length of one rank's slice of a dimension. ``name`` is for errors."""
        self.require_divisible(total, name)
        return total // self.size

    def require_divisible(self, total: int, name: str) -> None:
        if total % self.size:
            lower = total - total % self.size
            choices = f"{lower} or {lower + self.size}" if lower else f"{self.size}"
            raise ConfigError(
                f"{name}: must be a multiple of the tensor-parallel size {self.size} (got {total}). Use {choices}."
            )

    def shard(self, full: Tensor, dim: int) -> Tensor:
        """Return this rank's slice of ``full`` along ``dim``, as a view."""
        length = self.shard_size(full.size(dim), f"dimension {dim}")
        return full.narrow(dim, self.rank * length, length)


def create_tensor_parallel(groups: Sequence[Sequence[int]]) -> TensorParallel:
    """Create the process groups of all tensor-parallel groups. All ranks must call this together.

    Args:
        groups: global ranks of every group, the same on all ranks; each rank belongs to one group. A group of one rank
            (a merged forward rank) computes all shards of the largest group.

    Returns:
        Position of this rank in its group.
    """
    rank, largest, tp = dist.get_rank(), max(map(len, groups), default=1), TensorParallel()
    for ranks in groups:
        group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        if rank in ranks:
            assert group is None or isinstance(group, dist.ProcessGroup)
            # A layer with merged shards draws the random numbers of all of them, so its rank must have no group.
            merged = largest if group is None else 1
            tp = TensorParallel(list(ranks).index(rank), len(ranks), group, merged)
    return tp


_current: ContextVar[TensorParallel | None] = ContextVar("tensor_parallel", default=None)
_current_tokens: ContextVar[TensorParallel | None] = ContextVar("sequence_parallel", default=None)


def current_tensor_parallel() -> TensorParallel:
    """Return the position of this rank, for layers that a :class:`ds_ext.PipelineModule` builds."""
    return _current.get() or TensorParallel()


def current_sequence_parallel() -> TensorParallel:
    """Return the position of this rank in the group that divides the tokens between layers, which may have one rank."""
    return _current_tokens.get() or TensorParallel()


@contextmanager
def building_for(tp: TensorParallel, sequence_parallel: bool = False) -> Iterator[None]:
    """Context in which layers are built as shards of a group."""
    tokens = [_current.set(tp), _current_tokens.set(tp if sequence_parallel else None)]
    try:
        yield
    finally:
        _current.reset(tokens[0])
        _current_tokens.reset(tokens[1])
