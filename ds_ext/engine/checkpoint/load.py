"""Loads a checkpoint into a job of any schedule and sizes; checkpoint.py says what is in one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...errors import CheckpointError
from ..batches import Resumable
from .file import read_plain
from .folder import check_contents, open_checkpoint
from .reader import CheckpointReader
from .save import COUNTERS, DATA_POSITION, NOT_THE_CALLERS, STATE_FILE
from .states import (
    Checkpointed,
    Held,
    OptimizerStates,
    buffers_of,
    extra_states_of,
    layers_of,
    parameters_of,
    set_numbers,
)
from .together import by_rank_0, together


def load_checkpoint(
    engine: Checkpointed,
    folder: Path,
    tag: str | None = None,
    *,
    strict: bool = True,
    with_optimizer: bool = True,
    with_scheduler: bool = True,
    with_counters: bool = True,
) -> tuple[Path, dict[str, Any]]:
    """Load a checkpoint into this job's sizes; a collective call of all ranks.

    Args:
        engine: an initialized engine.
        folder, tag: the checkpoint ``folder/tag``; the current one without ``tag``.
        strict: refuse a checkpoint that lacks parameters of the model, or has others.
        with_optimizer: load the optimizer's states and settings.
        with_scheduler: load the learning-rate scheduler's state.
        with_counters: load the loss scale, the counters of steps and samples, and the position in the data.

    Returns:
        The checkpoint's folder and the client's state.

    Raises:
        ConfigError: there is no such checkpoint.
        CheckpointError: it is not whole, or does not fit the model or the optimizer. On every rank; then
            nothing has been changed.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    with_optimizer = with_optimizer and engine.in_checkpoints
    held = parameters_of(engine.module, engine.layout.tensor_parallel_size) if engine.in_checkpoints else {}
    states = OptimizerStates(engine.optimizer)

    # All ranks load one, also while another job writes here.
    chosen: str = by_rank_0(lambda: open_checkpoint(folder, tag)[0].name)

    def examine() -> tuple[str, dict[str, Any], dict[str, Any]]:
        checkpoint, manifest = open_checkpoint(folder, chosen)
        check_contents(checkpoint, manifest, rank, world)
        state = read_plain(checkpoint / STATE_FILE)
        _check_fit(engine, held, states, checkpoint, manifest, strict, with_optimizer)
        if with_scheduler:
            _check_scheduler(engine, checkpoint, state)
        return str(checkpoint), manifest, state

    name, manifest, state = _examined(examine, held, strict)
    reader = CheckpointReader(Path(name), manifest, engine.mpu.get_slice_parallel_rank())
    if engine.in_checkpoints:
        with torch.no_grad():
            _load_weights(engine, states, held, reader, manifest)
            if with_optimizer:
                _load_states(states, held, reader, manifest)
    if with_counters:
        _load_counters(engine, state)
    if with_scheduler and engine.lr_scheduler is not None and state["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
    dist.barrier()  # no rank trains, or fails, while another still reads
    return Path(name), {key: value for key, value in state.items() if key not in NOT_THE_CALLERS}


def _examined(
    examine: Callable[[], tuple[str, dict[str, Any], dict[str, Any]]], held: Mapping[str, Held], strict: bool
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the result of ``examine()``, when it succeeds on all ranks and they need all parameters together."""
    found: list[tuple[str, dict[str, Any], dict[str, Any]]] = []

    def names() -> list[str]:
        found.append(examine())
        return list(held)

    wanted = {name for part in together(names) for name in part}
    checkpoint, manifest, state = found[0]
    others = sorted(set(manifest["parameters"]) - wanted)
    if strict and others:
        raise CheckpointError(
            f"{checkpoint} has {len(others)} parameters that the model has not: {', '.join(others[:4])}"
            f"{', ...' if len(others) > 4 else ''}. Give the model the sizes of that run."
        )
    return checkpoint, manifest, state


def _check_fit(
    engine: Checkpointed,
    held: Mapping[str, Held],
    states: OptimizerStates,
    checkpoint: Path,
    manifest: Mapping[str, Any],
    strict: bool,
    with_optimizer: bool,
) -> None:
    """Raise CheckpointError unless the checkpoint has what this rank needs, in the same sizes."""
    job, parameters = manifest["job"], manifest["parameters"]
    if strict and job["layers"] != engine.module._num_layers:
        raise CheckpointError(
            f"{checkpoint} is of a model of {job['layers']} layers (those of the pipeline: embeddings and head count); "
            f"this one has {engine.module._num_layers}. Give the model the sizes of that run."
        )
    for name, one in held.items():
        if name not in parameters:
            if strict:
                raise CheckpointError(
                    f"{checkpoint} has no parameter {name}, which the model has. Give the model the sizes and layers "
                    f"of that run."
                )
        elif tuple(parameters[name]["shape"]) != one.shape.full:
            theirs, ours = (
                " x ".join(map(str, shape)) for shape in (parameters[name]["shape"], one.shape.full)
            )
            raise CheckpointError(
                f"{name} is {theirs} in {checkpoint} and {ours} in the model. Give the model the sizes of that run."
            )
    if with_optimizer and job["optimizer"] is not None and job["optimizer"] != states.name:
        raise CheckpointError(
            f"{checkpoint} has the states of the optimizer {job['optimizer']}; this job has {states.name}. Use that "
            f"one, or load with load_optimizer_states=False."
        )


def _check_scheduler(engine: Checkpointed, checkpoint: Path, state: Mapping[str, Any]) -> None:
    ours = None if engine.lr_scheduler is None else type(engine.lr_scheduler).__name__
    theirs = state["lr_scheduler_class"]
    if None not in (ours, theirs) and ours != theirs:
        raise CheckpointError(
            f"{checkpoint} has the state of the learning-rate scheduler {theirs}; this job has {ours}. Use that one, "
            f"or load with load_lr_scheduler_states=False."
        )


def _load_weights(
    engine: Checkpointed,
    states: OptimizerStates,
    held: Mapping[str, Held],
    reader: CheckpointReader,
    manifest: Mapping[str, Any],
) -> None:
    """Weights, master weights, buffers and extra states of this rank."""
    fragments = states.fragments()
    spread = {id(p) for _, members in states.groups() for p in members} if states.partitioned else set()
    for name, one in held.items():
        if name not in manifest["parameters"]:
            continue
        if id(one.parameter) not in spread:
            one.parameter.copy_(reader.weight(one, 0, one.parameter.numel()).view_as(one.parameter))
        elif (fragment := fragments.get(id(one.parameter))) is not None:
            assert fragment.master is not None
            fragment.master.copy_(reader.weight(one, fragment.start, fragment.numel))
    states.weights_changed()
    same_cut = reader.tensor_ranks == engine.layout.tensor_parallel_size
    for index, (_, layer) in layers_of(engine.module).items():
        for key, buffer in buffers_of(layer):
            saved = reader.other(index, key, same_cut)
            if saved is not None:
                buffer.copy_(saved)
        for key, owner in extra_states_of(layer).items():
            saved = reader.other(index, key, same_cut)
            if saved is not None:
                # A copy: what the module keeps must not be the file's memory.
                owner.set_extra_state(copy.deepcopy(saved))


def _load_states(
    states: OptimizerStates, held: Mapping[str, Held], reader: CheckpointReader, manifest: Mapping[str, Any]
) -> None:
    """The optimizer's states and the numbers of its parameter groups."""
    parameters, fragments = manifest["parameters"], states.fragments()
    states.clear()
    for name, one in held.items():
        fragment = fragments.get(id(one.parameter))
        if fragment is not None and name in parameters:
            tensors = reader.states(one, fragment.start, fragment.numel)
            states.write(fragment, tensors, parameters[name]["values"])
    names = {id(one.parameter): name for name, one in held.items()}
    for group, members in states.groups():
        known = [names[id(p)] for p in members if names.get(id(p)) in parameters]
        numbers = next((n for n in (parameters[name]["group"] for name in known) if n is not None), None)
        if numbers is not None:
            set_numbers(group, numbers)


def _load_counters(engine: Checkpointed, state: Mapping[str, Any]) -> None:
    for key in COUNTERS:
        setattr(engine, key, state[key])
    kind, position = state.get(DATA_POSITION) or (None, None)
    # That of other batches means something else.
    if isinstance(engine.batches, Resumable) and kind == type(engine.batches).__name__:
        engine.batches.load_state_dict(position)
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if getattr(scaler, "dynamic", False):
        # Its settings (window, minimum) are the JSON's.
        for key, value in state["loss_scale"].items():
            if hasattr(scaler, key):
                setattr(scaler, key, value)
