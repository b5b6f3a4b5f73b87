"""Ties between layers that DeepSpeed would build as one: separated in the layer list, and joined when they are built.

The layers differ in class or arguments, or are an embedding and the parts of a head.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn
from torch.utils._pytree import tree_flatten

from ...errors import ConfigError
from ..all_ranks import on_all_ranks
from ..contracts import AdaptedLayer
from ..types import Layer
from ..wrappers import plain_names
from .layered_module import LayeredModule, built_layers
from .tied_layers import attribute_at, require_tied_parameters


def separate_kinds(layers: Sequence[Layer]) -> tuple[list[Layer], dict[str, list[int]]]:
    """Return the layers, and the places of every key whose TiedLayerSpecs differ in class or arguments.

    DeepSpeed builds one layer for a key on each rank. So the specs of a further class, or with further arguments, get a
    key with the index of their first layer, and :func:`join_kinds` ties the weights.
    """
    separated, places = list(layers), dict[str, list[int]]()
    for index, spec in enumerate(layers):
        if isinstance(spec, TiedLayerSpec):
            earlier = places.setdefault(spec.key, [])
            first = next((i for i in earlier if _builds_the_same(layers[i], spec)), index)
            earlier.append(index)
            if not _builds_the_same(layers[earlier[0]], spec):
                separated[index] = copy.copy(spec)
                separated[index].key = f"{spec.key}@{first}"
    return separated, {
        k: of_key for k, of_key in places.items() if any(separated[i] is not layers[i] for i in of_key)
    }


def _builds_the_same(a: LayerSpec, b: LayerSpec) -> bool:
    """Return whether specs have the same class and equal arguments; equal tensors and arrays are one object."""
    (values, form), (others, other_form) = (
        tree_flatten((spec.typename, spec.module_args, spec.module_kwargs)) for spec in (a, b)
    )
    try:
        return form == other_form and all(
            x is y or (type(x) is type(y) and not hasattr(x, "shape") and bool(x == y))
            for x, y in zip(values, others, strict=True)
        )
    except Exception:  # of an argument's own comparison
        return False


def join_kinds(module: LayeredModule) -> list[dict[int, str]]:
    """Share the weights of a tie between its layers of different class or arguments. All ranks must call this together.

    Returns layer -> name of every weight, in the order of ``tied_weight_attr``.
    """
    if not module.tied_kinds:
        return []
    layers, specs = dict(built_layers(module)), module._layer_specs
    keys = {index: key for key, places in module.tied_kinds.items() for index in places}

    def describe() -> dict[int, dict[str, str]]:
        return {i: _describe_tied(layers[i], keys[i], specs[i].tied_weight_attr) for i in keys if i in layers}

    weights = {index: by_name for by_layer in on_all_ranks(describe) for index, by_name in by_layer.items()}
    joined: list[dict[int, str]] = []
    for key, places in module.tied_kinds.items():
        for index in places:
            if [*weights[index].values()] != [*weights[places[0]].values()]:
                got = [f"{weights[i]} of {specs[i].typename.__name__}" for i in (places[0], index)]
                raise ConfigError(
                    f"tied_weight_attr: layers {places[0]} and {index} of the tie {key!r} must name equal weights (got "
                    f"{got[0]} and {got[1]}). Name them in one order, or use one class, with a forward_fn."
                )
        joined += [
            dict(zip(places, names, strict=True)) for names in zip(*(weights[i] for i in places), strict=True)
        ]
    for places in joined:
        held = [index for index in places if index in layers]
        copies = [layers[index].get_parameter(places[index]) for index in held]
        for index in held:
            _join(layers[index], copies)
    return joined


def _describe_tied(layer: nn.Module, key: str, names: Sequence[str]) -> dict[str, str]:
    """Return first name -> shape and dtype of each tied weight of a layer."""
    require_tied_parameters(layer, key, names)
    first_names = {parameter: name for name, parameter in plain_names(dict(layer.named_parameters())).items()}
    weights = [attribute_at(layer, name) for name in names]
    return {first_names[w]: f"{tuple(w.shape)} {w.dtype}{' frozen' * (not w.requires_grad)}" for w in weights}


def _join(layer: nn.Module, copies: Sequence[nn.Parameter]) -> None:
    """Replace the copies of a weight in a layer by the first one.

    The others lose their elements: a layer that kept one elsewhere then fails.
    """
    others = {id(parameter) for parameter in copies if parameter is not copies[0]}
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in others:
                setattr(module, name, copies[0])
                parameter.data = parameter.new_empty(0)


def divide_tied_embedding(layers: Sequence[Layer], parts: int) -> tuple[list[Layer], list[dict[int, str]]]:
    """Return the layers without the head, and the places of the parameters that its parts share with an embedding.

    If the last layer is a TiedLayerSpec, its part i has as ``weight`` the parameter i of the ``nn.ParameterList`` that
    ``tied_weight_attr`` names in the layer with the same key. The spec of that layer has an attribute ``in_parts``:
    function of the number of parts; returns the spec of the layer with this list.
    """
    *body, head = layers
    if not isinstance(head, TiedLayerSpec):
        return body, []
    places = [
        index for index, spec in enumerate(body) if isinstance(spec, TiedLayerSpec) and spec.key == head.key
    ]
    divide = AdaptedLayer(body[places[0]]).in_parts if len(places) == 1 else None
    if len(head.tied_weight_attr) != 1 or divide is None:
        raise ConfigError(
            f"vocabulary_parallel_head: the head must be tied by one weight to one layer, whose spec has in_parts (got "
            f"{len(places)} layers with the key {head.key!r}, tied_weight_attr={head.tied_weight_attr}). Use those of "
            f"gpt_layer_specs(), untie the head, or remove vocabulary_parallel_head."
        )
    (index,), (name,) = places, head.tied_weight_attr
    body[index] = divide(parts)
    return body, [{index: f"{name}.{part}", len(body) + part: "weight"} for part in range(parts)]


def join_tied_rows(module: LayeredModule) -> None:
    """Set the embedding's rows on this rank as weights of a tied head's parts. All ranks must call this together."""

    def join() -> None:
        layers = dict(built_layers(module))
        for places in module.tied_rows:
            (first, name), (part, weight) = places.items()
            if first not in layers:
                continue
            state, rows = plain_names(layers[first].state_dict()), attribute_at(layers[first], name)
            expected = [places[first] for places in module.tied_rows]
            if sorted(state) != sorted(expected) or not isinstance(rows, nn.Parameter):
                raise ConfigError(
                    f"vocabulary_parallel_head: the embedding in parts must have only the parameters "
                    f"{', '.join(expected)} (got {', '.join(state)} in {type(layers[first]).__name__}). Let in_parts "
                    f"return a layer without others, or remove vocabulary_parallel_head."
                )
            if part in layers:
                setattr(layers[part], weight, rows)

    if module.tied_rows:
        on_all_ranks(join)
