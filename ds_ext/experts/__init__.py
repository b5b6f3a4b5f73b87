"""Layers of experts: their weights are (experts, ...) tensors, and each token is computed by a few experts."""

from ds_ext.experts.linear import expert_linear
from ds_ext.experts.modules import experts_forward, replace_experts

__all__ = ["expert_linear", "experts_forward", "replace_experts"]
