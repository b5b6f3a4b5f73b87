"""Four conjugate pairs of collectives for tensor parallelism (Shoeybi et al. 2019, section 3).

    name          forward                       backward
    copy_to       identity                      all-reduce
    reduce_from   all-reduce                    identity
    scatter_to    slice of the last dimension   all-gather of the last dimension
    gather_from   all-gather                    slice

In a group of one rank every function returns its input. No function modifies its input.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ext.tensor_parallel.group import TensorParallel


def copy_to_tensor_model_parallel_region(x: Tensor, tp: TensorParallel) -> Tensor:
    """Pass a replicated tensor of any shape to sharded weights. Its gradient is summed over the group."""
    return x if tp.size == 1 else _CopyTo.apply(x, tp)


def reduce_from_tensor_model_parallel_region(x: Tensor, tp: TensorParallel) -> Tensor:
    """Sum partial results of any shape over the group. All ranks get the total."""
    return x if tp.size == 1 else _ReduceFrom.apply(x, tp)


def scatter_to_tensor_model_parallel_region(x: Tensor, tp: TensorParallel) -> Tensor:
    """Return this rank's slice of the last dimension: (..., n) to (..., n / size).

    Raises:
        ConfigError: if the last dimension is not a multiple of the group size.
    """
    return x if tp.size == 1 else _ScatterTo.apply(x, tp)


def gather_from_tensor_model_parallel_region(x: Tensor, tp: TensorParallel) -> Tensor:
    """Concatenate the slices of all ranks along the last dimension: (..., n / size) to (..., n)."""
    return x if tp.size == 1 else _GatherFrom.apply(x, tp)


def _all_reduce(x: Tensor, tp: TensorParallel) -> Tensor:
    # Another branch of the graph may share this gradient: do not reduce it in place.
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=tp.group)
    return total


def _all_gather_last(x: Tensor, tp: TensorParallel) -> Tensor:
    x = x.contiguous()
    shards = [torch.empty_like(x) for _ in range(tp.size)]
    dist.all_gather(shards, x, group=tp.group)
    return torch.cat(shards, dim=-1)


def _slice_last(x: Tensor, tp: TensorParallel) -> Tensor:
    return tp.shard(x, x.dim() - 1).contiguous()


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grads[0], ctx.tp), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        return _all_reduce(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return _slice_last(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_gather_last(grads[0], ctx.tp), None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return _all_gather_last(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _slice_last(grads[0], ctx.tp), None
