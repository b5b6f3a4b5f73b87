"""State of a rank for a snapshot: everything that the next step depends on.

Contents and names are those of checkpoints (checkpoint/save.py), but each rank stores all its parts, also those of
replicas. So it continues without reading from another rank.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import CheckpointError, ConfigError
from ..batches import IteratorBatches, Resumable
from ..checkpoint.load import weight_targets
from ..checkpoint.save import COUNTERS, RANDOM_SEED, describe_job, loss_scale_of
from ..checkpoint.states import (
    Checkpointed,
    OptimizerStates,
    buffers_of,
    extra_states_of,
    layers_of,
    numbers_of,
    parameters_of,
    set_numbers,
)
from ..deepspeed_api.names import loss_scaler


def tensors_of(engine: Checkpointed) -> dict[str, Tensor]:
    """Return the trained weights (or master weights), optimizer states and buffers of this rank by name."""
    if not engine.role.in_checkpoints:
        return {}
    parameters = _trained(engine)
    states = OptimizerStates(engine.optimizer)
    tensors = {f"weight/{local.name}": tensor for local, _, tensor in weight_targets(states, parameters)}
    fragments = states.fragments()
    for name, local in parameters.items():
        fragment = fragments.get(id(local.parameter))
        if fragment is not None:
            tensors |= {f"state/{name}/{key}": state for key, state in states.read(fragment)[0].items()}
    for index, (_, layer) in layers_of(engine.module).items():
        tensors |= {f"buffer/{index}/{key}": buffer for key, buffer in buffers_of(layer)}
    return tensors


def values_of(engine: Checkpointed) -> dict[str, Any]:
    """Return the other values: counters, settings of the optimizer, position in the data, random-number generators."""
    states = OptimizerStates(engine.optimizer)
    parameters = _trained(engine) if engine.role.in_checkpoints else {}
    fragments = states.fragments()
    scheduler = engine.lr_scheduler
    return {
        "job": describe_job(engine),
        "counters": {key: getattr(engine, key) for key in COUNTERS},
        "values": {
            name: states.read(fragments[id(local.parameter)])[1]
            for name, local in parameters.items()
            if id(local.parameter) in fragments
        },
        "groups": [numbers_of(group) for group, _ in states.groups()],
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        "loss_scale": loss_scale_of(engine.optimizer),
        "data": engine.batches.state_dict() if isinstance(engine.batches, Resumable) else None,
        "extra": {
            f"{index}/{key}": owner.get_extra_state()
            for index, (_, layer) in layers_of(engine.module).items()
            for key, owner in extra_states_of(layer).items()
        },
        "random": _random_states(),
        RANDOM_SEED: engine.module.random_seed,
    }


def load(engine: Checkpointed, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Load a snapshot of this rank, of the same job. All ranks must call this together."""
    states = OptimizerStates(engine.optimizer)
    if engine.role.in_checkpoints:
        with torch.no_grad():
            parameters = _trained(engine)
            for local, _, target in weight_targets(states, parameters):
                target.copy_(tensors[f"weight/{local.name}"].view_as(target))
            states.weights_changed()
            states.clear()
            fragments = states.fragments()
            for name, local in parameters.items():
                fragment = fragments.get(id(local.parameter))
                if fragment is not None:
                    start = f"state/{name}/"
                    found = {
                        key.removeprefix(start): t for key, t in tensors.items() if key.startswith(start)
                    }
                    states.write(fragment, found, values["values"].get(name, {}))
            for index, (_, layer) in layers_of(engine.module).items():
                for key, buffer in buffers_of(layer):
                    buffer.copy_(tensors[f"buffer/{index}/{key}"])
                for key, owner in extra_states_of(layer).items():
                    owner.set_extra_state(values["extra"][f"{index}/{key}"])
    for (group, _), numbers in zip(states.groups(), values["groups"], strict=True):
        set_numbers(group, numbers)
    for key, value in values["counters"].items():
        setattr(engine, key, value)
    if engine.lr_scheduler is not None and values["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(values["lr_scheduler"])
    scaler = loss_scaler(engine.optimizer)
    for key, value in values["loss_scale"].items():
        setattr(scaler, key, value)
    if isinstance(engine.batches, Resumable) and values["data"] is not None:
        engine.batches.load_state_dict(values["data"])
    _set_random_states(values["random"])
    engine.module.random_seed = values[RANDOM_SEED]


def require_same_job(engine: Checkpointed, job: dict[str, Any]) -> None:
    """Raise CheckpointError for a snapshot of a job with other sizes or settings."""
    now = describe_job(engine)
    changed = sorted(key for key in now if now[key] != job.get(key))
    if changed:
        raise CheckpointError(
            f"snapshot: of a job with another {changed[0]} (got {job.get(changed[0])!r}, now {now[changed[0]]!r})."
        )


def require_position(engine: Checkpointed) -> None:
    """Raise ConfigError for data whose position cannot be restored."""
    if isinstance(engine.batches, IteratorBatches):
        raise ConfigError(
            "ds_ext.recovery: the position in the data must be known (got an iterator). Pass training_data to "
            "initialize(), or train_batch() an object with get, advance, state_dict and load_state_dict."
        )


def _trained(engine: Checkpointed) -> dict[str, Any]:
    """Return the trained parameters by name. Frozen ones have their values again when the script starts again."""
    found = parameters_of(engine.module, engine.layout.tensor_parallel_size)
    return {name: local for name, local in found.items() if local.parameter.requires_grad}


def _random_states() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(internal), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest],
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
