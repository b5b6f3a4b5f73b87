"""Placeholders: parameters of a rank that trains nothing, or nothing of a group.

DeepSpeed removes empty groups of an optimizer, so that the positions of the others would differ between ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import nn

from .types import Groups, ParameterGroup


class WithPlaceholders(Protocol):
    """Attributes of :class:`.module.PipelineModule` that placeholders need."""

    placeholders: list[nn.Parameter]
    _parameters: dict[str, nn.Parameter | None]

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def layer_parameters(self) -> Iterator[nn.Parameter]: ...

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None: ...


def as_groups(groups: Groups) -> list[ParameterGroup]:
    """Return parameter groups; a list of parameters is one group, whose list is the same object."""
    return groups if groups and isinstance(groups[0], Mapping) else [{"params": groups}]


def has_trained(parameters: Iterable[nn.Parameter | tuple[str, nn.Parameter]]) -> bool:
    plain = [entry[1] if isinstance(entry, tuple) else entry for entry in parameters]
    return any(parameter.requires_grad and parameter.numel() for parameter in plain)


def fill_groups(module: WithPlaceholders, groups: Groups) -> None:
    """Add a placeholder, in place, to each group without a trained parameter of this rank.

    DeepSpeed removes empty groups, so that positions would differ between ranks, and fails on groups of frozen
    parameters.

    Args:
        groups: parameters or parameter groups of this rank.
    """
    all_groups = as_groups(groups)
    is_named = any(isinstance(entry, tuple) for group in all_groups for entry in group["params"])
    for group in all_groups:
        if not has_trained(group["params"]):
            name, placeholder = add_placeholder(module)
            group["params"].append((name, placeholder) if is_named else placeholder)
            if "param_names" in group:
                group["param_names"].append(name)


def add_placeholder(module: WithPlaceholders, dim: int = 1) -> tuple[str, nn.Parameter]:
    """Return a new parameter with its name, for a group of an optimizer, which must not be empty.

    Its gradient is zero. It is in no stage and no checkpoint.
    """
    trained = [p for p in module.parameters() if p.requires_grad and p.is_floating_point()]
    like = trained[0].detach() if trained else torch.zeros(1)
    name = f"placeholder_{len(module.placeholders)}"
    placeholder = nn.Parameter(like.new_zeros([1] * dim))
    placeholder.use_muon = dim > 1  # pyright: ignore[reportAttributeAccessIssue]
    module.register_parameter(name, placeholder)
    module.placeholders.append(placeholder)
    return name, placeholder


def hide_placeholders(module: WithPlaceholders) -> None:
    """Leave the placeholders to the optimizer, except one of a rank that trains nothing.

    Scripts read names and parameters of the module, and make optimizers of them.
    """
    hidden = set(
        map(id, module.placeholders if has_trained(module.layer_parameters()) else module.placeholders[1:])
    )
    for name in [name for name, parameter in module._parameters.items() if id(parameter) in hidden]:
        del module._parameters[name]
