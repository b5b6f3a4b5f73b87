"""Cross entropy over logits whose vocabulary is sharded over the tensor-parallel group."""

from __future__ import annotations

import math
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
    backward needs none. All arithmetic is in fp32, or in fp64 for logits in fp64, on a chunk of the tokens at a time.
    Between forward and backward only the logits are kept; the backward adds their gradient.

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
    check_labels(labels_BS, vocab_size)
    return _VocabParallelCrossEntropy.apply(logits_BSV, labels_BS, tp, vocab_size)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    # Shapes: N tokens, V columns of this rank, R those of them that are tokens, C tokens of a chunk.

    @staticmethod
    def forward(
        ctx: Any, logits_BSV: Tensor, labels_BS: Tensor, tp: TensorParallel, vocab_size: int
    ) -> Tensor:
        # Columns of this rank that are tokens: ``first`` is the id of the first one, ``real`` their number.
        first = tp.rank * logits_BSV.size(-1)
        real = max(0, min(logits_BSV.size(-1), vocab_size - first))
        logits_NR, labels_N = logits_BSV[..., :real].flatten(0, -2), labels_BS.flatten()
        dtype = at_least_fp32(logits_BSV.dtype)

        max_N = largest_logits(logits_NR, dtype)
        if tp.size > 1:
            dist.all_reduce(max_N, op=dist.ReduceOp.MAX, group=tp.group)

        local_N, is_local_N = local_labels(labels_N, first, real)
        label_N = (gather_columns(logits_NR, local_N).to(dtype) - max_N).masked_fill(~is_local_N, 0.0)
        chunks = zip(
            *(x.split(chunk_tokens(labels_BS.numel(), logits_BSV.size(-1))) for x in (logits_NR, max_N)),
            strict=True,
        )
        sums_2N = torch.stack((torch.cat([_exp(logits, shift).sum(-1) for logits, shift in chunks]), label_N))
        if tp.size > 1:
            dist.all_reduce(sums_2N, group=tp.group)

        log_sum_N = sums_2N[0].log()
        ctx.first = first
        ctx.real = real
        ctx.save_for_backward(logits_BSV, labels_BS, log_sum_N + max_N)
        return (log_sum_N - sums_2N[1]).view_as(labels_BS).masked_fill(labels_BS == IGNORE_INDEX, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits_BSV, labels_BS, log_sum_exp_N = ctx.saved_tensors
        loss_grad_N = grads[0].masked_fill(labels_BS == IGNORE_INDEX, 0.0).flatten()
        grad_BSV = torch.empty_like(logits_BSV, memory_format=torch.contiguous_format)
        grad_BSV[..., ctx.real :] = 0.0
        if ctx.real:
            logits_NR, grad_NR = (x[..., : ctx.real].flatten(0, -2) for x in (logits_BSV, grad_BSV))
            tokens = (
                logits_NR,
                log_sum_exp_N,
                *local_labels(labels_BS.flatten(), ctx.first, ctx.real),
                loss_grad_N,
            )
            chunks = (
                x.split(chunk_tokens(labels_BS.numel(), logits_BSV.size(-1))) for x in (grad_NR, *tokens)
            )
            for grad_CR, *chunk in zip(*chunks, strict=True):
                grad_CR.copy_(_logits_grad(*chunk))
        return grad_BSV, None, None, None


def check_labels(labels_BS: Tensor, vocab_size: int) -> None:
    """Raise IndexError on CPU for a label that is neither a token id nor ``IGNORE_INDEX``; on CUDA, assert it."""
    check_ids(labels_BS.masked_fill(labels_BS == IGNORE_INDEX, 0), vocab_size)


def chunk_tokens(tokens: int, columns: int) -> int:
    """Return the tokens whose logits exist in fp32 at a time: 1/16 of them, but at least 1 MiB."""
    return max(-(-tokens // 16), (1 << 18) // max(columns, 1), 1)


def _exp(logits_CR: Tensor, shift_C: Tensor) -> Tensor:
    return logits_CR.to(shift_C.dtype, copy=True).sub_(shift_C.unsqueeze(-1)).exp_()


def _logits_grad(
    logits_CR: Tensor, log_sum_exp_C: Tensor, local_C: Tensor, is_local_C: Tensor, loss_grad_C: Tensor
) -> Tensor:
    """Return (softmax - one-hot label) * the gradient of the token's loss."""
    grad_CR = _exp(logits_CR, log_sum_exp_C)
    grad_CR.scatter_add_(-1, local_C.unsqueeze(-1), -is_local_C.unsqueeze(-1).to(grad_CR.dtype))
    return grad_CR.mul_(loss_grad_C.unsqueeze(-1))


def largest_logits(logits_NR: Tensor, dtype: torch.dtype) -> Tensor:
    """Return minus infinity if this rank holds only padding."""
    if logits_NR.size(-1) == 0:
        return logits_NR.new_full(logits_NR.shape[:-1], -math.inf, dtype=dtype)
    return logits_NR.amax(-1).to(dtype)


def local_labels(labels_N: Tensor, first: int, real: int) -> tuple[Tensor, Tensor]:
    """Return each label's column in this rank's slice (0 if on another rank), and whether it is on this rank."""
    is_local_N = (labels_N >= first) & (labels_N < first + real)
    return (labels_N - first).masked_fill(~is_local_N, 0), is_local_N


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def gather_columns(logits_NR: Tensor, columns_N: Tensor) -> Tensor:
    """Return the logit of each token's column; 0 if this rank holds only padding."""
    if logits_NR.size(-1) == 0:
        return logits_NR.new_zeros(columns_N.shape)
    return logits_NR.gather(-1, columns_N.unsqueeze(-1)).squeeze(-1)
