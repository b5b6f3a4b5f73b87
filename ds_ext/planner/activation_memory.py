"""Limit on the live activations of a planned order, from a limit on their memory."""

from __future__ import annotations

from ..errors import ConfigError, ScheduleError
from .job_plan import JobPlan
from .memory import memory
from .text import format_bytes, join_words, parse_bytes
from .training_sizes import TrainingSizes

KEY = "ds_ext.max_activation_memory"
OPTION = "max_activations"


def within_activation_memory(plan: JobPlan, sizes: TrainingSizes) -> JobPlan:
    """Return the plan with the largest ``max_activations`` that fits "max_activation_memory"; as it is if it fits.

    Args:
        sizes: model, with the layers of every stage.

    Raises:
        ConfigError: the schedule does not plan its order, or no order fits.
    """
    text = plan.settings.max_activation_memory
    assert text is not None
    if not (plan.schedule.planned and OPTION in plan.schedule.options):
        raise ConfigError(
            f'{KEY}: needs a schedule that plans its order (got schedule "{plan.schedule.name}"). Remove it, or use '
            f'{join_words(["zb_v", "bitpipe_zb", "bitpipe"])} with "mode": "greedy".'
        )
    if plan.options.get(OPTION):
        raise ConfigError(
            f"schedule_options.{OPTION}: contradicts {KEY} (got {plan.options[OPTION]} and {text}). Remove one of them."
        )
    try:
        limit = parse_bytes(text, KEY)
    except ScheduleError as error:
        raise ConfigError(str(error)) from None

    def need(candidate: JobPlan) -> int:
        devices = memory(candidate.timetable, sizes, candidate.settings.slice_lengths)
        return max(device.activations for device in devices)

    least = need(plan)
    if least <= limit:
        return plan
    best = None
    unit = plan.timetable.placement.num_devices / plan.timetable.placement.stages / plan.timetable.slices
    # In slices of a stage: fewer than one micro-batch has, and more than the order without a limit.
    low, high = 0, round(max(plan.simulation.peak_activations) / unit) + 1
    while high - low > 1:
        middle = (low + high) // 2
        try:
            candidate = plan.with_options({**plan.options, OPTION: middle * unit})
        except ConfigError:  # too few for one micro-batch
            low = middle
            continue
        least = min(least, need(candidate))
        if need(candidate) <= limit:
            best, low = candidate, middle
        else:
            high = middle
    if best is None:
        raise ConfigError(
            f"{KEY}: too small for one micro-batch at a time (got {text}). Use at least {format_bytes(least)}, more "
            f"recomputation, a smaller micro-batch or more sequence_slices."
        )
    return best
