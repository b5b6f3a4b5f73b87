"""Linear and embedding layers whose weights are sharded over a tensor-parallel group (Shoeybi et al. 2019).

A sharded parameter has the attributes ``model_parallel`` and ``tensor_model_parallel``, by which DeepSpeed and Megatron
count it on every rank in a gradient norm, and ``partition_dim``. Concatenating the shards in rank order along
``partition_dim`` gives the full weight. A replicated parameter has none of these attributes. A weight with padding rows
also has ``unpadded_size``, because the padding depends on the group size.

The full weight is initialized on the CPU and then sharded, so initial values do not depend on the group size. In
shapes, T is the size of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_ext.errors import ConfigError
from ds_ext.tensor_parallel.group import TensorParallel
from ds_ext.tensor_parallel.mappings import (
    all_reduce,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    keep_slice,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    shared_parameters,
)
from ds_ext.tensor_parallel.weight_gradients import (
    Rows,
    deferred_linear,
    embedding,
    embedding_rows,
    is_deferrable,
    linear,
)

InitMethod = Callable[[Tensor], object]
"""Function that fills a full (unsharded) fp32 CPU weight in place."""


class ColumnParallelLinear(nn.Module):
    """Linear layer ``y = x A^T + b`` with the output features (rows of A) sharded over the group.

    Args:
        input_size: input features of the full layer.
        output_size: output features of the full layer.
        tp: position of this rank in its group.
        bias: add a bias, which starts at zero.
        sequence_parallel: take this rank's slice of the tokens and return all tokens.
        groups: number of groups of output features that are never divided; None: one per feature. If the shards do not
            divide the groups, several ranks use one group: every rank then holds the whole weight and computes the
            features of its group.
        init: function that fills the full (output_size, input_size) weight.

    Raises:
        ConfigError: if ``output_size`` is not a multiple of the group size, or if ranks would divide a group.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        tp: TensorParallel,
        bias: bool = True,
        sequence_parallel: bool = False,
        *,
        init: InitMethod,
        groups: int | None = None,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        self.rows: slice | None = None  # those that this rank computes of a replicated weight; None: all
        weight, zeros = (output_size, input_size), nn.init.zeros_
        if groups is None or groups % tp.shards == 0:
            tp.require_divisible(output_size, "output_size")
            self.weight = sharded_parameter(weight, 0, tp, init)
            self.bias = sharded_parameter((output_size,), 0, tp, zeros) if bias else None
        else:
            if tp.shards % groups:
                raise ConfigError(
                    f"groups: must divide the {tp.shards} shards, or be a multiple of them (got {groups})."
                )
            self.weight = replicated_parameter(weight, init)
            self.bias = replicated_parameter((output_size,), zeros) if bias else None
            if tp.size > 1:
                rows, group = output_size // groups, tp.rank * groups // tp.size
                self.rows = slice(group * rows, (group + 1) * rows)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., input_size), the same on all ranks, to (..., output_size / T).

        With sequence parallelism the input is (B, S / T, input_size).
        """
        return self.project(enter_tensor_parallel(x, self.tp, self.sequence_parallel))

    def project(self, x: Tensor) -> Tensor:
        """Apply the weight to a result of :func:`enter_tensor_parallel`, which several layers may share."""
        with keep_slice(x):
            if self.rows is None:
                return linear(x, self.weight, self.bias)
            return linear_rows(x, self.weight, self.bias, self.rows, self.tp)


class RowParallelLinear(nn.Module):
    """Linear layer ``y = x A^T + b`` with the input features (columns of A) sharded over the group.

    Args:
        input_size: input features of the full layer.
        output_size: output features of the full layer.
        tp: position of this rank in its group.
        bias: add a replicated bias once, after the sum over the group; it starts at zero.
        sequence_parallel: return this rank's slice of the tokens.
        init: function that fills the full (output_size, input_size) weight.

    Raises:
        ConfigError: if ``input_size`` is not a multiple of the group size.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        tp: TensorParallel,
        bias: bool = True,
        sequence_parallel: bool = False,
        *,
        init: InitMethod,
    ) -> None:
        super().__init__()
        tp.require_divisible(input_size, "input_size")
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        self.weight = sharded_parameter((output_size, input_size), 1, tp, init)
        self.bias = replicated_parameter((output_size,), nn.init.zeros_) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., input_size / T) to (..., output_size) on all ranks.

        With sequence parallelism the output is (B, S / T, output_size). S: tokens of a sequence.
        """
        y = leave_tensor_parallel(linear(x, self.weight), self.tp, self.sequence_parallel)
        bias = self.bias
        if bias is not None and self.sequence_parallel:
            # Ranks add the bias to different tokens, so its gradient is summed over the group.
            (bias,) = shared_parameters(self.tp, bias)
        return y if bias is None else y + bias


class VocabParallelEmbedding(nn.Module):
    """Token embedding with the rows of its table sharded over the group.

    Args:
        num_embeddings: rows of the full table, padded to a multiple of the group size.
        embedding_dim: columns of the table.
        tp: position of this rank in its group.
        init: function that fills the full (num_embeddings, embedding_dim) table.
        padding: number of unused rows at the end. Checkpoints omit them and thus fit any padding.
        sequence_parallel: return this rank's slice of the tokens.

    Raises:
        ConfigError: if ``num_embeddings`` is not a multiple of the group size.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        tp: TensorParallel,
        *,
        init: InitMethod,
        padding: int = 0,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.num_embeddings = num_embeddings
        self.sequence_parallel = sequence_parallel
        self.rows = tp.shard_size(num_embeddings, "num_embeddings")
        shape, unpadded = (num_embeddings, embedding_dim), num_embeddings - padding
        self.weight = sharded_parameter(shape, 0, tp, init, unpadded=unpadded)

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Map all token ids (B, S) to (B, S, D) on all ranks, or to (B, S / T, D) with sequence parallelism.

        Raises:
            IndexError: on CPU, for an id outside the table. On CUDA this is a device assertion.
        """
        if self.tp.size == 1:
            return embedding(ids_BS, self.weight)
        check_ids(ids_BS, self.num_embeddings)
        partial_BSD = embedding_rows(ids_BS, self.weight, self.tp.rank * self.rows)
        return leave_tensor_parallel(partial_BSD, self.tp, self.sequence_parallel)


class DividedEmbedding(nn.Module):
    """Token embedding with one parameter per part of the vocabulary-parallel head that is tied to it.

    ``weights`` are this rank's rows of every part, as the :class:`.chunked_loss.HeadPart` of its number has them.
    ``vocab_size`` is without padding.
    """

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        tp: TensorParallel,
        vocab_size: int,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        for weight in weights:
            mark_rows(weight, tp, vocab_size)
        self.weight = nn.ParameterList(weights)
        self._vocab_size = vocab_size
        self._tp, self._sequence_parallel = tp, sequence_parallel

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Map token ids as :meth:`VocabParallelEmbedding.forward` does."""
        shards, rows = len(self.weight) * self._tp.size, len(self.weight[0])
        check_ids(ids_BS, self._vocab_size)
        firsts = range(self._tp.rank * rows, shards * rows, self._tp.size * rows)
        partial_BSD, *others = (
            embedding_rows(ids_BS, weight, first) for weight, first in zip(self.weight, firsts, strict=True)
        )
        for other_BSD in others:
            partial_BSD = partial_BSD + other_BSD
        return leave_tensor_parallel(partial_BSD, self._tp, self._sequence_parallel)


def enter_tensor_parallel(x: Tensor, tp: TensorParallel, sequence_parallel: bool) -> Tensor:
    """Return the input of a sharded weight: the gathered tokens, or ``x`` itself if all ranks have it."""
    if sequence_parallel:
        return gather_from_sequence_parallel_region(x, tp)
    return copy_to_tensor_model_parallel_region(x, tp)


def project_logits(x: Tensor, weight: Tensor, tp: TensorParallel, sequence_parallel: bool) -> Tensor:
    """Map hidden states, or this rank's tokens of them, to logits of all tokens for this rank's vocabulary."""
    x = enter_tensor_parallel(x, tp, sequence_parallel)
    with keep_slice(x):
        return linear(x, weight)


def leave_tensor_parallel(x: Tensor, tp: TensorParallel, sequence_parallel: bool) -> Tensor:
    """Sum the partial results over the group. Return this rank's slice of the tokens, or all tokens."""
    if sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(x, tp)
    return reduce_from_tensor_model_parallel_region(x, tp)


def shard_dim(parameter: Tensor) -> int | None:
    is_replicated = (
        getattr(parameter, "tensor_model_parallel", None) is False
    )  # Megatron's tag, with dimension -1
    return None if is_replicated else getattr(parameter, "partition_dim", None)


def is_sharded(parameter: Tensor) -> bool:
    tags = ("model_parallel", "tensor_model_parallel")
    return shard_dim(parameter) is not None or any(getattr(parameter, tag, False) for tag in tags)


def unpadded_size(parameter: Tensor, padded: int) -> int:
    """Return the size of the full weight along ``shard_dim()``; ``padded`` is its size with padding."""
    return getattr(parameter, "unpadded_size", padded)


def mark_rows(weight: nn.Parameter, tp: TensorParallel, vocab_size: int) -> None:
    """Mark this rank's rows of a part of a head, so that a checkpoint joins the parts, and the shards of each."""
    rows: Any = weight
    rows.partition_dim, rows.unpadded_size = 0, vocab_size
    rows.model_parallel = tp.size > 1 or getattr(weight, "model_parallel", False)


def check_ids(ids: Tensor, limit: int) -> None:
    """Check that token ids are in 0..limit-1. A sharded lookup would attribute other ids to another rank."""
    valid = ((ids >= 0) & (ids < limit)).all()
    if ids.device.type != "cpu":
        torch.ops.aten._assert_async.msg(valid, f"token ids: must be in 0..{limit - 1}")
    elif not valid:
        raise IndexError(
            f"token ids: must be in 0..{limit - 1} (got {int(ids.min())}..{int(ids.max())}). "
            "Use the data's tokenizer, or a larger vocab_size."
        )


def linear_rows(x: Tensor, weight: Tensor, bias: Tensor | None, rows: slice, tp: TensorParallel) -> Tensor:
    """Compute ``F.linear`` with ``rows`` of a replicated weight and bias. Ranks may use the same or different rows.

    The gradients are summed over the group, have the shape of the whole parameters, and are deferred where possible.
    """

    def sum_gradient(rows_gradient: Tensor, parameter: Tensor) -> Tensor:
        full = torch.zeros_like(parameter)
        full[rows] = rows_gradient
        return all_reduce(full, tp)

    if is_deferrable(x, weight, bias):
        return deferred_linear(x, weight, bias, Rows(rows, sum_gradient))
    if bias is None:
        (weight,) = shared_parameters(tp, weight)
        return F.linear(x, weight[rows])
    weight, bias = shared_parameters(tp, weight, bias)
    return F.linear(x, weight[rows], bias[rows])


_skip_initial_values = ContextVar("_skip_initial_values", default=False)


@contextmanager
def skip_initial_values() -> Iterator[None]:
    """Allocate only shards and leave them undefined, because weights are loaded next."""
    token = _skip_initial_values.set(True)
    try:
        yield
    finally:
        _skip_initial_values.reset(token)


def replicated_parameter(shape: Sequence[int], init: InitMethod) -> nn.Parameter:
    """Return a parameter that every rank holds whole. ``init`` fills it in fp32."""
    if _skip_initial_values.get():
        return nn.Parameter(torch.empty(tuple(shape), device="cpu"))
    full = torch.empty(tuple(shape), dtype=torch.float32, device="cpu")
    with torch.no_grad():
        init(full)
    return nn.Parameter(full.to(torch.get_default_dtype()))


def sharded_parameter(
    shape: Sequence[int],
    dim: int,
    tp: TensorParallel,
    init: InitMethod,
    unpadded: int | None = None,
    part: int = 0,
    parts: int = 1,
) -> nn.Parameter:
    """Return this rank's shard of a parameter, or of one of its parts of equal size.

    Args:
        shape, init: shape and initialization of the full parameter.
        unpadded: size of the full parameter along ``dim`` without padding; None: no padding.
        part, parts: number of the part, and number of the parts along ``dim``; each is sharded over the group.
    """
    part_size = shape[dim] // parts
    if _skip_initial_values.get():
        sizes = [*shape]
        sizes[dim] = tp.shard_size(part_size, f"dimension {dim}")
        parameter: Any = nn.Parameter(torch.empty(sizes, device="cpu"))
    else:
        full = torch.empty(tuple(shape), dtype=torch.float32, device="cpu")
        with torch.no_grad():
            init(full)
        # Clone the shard: a view would keep the full weight alive.
        rows = full.narrow(dim, part * part_size, part_size)
        parameter = nn.Parameter(tp.shard(rows, dim).to(torch.get_default_dtype()).clone())
    parameter.model_parallel = parameter.tensor_model_parallel = True
    parameter.partition_dim = dim
    if unpadded is not None:
        parameter.unpadded_size = unpadded
    return parameter
