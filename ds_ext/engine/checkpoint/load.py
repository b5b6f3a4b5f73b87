"""Loading of checkpoints into a job with any schedule and parallel sizes. See save.py for their contents."""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from ...errors import CheckpointError
from ..all_ranks import from_rank_0, on_all_ranks
from ..engine_state import EngineState
from ..rank_state import SCHEDULER, VALUES, RankState, set_random_states
from ..types import Json, Record, Saved, Scheduler
from .file import read_plain
from .folder import check_contents, open_checkpoint
from .optimizer_states import OptimizerStates, numbers_of, set_numbers
from .reader import CheckpointReader
from .run import Run
from .save import (
    DEEPSPEED_SCHEDULERS,
    RESERVED_KEYS,
    STATE_FILE,
    job_settings,
    random_file,
)

logger = logging.getLogger(__name__)


class _Opened(NamedTuple):
    """Checkpoint that was opened and checked, with the values in it that are the same on all ranks."""

    folder: Path
    manifest: Record
    saved_values: Record


def choose(run: Run, folder: Path, tag: str | None) -> str | None:
    """Return the checkpoint to load, the same on all ranks, even if another job writes to the folder; None without one.

    After a restart of its ranks, only what ``run`` has written or loaded counts. ``tag`` None: the current checkpoint.
    """
    name = None if tag is None else str(tag)
    checkpoint: str | None = from_rank_0(lambda: run.choose(folder, name), CheckpointError)
    if checkpoint is None and dist.get_rank() == 0:
        if run.continues:
            logger.warning("%s: no checkpoint that this run wrote or loaded before its restart", folder)
        else:
            logger.info("%s: no checkpoint", folder)
    return checkpoint


def load_checkpoint(
    engine: EngineState,
    folder: Path,
    tag: str,
    *,
    strict: bool = True,
    with_optimizer: bool = True,
    with_scheduler: bool = True,
    with_counters: bool = True,
) -> tuple[Path, Record]:
    """Load a checkpoint, and return its folder and the client state. All ranks must call this together.

    Args:
        strict: raise an error if the checkpoint and the model have different parameters.
        with_counters: load the loss scale, the counters of steps and samples, the position in the data, and the seed of
            the layers' random numbers.
    """
    with_optimizer = with_optimizer and engine.role.in_checkpoints
    rank_state = RankState(engine)
    opened = _Opened(folder, {}, {})

    def open_on_rank() -> list[str]:
        nonlocal opened
        opened = _open_and_check(engine, rank_state, folder, tag, strict, with_optimizer, with_scheduler)
        return [local.name for local in rank_state.parameters.values()]

    names_of_ranks: list[list[str]] = on_all_ranks(open_on_rank, CheckpointError)
    checkpoint, manifest, saved_values = opened
    if strict:
        _require_no_unknown_parameters(checkpoint, manifest, names_of_ranks)
    settings = _settings(engine, rank_state.optimizer)
    if engine.role.in_checkpoints:
        ranks = engine.layout.tensor_parallel_size
        reader = CheckpointReader(checkpoint, manifest, engine.mpu.get_slice_parallel_rank(), ranks)
        with torch.no_grad():
            _load_weights(engine, rank_state, reader, manifest)
            if with_optimizer:
                _load_states(rank_state, reader, manifest)
    _share_settings(rank_state)
    _load_values(engine, saved_values, with_optimizer, with_scheduler, with_counters)
    if with_counters:
        _load_random_states(engine, checkpoint, manifest["files"])
    scheduler = engine.lr_scheduler
    _apply_rates(scheduler)
    if with_scheduler and scheduler is not None and saved_values[SCHEDULER] is None:
        _catch_up(scheduler, engine.global_steps - engine.skipped_steps)
    engine.run.record_load(manifest)
    if dist.get_rank() == engine.role.first_in_checkpoints:
        _log_settings(settings, _settings(engine, rank_state.optimizer))
        _log_changes(manifest["job"].get("settings", {}), job_settings(engine))
    dist.barrier()  # no rank may train, or fail, while another is still reading
    return checkpoint, {key: value for key, value in saved_values.items() if key not in RESERVED_KEYS}


def _open_and_check(
    engine: EngineState,
    rank_state: RankState,
    folder: Path,
    tag: str,
    strict: bool,
    with_optimizer: bool,
    with_scheduler: bool,
) -> _Opened:
    """Open a checkpoint, and raise CheckpointError unless it is complete and fits the job."""
    checkpoint, manifest = open_checkpoint(folder, tag)
    check_contents(checkpoint, manifest, dist.get_rank(), dist.get_world_size())
    saved_values = read_plain(checkpoint / STATE_FILE)
    _check_fit(engine, rank_state, checkpoint, manifest, strict, with_optimizer)
    if with_optimizer:
        _check_joined(rank_state, checkpoint, manifest["parameters"])
    if with_scheduler:
        _check_scheduler(engine, checkpoint, saved_values)
    return _Opened(checkpoint, manifest, saved_values)


def _require_no_unknown_parameters(
    checkpoint: Path, manifest: Json, names_of_ranks: Sequence[Sequence[str]]
) -> None:
    unknown = sorted(set(manifest["parameters"]).difference(*names_of_ranks))
    if unknown:
        raise CheckpointError(
            f"{checkpoint}: contains {len(unknown)} parameters that the model does not have (got "
            f"{', '.join(unknown[:4])}{', ...' if len(unknown) > 4 else ''}). Use the model sizes of that run."
        )


def _load_values(
    engine: EngineState,
    saved_values: Json,
    with_optimizer: bool,
    with_scheduler: bool,
    with_counters: bool,
) -> None:
    """Set the values that are the same on all ranks. Call this after the states of the optimizer are loaded.

    ``with_counters`` loads all of them except the scheduler, and so the loss scale without the optimizer's states too.
    """
    for value in VALUES:
        loads = with_scheduler if value.key == SCHEDULER else with_counters
        if value.key not in saved_values or not loads:
            continue
        saved = saved_values[value.key]
        if value.key == SCHEDULER and with_optimizer:
            saved = _with_rates_of_groups(engine.lr_scheduler, saved)
        value.write(engine, saved)


def _with_rates_of_groups(scheduler: Scheduler | None, saved: Saved) -> Saved:
    """Return the state of a scheduler with the loaded rates of this rank's parameter groups.

    The saved rates are of the groups of the rank that saved them.
    """
    if scheduler is None or "base_lrs" not in (saved or {}):
        return saved
    groups = scheduler.optimizer.param_groups
    base_rates, rates = ([group[key] for group in groups] for key in ("initial_lr", "lr"))
    return {**saved, "base_lrs": base_rates, "_last_lr": rates}


def _check_fit(
    engine: EngineState,
    rank_state: RankState,
    checkpoint: Path,
    manifest: Json,
    strict: bool,
    with_optimizer: bool,
) -> None:
    """Raise CheckpointError unless the checkpoint has this rank's parameters and states with the same shapes."""
    job, saved = manifest["job"], manifest["parameters"]
    layers = engine.module.num_model_layers
    if strict and job["layers"] != layers:
        raise CheckpointError(
            f"{checkpoint}: the model has {layers} pipeline layers, embeddings and head included "
            f"(got {job['layers']} in the checkpoint). Use the model sizes of that run."
        )
    for local in rank_state.parameters.values():
        name = local.name
        if name not in saved:
            # A checkpoint with exclude_frozen_parameters has no frozen parameters: they keep their values.
            if strict and (local.parameter.requires_grad or job.get("with_frozen", True)):
                raise CheckpointError(
                    f"{checkpoint}: does not contain the model's parameter {name}. Use the model sizes and layers "
                    f"of that run."
                )
        elif tuple(saved[name]["shape"]) != local.shape.full:
            got = " x ".join(map(str, saved[name]["shape"]))
            expected = " x ".join(map(str, local.shape.full))
            raise CheckpointError(
                f"{name}: the model has the shape {expected} (got {got} in {checkpoint}). Use the model sizes of that "
                f"run."
            )
    if with_optimizer and job["optimizer"] not in (None, rank_state.optimizer.name):
        raise CheckpointError(
            f"{checkpoint}: this job has the optimizer {rank_state.optimizer.name} (got states of {job['optimizer']}). "
            f"Use that optimizer, or load with load_optimizer_states=False."
        )


def _check_joined(state: RankState, checkpoint: Path, saved: Json) -> None:
    """Raise CheckpointError if parameters that ZeRO joins on this rank differ in states with a single value."""
    partitions: dict[int, dict[str, list[str]]] = {}  # names of the parameters by values, for each partition
    for _, local, fragment in state.fragments(state.parameters) if state.optimizer.partitioned else ():
        values = saved.get(local.name, {}).get("values", {}).items()
        single = {key: value["value"] if isinstance(value, dict) else value for key, value in values}
        text = ", ".join(f"{key} {value}" for key, value in single.items()) or "none"
        partitions.setdefault(id(fragment.owner), {}).setdefault(text, []).append(local.name)
    for partition in partitions.values():
        if len(partition) > 1:
            got = [f"{text} of {', '.join([*of[:4], '...'][: len(of)])}" for text, of in partition.items()]
            raise CheckpointError(
                f"{checkpoint}: ZeRO and half precision need one step count for the parameters of a group (got "
                f"{'; '.join(got)}). Pass those with another one, such as newly trained ones, to initialize() in "
                f"another parameter group, or load with load_optimizer_states=False."
            )


def _check_scheduler(engine: EngineState, checkpoint: Path, saved_values: Json) -> None:
    expected = None if engine.lr_scheduler is None else type(engine.lr_scheduler).__name__
    got = saved_values["lr_scheduler_class"]
    if None not in (expected, got) and expected != got:
        raise CheckpointError(
            f"{checkpoint}: this job has the learning-rate scheduler {expected} (got the state of {got}). Use that "
            f"scheduler, or load with load_lr_scheduler_states=False."
        )


def _load_weights(engine: EngineState, state: RankState, reader: CheckpointReader, manifest: Json) -> None:
    known = {key: local for key, local in state.parameters.items() if local.name in manifest["parameters"]}
    for local, start, target in state.weights(known):
        target.copy_(reader.weight(local, start, target.numel()).view_as(target))
    state.optimizer.weights_changed()
    same_size = reader.tensor_ranks == engine.layout.tensor_parallel_size
    for index, key, buffer in state.buffers():
        saved = reader.other(index, key, same_size)
        if saved is not None:
            buffer.copy_(saved)
    for index, key, owner in state.extra_states():
        saved = reader.other(index, key, same_size)
        if saved is not None:
            # Copy: tensors of the file are memory-mapped.
            owner.set_extra_state(copy.deepcopy(saved))


def _load_states(state: RankState, reader: CheckpointReader, manifest: Json) -> None:
    saved = manifest["parameters"]
    state.optimizer.clear()
    for _, local, fragment in state.fragments(state.parameters):
        if local.name in saved:
            kept = fragment.kept(local.parameter)
            tensors = reader.states(local, kept.start, kept.numel)
            state.optimizer.write(kept, tensors, saved[local.name]["values"])
    names = {id(local.parameter): local.name for local in state.parameters.values()}
    for group, members in state.optimizer.groups():
        saved_names = [names[id(p)] for p in members if names.get(id(p)) in saved]
        saved_numbers = [saved[name]["group"] for name in saved_names if saved[name]["group"] is not None]
        if saved_numbers:
            set_numbers(group, saved_numbers[0])


def _share_settings(state: RankState) -> None:
    """Set other ranks' settings in groups without parameters of this rank. All ranks must call this together."""
    here, groups = {id(local.parameter) for local in state.parameters.values()}, state.optimizer.groups()
    settings = [numbers_of(group) if here & set(map(id, members)) else None for group, members in groups]
    of_ranks = [others for others in on_all_ranks(lambda: settings) if len(others) == len(settings)]
    for index, (group, _) in enumerate(groups):
        if settings[index] is None:
            set_numbers(group, next(filter(None, (others[index] for others in of_ranks)), {}))


def _load_random_states(engine: EngineState, checkpoint: Path, files: Json) -> None:
    """Load this rank's random states from a checkpoint of as many ranks; otherwise rank 0 logs that they are new."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if random_file(world - 1) in files and random_file(world) not in files:
        set_random_states(read_plain(checkpoint / random_file(rank)))
    elif rank == 0 and engine.global_steps > 0:
        saved = sum(random_file(number) in files for number in range(len(files)))
        logger.warning(
            "%s: the random states of torch, Python and NumPy are new (the checkpoint has those of %d ranks, this job "
            "has %d). The layers' random numbers continue, because they depend on the seed and the step.",
            *(checkpoint, saved, world),
        )


def _apply_rates(scheduler: Scheduler) -> None:
    """Set the learning rates of the scheduler's current step in its optimizer.

    A loaded optimizer has those of the checkpoint, which may be of a job with other arguments.
    """
    if isinstance(scheduler, DEEPSPEED_SCHEDULERS):
        scheduler.step(scheduler.last_batch_iteration)
    elif isinstance(scheduler, LRScheduler):
        for group, lr in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = lr


def _catch_up(scheduler: Scheduler, steps: int) -> None:
    """Bring a scheduler that the checkpoint does not have to the engine's step."""
    if isinstance(scheduler, DEEPSPEED_SCHEDULERS):
        scheduler.step(steps - 1)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch: "before optimizer.step()"
        for _ in range(getattr(scheduler, "last_epoch", 0), steps):
            scheduler.step()


def _settings(engine: EngineState, optimizer_states: OptimizerStates) -> dict[tuple[str, int], object]:
    """Return the settings of the optimizer and the scheduler that a checkpoint may replace, by (key, group)."""
    scheduler = engine.lr_scheduler
    set_by_scheduler = () if scheduler is None else ("lr", "initial_lr", "betas", "momentum")
    settings = {
        (f"optimizer.params.{key}", index): value
        for index, (group, _) in enumerate(optimizer_states.groups())
        for key, value in numbers_of(group).items()
        if key not in set_by_scheduler
    }
    if isinstance(scheduler, LRScheduler):  # DeepSpeed's load only their step
        settings |= {("optimizer.params.lr", index): lr for index, lr in enumerate(scheduler.base_lrs)}
        arguments, saved = inspect.signature(type(scheduler)).parameters, scheduler.state_dict()
        settings |= {
            (f"scheduler.params.{key}", 0): saved[key]
            for key in arguments
            if key in saved and key != "last_epoch"
        }
    return settings


def _log_settings(before: Mapping[tuple[str, int], object], after: Mapping[tuple[str, int], object]) -> None:
    lines = {
        f"{key} = {after[key, group]!r} (this job: {value!r})": None
        for (key, group), value in before.items()
        if (key, group) in after and after[key, group] != value
    }
    for line in lines:
        owner = "lr_scheduler" if line.startswith("scheduler.") else "optimizer.param_groups"
        logger.warning(
            "%s, from the checkpoint. To change it in your own script, set engine.%s after loading, on ranks that "
            "have an optimizer.",
            line,
            owner,
        )


def _log_changes(saved: Mapping[str, str], now: Mapping[str, str]) -> None:
    for key, value in now.items():
        if key in saved and saved[key] != value:
            logger.warning("%s = %s in this job (checkpoint: %s)", key, value, saved[key])
