"""Cross entropy of a linear head in chunks of tokens, so that the logits of a micro-batch never exist as a whole.

The forward computes the logits of a chunk, their loss, and the gradient of their hidden states for a loss with the
factor 1. Between forward and backward, this gradient replaces the logits. The backward multiplies it by the factor of
the loss. The weight gradient computes the logits a second time, now in chunks of the vocabulary: each row of the
gradient is one product over all tokens, which no sum over chunks rounds again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ds_ext.errors import ConfigError
from ds_ext.tensor_parallel.group import TensorParallel
from ds_ext.tensor_parallel.layers import enter_tensor_parallel
from ds_ext.tensor_parallel.loss import (
    IGNORE_INDEX,
    at_least_fp32,
    check_labels,
    chunk_tokens,
    gather_columns,
    largest_logits,
    local_labels,
)
from ds_ext.tensor_parallel.mappings import keep_slice, once
from ds_ext.tensor_parallel.weight_gradients import anchor, defer, is_deferrable, linear


class ChunkedHead:
    """Head of a model that the loss function applies, in chunks of tokens.

    The last layer has the weight. It returns the result of :meth:`enter`, the hidden states of all tokens, which the
    loss function passes to :meth:`loss`.

    Args:
        tp: position of this rank in the group over which the vocabulary is sharded.
    """

    def __init__(self, tp: TensorParallel) -> None:
        self._tp = tp
        self._last: Tensor | None = None  # weight of the last forward, because the engine may replace weights

    def enter(self, hidden_BSD: Tensor, weight_VD: Tensor, sequence_parallel: bool = False) -> Tensor:
        """Return the hidden states of all tokens, from those of this rank with sequence parallelism."""
        self._last = weight_VD
        return enter_tensor_parallel(hidden_BSD, self._tp, sequence_parallel)

    @property
    def _weight(self) -> Tensor:
        if self._last is None:
            raise ConfigError(
                "chunked_loss: the layers have another head than the loss function (got no forward of this head). Pass "
                "loss_fn.chunked of the same loss_fn to gpt_layer_specs()."
            )
        return self._last

    def logits(self, hidden_BSD: Tensor) -> Tensor:
        """Return all logits of this rank's vocabulary, (B, S, V)."""
        return linear(hidden_BSD, self._weight)

    def loss(self, hidden_BSD: Tensor, labels_BS: Tensor, vocab_size: int) -> Tensor:
        """Return the sum of the losses; see :func:`linear_cross_entropy`."""
        return linear_cross_entropy(hidden_BSD, self._weight, labels_BS, self._tp, vocab_size)


def linear_cross_entropy(
    hidden_BSD: Tensor, weight_VD: Tensor, labels_BS: Tensor, tp: TensorParallel, vocab_size: int
) -> Tensor:
    """Return the sum of the losses of all tokens, fp32 or fp64 [], the same on all ranks.

    It equals ``vocab_parallel_cross_entropy(linear(hidden_BSD, weight_VD), ...).sum()``. Every chunk needs two
    all-reduces in the forward. The gradient of the hidden states is this rank's share.

    Args:
        hidden_BSD: hidden states of all tokens, as :func:`.layers.enter_tensor_parallel` returns them.
        weight_VD: this rank's rows of the head, (padded vocabulary / tp.size, D). Its gradient is deferrable.
        labels_BS: token ids below ``vocab_size``, or ``IGNORE_INDEX``.
        tp: position of this rank in its group.
        vocab_size: number of tokens in the vocabulary, without padding.

    Raises:
        IndexError: on CPU, for any other label. On CUDA this is a device assertion.
    """
    check_labels(labels_BS, vocab_size)
    device = hidden_BSD.device.type
    if torch.is_autocast_enabled(device):  # the backward runs without it
        dtype = torch.get_autocast_dtype(device)
        hidden_BSD, weight_VD = hidden_BSD.to(dtype), weight_VD.to(dtype)
    deferred = is_deferrable(hidden_BSD, weight_VD, None)
    tracked = anchor(hidden_BSD.dtype, hidden_BSD.device) if deferred else weight_VD
    keeps_gradient = torch.is_grad_enabled() and hidden_BSD.requires_grad
    arguments = hidden_BSD, tracked, (weight_VD,), labels_BS, tp, vocab_size, keeps_gradient, deferred
    with keep_slice(hidden_BSD):
        return _LinearCrossEntropy.apply(*arguments)


class _LinearCrossEntropy(torch.autograd.Function):
    # Shapes: N tokens, V rows of this rank's weight, R those of them that are tokens, C tokens of a chunk.

    @staticmethod
    def forward(
        ctx: Any,
        hidden_BSD: Tensor,
        tracked: Tensor,  # the weight; or an anchor if its gradient is deferred, see weight_gradients.py
        parameters: tuple[Tensor],
        labels_BS: Tensor,
        tp: TensorParallel,
        vocab_size: int,
        keeps_gradient: bool,
        deferred: bool,
    ) -> Tensor:
        (weight_VD,) = parameters
        hidden_ND, labels_N = hidden_BSD.flatten(0, -2), labels_BS.flatten()
        first = tp.rank * len(weight_VD)
        real = max(0, min(len(weight_VD), vocab_size - first))
        weight_RD, dtype = weight_VD[:real], at_least_fp32(hidden_BSD.dtype)
        counts_N = (labels_N != IGNORE_INDEX).to(dtype)
        loss_N, log_sum_exp_N = torch.empty_like(counts_N), torch.empty_like(counts_N)
        grad_ND = torch.empty_like(hidden_ND) if keeps_gradient else None
        size = chunk_tokens(len(labels_N), len(weight_VD))
        for chunk in (slice(start, start + size) for start in range(0, len(labels_N), size)):
            # One name for the logits and what becomes of them, so that each is freed by the next.
            x_CR = F.linear(hidden_ND[chunk], weight_RD)
            max_C = largest_logits(x_CR, dtype)
            if tp.size > 1:
                dist.all_reduce(max_C, op=dist.ReduceOp.MAX, group=tp.group)
            local_C, is_local_C = local_labels(labels_N[chunk], first, real)
            label_C = (gather_columns(x_CR, local_C).to(dtype) - max_C).masked_fill(~is_local_C, 0.0)
            x_CR = x_CR.to(dtype).sub_(max_C.unsqueeze(-1)).exp_()
            sums_2C = torch.stack((x_CR.sum(-1), label_C))
            if tp.size > 1:
                dist.all_reduce(sums_2C, group=tp.group)
            log_sum_C = sums_2C[0].log()
            loss_N[chunk] = (log_sum_C - sums_2C[1]).masked_fill(counts_N[chunk] == 0, 0.0)
            log_sum_exp_N[chunk] = log_sum_C + max_C
            if grad_ND is not None:
                x_CR.mul_((counts_N[chunk] / sums_2C[0]).unsqueeze(-1))
                _subtract(x_CR, local_C, is_local_C * counts_N[chunk])
                torch.mm(x_CR.to(weight_RD.dtype), weight_RD, out=grad_ND[chunk])
            del x_CR  # before the next chunk exists
        ctx.first, ctx.real, ctx.parameters, ctx.deferred = first, real, parameters, deferred
        ctx.shape = hidden_BSD.shape
        read = (hidden_BSD, weight_VD.detach(), labels_N, log_sum_exp_N) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(grad_ND, *read)
        return loss_N.sum()

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (factor,) = grads
        grad_ND, *read = ctx.saved_tensors
        hidden_grad = weight_grad = None
        if grad_ND is not None:
            # In fp32: the factor may exceed the range of fp16.
            hidden_grad = (grad_ND.to(factor.dtype) * factor).to(grad_ND.dtype).view(ctx.shape)
        if read:
            hidden, weight, labels_N, log_sum_exp_N = (tensor.detach() for tensor in read)
            first, real = ctx.first, ctx.real

            def gradient() -> Tensor:
                tokens = labels_N, log_sum_exp_N
                return _weight_gradient(weight, first, real, hidden.flatten(0, -2), tokens, factor)

            if ctx.deferred:
                defer(ctx.parameters[0], gradient, hidden, labels_N, log_sum_exp_N)
            else:
                weight_grad = gradient()
        return hidden_grad, weight_grad, *[None] * 6


def _weight_gradient(
    weight_VD: Tensor, first: int, real: int, hidden_ND: Tensor, tokens: tuple[Tensor, Tensor], factor: Tensor
) -> Tensor:
    """Return the gradient of the weight, in chunks of C of its ``real`` rows; ``first`` is the id of the first one.

    ``tokens`` are labels and logarithms of the sums of exponentials.
    """
    labels_N, log_sum_exp_N = tokens
    factor_N = factor * (labels_N != IGNORE_INDEX)
    grad_VD = torch.empty_like(weight_VD, memory_format=torch.contiguous_format)
    grad_VD[real:] = 0.0
    size = chunk_tokens(real, len(labels_N))
    for start in range(0, real, size):
        rows = slice(start, min(start + size, real))
        x_NC = F.linear(hidden_ND, weight_VD[rows])
        x_NC = x_NC.to(factor.dtype).sub_(log_sum_exp_N.unsqueeze(-1)).exp_().mul_(factor_N.unsqueeze(-1))
        local_N, is_local_N = local_labels(labels_N, first + start, rows.stop - start)
        _subtract(x_NC, local_N, is_local_N * factor_N)
        torch.mm(x_NC.to(weight_VD.dtype).t(), hidden_ND, out=grad_VD[rows])
        del x_NC
    return grad_VD


def _subtract(x_CR: Tensor, columns_C: Tensor, values_C: Tensor) -> None:
    """Subtract a value from one column of every row, in place."""
    if x_CR.size(-1):
        x_CR.scatter_add_(-1, columns_C.unsqueeze(-1), -values_C.unsqueeze(-1))
