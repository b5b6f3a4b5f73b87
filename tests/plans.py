"""Parts of a job's plan from a JSON that need not be complete."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ds_ext.config.job import JobConfig, load_config
from ds_ext.model.config import TransformerConfig
from ds_ext.pipe_schedules import Placement, Timetable, get_schedule
from ds_ext.planner.candidates import Candidates
from ds_ext.planner.job_plan import (
    JobPlan,
    make_job_plan,
    options_with_fbd,
    place,
    resolve_schedule,
)
from ds_ext.recipes.training import setup
from ds_ext.recipes.training.script_flags import Model
from ds_ext.recipes.training.setup import model_fields


def small_config(args: argparse.Namespace, job: JobConfig | None) -> TransformerConfig:
    """Return the model of the flags, without looking at the vocabulary of the data."""
    return TransformerConfig(**{**model_fields(args, job), "vocab_size": 100})


def plan_job(
    prog: str,
    argv: Sequence[str],
    model: Model,
    make_config: Callable[[argparse.Namespace, JobConfig | None], TransformerConfig] = small_config,
) -> tuple[argparse.Namespace, JobPlan]:
    """Return the flags and the plan of a script's command line."""
    job = setup.plan_job(prog, argv, model, make_config, ["a", "b"], ["c", "d"])
    return job.args, job.plan


def _job(config: JobConfig | Mapping[str, Any]) -> JobConfig:
    return config if isinstance(config, JobConfig) else load_config(config)


def placement_of(config: JobConfig | Mapping[str, Any], world_size: int | None = None) -> Placement:
    """Return where the stages of a job live."""
    job = _job(config)
    schedule, _ = resolve_schedule(job, world_size)
    return place(job.ds_ext, schedule, options_with_fbd(job.ds_ext, schedule))


def timetable_of(config: Mapping[str, Any], micro_batches: int) -> Timetable:
    """Return the timetable of a job for ``micro_batches`` per pipeline group and step."""
    batch = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": micro_batches}
    return make_job_plan(load_config({**config, **batch})).timetable


def batch_of(
    schedule: str, steps: int, pp: int = 2, micro_batch: int = 2, options: Mapping[str, Any] | None = None
) -> dict[str, int]:
    """Return the batch keys for ``steps`` micro-batches per data-parallel rank, replicas included."""
    placement = get_schedule(schedule).placement(pp, options)
    groups = dist.get_world_size() // placement.num_devices if dist.is_initialized() else 1
    samples = micro_batch * steps * placement.replicas * groups
    return {"train_batch_size": samples, "train_micro_batch_size_per_gpu": micro_batch}


def candidates_of(config: JobConfig | Mapping[str, Any], world_size: int | None = None) -> Candidates:
    """Return the candidates of a job with "schedule": "auto"."""
    _, candidates = resolve_schedule(_job(config), world_size)
    assert candidates is not None
    return candidates
