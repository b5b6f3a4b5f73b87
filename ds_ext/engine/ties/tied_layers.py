"""Layers tied by a TiedLayerSpec."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from deepspeed.pipe import TiedLayerSpec
from torch import nn

from ...errors import ConfigError
from ..all_ranks import on_all_ranks
from ..types import Record
from ..wrappers import plain_names
from .layered_module import LayeredModule, rank_groups


def tied_weights(layer: nn.Module, names: Iterable[str]) -> list[nn.Parameter]:
    """Return the parameters of a tied layer with these names, each once, in the layer's order.

    A name may contain dots, and may refer to a property.
    """
    tied = {id(attribute_at(layer, name)) for name in names}
    return [parameter for parameter in layer.parameters() if id(parameter) in tied]


def attribute_at(layer: nn.Module, name: str) -> Any:
    value: Any = layer
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def require_whole_ties(module: LayeredModule) -> None:
    """Reject a tied layer that trains more than its tied weights. All ranks must call this together.

    DeepSpeed sums only the gradients of ``tied_weight_attr``. Any other parameter is one parameter if both ends of the
    tie are on one rank (a V placement), and two otherwise. The model would depend on the schedule, and a checkpoint
    stores a tied layer only once. To be called when the layers are built, before ties are indexed.
    """
    if any(isinstance(spec, TiedLayerSpec) for spec in module._layer_specs):
        on_all_ranks(lambda: check_ties(module))


def check_ties(module: LayeredModule) -> None:
    """Raise ConfigError for a tied layer on this rank that trains more than its tied weights."""
    places: dict[str, list[TiedLayerSpec]] = {}
    for spec in module._layer_specs:
        if isinstance(spec, TiedLayerSpec):
            places.setdefault(spec.key, []).append(spec)
    for key, specs in places.items():
        if len(specs) < 2 or key not in module.tied_modules:
            continue
        layer = module.tied_modules[key]
        require_tied_parameters(
            layer, key, sorted({name for spec in specs for name in spec.tied_weight_attr})
        )
        # Only weights that every spec names are tied.
        tied = set.intersection(
            *({id(p) for p in tied_weights(layer, spec.tied_weight_attr)} for spec in specs)
        )
        first_names = plain_names(dict(layer.named_parameters()))
        untied = [name for name, p in first_names.items() if p.requires_grad and id(p) not in tied]
        if untied:
            all_names = [name for name, p in first_names.items() if p.requires_grad or id(p) in tied]
            raise ConfigError(
                f"tied_weight_attr: all trainable parameters of the tied layer {key!r} must be tied, or some schedules "
                f"would share them and others would not (got {', '.join(untied)} of {type(layer).__name__} untied). "
                f"Set tied_weight_attr={all_names} in all {len(specs)} TiedLayerSpecs, build the layer without them "
                f"(nn.Linear: bias=False), or move them to a separate layer."
            )


def require_tied_parameters(layer: nn.Module, key: str, names: Iterable[str]) -> None:
    """Raise ConfigError for names in ``tied_weight_attr`` that are no parameters of a tied layer."""
    parameters = plain_names(dict(layer.named_parameters(remove_duplicate=False)))
    ids = {id(parameter) for parameter in parameters.values()}
    unknown = [name for name in names if id(attribute_at(layer, name)) not in ids]
    if unknown:
        raise ConfigError(
            f"tied_weight_attr: must name parameters of the tied layer {key!r} (got {', '.join(unknown)}; "
            f"{type(layer).__name__} has {', '.join(parameters) or 'no parameters'})."
        )


def index_tied_modules(module: LayeredModule) -> dict[str, Record]:
    """Return DeepSpeed's table of the tied modules, whose gradients are summed over the ranks that hold them.

    The ranks of a tie begin with that of its first layer, which broadcasts the initial weights. With ``fbd``, a tie has
    only backward ranks; forward ranks receive the weights. Every rank creates all process groups.
    """
    layers: dict[str, list[int]] = {}
    for index, layer in enumerate(module._layer_specs):
        if isinstance(layer, TiedLayerSpec):
            layers.setdefault(layer.key, []).append(index)
    ties: dict[str, Record] = {}
    for key in sorted(layers):
        if any(layers[key][0] in places for places in module.tied_kinds.values()):
            continue  # index_shared ties the weights
        for ranks in rank_groups(module, layers[key]):
            group = dist.new_group(ranks=list(ranks))
            if module.global_rank in ranks:
                ties[key] = _tie(module, key, list(ranks), group)
    return ties


def _tie(module: LayeredModule, key: str, ranks: list[int], group: object) -> Record:
    layer: Any = module.tied_modules[key]
    if module.global_rank != ranks[0]:
        for parameter in layer.parameters():
            parameter.ds_pipe_replicated = True  # a norm counts the parameter on the first rank only
    return {
        "ranks": ranks,
        "group": group,
        "weight_attr": module.tied_weight_attrs[key],
        "module": layer,
    }
