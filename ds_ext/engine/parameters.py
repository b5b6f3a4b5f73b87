"""Parameters and buffers of a rank, with names that depend neither on the schedule nor on the sizes.

The name of a parameter consists of the global index of its layer, or ``tied_modules.KEY``, and its name in the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deepspeed.pipe import TiedLayerSpec
from torch import Tensor, nn

from ..errors import CheckpointError
from ..tensor_parallel import shard_dim, unpadded_size
from .module import PipelineModule
from .wrappers import plain_name, plain_names

_EXTRA = "_extra_state"  # torch's key in a state_dict()


@dataclass(frozen=True)
class Shape:
    """Shape of a parameter and of its tensor-parallel shards.

    Attributes:
        full: shape of the full parameter, without padding.
        shard: shape of one rank's shard, with padding; shards are concatenated along ``dim``.
        dim: None for a replicated parameter.
    """

    full: tuple[int, ...]
    shard: tuple[int, ...]
    dim: int | None

    @classmethod
    def from_parameter(cls, name: str, parameter: Tensor, ranks: int) -> Shape:
        dim = shard_dim(parameter)
        full = list(parameter.shape)
        if dim is None and ranks > 1 and getattr(parameter, "model_parallel", False):
            raise CheckpointError(
                f"parameter {name}: a model_parallel parameter needs its sharded dimension (got no partition_dim). Set "
                f"the attribute partition_dim, so that jobs with other sizes can concatenate the shards."
            )
        if dim is not None:
            full[dim] = unpadded_size(parameter, full[dim] * ranks)
        return cls(tuple(full), tuple(parameter.shape), dim)


@dataclass(frozen=True)
class LocalParameter:
    """Parameter of this rank.

    Attributes:
        name: name in checkpoints.
        layer: global index of its layer, or of the first one that shares it; part of the layer file's name.
        key: name in that layer.
        part: part of the head that it belongs to; 0 for other parameters.
        parts: number of parts of the head; 1 for other parameters.
    """

    name: str
    parameter: nn.Parameter
    layer: int
    key: str
    shape: Shape
    part: int = 0
    parts: int = 1

    @property
    def unique_name(self) -> str:
        """Name among those of a rank, which may hold two parts of a head."""
        return unique_name(self.name, self.part, self.parts)

    def shard(self, tensor_rank: int, tensor_ranks: int) -> int:
        """Return the index of a tensor-parallel rank's shard among the shards of all parts."""
        return self.part * tensor_ranks + tensor_rank


def unique_name(name: str, part: int, parts: int) -> str:
    return name if parts == 1 else f"{name}/part_{part}"


def layers_of(module: PipelineModule) -> dict[int, nn.Module]:
    """Return global index -> layer of this rank's layers, by index.

    A tied layer has the index of its first place in the model, also if another rank holds that place. Every part of a
    head has an index, see :meth:`.PipelineModule.head_part`.
    """
    first_places: dict[str, int] = {}  # key of a tie -> index of its first layer
    for index, spec in enumerate(module._layer_specs):
        if isinstance(spec, TiedLayerSpec):
            first_places.setdefault(spec.key, index)
    layers: dict[int, nn.Module] = {}
    for stage in module.stages:
        for index, layer in module.stage_modules(stage).items():
            spec = module._layer_specs[index]
            layers[first_places[spec.key] if isinstance(spec, TiedLayerSpec) else index] = layer
    return dict(sorted(layers.items()))


def parameters_of(module: PipelineModule, tensor_ranks: int) -> dict[str, LocalParameter]:
    """Return all parameters of this rank by unique name, with frozen ones.

    Shared ones are named after their first layer, and rows of a tied embedding after the whole one.
    """
    parameters: dict[int, LocalParameter] = {}
    all_shared = {id(shared.parameter): shared for shared in module.shared}
    for index, layer in layers_of(module).items():
        for key, parameter in plain_names(dict(layer.named_parameters())).items():
            if id(parameter) in parameters:
                continue
            shared = all_shared.get(id(parameter))
            part, parts = module.head_part(index if shared is None else max(shared.places))
            place, key = (index - part, key) if shared is None else (shared.layer, shared.whole or shared.key)
            spec = module._layer_specs[place]
            name = f"tied_modules.{spec.key}.{key}" if isinstance(spec, TiedLayerSpec) else f"{place}.{key}"
            shape = Shape.from_parameter(name, parameter, tensor_ranks * parts)
            parameters[id(parameter)] = LocalParameter(name, parameter, place, key, shape, part, parts)
    return {local.unique_name: local for local in parameters.values()}


def buffers_of(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, buffer) of the persistent buffers of a layer."""
    parameters = plain_names(dict(layer.named_parameters(remove_duplicate=False)))
    state = layer.state_dict(keep_vars=True)
    extra_states = extra_states_of(layer)
    for key, value in state.items():
        if key not in parameters and key not in extra_states and isinstance(value, Tensor):
            yield key, value


def extra_states_of(layer: nn.Module) -> dict[str, nn.Module]:
    return {
        plain_name(f"{name}.{_EXTRA}" if name else _EXTRA): module
        for name, module in layer.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }
