"""Experts modules of transformers: those whose class has its ``use_experts_implementation``.

N: tokens, D: hidden size, K: experts of a token, P = N * K: pairs of a token and its expert.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from .linear import expert_linear


def replace_experts(module: nn.Module) -> None:
    """Let the experts in a module compute with :func:`experts_forward`, unless they have another forward already."""
    for layer in module.modules():
        has_interface = all(hasattr(layer, name) for name in ("_apply_gate", "has_gate", "is_transposed"))
        if has_interface and "forward" not in vars(layer):
            layer.forward = functools.partial(experts_forward, layer)


def experts_forward(module: Any, hidden_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """Compute the experts of every token and their weighted sum. No token is dropped.

    Args:
        experts_NK: experts of each token.
        weights_NK: their weights.
    """
    tokens, experts = experts_NK.shape
    order_P = experts_NK.flatten().argsort(stable=True)
    counts = experts_NK.flatten().bincount(minlength=module.num_experts).tolist()

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
    places_P = torch.empty_like(order_P)
    places_P[order_P] = torch.arange(len(order_P), device=order_P.device)
    return y_PD.index_select(0, places_P).view(tokens, experts, -1).sum(1).to(hidden_ND.dtype)
