"""Cross entropy of a linear head in chunks of tokens, so that the logits of a micro-batch never exist as a whole.

The forward computes the logits of a chunk, their loss, and the gradient of their hidden states for a loss with the
factor 1. Between forward and backward, this gradient replaces the logits. The backward multiplies it by the factor of
the loss. The weight gradient computes the logits a second time, now in chunks of the vocabulary: each row of the
gradient is one product over all tokens, which no sum over chunks rounds again.

The rows of the head may be divided into parts on several devices (arXiv 2411.05288, algorithm 2):

    partials, kept = zip(*[part.partial_loss(hidden_BSD, labels_BS, True) for part in parts])
    joined = combine_losses(partials)                        # joined.loss: loss of every token
    parts[0].input_gradient(joined, factor_N)                # for gradients of the losses
    parts[i].weight_gradients(hidden_BSD, labels_BS, kept[i], joined.log_sum_exp, factor_N).compute()

A chunked loss is the case of one part. With the softmax p over the rows of part i, whose share of the sum of all
exponentials is r, the gradient of a loss is the sum over i of r (p - y) W, minus (1 - r) y W. The one-hot label y is
zero in all parts but one. No term cancels another one, so that half precision rounds small gradients as little as in
one part.

A part keeps p - y for its weight gradient, in half precision if the weight is: it is 1/D of the logits, and the whole
head stays at three products. One part would keep all logits, so a chunked loss computes them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ds_ext.errors import ConfigError
from ds_ext.tensor_parallel.group import TensorParallel
from ds_ext.tensor_parallel.layers import enter_tensor_parallel, leave_tensor_parallel, mark_rows
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
from ds_ext.tensor_parallel.weight_gradients import WeightGradients, anchor, defer, is_deferrable, linear

FP16_SCALE = 2.0**15  # of gradients from -1 to 1, so that small ones are not rounded to zero


class ChunkedHead:
    """Head of a model that the loss function applies, in chunks of tokens.

    The last layer has the weight. It returns the result of :meth:`enter`, the hidden states of all tokens, which the
    loss function passes to :meth:`loss`. The vocabulary is sharded over ``tp``.
    """

    def __init__(self, tp: TensorParallel) -> None:
        self.tp = tp
        self._last: Tensor | None = None  # weight of the last forward, because the engine may replace weights

    def enter(self, hidden_BSD: Tensor, weight_VD: Tensor, sequence_parallel: bool = False) -> Tensor:
        """Return the hidden states of all tokens, from those of this rank with sequence parallelism."""
        self._last = weight_VD
        return enter_tensor_parallel(hidden_BSD, self.tp, sequence_parallel)

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
        return linear_cross_entropy(hidden_BSD, self._weight, labels_BS, self.tp, vocab_size)


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
        vocab_size: number of tokens in the vocabulary, without padding.
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
        rows = _Rows.of(weight_VD, tp, vocab_size)
        labels_N = labels_BS.flatten()
        hidden_ND = hidden_BSD.flatten(0, -2)
        partial, _ = _cross_entropy_over_part(hidden_ND, weight_VD, labels_N, tp, rows, keeps_gradient)
        joined = combine_losses([partial])
        log_sum_exp_N, grad_ND = joined.log_sum_exp, partial.gradient
        ctx.rows, ctx.parameters, ctx.deferred = rows, parameters, deferred
        ctx.shape = hidden_BSD.shape
        read = (hidden_BSD, weight_VD.detach(), labels_N, log_sum_exp_N) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(grad_ND, *read)
        return joined.loss.sum()

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
            rows = ctx.rows

            def gradient() -> Tensor:
                factor_N = factor * (labels_N != IGNORE_INDEX)
                hidden_ND = hidden.flatten(0, -2)

                def softmax_NC(chunk: slice) -> Tensor:
                    x_NC = F.linear(hidden_ND, weight[chunk]).to(factor_N.dtype)
                    return x_NC.sub_(log_sum_exp_N.unsqueeze(-1)).exp_().mul_(factor_N.unsqueeze(-1))

                return _weight_gradient(weight, rows, hidden_ND, labels_N, softmax_NC, factor_N)

            if ctx.deferred:
                defer(ctx.parameters[0], gradient, hidden, labels_N, log_sum_exp_N)
            else:
                weight_grad = gradient()
        return hidden_grad, weight_grad, *[None] * 6


# --- parts of the rows ---


class PartialLoss(NamedTuple):
    """Share of a part of the head in the losses of all tokens and in the gradients of their hidden states.

    Attributes:
        statistics: largest logit of the part; sum of the exponentials of the logits minus it; logit of the label minus
            it, 0 if another part has the label; and 1 if this part has the label. fp32 or fp64 (4, N), the same on all
            ranks.
        gradient: gradient of the cross entropy over the part alone; without the label if another part has it. This
            rank's share, zero for ignored labels; None in an evaluation.
        label_rows: row of the label in the weight, zero if another rank has it; None in an evaluation or with one part.
    """

    statistics: Tensor
    gradient: Tensor | None = None
    label_rows: Tensor | None = None


class LogitGradients(NamedTuple):
    """Gradients of the cross entropy over a part of the head, for the logits of this rank.

    Attributes:
        values: (N, R) for the R rows that are tokens, in the precision of the weight; without the label if another part
            has it, zero for ignored labels. In fp16 times ``FP16_SCALE``.
        log_sum_exp: logarithm of the sum of the exponentials of the part's logits, fp32 or fp64 (N,).
    """

    values: Tensor
    log_sum_exp: Tensor


@dataclass(frozen=True)
class TokenLosses:
    """Losses of all tokens.

    Attributes:
        loss: cross entropy of every token (N,); 0 for an ignored label.
        log_sum_exp: logarithm of the sum of the exponentials of all logits (N,).
        is_counted: the label is not ignored (N,).
    """

    loss: Tensor
    log_sum_exp: Tensor
    is_counted: Tensor
    _partials: Sequence[PartialLoss]
    _ratio_PN: Tensor

    def gradient(self, factor_N: Tensor) -> Tensor:
        """Return this rank's share of the gradient of the hidden states, for gradients of the losses.

        Gradients of ignored labels must be zero.
        """
        total: Tensor | None = None
        dtype = factor_N.dtype
        for partial, ratio_N in zip(self._partials, self._ratio_PN, strict=True):
            gradient, label_rows = partial.gradient, partial.label_rows
            assert gradient is not None and label_rows is not None
            label_factor_N = ((ratio_N - 1) * factor_N).masked_fill(partial.statistics[3] == 0, 0.0)
            for x, x_factor_N in ((gradient, ratio_N * factor_N), (label_rows, label_factor_N)):
                scaled = x.to(dtype) * x_factor_N.view(*x.shape[:-1], 1)
                total = scaled if total is None else total.add_(scaled)
        assert total is not None
        return total.to(cast(Tensor, self._partials[0].gradient).dtype)


def combine_losses(partials: Sequence[PartialLoss]) -> TokenLosses:
    max_PN, sum_PN, label_PN, has_label_PN = torch.stack([partial.statistics for partial in partials]).unbind(
        1
    )
    max_N, has_label_PN = max_PN.amax(0), has_label_PN > 0
    sum_PN = sum_PN * (max_PN - max_N).exp()
    sum_N, is_counted_N = sum_PN.sum(0), has_label_PN.any(0)
    label_N = torch.where(has_label_PN, label_PN + (max_PN - max_N), 0.0).sum(0)
    loss_N = (sum_N.log() - label_N).masked_fill(~is_counted_N, 0.0)
    return TokenLosses(loss_N, sum_N.log() + max_N, is_counted_N, partials, sum_PN / sum_N)


class HeadPart(nn.Module):
    """Part of the rows of a head, whose other parts are on other devices.

    Args:
        weight: this rank's rows of the part. The rows of all ranks are divided evenly, padding included.
        tp: position of this rank in the group over which the part is sharded.
        vocab_size: number of tokens in the vocabulary, without padding.
        sequence_parallel: hidden states are this rank's tokens.
        name: name of the weight in the whole head, and so in checkpoints, such as ``projection.weight``.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        part: int,
        tp: TensorParallel,
        vocab_size: int,
        sequence_parallel: bool = False,
        name: str = "weight",
    ) -> None:
        super().__init__()
        owner, (*path, key) = cast(nn.Module, self), name.split(".")
        for child in path:
            owner.add_module(child, nn.Module())
            owner = owner.get_submodule(child)
        owner.register_parameter(key, weight)
        self._name = name
        mark_rows(weight, tp, vocab_size)
        self._part, self._tp, self._vocab_size = part, tp, vocab_size
        self._sequence_parallel = sequence_parallel

    @torch.no_grad()
    def partial_loss(
        self, hidden_BSD: Tensor, labels_BS: Tensor, with_gradient: bool
    ) -> tuple[PartialLoss, LogitGradients | None]:
        """Return the partial losses of this part, and the input of its weight gradient; None without a gradient."""
        check_labels(labels_BS, self._vocab_size)
        hidden_BSD = self._enter(hidden_BSD)
        hidden_ND, labels_N, rows = hidden_BSD.flatten(0, -2), labels_BS.flatten(), self._rows
        keeps_logits = with_gradient and self._weight.requires_grad
        partial, kept = _cross_entropy_over_part(
            hidden_ND, self._weight, labels_N, self._tp, rows, with_gradient, keeps_logits
        )
        if partial.gradient is None:
            return partial, None
        local_N, is_local_N = local_labels(labels_N, rows.first, rows.real)
        label_rows = self._weight[local_N].masked_fill_(~is_local_N.unsqueeze(-1), 0.0)
        gradients = (x.view_as(hidden_BSD) for x in (partial.gradient, label_rows))
        return PartialLoss(partial.statistics, *gradients), kept

    @torch.no_grad()
    def input_gradient(self, joined: TokenLosses, factor_N: Tensor) -> Tensor:
        """Return the gradient of the hidden states, for the gradients of the losses of :func:`combine_losses`."""
        # Summed like the partial results of a layer: the backward of enter_tensor_parallel().
        return leave_tensor_parallel(joined.gradient(factor_N), self._tp, self._sequence_parallel)

    def weight_gradients(
        self,
        hidden_BSD: Tensor,
        labels_BS: Tensor,
        kept: LogitGradients | None,
        log_sum_exp_N: Tensor,
        factor_N: Tensor,
    ) -> WeightGradients:
        """Return the gradient of the weight, not computed yet, for the gradients of the losses.

        ``hidden_BSD``, ``labels_BS`` and ``kept`` are those of :meth:`partial_loss`.
        """
        later = WeightGradients()
        if kept is None:
            return later

        def gradient() -> Tensor:
            hidden_ND, labels_N = self._enter(hidden_BSD).flatten(0, -2), labels_BS.flatten()
            log_ratio_N = kept.log_sum_exp - log_sum_exp_N
            scale_N = log_ratio_N.exp() * factor_N / _scale(kept.values.dtype)

            def softmax_NC(chunk: slice) -> Tensor:
                return kept.values[:, chunk].to(scale_N.dtype, copy=True).mul_(scale_N.unsqueeze(-1))

            label_N = -log_ratio_N.expm1() * factor_N
            return _weight_gradient(self._weight, self._rows, hidden_ND, labels_N, softmax_NC, label_N)

        later.add(self._weight, gradient, hidden_BSD, labels_BS, *kept, log_sum_exp_N, factor_N)
        return later

    def _enter(self, hidden_BSD: Tensor) -> Tensor:
        return enter_tensor_parallel(hidden_BSD, self._tp, self._sequence_parallel)

    @property
    def _weight(self) -> nn.Parameter:
        return self.get_parameter(self._name)

    @property
    def _rows(self) -> _Rows:
        return _Rows.of(self._weight, self._tp, self._vocab_size, self._part)


class _Rows(NamedTuple):
    """Rows of a weight: token id of the first one, number of those that are tokens, and tokens of all ranks."""

    first: int
    real: int
    of_part: range

    @classmethod
    def of(cls, weight_VD: Tensor, tp: TensorParallel, vocab_size: int, part: int = 0) -> _Rows:
        of_part = range(part * tp.size * len(weight_VD), (part + 1) * tp.size * len(weight_VD))
        first = of_part.start + tp.rank * len(weight_VD)
        return cls(first, max(0, min(len(weight_VD), vocab_size - first)), of_part)


def _cross_entropy_over_part(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    tp: TensorParallel,
    rows: _Rows,
    with_gradient: bool,
    keeps_logits: bool = False,
) -> tuple[PartialLoss, LogitGradients | None]:
    """Return statistics and gradients of a part. Every chunk of tokens needs two all-reduces."""
    weight_RD, dtype = weight_VD[: rows.real], at_least_fp32(hidden_ND.dtype)
    counts_N = (labels_N != IGNORE_INDEX).to(dtype)
    statistics_4N = counts_N.new_empty(4, len(counts_N))
    statistics_4N[3] = (labels_N >= rows.of_part.start) & (labels_N < rows.of_part.stop)
    grad_ND = torch.empty_like(hidden_ND) if with_gradient else None
    kept_NR = weight_VD.new_empty(len(labels_N), rows.real) if keeps_logits else None
    for chunk in _chunks(len(labels_N), chunk_tokens(len(labels_N), len(weight_VD))):
        # One name for the logits and what becomes of them, so that each is freed by the next.
        x_CR = F.linear(hidden_ND[chunk], weight_RD)
        max_C = largest_logits(x_CR, dtype)
        if tp.size > 1:
            dist.all_reduce(max_C, op=dist.ReduceOp.MAX, group=tp.group)
        local_C, is_local_C = local_labels(labels_N[chunk], rows.first, rows.real)
        label_C = (gather_columns(x_CR, local_C).to(dtype) - max_C).masked_fill(~is_local_C, 0.0)
        x_CR = x_CR.to(dtype).sub_(max_C.unsqueeze(-1)).exp_()
        sums_2C = torch.stack((x_CR.sum(-1), label_C))
        if tp.size > 1:
            dist.all_reduce(sums_2C, group=tp.group)
        statistics_4N[0, chunk], statistics_4N[1:3, chunk] = max_C, sums_2C
        if grad_ND is not None:
            x_CR.mul_((counts_N[chunk] / sums_2C[0]).unsqueeze(-1))
            _subtract(x_CR, local_C, is_local_C * counts_N[chunk])
            torch.mm(x_CR.to(weight_RD.dtype), weight_RD, out=grad_ND[chunk])
            if kept_NR is not None:
                kept_NR[chunk] = x_CR.mul_(_scale(kept_NR.dtype))
        del x_CR  # before the next chunk exists
    partial, (max_N, sum_N, *_) = PartialLoss(statistics_4N, grad_ND), statistics_4N
    return partial, None if kept_NR is None else LogitGradients(kept_NR, max_N + sum_N.log())


def _scale(dtype: torch.dtype) -> float:
    """Return the factor of logit gradients, from -1 to 1, that are kept with this dtype."""
    return FP16_SCALE if dtype == torch.float16 else 1.0


def _weight_gradient(
    weight_VD: Tensor,
    rows: _Rows,
    hidden_ND: Tensor,
    labels_N: Tensor,
    gradient_NC: Callable[[slice], Tensor],
    label_N: Tensor,
) -> Tensor:
    """Return the gradient of the weight, in chunks of C of its rows that are tokens.

    Args:
        gradient_NC: returns the gradients of the logits of a chunk, without ``label_N``.
        label_N: value to subtract from the gradient of a label's logit, zero for ignored labels.
    """
    first, real, _ = rows
    grad_VD = torch.empty_like(weight_VD, memory_format=torch.contiguous_format)
    grad_VD[real:] = 0.0
    for chunk in _chunks(real, chunk_tokens(real, len(labels_N))):
        x_NC = gradient_NC(chunk)
        local_N, is_local_N = local_labels(labels_N, first + chunk.start, chunk.stop - chunk.start)
        _subtract(x_NC, local_N, is_local_N * label_N)
        torch.mm(x_NC.to(weight_VD.dtype).t(), hidden_ND, out=grad_VD[chunk])
        del x_NC
    return grad_VD


def _chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _subtract(x_CR: Tensor, columns_C: Tensor, values_C: Tensor) -> None:
    """Subtract a value from one column of every row, in place."""
    if x_CR.size(-1):
        x_CR.scatter_add_(-1, columns_C.unsqueeze(-1), -values_C.unsqueeze(-1))
