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
    schedule, slices = plan.schedule, plan.settings.sequence_slices
    if not (schedule.planned and OPTION in schedule.options) or plan.rules is not None:
        raise ConfigError(
            f'{KEY}: needs a schedule that plans its order (got schedule "{plan.settings.schedule}"). Remove it, or '
            f'use "zb_v", "bitpipe_zb", or "bitpipe" with "mode": "greedy".'
        )
    if plan.options.get(OPTION):
        raise ConfigError(
            f"schedule_options.{OPTION}: contradicts {KEY} (got {plan.options[OPTION]} and {text}). Remove one of them."
        )
    try:
        limit = parse_bytes(text, KEY)
    except ScheduleError as error:
        raise ConfigError(str(error)) from None

    devices, micro_batches = plan.settings.pipeline_parallel_size, plan.sizes.micro_batches

    def need(timetable: Timetable) -> int:
        parts = memory(timetable, sizes, plan.settings.slice_lengths)
        return max(device.activations for device in parts)

    def limited(activations: int) -> dict[str, Any]:
        return {**plan.options, OPTION: activations * unit}

    least = need(plan.timetable)
    if least <= limit:
        return plan
    unit = plan.timetable.placement.num_devices / plan.timetable.placement.stages / slices
    # In slices of a stage: fewer than one micro-batch has, and more than the order without a limit.
    low, high = 0, round(max(plan.simulation.peak_activations) / unit) + 1
    plan.with_options(limited(high))  # raises for other options
    best = None
    while high - low > 1:
        middle = (low + high) // 2
        try:
            timetable = schedule.timetable(devices, micro_batches, limited(middle), slices=slices)
        except ScheduleError:  # too few for one micro-batch
            low = middle
            continue
        least = min(least, need(timetable))
        if need(timetable) <= limit:
            best = low = middle
        else:
            high = middle
    if best is None:
        raise ConfigError(
            f"{KEY}: too small for one micro-batch at a time (got {text}). Use at least "
            f"{math.ceil(least / 1e5) / 10:g}MB, more recomputation or a smaller micro-batch."
        )
    return plan.with_options(limited(best))
