"""Parameters used by several layers: tied by a TiedLayerSpec, or shared as one object.

DeepSpeed sums the gradients of tied layers over the ranks that hold them. Two layers that share a parameter object have
one parameter if they are on the same rank, and otherwise one copy on each rank. The functions here compare objects over
the whole layer list, and tie shared parameters as DeepSpeed ties layers.
"""

from __future__ import annotations

import bisect
import copy
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..errors import ConfigError
from ..parallel.layout import ParallelLayout
from .all_ranks import on_all_ranks
from .contracts import AdaptedLayer
from .grid import FoldedTopology
from .types import Function, Layer, Record
from .wrappers import plain_name, plain_names


class LayeredModule(Protocol):
    """Attributes of PipelineModule that its ties depend on."""

    @property
    def layout(self) -> ParallelLayout: ...

    role_name: str | None  # "forward" or "backward" with fbd, else None
    global_rank: int
    num_stages: int
    parts: list[int]
    shared: list[SharedParameter]
    tied_rows: list[dict[int, str]]  # of a tied head in parts: layer -> parameter, of every part
    tied_kinds: dict[str, list[int]]  # key of a tie of several kinds of layers -> its layers
    joined: list[dict[int, str]]  # layer -> parameter, of every weight that different kinds of layers tie
    tied_modules: Mapping[str, nn.Module]
    tied_weight_attrs: Mapping[str, list[str]]
    _layer_specs: Sequence[Layer]

    @property
    def stages(self) -> Sequence[int]: ...

    def stage_modules(self, stage: int) -> dict[int, nn.Module]: ...

    def stage_owner(self, layer_idx: int) -> int: ...

    def topology(self) -> FoldedTopology: ...


@dataclass(frozen=True)
class SharedParameter:
    """Parameter that several layers share as one object.

    Attributes:
        parameter: object in this process. Every process has one, even if its stages do not use it; rows of a tied
            embedding are None on a rank without them.
        places: global index of each layer with the parameter -> name of the parameter in that layer.
        whole: name in the first layer of the parameter of which these are rows; "": it is no part.
    """

    parameter: Tensor | None
    places: dict[int, str]
    whole: str = ""

    @property
    def layer(self) -> int:
        """Index of the first layer with the parameter, part of its name in checkpoints."""
        return min(self.places)

    @property
    def key(self) -> str:
        return self.places[self.layer]


# --- before the layers are built ---


def require_visible_parameters(layers: Sequence[Layer], loss_fn: Function | None) -> None:
    """Raise ConfigError for a function with trainable parameters, which no optimizer would train.

    This includes a module's method used as a layer. A module's method is accepted as a loss function, because it may
    not use the parameters.
    """
    functions: list[tuple[str, object]] = []
    for index, layer in enumerate(layers):
        if isinstance(layer, TiedLayerSpec):
            functions.append(
                (f"layer {index} (forward_fn of the tied layer {layer.key!r})", layer.forward_fn)
            )
        elif not isinstance(layer, LayerSpec | nn.Module):
            functions.append((f"layer {index} ({_name(layer)})", layer))
    if isinstance(loss_fn, nn.Module):
        functions.append((f"loss_fn ({_name(loss_fn)})", loss_fn))
    for place, function in functions:
        for owner in _references(function):
            trained = [owner] if isinstance(owner, nn.Parameter) else list(owner.parameters())
            if any(parameter.requires_grad for parameter in trained):
                raise ConfigError(
                    f"{place}: parameters in functions are not trained (got a reference to {type(owner).__name__}). "
                    f"Use the nn.Module itself as the layer. For a weight of another layer, use "
                    f"deepspeed.pipe.TiedLayerSpec with a forward_fn. If it only needs settings of the module, copy "
                    f"them to variables."
                )


def _name(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _references(function: object) -> Iterator[nn.Module | nn.Parameter]:
    """Yield the modules and parameters that a function, method, partial or callable object refers to."""
    if isinstance(function, nn.Module | nn.Parameter):
        yield function
    elif isinstance(function, MethodType):
        yield from _references(function.__self__)
    elif isinstance(function, partial):
        for value in (function.func, *function.args, *function.keywords.values()):
            yield from _references(value)
    elif isinstance(function, FunctionType):
        used = inspect.getclosurevars(function)
        for value in (*used.nonlocals.values(), *used.globals.values(), *(function.__defaults__ or ())):
            if isinstance(value, nn.Module | nn.Parameter | MethodType | partial):
                yield from _references(value)
    elif callable(function) and not isinstance(function, type):
        for value in getattr(function, "__dict__", {}).values():
            if isinstance(value, nn.Module | nn.Parameter):
                yield value


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


# --- TiedLayerSpec ---


def tied_weights(layer: nn.Module, names: Iterable[str]) -> list[nn.Parameter]:
    """Return the parameters of a tied layer with these names, each once, in the layer's order.

    A name may contain dots, and may refer to a property.
    """
    tied = {id(_attribute(layer, name)) for name in names}
    return [parameter for parameter in layer.parameters() if id(parameter) in tied]


def _attribute(layer: nn.Module, name: str) -> Any:
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
        _require_parameters(layer, key, sorted({name for spec in specs for name in spec.tied_weight_attr}))
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


def _require_parameters(layer: nn.Module, key: str, names: Iterable[str]) -> None:
    """Raise ConfigError for names in ``tied_weight_attr`` that are no parameters of a tied layer."""
    parameters = plain_names(dict(layer.named_parameters(remove_duplicate=False)))
    ids = {id(parameter) for parameter in parameters.values()}
    unknown = [name for name in names if id(_attribute(layer, name)) not in ids]
    if unknown:
        raise ConfigError(
            f"tied_weight_attr: must name parameters of the tied layer {key!r} (got {', '.join(unknown)}; "
            f"{type(layer).__name__} has {', '.join(parameters) or 'no parameters'})."
        )


def join_kinds(module: LayeredModule) -> list[dict[int, str]]:
    """Share the weights of a tie between its layers of different class or arguments. All ranks must call this together.

    Returns layer -> name of every weight, in the order of ``tied_weight_attr``.
    """
    if not module.tied_kinds:
        return []
    layers, specs = dict(_built_layers(module)), module._layer_specs
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
    _require_parameters(layer, key, names)
    first_names = {parameter: name for name, parameter in plain_names(dict(layer.named_parameters())).items()}
    weights = [_attribute(layer, name) for name in names]
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
        for ranks in _rank_groups(module, layers[key]):
            group = dist.new_group(ranks=list(ranks))
            if module.global_rank in ranks:
                ties[key] = _tie(module, key, list(ranks), group)
    return ties


def _tie_ranks(layout: ParallelLayout, stages: Sequence[int]) -> Iterator[list[int]]:
    """Yield the backward ranks of ``stages`` of each pipe, data-parallel group and tensor-parallel rank."""
    for data in range(layout.data_parallel_size):
        for pipe in layout.placement.pipes:
            for tensor in range(layout.tensor_parallel_size):
                yield [layout.rank(pipe[stage], data, tensor) for stage in stages]


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


# --- one parameter object in several layers ---


def join_tied_rows(module: LayeredModule) -> None:
    """Set the embedding's rows on this rank as weights of a tied head's parts. All ranks must call this together."""

    def join() -> None:
        layers = dict(_built_layers(module))
        for places in module.tied_rows:
            (first, name), (part, weight) = places.items()
            if first not in layers:
                continue
            state, rows = plain_names(layers[first].state_dict()), _attribute(layers[first], name)
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
    layers = dict(_built_layers(module))
    for places in (*module.tied_rows, *module.joined):
        held = (_attribute(layers[index], name) for index, name in places.items() if index in layers)
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
    for index, layer in _built_layers(module):
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
    for index, layer in _built_layers(module):
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
        by_ranks.setdefault(_rank_groups(module, shared.places), []).append(shared)
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


def _rank_groups(module: LayeredModule, places: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that together hold all ``places``; empty if each rank holds all or none of them.

    The ranks of a group are in the order of the first layer in ``places`` that they hold.
    """
    if module.role_name is not None:
        # fbd: tie the backward ranks only. Forward ranks receive the weights.
        stages = sorted({stage_of(module, index) for index in places})
        return tuple(map(tuple, _tie_ranks(module.layout, stages))) if len(stages) > 1 else ()
    owners = list(dict.fromkeys(module.stage_owner(index) for index in sorted(places)))
    if len(owners) < 2:
        return ()
    topology = module.topology()
    other_axes = [axis for axis in topology.get_axis_names() if axis != "pipe"]
    ranges = [range(topology.get_dim(axis)) for axis in other_axes]
    coordinates = [dict(zip(other_axes, values, strict=True)) for values in itertools.product(*ranges)]
    return tuple(tuple(topology.get_rank(pipe=owner, **entry) for owner in owners) for entry in coordinates)


def stage_of(module: LayeredModule, index: int) -> int:
    """Return the stage of a layer, also of a part of the head."""
    return bisect.bisect_right(module.parts, index) - 1


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


def _built_layers(module: LayeredModule) -> Iterator[tuple[int, nn.Module]]:
    for stage in module.stages:
        yield from module.stage_modules(stage).items()


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
