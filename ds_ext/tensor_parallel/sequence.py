"""Sequence parallelism: between the sharded layers each rank holds a slice of the tokens (Korthikanti et al. 2022,
arXiv 2205.05198, section 4.2.2).

    name               forward                                backward
    gather             all-gather of the tokens               reduce-scatter
    reduce_scatter     reduce-scatter of the partial sums     all-gather
    shared_parameters  identity                               all-reduce

Tokens are dimension 1: (B, S / size, ...) on a rank is tokens rank * S / size and on of (B, S, ...). An all-reduce is a
reduce-scatter and an all-gather, so that sequence parallelism sends as much as tensor parallelism alone; norms, dropout
and residuals are computed, kept and sent to the next stage once instead of on every rank.

Parameters that work on a slice of the tokens (norms, biases behind a reduce-scatter, positions) are replicated, and
each rank has the gradient of its own tokens: ``shared_parameters`` adds them up in every backward, so that the engine,
ZeRO and the gradient norm see what they see without sequence parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ext.tensor_parallel.group import TensorParallel

_TOKENS = 1


def gather_from_sequence_parallel_region(x: Tensor, tp: TensorParallel) -> Tensor:
    """All tokens, for sharded weights: (B, S / size, ...) to (B, S, ...); the gradient is summed and cut again."""
    return x if tp.size == 1 else _Gather.apply(x, tp)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, tp: TensorParallel) -> Tensor:
    """This rank's tokens of the sum of all ranks' partial results: (B, S, ...) to (B, S / size, ...).

    Raises:
        ConfigError: if the tokens do not divide by the size of the group.
    """
    return x if tp.size == 1 else _ReduceScatter.apply(x, tp)


def shared_parameters(tp: TensorParallel, *parameters: Tensor) -> tuple[Tensor, ...]:
    """Replicated parameters for use on a slice of the tokens; their gradients are summed over the group, in one go."""
    return parameters if tp.size == 1 else _Shared.apply(tp, *parameters)


def _all_gather(x: Tensor, tp: TensorParallel) -> Tensor:
    x = x.contiguous()
    slices = [torch.empty_like(x) for _ in range(tp.size)]
    dist.all_gather(slices, x, group=tp.group)
    return torch.cat(slices, dim=_TOKENS)


def _reduce_scatter(x: Tensor, tp: TensorParallel) -> Tensor:
    tp.shard_size(x.size(_TOKENS), "the number of tokens, with sequence_parallel,")
    slices = [part.contiguous() for part in x.chunk(tp.size, dim=_TOKENS)]
    mine = torch.empty_like(slices[0])
    dist.reduce_scatter(mine, slices, group=tp.group)
    return mine


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return _all_gather(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grads[0], ctx.tp), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return _reduce_scatter(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grads[0], ctx.tp), None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tp: TensorParallel, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.tp = tp
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(total, group=ctx.tp.group)
        parts = total.split([grad.numel() for grad in grads])
        return None, *(part.view_as(grad) for part, grad in zip(parts, grads, strict=True))
