"""Checkpoints that are written under any schedule and sizes, and loaded under any other.

    step_20/
      ds_ext.json                          the manifest: files, and of each parameter its cut and where its parts are
      mp_rank_00_model_states.pt           counters, learning-rate scheduler, loss scale, the caller's state
      layer_03-model_states.pt             DeepSpeed's: a layer's weights as they are computed with, a file a shard
      optimizer_rank_02.safetensors        the optimizer's states and fp32 master weights that rank 2 has

Each rank writes what it holds, and replicas (of BitPipe, data parallelism, tied and unsharded parameters) are written
once. Nothing is gathered: the manifest says which elements of which parameter are where, and a loading rank
reads those that it needs (checkpoint_reader.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...config.deepspeed_json import precision, zero_stage
from ...errors import CheckpointError, ConfigError
from ..batches import Resumable
from ..module import PipelineModule
from .file import is_plain, layer_file, write_plain, write_tensors
from .folder import publish, start_writing
from .states import (
    MASTER,
    Checkpointed,
    Held,
    OptimizerStates,
    extra_states_of,
    layers_of,
    numbers_of,
    parameters_of,
)
from .together import by_rank_0, together

STATE_FILE = "mp_rank_00_model_states.pt"
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
DATA_POSITION = "data_position"
NOT_THE_CALLERS = (
    *COUNTERS,
    *(
        "module",
        "optimizer",
        "lr_scheduler",
        "lr_scheduler_class",
        "loss_scale",
        "dp_world_size",
        "mp_world_size",
        DATA_POSITION,
    ),
)
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def save_checkpoint(
    engine: Checkpointed,
    folder: Path,
    tag: str,
    client_state: Mapping[str, Any],
    make_current: bool,
    with_frozen: bool,
) -> None:
    """Write a checkpoint; a collective call of all ranks.

    Args:
        engine: an initialized engine.
        folder, tag: the checkpoint becomes ``folder/tag``.
        client_state: what the caller wants back: numbers, texts, tensors, and lists and dictionaries of them.
        make_current: write the tag into ``folder/latest``.
        with_frozen: write parameters that are not trained too.

    Raises:
        ConfigError: the tag or the client's state cannot be saved.
        CheckpointError: a rank could not write; the last good checkpoint is as it was. On every rank.
    """
    folder = folder.absolute()
    written: str = by_rank_0(lambda: str(start_writing(folder, tag)), tag)
    parts = together(
        lambda: _write_part(engine, Path(written), client_state, with_frozen), tag, Path(written)
    )
    by_rank_0(lambda: publish(Path(written), tag, _manifest(engine, parts), make_current), tag, Path(written))


def _write_part(
    engine: Checkpointed, written: Path, client_state: Mapping[str, Any], with_frozen: bool
) -> dict[str, Any]:
    """Write the files of this rank. Returns its part of the manifest."""
    if not written.is_dir():
        raise CheckpointError(
            f"rank {dist.get_rank()} does not see {written}, which rank 0 has made: all hosts need one file system for "
            f"checkpoints."
        )
    files: dict[str, dict[str, int]] = {}
    if not engine.in_checkpoints:
        return {"files": files, "fragments": {}, "parameters": {}, "job": None}
    if dist.get_rank() == engine.first_in_checkpoints:
        files[STATE_FILE] = write_plain(written / STATE_FILE, _state_of(engine, client_state))
    held = parameters_of(engine.module, engine.layout.tensor_parallel_size)
    if not with_frozen:
        held = {name: one for name, one in held.items() if one.parameter.requires_grad}
    if engine.mpu.get_data_parallel_rank() == 0:
        files |= _write_layers(engine, written, held)
    states = OptimizerStates(engine.optimizer)
    tensors, fragments = _optimizer_part(engine, states, held)
    if tensors:
        name = f"optimizer_rank_{dist.get_rank():02d}.safetensors"
        files[name] = write_tensors(written / name, tensors)
        for fragment in fragments.values():
            fragment["file"] = name
    groups = [(numbers_of(group), {id(p) for p in members}) for group, members in states.groups()]
    described = {
        name: {
            "shape": list(one.shape.full),
            "shard": list(one.shape.shard),
            "dim": one.shape.dim,
            "layer": one.layer,
            "key": one.key,
            "group": next((numbers for numbers, members in groups if id(one.parameter) in members), None),
        }
        for name, one in held.items()
    }
    return {"files": files, "fragments": fragments, "parameters": described, "job": describe_job(engine)}


def _write_layers(engine: Checkpointed, written: Path, held: Mapping[str, Held]) -> dict[str, dict[str, int]]:
    """Write DeepSpeed's files: the weights and buffers of each layer of this rank."""
    files, kept = {}, {id(one.parameter) for one in held.values()}
    tensor_ranks, tensor_rank = engine.layout.tensor_parallel_size, engine.mpu.get_slice_parallel_rank()
    for index, (_, layer) in layers_of(engine.module).items():
        if _first_holder(engine.module, index):
            name = layer_file(index, tensor_rank, tensor_ranks)
            state = {
                # A view would bring its whole flat partition with it.
                key: value.detach().cpu().clone() if isinstance(value, Tensor) else value
                for key, value in layer.state_dict(keep_vars=True).items()
                if not isinstance(value, torch.nn.Parameter) or id(value) in kept
            }
            _require_plain_extra_states(index, layer, state)
            files[name] = write_plain(written / name, state)
    return files


def _require_plain_extra_states(index: int, layer: torch.nn.Module, state: Mapping[str, Any]) -> None:
    for key, owner in extra_states_of(layer).items():
        if key in state and not is_plain(state[key]):
            raise CheckpointError(
                f"{type(owner).__name__}.get_extra_state() of layer {index} ({key}) gives a "
                f"{type(state[key]).__name__} that is or holds something else than numbers, texts, tensors, and lists "
                f"and dictionaries of them, which alone are read without running code. Return those, or a uint8 tensor "
                f"of bytes."
            )


def _first_holder(module: PipelineModule, index: int) -> bool:
    """Return whether this rank writes the layer ``index``; a tied layer is written by the rank of its first place."""
    return any(module.parts[stage] <= index < module.parts[stage + 1] for stage in module.stages)


def _optimizer_part(
    engine: Checkpointed, states: OptimizerStates, held: Mapping[str, Held]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Return the optimizer's tensors that this rank writes, by "parameter/state", and their places."""
    tensors: dict[str, Tensor] = {}
    found: dict[str, dict[str, Any]] = {}
    if not states.partitioned and engine.mpu.get_data_parallel_rank() != 0:
        return tensors, found
    fragments, tensor_rank = states.fragments(), engine.mpu.get_slice_parallel_rank()
    for name, one in held.items():
        fragment = fragments.get(id(one.parameter))
        replica = getattr(one.parameter, "ds_pipe_replicated", False) or (
            one.shape.dim is None and tensor_rank > 0
        )
        if fragment is None or replica:
            continue
        own, values = states.read(fragment)
        if fragment.master is not None and one.parameter.dtype != fragment.master.dtype:
            own[MASTER] = fragment.master
        tensors |= {f"{name}/{key}": tensor for key, tensor in own.items()}
        found[name] = {
            "shard": tensor_rank if one.shape.dim is not None else 0,
            "range": [fragment.start, fragment.numel],
            "states": sorted(own),
            "values": values,
        }
    return tensors, found


def _manifest(engine: Checkpointed, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the parts of all ranks as one manifest; see open_checkpoint()."""
    parameters: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, described in part["parameters"].items():
            fragments = {str(shard): [] for shard in range(engine.layout.tensor_parallel_size)}
            parameters.setdefault(name, {**described, "states": [], "values": {}, "fragments": fragments})
    for part in parts:
        for name, fragment in part["fragments"].items():
            whole = parameters[name]
            whole["values"] |= fragment["values"]
            whole["states"] = sorted({*whole["states"], *fragment["states"]})
            if fragment["states"]:
                whole["fragments"][str(fragment["shard"])].append([fragment["file"], *fragment["range"]])
    files = {name: record for part in parts for name, record in part["files"].items()}
    job = next(part["job"] for part in parts if part["job"] is not None)
    return {"job": job, "files": files, "parameters": parameters}


def describe_job(engine: Checkpointed) -> dict[str, Any]:
    """Return the sizes and settings of the job, for the manifest."""
    layout = engine.layout
    return {
        "schedule": engine.plan.timetable.schedule,
        "pipeline_parallel_size": layout.placement.devices_per_pipe,
        "tensor_parallel_size": layout.tensor_parallel_size,
        "data_parallel_size": layout.data_parallel_size,
        "zero_stage": zero_stage(engine.config),
        "precision": precision(engine.config),
        "optimizer": OptimizerStates(engine.optimizer).name,
        "layers": engine.module._num_layers,
    }


def _state_of(engine: Checkpointed, client_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return counters and all else that is the same on all ranks, under DeepSpeed's names where they exist."""
    taken = sorted(set(client_state) & set(NOT_THE_CALLERS))
    if taken:
        raise ConfigError(
            f"client_state cannot have the keys {', '.join(taken)}, which are the engine's own."
        )
    scaler, scheduler = getattr(engine.optimizer, "loss_scaler", None), engine.lr_scheduler
    batches = engine.batches
    position = (type(batches).__name__, batches.state_dict()) if isinstance(batches, Resumable) else None
    return {
        **{key: getattr(engine, key) for key in COUNTERS},
        "module": None,
        "optimizer": None,
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        "lr_scheduler_class": None if scheduler is None else type(scheduler).__name__,
        "loss_scale": {key: getattr(scaler, key) for key in _LOSS_SCALE if hasattr(scaler, key)},
        DATA_POSITION: position,
        "dp_world_size": engine.dp_world_size,
        "mp_world_size": 1,  # to DeepSpeed's loader, how many of these files there are
        **client_state,
    }
