"""Cross entropy over logits whose vocabulary is sharded over the tensor-parallel group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ext.tensor_parallel.group import TensorParallel
from ds_ext.tensor_parallel.layers import check_ids

IGNORE_INDEX = -100
"""Label of positions without loss and gradient (torch's default)."""


def vocab_parallel_cross_entropy(
    logits_BSV: Tensor, labels_BS: Tensor, tp: TensorParallel, vocab_size: int
) -> Tensor:
    """Return the loss of every token, fp32 or fp64 (B, S), the same on all ranks.

    The forward needs two all-reduces: one for the maximum, one for the sum of exponentials and the label's logit. The
    backward needs none. All arithmetic is in fp32, or in fp64 for logits in fp64. Between forward and backward only the
    logits are kept.

    Megatron includes the padding rows of the vocabulary in the softmax. They are excluded here and have neither
    probability nor gradient, because their number depends on the tensor-parallel size and the loss must not.

    Args:
        logits_BSV: this rank's slice of the logits, (B, S, padded vocabulary / tp.size).
        labels_BS: token ids below ``vocab_size``, or ``IGNORE_INDEX``.
        tp: position of this rank in its group.
        vocab_size: number of tokens in the vocabulary, without padding.

    Raises:
        IndexError: on CPU, for any other label. On CUDA this is a device assertion.
    """
    check_ids(labels_BS.masked_fill(labels_BS == IGNORE_INDEX, 0), vocab_size)
    return _VocabParallelCrossEntropy.apply(logits_BSV, labels_BS, tp, vocab_size)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_BSV: Tensor, labels_BS: Tensor, tp: TensorParallel, vocab_size: int
    ) -> Tensor:
        # Columns of this rank that are tokens: ``first`` is the id of the first one, ``real`` their number.
        first = tp.rank * logits_BSV.size(-1)
        real = max(0, min(logits_BSV.size(-1), vocab_size - first))
        logits_BSR = _at_least_fp32(logits_BSV[..., :real])

        # The last ranks may hold only padding, and an empty slice has no maximum.
        max_BS = logits_BSR.amax(-1) if real else logits_BSR.new_full(labels_BS.shape, float("-inf"))
        if tp.size > 1:
            dist.all_reduce(max_BS, op=dist.ReduceOp.MAX, group=tp.group)

        local_BS, is_local_BS = _local_labels(labels_BS, first, real)
        shifted_BSR = logits_BSR - max_BS.unsqueeze(-1)
        label_BS = _gather_columns(shifted_BSR, local_BS).masked_fill(~is_local_BS, 0.0)
        sums_2BS = torch.stack((shifted_BSR.exp_().sum(-1), label_BS))
        if tp.size > 1:
            dist.all_reduce(sums_2BS, group=tp.group)

        log_sum_BS = sums_2BS[0].log()
        ctx.first = first
        ctx.real = real
        ctx.save_for_backward(logits_BSV, labels_BS, log_sum_BS + max_BS)
        return (log_sum_BS - sums_2BS[1]).masked_fill(labels_BS == IGNORE_INDEX, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits_BSV, labels_BS, log_sum_exp_BS = ctx.saved_tensors
        loss_grad_BS1 = grads[0].masked_fill(labels_BS == IGNORE_INDEX, 0.0).unsqueeze(-1)
        grad_BSV = torch.zeros_like(logits_BSV, memory_format=torch.contiguous_format)
        if ctx.real:
            local_BS, is_local_BS = _local_labels(labels_BS, ctx.first, ctx.real)
            grad_BSR = (_at_least_fp32(logits_BSV[..., : ctx.real]) - log_sum_exp_BS.unsqueeze(-1)).exp_()
            grad_BSR.scatter_add_(-1, local_BS.unsqueeze(-1), -is_local_BS.unsqueeze(-1).to(grad_BSR.dtype))
            grad_BSV[..., : ctx.real] = grad_BSR.mul_(loss_grad_BS1)
        return grad_BSV, None, None, None


def _local_labels(labels_BS: Tensor, first: int, real: int) -> tuple[Tensor, Tensor]:
    """Return each label's column in this rank's slice (0 if on another rank), and whether it is on this rank."""
    is_local_BS = (labels_BS >= first) & (labels_BS < first + real)
    return (labels_BS - first).masked_fill(~is_local_BS, 0), is_local_BS


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _gather_columns(logits_BSR: Tensor, columns_BS: Tensor) -> Tensor:
    """Return the logit of each position's column; 0 if this rank holds only padding."""
    if logits_BSR.size(-1) == 0:
        return logits_BSR.new_zeros(columns_BS.shape)
    return logits_BSR.gather(-1, columns_BS.unsqueeze(-1)).squeeze(-1)
