"""Parameters that several layers share: by a TiedLayerSpec, or because two layers hold the same object.

DeepSpeed sums the gradients of tied layers over the ranks that hold them. A parameter object that two layers of the
list share is one parameter only where both layers are on one rank; elsewhere each rank has its own copy. So identities
are compared over the whole list, and shared parameters are tied as DeepSpeed ties layers.
"""

from __future__ import annotations

import bisect
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

from ..errors import ConfigError
from ..parallel.layout import ParallelLayout
from .topology import FoldedTopology


class LayeredModule(Protocol):
    """PipelineModule, as far as its ties depend on it."""

    @property
    def layout(self) -> ParallelLayout: ...

    role: str | None
    global_rank: int
    num_stages: int
    parts: list[int]
    shared: list[SharedParameter]
    tied_modules: Mapping[str, nn.Module]
    tied_weight_attrs: Mapping[str, list[str]]
    _layer_specs: Sequence[Any]

    @property
    def stages(self) -> Sequence[int]: ...

    def stage_modules(self, stage: int) -> dict[int, nn.Module]: ...

    def stage_owner(self, layer_idx: int) -> int: ...

    def topology(self) -> FoldedTopology: ...


@dataclass(frozen=True)
class SharedParameter:
    """Parameter that several layers hold as one object.

    Attributes:
        parameter: this process's object; every process has one, whether its stages use it or not.
        places: index in the whole model of each layer that holds it -> its name in that layer.
    """

    parameter: Tensor
    places: dict[int, str]

    @property
    def layer(self) -> int:
        """Index of the first layer that holds it; checkpoints name it by this layer."""
        return min(self.places)

    @property
    def key(self) -> str:
        """Name in the first layer."""
        return self.places[self.layer]


# --- before the layers are built ---


def require_visible_parameters(layers: Sequence[Any], loss_fn: Any) -> None:
    """Refuse functions that hold trainable parameters: no optimizer would train these.

    A method of a module is refused as a layer. As a loss it need not use the module's parameters.

    Raises:
        ConfigError: names the function and the module.
    """
    functions: list[tuple[str, Any]] = []
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
                    f"{place}: refers to an object with trainable parameters (got {type(owner).__name__}), which a "
                    f"function does not train. Give the nn.Module itself as the layer; for a weight of another layer "
                    f"use deepspeed.pipe.TiedLayerSpec with a forward_fn; read plain settings into a variable first."
                )


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _references(function: Any) -> Iterator[nn.Module | nn.Parameter]:
    """Modules and parameters that a function, method, partial or callable object refers to."""
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


# --- TiedLayerSpec ---


def tied_weights(layer: nn.Module, names: Iterable[str]) -> list[nn.Parameter]:
    """Parameters of a tied layer that ``names`` give, each once, in the layer's order.

    A name may be dotted, and may be a property that returns a parameter of the layer.
    """
    named = {id(_attribute(layer, name)) for name in names}
    return [parameter for parameter in layer.parameters() if id(parameter) in named]


def _attribute(layer: nn.Module, name: str) -> Any:
    value: Any = layer
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def require_whole_ties(module: LayeredModule) -> None:
    """Refuse a tied layer that trains more than its tied weights; a collective call of all ranks.

    DeepSpeed sums the gradients of ``tied_weight_attr`` only. Where two places are on two ranks, the others become
    two different parameters; where they are on one rank (a V placement) they are one. The model would depend on the
    schedule, and a checkpoint, which keeps a tied layer once, would lose one of the two.

    Args:
        module: its layers are built, not yet indexed.

    Raises:
        ConfigError: names the tie and the parameters. On every rank.
    """
    places: dict[str, list[TiedLayerSpec]] = {}
    for spec in module._layer_specs:
        if isinstance(spec, TiedLayerSpec):
            places.setdefault(spec.key, []).append(spec)
    several = {key: specs for key, specs in places.items() if len(specs) > 1}
    if several:
        _raise_first(_gather(next(_faults(module, several), None)))


def _faults(module: LayeredModule, several: dict[str, list[TiedLayerSpec]]) -> Iterator[str]:
    """Yield the faults of the tied layers on this rank."""
    for key, specs in several.items():
        if key not in module.tied_modules:
            continue
        layer = module.tied_modules[key]
        known = dict(layer.named_parameters(remove_duplicate=False))
        ids = {id(parameter) for parameter in known.values()}
        names = sorted({name for spec in specs for name in spec.tied_weight_attr})
        unknown = [name for name in names if id(_attribute(layer, name)) not in ids]
        if unknown:
            yield (
                f"tied_weight_attr of the tied layer {key!r} names {', '.join(unknown)}, and {type(layer).__name__} "
                f"has the parameters {', '.join(known) or '(none)'}."
            )
        # A weight that one place does not name is not tied.
        tied = set.intersection(
            *({id(p) for p in tied_weights(layer, spec.tied_weight_attr)} for spec in specs)
        )
        free = [name for name, p in layer.named_parameters() if p.requires_grad and id(p) not in tied]
        if free:
            every = [name for name, p in layer.named_parameters() if p.requires_grad or id(p) in tied]
            yield (
                f"the tied layer {key!r} ({type(layer).__name__}) trains {', '.join(free)} besides its tied weights, "
                f"so its {len(specs)} places would share it under some schedules only. Tie all of it with "
                f"tied_weight_attr={every} in each TiedLayerSpec, build the layer without it (nn.Linear: bias=False), "
                f"or move it into a separate layer."
            )


def index_tied_modules(module: LayeredModule) -> dict[str, Any]:
    """Return DeepSpeed's table of the tied modules whose gradients are summed over ranks: those of the backward pipes.

    Forward ranks get the weights of both ends from their backward ranks. Every rank makes all groups.
    """
    layers: dict[str, list[int]] = {}
    for index, layer in enumerate(module._layer_specs):
        if isinstance(layer, TiedLayerSpec):
            layers.setdefault(layer.key, []).append(index)
    found: dict[str, Any] = {}
    for key in sorted(layers):
        stages = sorted({_stage_of(module, index) for index in layers[key]})
        if len(stages) < 2:
            continue
        for ranks in _tie_ranks(module.layout, stages):
            group = dist.new_group(ranks=ranks)
            if module.global_rank in ranks:
                found[key] = _tie(module, key, ranks, group)
    return found


def _tie_ranks(layout: ParallelLayout, stages: Sequence[int]) -> Iterator[list[int]]:
    """Yield the backward ranks of ``stages`` of each pipe, data-parallel group and tensor-parallel rank."""
    for data in range(layout.data_parallel_size):
        for pipe in layout.placement.pipes:
            for tensor in range(layout.tensor_parallel_size):
                yield [layout.rank(pipe[stage], data, tensor) for stage in stages]


def _tie(module: LayeredModule, key: str, ranks: list[int], group: Any) -> dict[str, Any]:
    layer: Any = module.tied_modules[key]
    if module.global_rank != ranks[0]:
        for parameter in layer.parameters():
            parameter.ds_pipe_replicated = True  # a norm counts the first one
    return {
        "ranks": ranks,
        "group": group,
        "weight_attr": module.tied_weight_attrs[key],
        "module": layer,
    }


# --- one object in several layers ---


def find_shared(module: LayeredModule) -> list[SharedParameter]:
    """Return the parameters that several layers share by identity; a collective call of all ranks.

    Every process has all modules of the layer list and all arguments of its LayerSpecs, so all find the same
    candidates. Only ranks that build a layer know whether it holds the parameters of its arguments; they exchange it.

    Args:
        module: its layers are built, not yet indexed.

    Raises:
        ConfigError: a sharing that would depend on the schedule. On every rank.
    """
    listed: dict[int, tuple[Tensor, set[int]]] = {}
    for index, spec in enumerate(module._layer_specs):
        for tensor in _listed(spec):
            listed.setdefault(id(tensor), (tensor, set()))[1].add(index)
    candidates = [tensor for tensor, indices in listed.values() if len(indices) > 1]
    numbers = {id(tensor): number for number, tensor in enumerate(candidates)}
    held: dict[int, dict[int, str]] = {}
    others: dict[int, dict[int, str]] = {}
    for index, layer in _built(module):
        for name, tensor in _named_tensors(layer):
            if id(tensor) in numbers:
                held.setdefault(numbers[id(tensor)], {}).setdefault(index, name)
            elif isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                others.setdefault(id(tensor), {}).setdefault(index, name)
    # A LayerSpec may find a parameter elsewhere (a global, say): ranks that build one of its layers cannot see that.
    unseen = [p for p in others.values() if len(p) > 1 and not _is_one_tie(module, p)]
    unseen += _unregistered(module, listed)
    fault = next((_refusal(module, places) for places in unseen), None)
    found = _gather((len(candidates), held, fault))
    _raise_first([fault for *_, fault in found])
    counts = [count for count, *_ in found]
    if len(set(counts)) > 1:
        raise ConfigError(
            f"layers: the ranks share different numbers of parameters between layers (got "
            f"{', '.join(map(str, counts))} on ranks 0 to {len(counts) - 1}). Build the same layers on every rank."
        )
    shared = []
    for number, tensor in enumerate(candidates):
        places = {i: name for _, theirs, _ in found for i, name in theirs.get(number, {}).items()}
        if len(places) < 2 or _is_one_tie(module, places):
            continue  # the layers copied what they were given, or a TiedLayerSpec ties them
        if not isinstance(tensor, nn.Parameter) or any(_is_tied(module, index) for index in places):
            raise ConfigError(_refusal(module, places))
        shared.append(SharedParameter(tensor, dict(sorted(places.items()))))
    return shared


def _unregistered(
    module: LayeredModule, listed: Mapping[int, tuple[Tensor, set[int]]]
) -> Iterator[dict[int, str]]:
    """Yield the places of parameters that a layer keeps in a list or dictionary, and another layer registers."""
    for index, layer in _built(module):
        own = {id(parameter) for parameter in layer.parameters()}
        for name, held in (
            (f"{type(one).__name__}.{key}", v) for one in layer.modules() for key, v in vars(one).items()
        ):
            if not isinstance(held, list | tuple | dict):
                continue
            for value in held.values() if isinstance(held, dict) else held:
                for tensor in _listed(value) if isinstance(value, nn.Module | nn.Parameter) else ():
                    others = listed.get(id(tensor), (tensor, set[int]()))[1] - {index}
                    if tensor.requires_grad and id(tensor) not in own and others:
                        yield {index: name, min(others): "a parameter"}


def index_shared(module: LayeredModule) -> dict[str, Any]:
    """Return DeepSpeed's table entries for the shared parameters that several ranks hold; makes their groups.

    One entry for all parameters of the same ranks. A rank of the group sums their gradients, the first one broadcasts
    their start values and counts them in a norm.
    """
    by_ranks: dict[tuple[tuple[int, ...], ...], list[SharedParameter]] = {}
    for shared in module.shared:
        by_ranks.setdefault(_rank_groups(module, shared.places), []).append(shared)
    found: dict[str, Any] = {}
    for groups, members in by_ranks.items():
        for ranks in groups:
            group = dist.new_group(ranks=ranks)
            if module.global_rank in ranks:
                tensors = nn.ParameterList([shared.parameter for shared in members])
                for tensor in tensors:
                    tensor.ds_pipe_replicated = module.global_rank != ranks[0]  # a norm counts the first one
                found[f"shared {members[0].layer}.{members[0].key}"] = {
                    "ranks": list(ranks),
                    "group": group,
                    "weight_attr": [str(number) for number in range(len(members))],
                    "module": tensors,
                }
    return found


def _rank_groups(module: LayeredModule, places: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks that hold all of ``places`` together; empty where every rank of a place holds all of them."""
    if module.role is not None:
        stages = sorted({_stage_of(module, index) for index in places})
        return tuple(map(tuple, _tie_ranks(module.layout, stages))) if len(stages) > 1 else ()
    owners = sorted({module.stage_owner(index) for index in places})
    if len(owners) < 2:
        return ()
    topology = module.topology()
    others = [axis for axis in topology.get_axis_names() if axis != "pipe"]
    sizes = [range(topology.get_dim(axis)) for axis in others]
    return tuple(
        tuple(topology.get_rank(pipe=owner, **dict(zip(others, place, strict=True))) for owner in owners)
        for place in itertools.product(*sizes)
    )


def _stage_of(module: LayeredModule, index: int) -> int:
    return bisect.bisect_right(module.parts, index) - 1


def _listed(value: Any) -> Iterator[Tensor]:
    """Parameters, and buffers that change or are saved, of what the layer list holds of a layer before it is built."""
    if isinstance(value, LayerSpec):
        for argument in (*value.module_args, *value.module_kwargs.values()):
            yield from _listed(argument)
    elif isinstance(value, nn.Module):
        yield from (tensor for _, tensor in _named_tensors(value))
    elif isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _listed(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _listed(item)


def _named_tensors(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters by each of their names, and buffers with state: those that are saved and are floating-point."""
    yield from layer.named_parameters(remove_duplicate=False)
    for prefix, module in layer.named_modules():
        for name, buffer in module._buffers.items():
            if (
                buffer is not None
                and buffer.is_floating_point()
                and name not in module._non_persistent_buffers_set
            ):
                yield f"{prefix}.{name}" if prefix else name, buffer


def _built(module: LayeredModule) -> Iterator[tuple[int, nn.Module]]:
    """Index and layer of what this rank has built."""
    for stage in module.stages:
        yield from module.stage_modules(stage).items()


def _is_tied(module: LayeredModule, index: int) -> bool:
    return isinstance(module._layer_specs[index], TiedLayerSpec)


def _is_one_tie(module: LayeredModule, places: Iterable[int]) -> bool:
    """Return whether one TiedLayerSpec key has all of ``places``."""
    specs = [module._layer_specs[index] for index in places]
    return all(isinstance(spec, TiedLayerSpec) for spec in specs) and len({spec.key for spec in specs}) == 1


def _refusal(module: LayeredModule, places: Mapping[int, str]) -> str:
    specs = {index: module._layer_specs[index] for index in places}
    types = {i: s.typename if isinstance(s, LayerSpec) else type(s) for i, s in specs.items()}
    named = ", ".join(
        f"{name} of layer {index} ({types[index].__name__})" for index, name in sorted(places.items())
    )
    return (
        f"layers: several layers share one tensor in a way that would depend on the schedule (got {named}). Share it "
        f"by deepspeed.pipe.TiedLayerSpec with one key in all of these layers, give each layer its own, or register a "
        f"constant buffer with persistent=False."
    )


def _gather(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def _raise_first(faults: Iterable[str | None]) -> None:
    fault = next((fault for fault in faults if fault is not None), None)
    if fault is not None:
        error = ConfigError(fault)
        error.reported_by = 0  # every rank has it
        raise error
