"""Saving of checkpoints that load with any schedule and parallel sizes.

    step_20/
      ds_ext.json                          manifest: files, and shape and fragments of each parameter
      mp_rank_00_model_states.pt           counters, learning-rate scheduler, loss scale, client state
      layer_03-model_states.pt             DeepSpeed's format: a layer's weights in model precision, one file per shard
      optimizer_rank_02.safetensors        optimizer states and fp32 master weights of rank 2
      random_rank_02.pt                    states of rank 2's random-number generators

Each rank writes its own parameters and states. Of several replicas (BitPipe, data parallelism, tied and
unsharded parameters), only one is written. Nothing is gathered. The manifest maps the elements of each parameter to
files, and a loading rank reads only the elements that it needs (reader.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.constants import PIPE_REPLICATED
from torch import Tensor

from ...comm.groups import first_step_limit_s
from ...config.deepspeed_json import half_through_zero, precision, zero_stage
from ...config.schedulers import MegatronLR
from ...errors import CheckpointError, ConfigError
from ...launch.job_facts import setting_facts
from ...launch.roll_call import Facts
from ..all_ranks import error_text, from_rank_0, on_all_ranks
from ..batches import MicroBatches
from ..engine_state import EngineState
from ..module import PipelineModule
from ..parameters import LocalParameter, layers_of, parameters_of
from ..rank_state import VALUES, RankState, random_states
from ..types import Json, ParameterGroup, Record
from .background import BackgroundSave, memory_needs, memory_problem, warn_not_removed
from .background_process import Task
from .file import MemoryFile, NewFile, is_plain, layer_file, write_plain, write_tensors
from .folder import CheckedFile, complete_checkpoints, publish, remove_older, require_keep, start_writing
from .optimizer_states import MASTER, OptimizerStates, numbers_of

logger = logging.getLogger(__name__)

STATE_FILE = "mp_rank_00_model_states.pt"
_MASTER_BYTES, _STATE_BYTES = 4, 4  # master weights and optimizer states are fp32
# Keys of the file that a script's client state must not have.
RESERVED_KEYS = (
    *(value.key for value in VALUES),
    *("module", "optimizer", "lr_scheduler_class", "dp_world_size", "mp_world_size"),
)
# They load their step only: their settings are those of the JSON.
DEEPSPEED_SCHEDULERS = tuple(getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES)


def save_checkpoint(
    engine: EngineState,
    folder: Path,
    tag: str,
    client_state: Json,
    make_current: bool,
    with_frozen: bool,
    keep: int = 0,
    background: bool = False,
) -> BackgroundSave | None:
    """Write a checkpoint. All ranks must call this together.

    Args:
        client_state: values that loading returns: numbers, strings, tensors, NumPy arrays, Namespaces, and lists and
            dictionaries of them.
        make_current: write the tag to ``folder/latest``.
        keep: number of complete checkpoints of training runs to keep in the folder; 0: all. If an older one cannot be
            removed, rank 0 logs a warning.
        background: copy the state, and let processes write it. With too little memory, a warning has the numbers, and
            the checkpoint is written before this returns.

    Returns the save of this rank in the background, for :func:`finish_save`; None: the checkpoint is complete.
    """
    folder, began = folder.absolute(), time.time()
    new_file = MemoryFile if background and _has_memory(engine) else CheckedFile
    files: dict[str, dict[str, int]] = {}  # of this rank

    def start() -> Path:
        require_keep(keep)
        with _describe_failure(folder, tag):
            engine.run.lock(folder)
            return start_writing(folder, tag)

    def write_part() -> Record:
        with _describe_failure(folder, tag):
            return _write_part(engine, written, client_state, with_frozen, new_file, files)

    def finish() -> None:
        with _describe_failure(folder, tag):
            publish(written, tag, _manifest(engine, parts), make_current)
        warn_not_removed(remove_older(folder, keep))

    written: Path = from_rank_0(start, CheckpointError)
    try:
        parts = on_all_ranks(write_part, CheckpointError)
        if new_file is CheckedFile:
            from_rank_0(finish, CheckpointError)
            return None
        rank = dist.get_rank()
        task = Task(
            rank=rank,
            parent=os.getpid(),
            written=str(written),
            files={name: files.pop(name)["descriptor"] for name in [*files]},
            ranks=dist.get_world_size() if rank == 0 else 0,
            tag=tag,
            manifest=_manifest(engine, parts) if rank == 0 else {},
            make_current=make_current,
            keep=keep,
            limit_s=first_step_limit_s(engine.plan.settings.transport_options.timeout_s),
        )
        saves: list[BackgroundSave] = []
        on_all_ranks(lambda: saves.append(BackgroundSave(task, engine.global_steps, began)), CheckpointError)
        return saves[0]
    except Exception:
        for record in files.values():
            with contextlib.suppress(KeyError, OSError):
                os.close(record["descriptor"])
        if dist.get_rank() == 0:
            shutil.rmtree(written, ignore_errors=True)
        raise


def finish_save(save: BackgroundSave) -> None:
    """Wait for a save in the background. All ranks must call this together."""

    def require(error: str) -> None:
        if error:
            raise CheckpointError(_not_saved(save.path.parent, save.path.name, error))

    try:
        # First the files of all ranks, because the process that publishes would wait for those of a lost rank.
        on_all_ranks(lambda: require(save.wait_for_files()), CheckpointError)
        on_all_ranks(lambda: require(save.wait()), CheckpointError)
    except CheckpointError:
        save.stop()
        raise


def _has_memory(engine: EngineState) -> bool:
    """Return whether the hosts have memory for a copy of their ranks' states, else warn. All ranks call it together."""
    problem = memory_problem(on_all_ranks(lambda: memory_needs(checkpoint_bytes(engine))))
    if problem and dist.get_rank() == 0:
        logger.warning("background: %s. The checkpoint is written before training continues.", problem)
    return not problem


@contextmanager
def _describe_failure(folder: Path, tag: str) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names the last complete checkpoint."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(_not_saved(folder, tag, error_text(error))) from None


def _not_saved(folder: Path, tag: str, error: str) -> str:
    complete = complete_checkpoints(folder)
    last = (
        f"The last complete one is {complete[-1]}."
        if complete
        else "The folder contains no other checkpoint."
    )
    return f"the checkpoint {tag!r} was not saved: {error}. {last}"


def _write_part(
    engine: EngineState,
    written: Path,
    client_state: Json,
    with_frozen: bool,
    new_file: NewFile,
    files: dict[str, dict[str, int]],
) -> Record:
    """Write the files of this rank, and add their records to ``files``. Returns its part of the manifest."""
    if not written.is_dir():
        raise CheckpointError(
            f"{written}: created by rank 0, but rank {dist.get_rank()} cannot see it. Use a file system that all hosts "
            f"share."
        )
    name = random_file(dist.get_rank())
    files[name] = write_plain(written / name, random_states(), new_file)
    if not engine.role.in_checkpoints:
        return {"files": files, "fragments": {}, "parameters": {}, "aliases": {}, "job": None}
    if dist.get_rank() == engine.role.first_in_checkpoints:
        files[STATE_FILE] = write_plain(written / STATE_FILE, state_of(engine, client_state), new_file)
    state = RankState(engine)
    require_plain_extra_states(state)
    parameters = state.parameters if with_frozen else state.trained
    aliases: dict[str, str] = {}
    if engine.mpu.get_data_parallel_rank() == 0:
        aliases = _write_layers(engine, written, parameters, new_file, files)
    name = f"optimizer_rank_{dist.get_rank():02d}.safetensors"
    tensors, fragments = _optimizer_part(engine, state, parameters, name)
    if tensors:
        files[name] = write_tensors(written / name, tensors, new_file)
    job = {
        **describe_job(engine),
        "run": engine.run.id,
        "step": engine.global_steps,
        "at": time.time(),
        "with_frozen": with_frozen,
        "settings": job_settings(engine),
    }
    descriptions = _describe_parameters(state.optimizer, parameters)
    return {
        "files": files,
        "fragments": fragments,
        "parameters": descriptions,
        "aliases": aliases,
        "job": job,
    }


def _describe_parameters(
    optimizer: OptimizerStates, parameters: Mapping[str, LocalParameter]
) -> dict[str, Record]:
    settings: dict[int, Record] = {}
    for group, members in optimizer.groups():
        settings |= dict.fromkeys(map(id, members), numbers_of(group))
    return {
        local.name: {
            "shape": list(local.shape.full),
            "shard": list(local.shape.shard),
            "dim": local.shape.dim,
            "layer": local.layer,
            "key": local.key,
            "parts": local.parts,
            "group": settings.get(id(local.parameter)),
        }
        for local in parameters.values()
    }


def _write_layers(
    engine: EngineState,
    written: Path,
    parameters: Mapping[str, LocalParameter],
    new_file: NewFile,
    files: dict[str, dict[str, int]],
) -> dict[str, str]:
    """Write the weights and buffers of each layer of this rank, in DeepSpeed's files.

    Returns ``LAYER.KEY`` -> name of the parameter, for the further places of shared parameters.
    """
    names = {id(local.parameter): local for local in parameters.values()}
    ranks, tensor_rank = engine.layout.tensor_parallel_size, engine.mpu.get_slice_parallel_rank()
    aliases: dict[str, str] = {}
    for index, layer in layers_of(engine.module).items():
        if not _holds_first_place(engine.module, index):
            continue
        part, parts = engine.module.head_part(index)
        place = index - part
        state = {
            key: value
            for key, value in layer.state_dict(keep_vars=True).items()
            if not isinstance(value, torch.nn.Parameter) or id(value) in names
        }
        states = {(part, parts): state}
        if any(index in rows for rows in engine.module.tied_rows):  # every part as the whole parameter
            members = [names[id(value)] for value in state.values()]
            states = {(local.part, local.parts): {local.key: local.parameter} for local in members}
        for (part, parts), state in states.items():
            for key, value in state.items():
                if isinstance(value, torch.nn.Parameter):
                    local = names[id(value)]
                    if (local.layer, local.key) != (place, key):
                        aliases[f"{place}.{key}"] = local.name
            plain = {k: v.detach().cpu() if isinstance(v, Tensor) else v for k, v in state.items()}
            name = layer_file(place, part * ranks + tensor_rank, parts * ranks)
            files[name] = write_plain(written / name, plain, new_file)
    return aliases


def require_plain_extra_states(state: RankState) -> None:
    for index, key, owner in state.extra_states():
        value = owner.get_extra_state()
        if not is_plain(value):
            raise CheckpointError(
                f"{type(owner).__name__}.get_extra_state() of layer {index} ({key}): must return numbers, strings, "
                f"tensors, or lists and dictionaries of them, because loading other values can run code (got "
                f"{type(value).__name__}). Return these, or a uint8 tensor."
            )


def _holds_first_place(module: PipelineModule, index: int) -> bool:
    """Return whether a stage of this rank has layer ``index``, which for a tied layer is its first place.

    The first place of a part of a tied head is the embedding.
    """
    if any(index == max(rows) for rows in module.tied_rows):
        return False
    return any(module.parts[stage] <= index < module.parts[stage + 1] for stage in module.stages)


def _optimizer_part(
    engine: EngineState, state: RankState, parameters: Mapping[str, LocalParameter], file: str
) -> tuple[dict[str, Tensor], dict[str, Record]]:
    """Return tensors of the optimizer for ``file``, by "unique name/state", and the fragments by unique name."""
    tensors: dict[str, Tensor] = {}
    fragments: dict[str, Record] = {}
    if not state.optimizer.partitioned and engine.mpu.get_data_parallel_rank() != 0:
        return tensors, fragments
    tensor_rank = engine.mpu.get_slice_parallel_rank()
    for name, local, fragment in state.fragments(parameters):
        is_sharded = local.shape.dim is not None
        if getattr(local.parameter, PIPE_REPLICATED, False) or (tensor_rank > 0 and not is_sharded):
            continue
        states, values = state.optimizer.read(fragment)
        if fragment.master is not None and local.parameter.dtype != fragment.master.dtype:
            states[MASTER] = fragment.master
        tensors |= {f"{name}/{key}": tensor for key, tensor in states.items()}
        fragments[name] = {
            "parameter": local.name,
            "file": file,
            "shard": local.shard(tensor_rank, engine.layout.tensor_parallel_size) if is_sharded else 0,
            "range": [fragment.start, fragment.numel],
            "states": sorted(states),
            "values": values,
        }
    return tensors, fragments


def checkpoint_bytes(engine: EngineState) -> int:
    """Return the bytes of the weights and optimizer states that this rank counts toward a checkpoint.

    Replicas count once. The number of states follows from the optimizer: two for Adam, one for Lion and for momentum.
    """
    if not engine.role.in_checkpoints or engine.mpu.get_data_parallel_rank() != 0:
        return 0
    optimizer = OptimizerStates(engine.optimizer)
    num_states = {
        id(parameter): _num_states(optimizer.name or "", group)
        for group, parameters in optimizer.groups()
        for parameter in parameters
    }
    is_first_shard = engine.mpu.get_slice_parallel_rank() == 0
    total = 0
    for local in parameters_of(engine.module, engine.layout.tensor_parallel_size).values():
        parameter = local.parameter
        if getattr(parameter, PIPE_REPLICATED, False):
            continue
        bytes_per_element = parameter.element_size()
        is_sharded = local.shape.dim is not None
        if (is_first_shard or is_sharded) and id(parameter) in num_states:
            bytes_per_element += num_states[id(parameter)] * _STATE_BYTES
            if parameter.element_size() < _MASTER_BYTES:
                bytes_per_element += _MASTER_BYTES
        total += parameter.numel() * bytes_per_element
    return total


def _num_states(optimizer: str, group: ParameterGroup) -> int:
    """Return the minimum number of states of an optimizer per element of a parameter group."""
    if any(name in optimizer.lower() for name in ("lion", "adagrad", "rmsprop")):
        return 1
    return 2 if "betas" in group else int(bool(group.get("momentum")))


def _manifest(engine: EngineState, parts: list[Record]) -> Record:
    parameters: dict[str, Record] = {}
    for part in parts:
        for name, description in part["parameters"].items():
            shards = engine.layout.tensor_parallel_size * description["parts"]
            fragments = {str(shard): [] for shard in range(shards)}
            parameters.setdefault(name, {**description, "states": [], "values": {}, "fragments": fragments})
    for part in parts:
        for fragment in part["fragments"].values():
            parameter = parameters[fragment["parameter"]]
            parameter["values"] |= fragment["values"]
            parameter["states"] = sorted({*parameter["states"], *fragment["states"]})
            if fragment["states"]:
                parameter["fragments"][str(fragment["shard"])].append([fragment["file"], *fragment["range"]])
    files = {name: record for part in parts for name, record in part["files"].items()}
    aliases = {place: name for part in parts for place, name in part["aliases"].items()}
    job = next(part["job"] for part in parts if part["job"] is not None)
    return {"job": job, "files": files, "parameters": parameters, "aliases": aliases}


def describe_job(engine: EngineState) -> Record:
    layout = engine.layout
    return {
        "schedule": engine.plan.timetable.schedule,
        "pipeline_parallel_size": layout.placement.devices_per_pipe,
        "tensor_parallel_size": layout.tensor_parallel_size,
        "data_parallel_size": layout.data_parallel_size,
        "zero_stage": zero_stage(half_through_zero(engine.config)),
        "precision": precision(engine.config),
        "optimizer": OptimizerStates(engine.optimizer).name,
        "layers": engine.module.num_model_layers,
    }


def job_settings(engine: EngineState) -> Facts:
    """Return settings that a resumed job may change, except those that it takes from the checkpoint."""
    scheduler, job, facts = engine.lr_scheduler, engine.plan.job.deepspeed, engine.run_facts
    settings = {key: facts[key] for key in ("train_batch_size", "precision", "dropout") if key in facts}
    settings["train_micro_batch_size_per_gpu"] = engine.plan.sizes.micro_batch_size
    settings["gradient_clipping"] = float(engine.gradient_clipping())
    settings["scheduler.type"] = None if scheduler is None else type(scheduler).__name__
    if isinstance(scheduler, (MegatronLR, *DEEPSPEED_SCHEDULERS)):  # others load their settings
        settings["optimizer.params.lr"] = job.get("optimizer", {}).get("params", {}).get("lr")
        settings["scheduler.params"] = job.get("scheduler", {}).get("params", {})
    if isinstance(engine.batches, MicroBatches):
        order = engine.batches.shuffle_seed is not None
        settings |= {"initialize.shuffle": order, "initialize.repeat": engine.batches.repeat}
    return {**facts.get("data", {}), **setting_facts(settings)}


def state_of(engine: EngineState, client_state: Json) -> Record:
    """Return the values that are the same on all ranks, under DeepSpeed's keys if it has them."""
    if not isinstance(client_state, Mapping):
        raise ConfigError(
            f"client_state: must be a dictionary (got {type(client_state).__name__}). Use {{'state': ...}}."
        )
    reserved = sorted(set(client_state) & set(RESERVED_KEYS))
    if reserved:
        raise ConfigError(
            f"client_state: the engine uses these keys (got {', '.join(reserved)}). Rename them."
        )
    scheduler = engine.lr_scheduler
    return {
        **{value.key: value.read(engine) for value in VALUES},
        "module": None,
        "optimizer": None,
        "lr_scheduler_class": None if scheduler is None else type(scheduler).__name__,
        "dp_world_size": engine.dp_world_size,
        "mp_world_size": 1,  # for DeepSpeed's loader: number of these files
        **client_state,
    }


def random_file(rank: int) -> str:
    return f"random_rank_{rank:02d}.pt"
