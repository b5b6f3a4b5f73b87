"""Parts of a job's plan from a JSON that need not be complete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_ext.config.job import JobConfig, load_config
from ds_ext.pipe_schedules import Placement, Timetable
from ds_ext.planner.candidates import Candidates
from ds_ext.planner.job_plan import make_job_plan, place, resolve_schedule, schedule_options


def _job(config: JobConfig | Mapping[str, Any]) -> JobConfig:
    return config if isinstance(config, JobConfig) else load_config(config)


def placement_of(config: JobConfig | Mapping[str, Any], world_size: int | None = None) -> Placement:
    """Return where the stages of a job live."""
    job = _job(config)
    schedule, _ = resolve_schedule(job, world_size)
    return place(job.ds_ext, schedule, schedule_options(job.ds_ext, schedule))


def timetable_of(config: Mapping[str, Any], micro_batches: int) -> Timetable:
    """Return the timetable of a job for ``micro_batches`` per pipeline group and step."""
    steps = micro_batches // placement_of(config).replicas
    batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": steps}
    return make_job_plan(load_config({**config, **batch})).timetable


def candidates_of(config: JobConfig | Mapping[str, Any], world_size: int | None = None) -> Candidates:
    """Return the candidates of a job with "schedule": "auto"."""
    _, candidates = resolve_schedule(_job(config), world_size)
    assert candidates is not None
    return candidates
