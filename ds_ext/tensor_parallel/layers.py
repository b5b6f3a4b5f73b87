"""Linear and embedding layers whose weights are sharded over a tensor-parallel group (Shoeybi et al. 2019).

A sharded parameter carries ``model_parallel`` and ``tensor_model_parallel`` (DeepSpeed and Megatron count it
on every rank when they take a gradient norm) and ``partition_dim``, the dimension along which the shards of
the ranks, concatenated in rank order, give the full weight. A replicated parameter carries none of them. A weight
whose last rows are padding, which depends on the size of the group, also carries ``unpadded_size``.

The full weight is always made first, on the CPU, and then cut: a start value cannot depend on the size of the
group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_ext.tensor_parallel.group import TensorParallel
from ds_ext.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from ds_ext.tensor_parallel.sequence import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    shared_parameters,
)
from ds_ext.tensor_parallel.weight_gradients import embedding, linear

InitMethod = Callable[[Tensor], object]
"""Fills a full (unsharded) fp32 CPU weight in place."""


class ColumnParallelLinear(nn.Module):
    """``y = x A^T + b`` with the rows of A, which are the output features, shared out over the group.

    Input (..., input_size), equal on all ranks. Output (..., output_size / size), this rank's features, or
    (..., output_size) with ``gather_output``.

    Args:
        input_size, output_size: sizes of the full layer.
        tp: this rank's place in its group.
        sequence_parallel: the input is (B, S / size, input_size), this rank's tokens; the output has all of them.
        init: fills the full (output_size, input_size) weight; the bias starts at zero.

    Raises:
        ConfigError: if ``output_size`` does not divide by the size of the group.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        tp: TensorParallel,
        bias: bool = True,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        *,
        init: InitMethod,
    ) -> None:
        super().__init__()
        tp.shard_size(output_size, "output_size")
        self.tp = tp
        self.gather_output = gather_output
        self.sequence_parallel = sequence_parallel
        self.weight = sharded_parameter((output_size, input_size), 0, tp, init)
        self.bias = sharded_parameter((output_size,), 0, tp, nn.init.zeros_) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = linear(enter_tensor_parallel(x, self.tp, self.sequence_parallel), self.weight, self.bias)
        return gather_from_tensor_model_parallel_region(y, self.tp) if self.gather_output else y


class RowParallelLinear(nn.Module):
    """``y = x A^T + b`` with the columns of A, which are the input features, shared out over the group.

    Input (..., input_size / size), this rank's features, or (..., input_size) without ``input_is_parallel``.
    Output (..., output_size), equal on all ranks. The bias is replicated and added once, after the sum.

    Args:
        input_size, output_size: sizes of the full layer.
        tp: this rank's place in its group.
        sequence_parallel: the output is (B, S / size, output_size), this rank's tokens.
        init: fills the full (output_size, input_size) weight; the bias starts at zero.

    Raises:
        ConfigError: if ``input_size`` does not divide by the size of the group.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        tp: TensorParallel,
        bias: bool = True,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        *,
        init: InitMethod,
    ) -> None:
        super().__init__()
        tp.shard_size(input_size, "input_size")
        self.tp = tp
        self.input_is_parallel = input_is_parallel
        self.sequence_parallel = sequence_parallel
        self.weight = sharded_parameter((output_size, input_size), 1, tp, init)
        self.bias = nn.Parameter(torch.zeros(output_size, device="cpu")) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if not self.input_is_parallel:
            x = scatter_to_tensor_model_parallel_region(x, self.tp)
        y = leave_tensor_parallel(linear(x, self.weight), self.tp, self.sequence_parallel)
        if self.bias is None:
            return y
        return y + (shared_parameters(self.tp, self.bias)[0] if self.sequence_parallel else self.bias)


class VocabParallelEmbedding(nn.Module):
    """A token embedding whose rows are shared out over the group: ids_BS to hidden_BSD, on all ranks.

    With ``sequence_parallel`` every rank gets its tokens of the result, (B, S / size, D); the ids are those of all.

    Args:
        num_embeddings: rows of the full table, padded to a multiple of the size of the group.
        embedding_dim: columns.
        tp: this rank's place in its group.
        init: fills the full (num_embeddings, embedding_dim) table.
        padding: how many of the last rows no id ever names, so that a checkpoint is one of any padding.

    Raises:
        ConfigError: if ``num_embeddings`` does not divide by the size of the group.
        IndexError: at run time, on CPU, for an id outside the table (a device assertion on CUDA).
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
        if self.tp.size == 1:
            return embedding(ids_BS, self.weight)
        check_ids(ids_BS, self.num_embeddings)
        local_BS = ids_BS - self.tp.rank * self.rows
        foreign_BS = (local_BS < 0) | (local_BS >= self.rows)
        partial_BSD = embedding(local_BS.masked_fill(foreign_BS, 0), self.weight)
        partial_BSD = partial_BSD.masked_fill(foreign_BS.unsqueeze(-1), 0.0)
        return leave_tensor_parallel(partial_BSD, self.tp, self.sequence_parallel)


def enter_tensor_parallel(x: Tensor, tp: TensorParallel, sequence_parallel: bool) -> Tensor:
    """What sharded weights read: the tokens of all ranks, or the tensor that all ranks have."""
    if sequence_parallel:
        return gather_from_sequence_parallel_region(x, tp)
    return copy_to_tensor_model_parallel_region(x, tp)


def leave_tensor_parallel(x: Tensor, tp: TensorParallel, sequence_parallel: bool) -> Tensor:
    """The sum of the ranks' partial results: on every rank its tokens of it, or all of it."""
    if sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(x, tp)
    return reduce_from_tensor_model_parallel_region(x, tp)


def shard_dim(parameter: Tensor) -> int | None:
    """The dimension along which the ranks' shards concatenate to the full weight; None if replicated."""
    return getattr(parameter, "partition_dim", None)


def unpadded_size(parameter: Tensor, padded: int) -> int:
    """How many of the ``padded`` elements along ``shard_dim()`` of the full weight are not padding."""
    return getattr(parameter, "unpadded_size", padded)


def check_ids(ids: Tensor, limit: int) -> None:
    """Refuse token ids outside 0..limit-1, which sharded lookups would otherwise take for another rank's.

    Raises:
        IndexError: on CPU. On an accelerator the same condition is a device assertion, which costs no wait.
    """
    valid = ((ids >= 0) & (ids < limit)).all()
    if ids.device.type != "cpu":
        torch.ops.aten._assert_async.msg(valid, f"token ids must be in 0..{limit - 1}")
    elif not valid:
        raise IndexError(
            f"token ids must be in 0..{limit - 1}; got {int(ids.min())}..{int(ids.max())}. "
            "Use the tokenizer that made the data, or a larger vocab_size."
        )


def sharded_parameter(
    shape: Sequence[int], dim: int, tp: TensorParallel, init: InitMethod, unpadded: int | None = None
) -> nn.Parameter:
    """This rank's shard along ``dim`` of a parameter of ``shape``, which ``init`` fills while it is whole.

    Of the whole, ``unpadded`` elements along ``dim`` are no padding; None: all.
    """
    full = torch.empty(tuple(shape), dtype=torch.float32, device="cpu")
    with torch.no_grad():
        init(full)
    # A clone, because a view would keep the full weight alive.
    parameter: Any = nn.Parameter(tp.shard(full, dim).to(torch.get_default_dtype()).clone())
    parameter.model_parallel = parameter.tensor_model_parallel = True
    parameter.partition_dim = dim
    if unpadded is not None:
        parameter.unpadded_size = unpadded
    return parameter
