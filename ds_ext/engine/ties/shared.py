"""Parameters that several layers share as one object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from ...errors import ConfigError
from ..all_ranks import on_all_ranks
from ..types import Layer, Record
from ..wrappers import plain_name, plain_names
from .layered_module import LayeredModule, SharedParameter, built_layers, rank_groups
from .tied_layers import attribute_at


def find_shared(module: LayeredModule) -> list[SharedParameter]:
    """Return the parameters that several layers share as one object. All ranks must call this together.

    Every process has the modules of the layer list and the arguments of its LayerSpecs, so all processes find the same
    candidates. Whether a layer uses a candidate is visible only to ranks that build the layer. To be called when the
    layers are built, before ties are indexed.
    """
    # id -> tensor, and the layers in whose entries of the list it occurs
    entries: dict[int, tuple[Tensor, set[int]]] = {}
    for index, spec in enumerate(module._layer_specs):
        for tensor in _entry_tensors(spec):
            entries.setdefault(id(tensor), (tensor, set()))[1].add(index)
    candidates = [tensor for tensor, indices in entries.values() if len(indices) > 1]

    def find_places() -> list[dict[int, str]]:
        return _places_on_this_rank(module, candidates, entries)

    places_of_ranks: list[list[dict[int, str]]] = on_all_ranks(find_places)
    counts = [len(places) for places in places_of_ranks]
    if len(set(counts)) > 1:
        raise ConfigError(
            f"layers: all ranks must share the same parameters between layers (got {', '.join(map(str, counts))} on "
            f"ranks 0 to {len(counts) - 1}). Build the same layers on every rank."
        )
    shared = []
    for tensor, *places_by_rank in zip(candidates, *places_of_ranks, strict=True):
        places = {index: name for by_index in places_by_rank for index, name in by_index.items()}
        if len(places) < 2 or _is_one_tie(module, places):
            continue  # the layers copied their arguments, or a TiedLayerSpec ties them
        if not isinstance(tensor, nn.Parameter) or any(_is_tied(module, index) for index in places):
            raise ConfigError(_refusal(module, places))
        shared.append(SharedParameter(tensor, dict(sorted(places.items()))))
    layers = dict(built_layers(module))
    for places in (*module.tied_rows, *module.joined):
        held = (attribute_at(layers[index], name) for index, name in places.items() if index in layers)
        whole = places[min(places)].rpartition(".")[0] if places in module.tied_rows else ""
        shared.append(SharedParameter(next(held, None), places, whole))
    return shared


def _places_on_this_rank(
    module: LayeredModule, candidates: Sequence[Tensor], entries: Mapping[int, tuple[Tensor, set[int]]]
) -> list[dict[int, str]]:
    """Return layer -> name of every candidate in the layers of this rank.

    ``entries``: id -> (tensor, layers in whose entries it occurs), from :func:`find_shared`.
    """
    candidate_places: dict[int, dict[int, str]] = {id(tensor): {} for tensor in candidates}
    parameter_places: dict[int, dict[int, str]] = {}
    for index, layer in built_layers(module):
        for name, tensor in _named_tensors(layer):
            if id(tensor) in candidate_places:
                candidate_places[id(tensor)].setdefault(index, name)
            elif isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                parameter_places.setdefault(id(tensor), {}).setdefault(index, name)
    invisible = [
        places
        for places in parameter_places.values()
        if len(places) > 1 and not _is_one_tie(module, places) and places not in module.tied_rows
    ]
    invisible += _unregistered(module, entries)
    if invisible:
        raise ConfigError(_refusal(module, invisible[0]))
    return list(candidate_places.values())


def _unregistered(
    module: LayeredModule, entries: Mapping[int, tuple[Tensor, set[int]]]
) -> Iterator[dict[int, str]]:
    """Yield the places of each parameter that one layer has in a list or dictionary, and another layer registers."""
    for index, layer in built_layers(module):
        registered = {id(parameter) for parameter in layer.parameters()}
        attributes = [(submodule, *item) for submodule in layer.modules() for item in vars(submodule).items()]
        for submodule, key, container in attributes:
            if not isinstance(container, list | tuple | dict):
                continue
            values = container.values() if isinstance(container, dict) else container
            owners = [value for value in values if isinstance(value, nn.Module | nn.Parameter)]
            for tensor in _entry_tensors(owners):
                other_layers = entries[id(tensor)][1] - {index} if id(tensor) in entries else set[int]()
                if tensor.requires_grad and id(tensor) not in registered and other_layers:
                    yield {index: f"{type(submodule).__name__}.{key}", min(other_layers): "a parameter"}


def index_shared(module: LayeredModule) -> dict[str, Record]:
    """Return entries of DeepSpeed's table for the parameters shared between ranks, and create their process groups.

    Parameters on the same ranks share one entry. The ranks of a group sum the gradients. The first rank broadcasts the
    initial values and counts the parameters in norms.
    """
    by_ranks: dict[tuple[tuple[int, ...], ...], list[SharedParameter]] = {}
    for shared in module.shared:
        by_ranks.setdefault(rank_groups(module, shared.places), []).append(shared)
    ties: dict[str, Record] = {}
    for groups, members in by_ranks.items():
        for ranks in groups:
            group = dist.new_group(ranks=ranks)
            if module.global_rank in ranks:
                tensors = nn.ParameterList([shared.parameter for shared in members])
                for tensor in tensors:
                    tensor.ds_pipe_replicated = module.global_rank != ranks[0]
                ties[f"shared {members[0].layer}.{members[0].key}"] = {
                    "ranks": list(ranks),
                    "group": group,
                    "weight_attr": [str(number) for number in range(len(members))],
                    "module": tensors,
                }
    return ties


def _entry_tensors(value: Layer) -> Iterator[Tensor]:
    """Yield the parameters and the saved floating-point buffers in an entry of the layer list, before it is built."""
    if isinstance(value, LayerSpec):
        for argument in (*value.module_args, *value.module_kwargs.values()):
            yield from _entry_tensors(argument)
    elif isinstance(value, nn.Module):
        yield from (tensor for _, tensor in _named_tensors(value))
    elif isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _entry_tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _entry_tensors(item)


def _named_tensors(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of parameters, under each of their names, and of saved floating-point buffers."""
    yield from plain_names(dict(layer.named_parameters(remove_duplicate=False))).items()
    for prefix, module in layer.named_modules():
        for name, buffer in module._buffers.items():
            if (
                buffer is not None
                and buffer.is_floating_point()
                and name not in module._non_persistent_buffers_set
            ):
                yield plain_name(f"{prefix}.{name}" if prefix else name), buffer


def _is_tied(module: LayeredModule, index: int) -> bool:
    return isinstance(module._layer_specs[index], TiedLayerSpec)


def _is_one_tie(module: LayeredModule, places: Mapping[int, str]) -> bool:
    """Return whether one TiedLayerSpec key ties all ``places``: layer -> parameter."""
    if any(places.items() <= joined.items() for joined in module.joined):
        return True
    specs = [module._layer_specs[index] for index in places]
    return all(isinstance(spec, TiedLayerSpec) for spec in specs) and len({spec.key for spec in specs}) == 1


def _refusal(module: LayeredModule, places: Mapping[int, str]) -> str:
    """Return the error for a tensor that several layers share; ``places``: layer -> name in it."""
    specs = {index: module._layer_specs[index] for index in places}
    types = {i: s.typename if isinstance(s, LayerSpec) else type(s) for i, s in specs.items()}
    names = [f"{name} of layer {index} ({types[index].__name__})" for index, name in sorted(places.items())]
    return (
        f"layers: several layers share one tensor in a way that would depend on the schedule (got {', '.join(names)}). "
        f"Use deepspeed.pipe.TiedLayerSpec with one key in all of these layers, use a separate tensor in each layer, "
        f"or register a constant buffer with persistent=False."
    )
