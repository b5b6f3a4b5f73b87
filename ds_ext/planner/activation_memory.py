"""Limit on the live activations of a planned order, from a limit on their memory."""

from __future__ import annotations

import math
from typing import Any

from ..errors import ConfigError, ScheduleError
from ..pipe_schedules import Timetable
from .job_plan import JobPlan
from .memory import memory
from .text import parse_bytes
from .training_sizes import TrainingSizes

KEY = "ds_ext.max_activation_memory"
OPTION = "max_activations"


def within_activation_memory(plan: JobPlan, sizes: TrainingSizes) -> JobPlan:
    """Return the plan with the largest ``max_activations`` that fits "max_activation_memory"; as it is if it fits.

    ``sizes`` has the layers of every stage.
    """
    text = plan.settings.max_activation_memory
    assert text is not None
    _require_planned(plan, text)
    try:
        limit = parse_bytes(text, KEY)
    except ScheduleError as error:
        raise ConfigError(str(error)) from None
    unlimited = _activation_bytes(plan, sizes, plan.timetable)
    return plan if unlimited <= limit else plan.with_options(_largest_limit(plan, sizes, limit, unlimited))


def _require_planned(plan: JobPlan, text: str) -> None:
    schedule = plan.schedule
    if not (schedule.planned and OPTION in schedule.options) or plan.rules is not None:
        raise ConfigError(
            f'{KEY}: needs a schedule that plans its order (got schedule "{plan.settings.schedule}"). Remove it, or '
            f'use "zb_v", "bitpipe_zb", or "bitpipe" with "mode": "greedy".'
        )
    if plan.options.get(OPTION):
        raise ConfigError(
            f"schedule_options.{OPTION}: contradicts {KEY} (got {plan.options[OPTION]} and {text}). Remove one of them."
        )


def _activation_bytes(plan: JobPlan, sizes: TrainingSizes, timetable: Timetable) -> int:
    return max(device.activations for device in memory(timetable, sizes, plan.settings.slice_lengths))


def _largest_limit(plan: JobPlan, sizes: TrainingSizes, limit: int, unlimited: int) -> dict[str, Any]:
    """Return the options with the largest ``max_activations`` whose order needs at most ``limit`` bytes."""
    settings, placement = plan.settings, plan.timetable.placement
    unit = placement.num_devices / placement.stages / settings.sequence_slices

    def limited(activations: int) -> dict[str, Any]:
        return {**plan.options, OPTION: activations * unit}

    # In slices of a stage: fewer than one micro-batch has, and more than the order without a limit.
    low, high = 0, round(max(plan.simulation.peak_activations) / unit) + 1
    plan.with_options(limited(high))  # raises for other options
    best, least = None, unlimited
    while high - low > 1:
        middle = (low + high) // 2
        try:
            timetable = plan.schedule.timetable(
                settings.pipeline_parallel_size,
                plan.sizes.micro_batches,
                limited(middle),
                slices=settings.sequence_slices,
            )
        except ScheduleError:  # too few for one micro-batch
            low = middle
            continue
        need = _activation_bytes(plan, sizes, timetable)
        least = min(least, need)
        if need <= limit:
            best = low = middle
        else:
            high = middle
    if best is None:
        raise ConfigError(
            f"{KEY}: too small for one micro-batch at a time (got {settings.max_activation_memory}). Use at least "
            f"{math.ceil(least / 1e5) / 10:g}MB, more recomputation or a smaller micro-batch."
        )
    return limited(best)
