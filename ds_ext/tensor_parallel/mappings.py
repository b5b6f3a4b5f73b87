"""Collectives of tensor and sequence parallelism as differentiable functions.

    name                forward                                 backward
    copy_to             identity                                all-reduce
    reduce_from         all-reduce                              identity
    gather              all-gather of the tokens                reduce-scatter
    reduce_scatter      reduce-scatter of the partial sums      all-gather
    gather_features     all-gather of the last dimension        this rank's slice
    split_features      this rank's slice of the last dimension all-gather
    gather_tokens       all-gather of the tokens                this rank's slice
    split_tokens        this rank's slice of the tokens         all-gather
    shared_parameters   identity                                all-reduce

The first two are those of tensor parallelism (Shoeybi et al. 2019, section 3). In a group of one rank every function
returns its input. No function modifies its input.

With sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2) each rank holds a slice of the
tokens between sharded layers. Tokens are dimension 1: (B, S / size, ...) on a rank holds tokens rank * S / size
onwards of (B, S, ...). An all-reduce equals a reduce-scatter plus an all-gather, so sequence parallelism sends as much
as tensor parallelism alone. Norms, dropout and residuals are computed, stored and sent to the next stage once instead
of on every rank.

Weights that read gathered tokens keep this rank's slice for the backward, which gathers it again (ibid.):
:func:`keep_slice`. This sends a quarter more, but a layer keeps 1 / size of these inputs.

Parameters applied to a slice of the tokens (norms, biases after a reduce-scatter, positions) are replicated, and each
rank computes the gradient from its own tokens. ``shared_parameters`` sums these gradients in every backward. The
engine, ZeRO and the gradient norm therefore need no special case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

try:
    from torch._C._autograd import _top_saved_tensors_default_hooks as _top_hooks
except ImportError:  # private: a later torch may not have it
    _top_hooks = None

from ds_ext.comm.gloo_cuda import transferable
from ds_ext.tensor_parallel.group import TensorParallel

_TOKENS = 1
_F = TypeVar("_F", bound=Callable[..., Any])


def once(backward: _F) -> _F:
    """Refuse to differentiate a backward again: autograd does not see its collectives."""
    return cast(_F, once_differentiable(backward))


def copy_to_tensor_model_parallel_region(x: Tensor, tp: TensorParallel) -> Tensor:
    return x if tp.size == 1 else _CopyTo.apply(x, tp)


def reduce_from_tensor_model_parallel_region(x: Tensor, tp: TensorParallel) -> Tensor:
    return x if tp.size == 1 else _ReduceFrom.apply(x, tp)


def gather_from_sequence_parallel_region(x: Tensor, tp: TensorParallel) -> Tensor:
    """Gather all tokens for sharded weights: (B, S / size, ...) to (B, S, ...)."""
    if tp.size == 1:
        return x
    gathered = _Gather.apply(x, tp)
    if torch.is_grad_enabled() and not _is_hooked():
        gathered.slice_of_tokens = _Slice(x, tp)
    return gathered


def keep_slice(x: Tensor) -> AbstractContextManager[object]:
    """Keep this rank's slice of gathered tokens for the backward of the operations in this context.

    In a forward that is recomputed, and for other tensors than :func:`gather_from_sequence_parallel_region` returns,
    operations keep ``x`` as usual.
    """
    kept = getattr(x, "slice_of_tokens", None)
    return nullcontext() if kept is None else saved_tensors_hooks(*kept.hooks(x))


def reduce_scatter_to_sequence_parallel_region(x: Tensor, tp: TensorParallel) -> Tensor:
    """Sum partial results and return this rank's slice of the tokens: (B, S, ...) to (B, S / size, ...)."""
    return x if tp.size == 1 else _ReduceScatter.apply(x, tp)


def shared_parameters(tp: TensorParallel, *parameters: Tensor) -> tuple[Tensor, ...]:
    """Return replicated parameters for a slice of the tokens. One all-reduce sums their gradients over the group."""
    return parameters if tp.size == 1 else _Shared.apply(tp, *parameters)


def gather_features(x: Tensor, tp: TensorParallel) -> Tensor:
    """Gather the last dimension, for results that every rank uses alike: (..., F / size) to (..., F)."""
    return x if tp.size == 1 else _GatherAlike.apply(x, tp, -1)


def gather_tokens(x: Tensor, tp: TensorParallel) -> Tensor:
    """Gather all tokens, for results that every rank uses alike: (B, S / size, ...) to (B, S, ...)."""
    return x if tp.size == 1 else _GatherAlike.apply(x, tp, _TOKENS)


def split_features(x: Tensor, tp: TensorParallel) -> Tensor:
    """Return this rank's slice of the last dimension of a tensor that all ranks have: (..., F) to (..., F / size)."""
    return x if tp.size == 1 else _SplitAlike.apply(x, tp, -1)


def split_tokens(x: Tensor, tp: TensorParallel) -> Tensor:
    """Return this rank's slice of the tokens of a tensor that all ranks have: (B, S, ...) to (B, S / size, ...)."""
    if tp.size == 1:
        return x
    tp.require_divisible(x.size(_TOKENS), "number of tokens with sequence_parallel")
    return _SplitAlike.apply(x, tp, _TOKENS)


def all_reduce(x: Tensor, tp: TensorParallel) -> Tensor:
    """Return the sum of a tensor over the group, without a gradient."""
    # Another branch of the graph may share this gradient: do not reduce it in place.
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=tp.group)
    return total


def _all_gather(x: Tensor, tp: TensorParallel, dim: int = _TOKENS) -> Tensor:
    x = x.contiguous()
    slices = [torch.empty_like(x) for _ in range(tp.size)]
    dist.all_gather(slices, x, group=tp.group)
    return torch.cat(slices, dim=dim)


def _reduce_scatter(x: Tensor, tp: TensorParallel) -> Tensor:
    tp.require_divisible(x.size(_TOKENS), "number of tokens with sequence_parallel")
    slices = [
        part.contiguous() for part in transferable(x, "reduce_scatter_", tp.group).chunk(tp.size, dim=_TOKENS)
    ]
    reduced = torch.empty_like(slices[0])
    dist.reduce_scatter(reduced, slices, group=tp.group)
    return reduced.to(x.device)


def _is_hooked() -> bool:
    """Return whether other code decides what operations keep, such as recomputation."""
    return _top_hooks is None or _top_hooks(True) is not None


_View = tuple[Sequence[int], Sequence[int]]  # shape and strides of a view of all gathered tokens


class _Slice:
    """This rank's slice of gathered tokens, which the backwards of all operations on them share."""

    def __init__(self, x: Tensor, tp: TensorParallel) -> None:
        self._slice, self._tp = _Kept(x.detach()), tp
        self._gathered: Tensor | None = None
        self._packed = self._unpacked = 0

    def hooks(self, gathered: Tensor) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """Return the functions that pack and unpack saved tensors: views of ``gathered``, and weights."""
        memory = gathered.untyped_storage().data_ptr()

        def pack(tensor: Tensor) -> _Kept | _View:
            if tensor.untyped_storage().data_ptr() != memory:
                return _Kept(tensor)
            self._packed += 1
            return tensor.shape, tensor.stride()

        def unpack(kept: _Kept | _View) -> Tensor:
            return kept.get() if isinstance(kept, _Kept) else self._gather().as_strided(*kept)

        return pack, unpack

    def _gather(self) -> Tensor:
        """Gather the tokens again; the tensor is freed after all operations have it."""
        mine = self._slice.get()
        if self._gathered is None:
            self._gathered = _all_gather(mine, self._tp)
        gathered = self._gathered
        self._unpacked += 1
        if self._unpacked >= self._packed:
            self._gathered, self._unpacked = None, 0
        return gathered


class _Kept:
    """Tensor that a backward needs unchanged. torch does not check this for tensors with hooks."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def get(self) -> Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"tensor of shape {tuple(self._tensor.shape)} is at version {self._tensor._version}; expected version "
                f"{self._version}."
            )
        return self._tensor


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0], ctx.tp), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        return all_reduce(x, tp)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return _all_gather(x, tp)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grads[0], ctx.tp), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return _reduce_scatter(x, tp)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grads[0], ctx.tp), None


class _GatherAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel, dim: int) -> Tensor:
        ctx.tp, ctx.dim = tp, dim
        return _all_gather(x, tp, dim)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.tp.shard(grads[0], ctx.dim % grads[0].dim()).contiguous(), None, None


class _SplitAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel, dim: int) -> Tensor:
        ctx.tp, ctx.dim = tp, dim
        return tp.shard(x, dim % x.dim()).contiguous()

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(grads[0], ctx.tp, ctx.dim), None, None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tp: TensorParallel, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.tp = tp
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(total, group=ctx.tp.group)
        parts = total.split([grad.numel() for grad in grads])
        return None, *(part.view_as(grad) for part, grad in zip(parts, grads, strict=True))
