"""Layers of experts: their weights are (experts, ...) tensors, and each token is computed by a few experts."""

from ds_ext.experts.linear import expert_linear
from ds_ext.experts.loads import ExpertLoads, Loads
from ds_ext.experts.modules import divided_experts_forward, experts_forward, has_interface, replace_experts

__all__ = [
    "ExpertLoads",
    "Loads",
    "divided_experts_forward",
    "expert_linear",
    "experts_forward",
    "has_interface",
    "replace_experts",
]
