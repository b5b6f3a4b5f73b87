"""Linear layers of many experts, whose weight gradients can be deferred like those of one linear layer.

P: pairs of a token and its expert, sorted by expert; E: experts; I, O: input and output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..tensor_parallel.mappings import once
from ..tensor_parallel.weight_gradients import anchor, defer, is_deferrable

_Spans = list[tuple[int, slice]]


def expert_linear(
    x_PI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, counts: Sequence[int], transposed: bool = False
) -> Tensor:
    """Compute the rows of each expert with its weight: (P, I) to (P, O).

    The gradients of experts without rows are zeros.

    Args:
        counts: rows of each expert; their sum is P.
        transposed: the weight is (E, I, O).
    """
    starts = [*accumulate(counts, initial=0)]
    spans = [(e, slice(*rows)) for e, rows in enumerate(pairwise(starts)) if rows[0] < rows[1]]
    spans = spans or [(0, slice(0, 0))]  # for gradients of zeros
    if torch.is_autocast_enabled(x_PI.device.type):  # it leaves products into given memory alone
        weights, biases = weight_EOI.unbind(), [None] * len(counts) if bias_EO is None else bias_EO.unbind()
        rows = [F.linear(x_PI[r], weights[e].mT if transposed else weights[e], biases[e]) for e, r in spans]
        return torch.cat(rows)
    parameters = weight_EOI, bias_EO
    later = is_deferrable(x_PI, weight_EOI, bias_EO)
    inputs = (anchor(x_PI.dtype, x_PI.device), None, None) if later else (None, *parameters)
    return _ExpertLinear.apply(x_PI, *inputs, parameters, spans, transposed)


class _ExpertLinear(torch.autograd.Function):
    """Rows of each expert with its weight. Weights that are inputs get their gradients at once, others later."""

    @staticmethod
    def forward(
        ctx: Any,
        x_PI: Tensor,
        anchor: Tensor | None,
        weight_input: Tensor | None,
        bias_input: Tensor | None,
        parameters: tuple[Tensor, Tensor | None],
        spans: _Spans,
        transposed: bool,
    ) -> Tensor:
        weight, bias = parameters
        ctx.parameters, ctx.spans, ctx.transposed = parameters, spans, transposed
        ctx.save_for_backward(x_PI, weight.detach() if ctx.needs_input_grad[0] else None)
        y_PO = x_PI.new_empty(len(x_PI), weight.size(2 if transposed else 1))
        for e, r in spans:
            matrix_IO = weight[e] if transposed else weight[e].t()
            if bias is None:
                torch.mm(x_PI[r], matrix_IO, out=y_PO[r])
            else:
                torch.addmm(bias[e], x_PI[r], matrix_IO, out=y_PO[r])
        return y_PO

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_PI, weight_then = ctx.saved_tensors
        x_PI = x_PI.detach()
        grad_PO, (weight, bias), transposed = grads[0], ctx.parameters, ctx.transposed
        grad_x_PI = None
        if weight_then is not None:
            grad_x_PI = torch.empty_like(x_PI)
            for e, r in ctx.spans:
                torch.mm(grad_PO[r], weight_then[e].t() if transposed else weight_then[e], out=grad_x_PI[r])

        def of_weight() -> Tensor:
            gradient = torch.zeros_like(weight)
            for e, r in ctx.spans:
                left, right = (x_PI[r], grad_PO[r]) if transposed else (grad_PO[r], x_PI[r])
                torch.mm(left.t(), right, out=gradient[e])
            return gradient

        def of_bias() -> Tensor:
            gradient = torch.zeros_like(bias)
            for e, r in ctx.spans:
                torch.sum(grad_PO[r], 0, out=gradient[e])
            return gradient

        _, is_later, needs_weight, needs_bias, *others = ctx.needs_input_grad
        if is_later:
            defer(weight, of_weight, grad_PO, x_PI)
            if bias is not None:
                defer(bias, of_bias, grad_PO)
        gradients = of_weight() if needs_weight else None, of_bias() if needs_bias else None
        return grad_x_PI, None, *gradients, *[None] * len(others)
