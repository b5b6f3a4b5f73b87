"""Experts modules of transformers: those whose class has its ``use_experts_implementation``.

N: tokens, D: hidden size, E: experts, K: experts of a token, P: pairs of a token and an expert of this rank, at most
N * K.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..tensor_parallel import TensorParallel, copy_to_tensor_model_parallel_region
from .linear import expert_linear

COUNTS = "tokens_per_expert"  # buffer of experts whose tokens are counted in training


def replace_experts(module: nn.Module) -> None:
    """Let the experts in a module compute with :func:`experts_forward`, unless they have another forward already."""
    for layer in module.modules():
        if has_interface(layer) and "forward" not in vars(layer):
            layer.forward = functools.partial(experts_forward, layer, TensorParallel())


def has_interface(module: nn.Module) -> bool:
    """Return whether :func:`experts_forward` can compute a module."""
    return all(hasattr(module, name) for name in ("_apply_gate", "has_gate", "is_transposed"))


def divided_experts_forward(
    module: Any,
    tp: TensorParallel,
    enter: Callable[[Tensor], Tensor],
    leave: Callable[[Tensor], Tensor],
    hidden_ND: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
) -> Tensor:
    """Compute what :func:`experts_forward` does, each rank with its experts for the tokens that all ranks have.

    Args:
        enter, leave: sums of a tensor over the ranks, in the backward and in the forward.
    """
    weights_NK = copy_to_tensor_model_parallel_region(weights_NK, tp)
    return leave(experts_forward(module, tp, enter(hidden_ND), experts_NK, weights_NK))


def experts_forward(
    module: Any, tp: TensorParallel, hidden_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor
) -> Tensor:
    """Compute the experts of every token and their weighted sum. No token is dropped.

    Args:
        tp: position in the group that divides the experts; the sum is that of this rank's.
        experts_NK: experts of each token.
        weights_NK: their weights.
    """
    tokens, experts = experts_NK.shape
    tokens_E = experts_NK.flatten().bincount(minlength=module.num_experts)
    if COUNTS in module._buffers and module.training:
        module.get_buffer(COUNTS).add_(tokens_E)
    counts = tokens_E.tolist()
    size = module.num_experts // tp.size
    first, counts = sum(counts[: tp.rank * size]), counts[tp.rank * size : (tp.rank + 1) * size]
    order_P = experts_NK.flatten().argsort(stable=True)[first : first + sum(counts)]

    def project(x_PI: Tensor, name: str) -> Tensor:
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        return expert_linear(x_PI, getattr(module, name), bias, counts, module.is_transposed)

    y = project(
        hidden_ND.index_select(0, order_P // experts), "gate_up_proj" if module.has_gate else "up_proj"
    )
    y = module._apply_gate(y) if module.has_gate else module.act_fn(y)
    y_PD = project(y, "down_proj")
    if getattr(module, "has_post_expert_norm", False):
        y_PD = module.post_expert_norm(y_PD)
    y_PD = y_PD * weights_NK.flatten()[order_P].unsqueeze(-1)
    places = order_P.new_full((tokens * experts,), len(order_P))  # of other ranks' experts: a row of zeros
    places[order_P] = torch.arange(len(order_P), device=order_P.device)
    rows = y_PD if tp.size == 1 else F.pad(y_PD, (0, 0, 0, 1))
    return rows.index_select(0, places).view(tokens, experts, -1).sum(1).to(hidden_ND.dtype)
