"""Parameters and optimizer states of a rank, under names that depend neither on the schedule nor on the sizes.

A parameter's name is its module's: the index of its layer in the whole model and its name there, or
``tied_modules.KEY`` and its name. The optimizer's states of a rank are *fragments*: a range of the elements of a
parameter's tensor-parallel shard, the whole shard without ZeRO. DeepSpeed's ZeRO-1 and bf16 optimizers keep in each
parameter's ``_hp_mapping`` their range and its place in their flat partition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import Tensor, nn

from ...errors import CheckpointError
from ...parallel.layout import ParallelLayout
from ...planner.job_plan import JobPlan
from ...tensor_parallel import shard_dim, unpadded_size
from ..batches import Batches
from ..module import PipelineModule

MASTER = "fp32"  # DeepSpeed's name of a master weight in its universal checkpoints
_EXTRA = "_extra_state"  # torch's name in a state_dict()


class Checkpointed(Protocol):
    """Engine, as far as checkpoints read and change it. Objects of DeepSpeed's and torch's are Any."""

    plan: JobPlan
    module: PipelineModule
    layout: ParallelLayout
    batches: Batches | None
    optimizer: Any
    lr_scheduler: Any
    mpu: Any
    config: Any
    dp_world_size: int
    global_steps: int
    global_samples: int
    skipped_steps: int

    @property
    def in_checkpoints(self) -> bool:
        """True where this rank's weights are written and read; False where they are another rank's."""
        ...

    @property
    def first_in_checkpoints(self) -> int:
        """Rank that writes the counters and everything else that is the same on all ranks."""
        ...


@dataclass(frozen=True)
class Shape:
    """Cut of a parameter over tensor-parallel ranks.

    Attributes:
        full: sizes of the whole parameter, without padding.
        shard: sizes of one rank's shard, padding included; shards concatenate along ``dim``.
        dim: the dimension that is cut; None for a parameter that every rank holds whole.
    """

    full: tuple[int, ...]
    shard: tuple[int, ...]
    dim: int | None

    @classmethod
    def of(cls, name: str, parameter: Tensor, ranks: int) -> Shape:
        """Return the shape of a parameter; raises CheckpointError for a shard without the dimension of its cut."""
        dim, full = shard_dim(parameter), list(parameter.shape)
        if dim is None and ranks > 1 and getattr(parameter, "model_parallel", False):
            raise CheckpointError(
                f"parameter {name} is marked model_parallel and does not say along which dimension it is cut: set its "
                f"attribute partition_dim, so that its shards can be put together under other sizes."
            )
        if dim is not None:
            full[dim] = unpadded_size(parameter, full[dim] * ranks)
        return cls(tuple(full), tuple(parameter.shape), dim)


@dataclass(frozen=True)
class Held:
    """A parameter of this rank.

    Attributes:
        layer: index of the (first) layer that holds it; layer files are named by it.
        key: its name in that layer.
    """

    name: str
    parameter: nn.Parameter
    layer: int
    key: str
    shape: Shape


def layers_of(module: PipelineModule) -> dict[int, tuple[str, nn.Module]]:
    """Index -> (name in the whole module, layer) of this rank's layers; a tied one once, at the index of its first."""
    first_ties: dict[str, int] = {}
    for index, spec in enumerate(module._layer_specs):
        if isinstance(spec, TiedLayerSpec):
            first_ties.setdefault(spec.key, index)
    found: dict[int, tuple[str, nn.Module]] = {}
    for stage in module.stages:
        for index, layer in module.stage_modules(stage).items():
            spec = module._layer_specs[index]
            if isinstance(spec, TiedLayerSpec):
                found[first_ties[spec.key]] = (f"tied_modules.{spec.key}", layer)
            else:
                found[index] = (str(index), layer)
    return dict(sorted(found.items()))


def parameters_of(module: PipelineModule, tensor_ranks: int) -> dict[str, Held]:
    """All parameters that this rank holds, frozen ones too, by name; one that layers share has its first layer's."""
    found: dict[str, Held] = {}
    seen: set[int] = set()
    first = {id(shared.parameter): (shared.layer, shared.key) for shared in module.shared}
    for index, (prefix, layer) in layers_of(module).items():
        for key, parameter in layer.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                at, key_there = first.get(id(parameter), (index, key))
                name = f"{at}.{key_there}" if id(parameter) in first else f"{prefix}.{key}"
                found[name] = Held(name, parameter, at, key_there, Shape.of(name, parameter, tensor_ranks))
    return found


@dataclass(frozen=True)
class Fragment:
    """A range of a parameter whose optimizer states this rank holds.

    Attributes:
        start, numel: the range, in elements of the parameter (of its shard).
        owner: what the optimizer takes for its parameter: a flat partition, or the parameter itself.
        offset: where the range starts in ``owner``.
        master: the range's master weights when they are not the parameter itself, flat; writing changes them.
    """

    start: int
    numel: int
    owner: Tensor
    offset: int
    master: Tensor | None

    def part(self, state: Tensor) -> Tensor:
        """The range of a state that is as large as ``owner``: a flat view."""
        return state.view(-1)[self.offset : self.offset + self.numel]


class OptimizerStates:
    """The states of any optimizer that the engine can have, by parameter.

    Args:
        optimizer: the engine's; None has no states.
    """

    def __init__(self, optimizer: Any) -> None:
        # DeepSpeed wraps an object around the optimizer to spread its states.
        self.wrapper: Any = optimizer if isinstance(optimizer, ZeROOptimizer) else None
        self.base: Any = optimizer if self.wrapper is None else self.wrapper.optimizer

    @property
    def name(self) -> str | None:
        """The optimizer's class (states of one class do not fit another); None without an optimizer."""
        return None if self.base is None else type(self.base).__name__

    @property
    def partitioned(self) -> bool:
        """True where each data-parallel rank holds a part of the states."""
        return self.wrapper is not None

    def groups(self) -> list[tuple[dict[str, Any], list[nn.Parameter]]]:
        """(settings, the model's parameters) of each parameter group of this rank."""
        if self.base is None:
            return []
        if self.wrapper is None:
            return [(group, group["params"]) for group in self.base.param_groups]
        of_the_model = getattr(self.wrapper, "bf16_groups", None) or self.wrapper.bit16_groups
        return list(zip(self.base.param_groups, of_the_model, strict=True))

    def fragments(self) -> dict[int, Fragment]:
        """The fragments of this rank by ``id`` of the parameter."""
        found = {}
        for group, parameters in self.groups():
            for parameter in parameters:
                if self.wrapper is None:
                    found[id(parameter)] = Fragment(0, parameter.numel(), parameter, 0, None)
                elif (mapping := getattr(parameter, "_hp_mapping", None)) is not None:
                    low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
                    found[id(parameter)] = Fragment(
                        low.start, low.numel, group["params"][0], high.start, mapping.hp_fragment.detach()
                    )
        return found

    def read(self, fragment: Fragment) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The fragment's states with a number for each element (flat views), and those with one for all.

        Raises:
            CheckpointError: a state is of neither kind.
        """
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        for key, state in self.base.state.get(fragment.owner, {}).items():
            if isinstance(state, Tensor) and key != "step" and state.shape == fragment.owner.shape:
                tensors[key] = fragment.part(state)
            elif isinstance(state, Tensor) and state.numel() == 1:
                dtype = str(state.dtype).removeprefix("torch.")
                values[key] = {"dtype": dtype, "shape": list(state.shape), "value": state.item()}
            elif state is None or isinstance(state, bool | int | float | str):
                values[key] = state
            else:
                raise CheckpointError(
                    f"{self.name} keeps a state {key!r} that has neither one number for each element of a parameter "
                    f"nor one for all of it, so it cannot be cut for other sizes. Use another optimizer."
                )
        return tensors, values

    def clear(self) -> None:
        """Forget all states, as of an optimizer that has not taken a step."""
        if self.base is not None:
            self.base.state.clear()
        if self.wrapper is not None:
            self.wrapper._hp_optimizer_states_linked = False

    def write(self, fragment: Fragment, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Set the states of a fragment; the rest of its owner's are zero until they are set."""
        if not tensors and not values:
            return
        state = self.base.state[fragment.owner]
        for key, tensor in tensors.items():
            if key not in state:
                state[key] = torch.zeros_like(fragment.owner.detach())
            fragment.part(state[key]).copy_(tensor)
        for key, value in values.items():
            state[key] = self._value(fragment, value)

    def _value(self, fragment: Fragment, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        group = next(g for g in self.base.param_groups if any(p is fragment.owner for p in g["params"]))
        on_device = group.get("capturable") or group.get(
            "fused"
        )  # torch keeps single numbers on the host otherwise
        device = fragment.owner.device if on_device else "cpu"
        return torch.full(value["shape"], value["value"], dtype=getattr(torch, value["dtype"]), device=device)

    def weights_changed(self) -> None:
        """Copy the master weights to the model; collective over data-parallel ranks."""
        if self.wrapper is not None:
            self.wrapper.update_lp_params()


def numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group that are numbers (lr, betas, ...); the others say how it is computed."""

    def number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    found = {}
    for key, value in group.items():
        if key == "params":
            continue
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if number(value):
            found[key] = value
        elif isinstance(value, list | tuple) and value and all(map(number, value)):
            found[key] = list(value)
    return found


def set_numbers(group: dict[str, Any], numbers: Mapping[str, Any]) -> None:
    """Give a parameter group the settings that :func:`numbers_of` found."""
    for key, value in numbers.items():
        ours = group.get(key)
        if isinstance(ours, Tensor):
            ours.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(ours, tuple) else value


def buffers_of(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The persistent buffers of a layer, by name."""
    parameters, state = dict(layer.named_parameters(remove_duplicate=False)), layer.state_dict(keep_vars=True)
    others = extra_states_of(layer)
    for key, value in state.items():
        if key not in parameters and key not in others and isinstance(value, Tensor):
            yield key, value


def extra_states_of(layer: nn.Module) -> dict[str, nn.Module]:
    """The modules of a layer that have a ``get_extra_state()``, by the name that ``state_dict()`` gives its result."""
    return {
        f"{name}.{_EXTRA}" if name else _EXTRA: module
        for name, module in layer.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }
