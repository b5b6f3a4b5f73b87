"""Cross entropy over logits whose vocabulary is shared out over the tensor-parallel group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ext.tensor_parallel.group import TensorParallel
from ds_ext.tensor_parallel.layers import check_ids

IGNORE_INDEX = -100
"""Positions with this label have no loss and no gradient (the value torch uses)."""


def vocab_parallel_cross_entropy(
    logits_BSV: Tensor, labels_BS: Tensor, tp: TensorParallel, vocab_size: int
) -> Tensor:
    """Loss of every token, from this rank's slice of the vocabulary: fp32 (B, S), equal on all ranks.

    Two all-reduces forward (the maximum; the sum of exponentials together with the label's logit), none
    backward. Everything is computed in fp32 whatever the dtype of the logits; nothing of their size is kept
    between the passes but the logits themselves.

    Megatron lets the rows that only pad the vocabulary compete in the softmax and learn to lose. Here they
    are left out of it: they have no probability and no gradient. The padding grows with the tensor-parallel
    size, and the loss must not depend on that.

    Args:
        logits_BSV: (B, S, padded vocabulary / tp.size), the slice of rank ``tp.rank``.
        labels_BS: token ids below ``vocab_size``, or ``IGNORE_INDEX``.
        tp: this rank's place in its group.
        vocab_size: entries of the true vocabulary, without padding.

    Raises:
        IndexError: on CPU, for a label that is neither (a device assertion on CUDA).
    """
    check_ids(labels_BS.masked_fill(labels_BS == IGNORE_INDEX, 0), vocab_size)
    return _VocabParallelCrossEntropy.apply(logits_BSV, labels_BS, tp, vocab_size)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_BSV: Tensor, labels_BS: Tensor, tp: TensorParallel, vocab_size: int
    ) -> Tensor:
        first = tp.rank * logits_BSV.size(-1)
        real = max(0, min(logits_BSV.size(-1), vocab_size - first))
        logits_BSR = logits_BSV[..., :real].float()

        # The last ranks may hold nothing but padding, and an empty slice has no maximum.
        max_BS = logits_BSR.amax(-1) if real else logits_BSR.new_full(labels_BS.shape, float("-inf"))
        if tp.size > 1:
            dist.all_reduce(max_BS, op=dist.ReduceOp.MAX, group=tp.group)

        local_BS, own_BS = _local_labels(labels_BS, first, real)
        shifted_BSR = logits_BSR - max_BS.unsqueeze(-1)
        label_BS = _pick(shifted_BSR, local_BS).masked_fill(~own_BS, 0.0)
        sums_2BS = torch.stack((shifted_BSR.exp_().sum(-1), label_BS))
        if tp.size > 1:
            dist.all_reduce(sums_2BS, group=tp.group)

        log_sum_BS = sums_2BS[0].log()
        ctx.first, ctx.real = first, real
        ctx.save_for_backward(logits_BSV, labels_BS, log_sum_BS + max_BS)
        return (log_sum_BS - sums_2BS[1]).masked_fill(labels_BS == IGNORE_INDEX, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits_BSV, labels_BS, log_sum_exp_BS = ctx.saved_tensors
        loss_grad_BS1 = grads[0].masked_fill(labels_BS == IGNORE_INDEX, 0.0).unsqueeze(-1)
        grad_BSV = torch.zeros_like(logits_BSV, memory_format=torch.contiguous_format)
        if ctx.real:
            local_BS, own_BS = _local_labels(labels_BS, ctx.first, ctx.real)
            grad_BSR = (logits_BSV[..., : ctx.real].float() - log_sum_exp_BS.unsqueeze(-1)).exp_()
            grad_BSR.scatter_add_(-1, local_BS.unsqueeze(-1), -own_BS.unsqueeze(-1).float())
            grad_BSV[..., : ctx.real] = grad_BSR.mul_(loss_grad_BS1)
        return grad_BSV, None, None, None


def _local_labels(labels_BS: Tensor, first: int, real: int) -> tuple[Tensor, Tensor]:
    """Column of each label in this rank's slice (0 for another rank's), and whether it is this rank's."""
    own_BS = (labels_BS >= first) & (labels_BS < first + real)
    return (labels_BS - first).masked_fill(~own_BS, 0), own_BS


def _pick(logits_BSR: Tensor, columns_BS: Tensor) -> Tensor:
    if logits_BSR.size(-1) == 0:
        return logits_BSR.new_zeros(columns_BS.shape)
    return logits_BSR.gather(-1, columns_BS.unsqueeze(-1)).squeeze(-1)
