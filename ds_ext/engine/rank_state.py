"""State of a rank: the list of what it must keep, for checkpoints, snapshots, recovery and the check before a save.

- tensors: weights or master weights, optimizer states, and buffers, by parameter and layer;
- extra states of layers, and the numeric settings of the optimizer's groups; in a snapshot also the parameters and the
  other plain settings of the groups, what requires gradients, and non-persistent buffers;
- values that are the same on all ranks (:data:`VALUES`): counters, learning-rate scheduler, loss scale, position in the
  data, and the seed of the layers' random numbers;
- random states of this rank: torch's, Python's and NumPy's generators.

A checkpoint has each tensor once and loads with any schedule and sizes; its random states load at the same number of
ranks. A snapshot has all tensors of its rank, and loads on a rank of the same job.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from torch import Tensor, nn

from ..errors import ConfigError
from .batches import Resumable
from .checkpoint.optimizer_states import Fragment, OptimizerStates, group_settings, set_numbers
from .deepspeed_api.names import loss_scaler
from .engine_state import EngineState
from .parameters import LocalParameter, buffers_of, extra_states_of, layers_of, parameters_of
from .types import Json, Record, Saved
from .wrappers import plain_name

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
SCHEDULER = "lr_scheduler"
RANDOM = "random"  # key of the random states in a snapshot
_STATIC_SCALE = ("cur_scale",)
_DYNAMIC_SCALE = (*_STATIC_SCALE, "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class Value:
    """Value that is the same on all ranks. Its key is DeepSpeed's if DeepSpeed saves it."""

    key: str
    read: Callable[[EngineState], Saved]
    write: Callable[[EngineState, Saved], None]


def _counter(key: str) -> Value:
    return Value(key, lambda engine: getattr(engine, key), lambda engine, value: setattr(engine, key, value))


def _scheduler(engine: EngineState) -> Record | None:
    return None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()


def _set_scheduler(engine: EngineState, state: Record | None) -> None:
    if engine.lr_scheduler is not None and state is not None:
        engine.lr_scheduler.load_state_dict(state)


def _loss_scale(engine: EngineState) -> Record:
    scaler = loss_scaler(engine.optimizer)
    keys = _DYNAMIC_SCALE if isinstance(scaler, DynamicLossScaler) else _STATIC_SCALE
    return {} if scaler is None else {key: getattr(scaler, key) for key in keys}


def _set_loss_scale(engine: EngineState, state: Json) -> None:
    scaler = loss_scaler(engine.optimizer)
    if isinstance(scaler, DynamicLossScaler):  # the JSON sets the window, the minimum and a static scale
        for key, value in state.items():
            setattr(scaler, key, value)


def _position(engine: EngineState) -> tuple[str, Saved] | None:
    batches = engine.batches
    return (type(batches).__name__, batches.state_dict()) if isinstance(batches, Resumable) else None


def _set_position(engine: EngineState, saved: tuple[str, Saved] | None) -> None:
    kind, position = saved or (None, None)
    # A different class of batches may define its position differently.
    if isinstance(engine.batches, Resumable) and kind == type(engine.batches).__name__:
        engine.batches.load_state_dict(position)


VALUES = (
    *map(_counter, COUNTERS),
    Value(SCHEDULER, _scheduler, _set_scheduler),
    Value("loss_scale", _loss_scale, _set_loss_scale),
    Value("data_position", _position, _set_position),
    Value(
        "ds_ext_random_seed",
        lambda engine: engine.module.random_seed,
        lambda engine, seed: setattr(engine.module, "random_seed", seed),
    ),
)


class RankState:
    """State of this rank; it is read and written in place.

    Attributes:
        parameters: parameters that this rank keeps, by unique name, with frozen ones; none on a rank whose weights
            another one keeps.
    """

    def __init__(self, engine: EngineState) -> None:
        engine.wait_for_weights()
        self._engine = engine
        self.optimizer = OptimizerStates(engine.optimizer)
        self.parameters: dict[str, LocalParameter] = {}
        if engine.role.in_checkpoints:
            self.parameters = parameters_of(engine.module, engine.layout.tensor_parallel_size)

    @functools.cached_property
    def trained(self) -> dict[str, LocalParameter]:
        """Parameters that this job has trained, by name. Others have their values again after a restart."""
        return {
            name: local
            for name, local in self.parameters.items()
            if local.parameter.requires_grad or getattr(local.parameter, "was_trained", False)
        }

    # --- parts ---

    def weights(
        self, parameters: Mapping[str, LocalParameter]
    ) -> Iterator[tuple[LocalParameter, int, Tensor]]:
        """Yield (parameter, start, tensor) for the weights that this rank sets: whole parameters, or master weights.

        ``start`` is the first element of the tensor in the flattened shard of the parameter. Afterwards, call
        :meth:`OptimizerStates.weights_changed`.
        """
        states, fragments = self.optimizer, self.optimizer.fragments()
        partitioned = {id(p) for _, members in states.groups() for p in members} if states.partitioned else ()
        for local in parameters.values():
            if id(local.parameter) not in partitioned:
                yield local, 0, local.parameter
            elif (fragment := fragments.get(id(local.parameter))) is not None:
                assert fragment.master is not None
                yield local, fragment.start, fragment.master

    def fragments(
        self, parameters: Mapping[str, LocalParameter]
    ) -> Iterator[tuple[str, LocalParameter, Fragment]]:
        fragments = self.optimizer.fragments()
        for name, local in parameters.items():
            if (fragment := fragments.get(id(local.parameter))) is not None:
                yield name, local, fragment

    def buffers(self) -> Iterator[tuple[int, str, Tensor]]:
        for index, layer in self._layers():
            for key, buffer in buffers_of(layer):
                yield index, key, buffer

    def extra_states(self) -> Iterator[tuple[int, str, nn.Module]]:
        for index, layer in self._layers():
            for key, owner in extra_states_of(layer).items():
                yield index, key, owner

    def _layers(self) -> list[tuple[int, nn.Module]]:
        return [*layers_of(self._engine.module).items()] if self._engine.role.in_checkpoints else []

    # --- a whole copy, for snapshots ---

    def transient(self) -> Iterator[tuple[str, dict[str, Tensor | None], str]]:
        """Yield key, buffers of the owner by name, and name of every non-persistent buffer."""
        for index, layer in layers_of(self._engine.module).items():
            for path, owner in layer.named_modules():
                for name in sorted(owner._non_persistent_buffers_set & owner._buffers.keys()):
                    yield f"transient/{index}/{plain_name(f'{path}.{name}')}", owner._buffers, name

    def _members(self) -> list[list[str]]:
        names = {id(local.parameter): name for name, local in self.parameters.items()}
        return [
            sorted(names[id(p)] for p in members if id(p) in names) for _, members in self.optimizer.groups()
        ]

    def require_groups(self, values: Json) -> None:
        """Raise ConfigError if :meth:`load` cannot make the groups of the optimizer those of a snapshot."""
        now, saved = self._members(), values["members"]
        added, held = saved[len(now) :], {name for group in now for name in group}
        twice = any(name in held for group in added for name in group)
        if saved[: len(now)] != now or twice or (added and self.optimizer.partitioned):
            raise ConfigError(
                f"optimizer.param_groups: the snapshot has others (got {list(map(len, now))} parameters in them, "
                f"{list(map(len, saved))} in the snapshot). Build the optimizer as at the first start, and add no "
                f"group before engine.recover(), which adds those of the snapshot."
            )

    def tensors(self) -> dict[str, Tensor]:
        """Return the trained weights (or master weights), optimizer states and all buffers by name."""
        tensors = {f"weight/{local.unique_name}": tensor for local, _, tensor in self.weights(self.trained)}
        for name, local, fragment in self.fragments(self.trained):
            states, _ = self.optimizer.read(fragment.kept(local.parameter))
            tensors |= {f"state/{name}/{key}": state for key, state in states.items()}
        tensors |= {f"buffer/{index}/{key}": buffer for index, key, buffer in self.buffers()}
        transient = {key: buffers[name] for key, buffers, name in self.transient()}
        return tensors | {key: buffer for key, buffer in transient.items() if buffer is not None}

    def values(self) -> Record:
        return {
            **{value.key: value.read(self._engine) for value in VALUES},
            "values": {
                name: self.optimizer.read(fragment)[1] for name, _, fragment in self.fragments(self.trained)
            },
            "groups": [group_settings(group) for group, _ in self.optimizer.groups()],
            "members": self._members(),
            "requires_grad": {name: local.parameter.requires_grad for name, local in self.parameters.items()},
            "extra": {f"{index}/{key}": owner.get_extra_state() for index, key, owner in self.extra_states()},
            RANDOM: random_states(),
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], values: Json) -> None:
        """Load :meth:`tensors` and :meth:`values` of this rank, of the same job. All ranks must call this together.

        Non-persistent buffers without a tensor keep their values. See :meth:`require_groups`.
        """
        kept = {key.removeprefix("weight/") for key in tensors}
        for name in kept & self.parameters.keys():
            self.parameters[name].parameter.was_trained = True  # pyright: ignore[reportAttributeAccessIssue]
        for name, flag in values["requires_grad"].items():
            self.parameters[name].parameter.requires_grad_(flag)
        present = len(self.optimizer.groups())
        for names, settings in zip(values["members"][present:], values["groups"][present:], strict=True):
            members = [self.parameters[name].parameter for name in names]
            typed = {
                key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()
            }
            self.optimizer.base.add_param_group({"params": members, **typed})
        for local, _, target in self.weights(self.trained):
            target.copy_(tensors[f"weight/{local.unique_name}"].view_as(target))
        if self._engine.role.in_checkpoints:
            self.optimizer.weights_changed()
            self.optimizer.clear()
        for name, local, fragment in self.fragments(self.trained):
            start = f"state/{name}/"
            states = {key.removeprefix(start): t for key, t in tensors.items() if key.startswith(start)}
            self.optimizer.write(fragment.kept(local.parameter), states, values["values"].get(name, {}))
        for index, key, buffer in self.buffers():
            buffer.copy_(tensors[f"buffer/{index}/{key}"])
        for key, buffers, name in self.transient():
            tensor, buffer = tensors.get(key), buffers[name]
            if tensor is not None and buffer is not None and buffer.shape == tensor.shape:
                buffer.copy_(tensor)
            elif tensor is not None:
                buffers[name] = tensor.to(self._engine.device)
        for index, key, owner in self.extra_states():
            owner.set_extra_state(values["extra"][f"{index}/{key}"])
        for (group, _), settings in zip(self.optimizer.groups(), values["groups"], strict=True):
            set_numbers(group, settings)
        for value in VALUES:
            value.write(self._engine, values[value.key])
        set_random_states(values[RANDOM])


def random_states() -> Record:
    kind, keys, *position = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(internal), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *position],
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Json) -> None:
    """Set the states that :func:`random_states` returned. A GPU keeps its state if they were read without one."""
    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    kind, keys, *position = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *position))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
