"""Which parameters decay."""

from __future__ import annotations

from typing import Any

from torch import nn


def weight_decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: matrices decay as it is told, vectors (biases, norms) not at all.

    The convention of GPT-2's, BERT's and Megatron's training. Groups that would be empty are left out; ranks that hold
    the same stages get the same groups in the same order, as ZeRO needs them.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1]},
        {"params": [parameter for parameter in trained if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
