"""Runs of a number of tokens: MFU, days, GPU-hours and cost, and the fewest devices that meet a deadline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..errors import ScheduleError
from ..pipe_schedules.costs import Costs
from ..pipe_schedules.placement import linear
from .parallel_sizes import RANKS_PER_HOST, Cluster, ClusterPlan, plan_cluster
from .training_sizes import TrainingSizes

_DAY_S = 86400
_ADAM_BYTES = 16  # per parameter in half precision, with fp32 states
_MOST = 4  # times the devices that the work and the states need at least


@dataclass(frozen=True)
class Run:
    """Figures of a run with the best sizes of a plan.

    Attributes:
        devices: number of devices.
        tokens_per_s: over all devices.
        model_flops: model FLOPs per second and device, without recomputation.
        mfu: model FLOPs utilization (arXiv 2204.02311, appendix B): ``model_flops`` relative to the peak rate; None
            without this rate.
        days, gpu_hours: duration; None without a number of tokens.
        cost: price of all GPU-hours; None without a price.
    """

    devices: int
    tokens_per_s: float
    model_flops: float
    mfu: float | None
    days: float | None
    gpu_hours: float | None
    cost: float | None


def run_of(
    plan: ClusterPlan,
    cluster: Cluster,
    sizes: TrainingSizes,
    *,
    peak_flops: float | None = None,
    tokens: float | None = None,
    price: float | None = None,
) -> Run:
    """Return the figures of a run; the best sizes of the plan must fit.

    Args:
        peak_flops: dense rate of a device on its data sheet.
        price: price of a device per hour.
    """
    samples_per_s = cluster.batch / (plan.best.step_s or math.inf)
    flops = samples_per_s * sizes.flops_per_sample / cluster.devices
    days = None if tokens is None else tokens / (samples_per_s * sizes.seq_length) / _DAY_S
    hours = None if days is None else 24 * days * cluster.devices
    return Run(
        cluster.devices,
        samples_per_s * sizes.seq_length,
        flops,
        None if peak_flops is None else flops / peak_flops,
        days,
        hours,
        None if price is None or hours is None else hours * price,
    )


def plan_for_deadline(
    cluster: Cluster,
    sizes: TrainingSizes,
    ratios: Costs,
    tokens: float,
    days: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Cluster, ClusterPlan]:
    """Return the fewest devices that train ``tokens`` in ``days``, and their plan: 1, 2, 4, or whole hosts of 8.

    Sizes that miss the deadline are not evaluated.

    Args:
        cluster: cluster with any number of devices; their memory, rate, links and the other limits are used.

    Raises:
        ScheduleError: no number of devices meets the deadline, or no sizes are possible.
    """
    limit_s = cluster.batch * sizes.seq_length * days * _DAY_S / tokens
    passes = 1 + (ratios.backward_input + ratios.backward_weight) / (ratios.forward or 1.0)
    work_s = cluster.batch * sizes.forward_flops * passes * (1 - ratios.jitter) / cluster.flops
    least = work_s / limit_s
    states = sizes.device_parameters(linear(1), 0) * _ADAM_BYTES / cluster.memory_bytes
    shortest_s, refusal, tried = math.inf, None, 0
    for devices in _rentable(least, _MOST * max(least, states)):
        variant, tried = cluster.resized(devices, cluster.memory_bytes, cluster.flops), devices
        try:
            plan = plan_cluster(variant, sizes, ratios, progress, limit_s)
        except ScheduleError as error:
            refusal = error
            continue
        if plan.best.fits and (plan.best.step_s or 0.0) <= limit_s:
            return variant, plan
        shortest_s = min(shortest_s, *(min(row.step_s or math.inf, row.least_s) for row in plan.ranked))
    if refusal is not None and math.isinf(shortest_s):
        raise refusal
    longest = (
        f"at least {shortest_s / limit_s * days:,.1f} days" if shortest_s < math.inf else "too little memory"
    )
    raise ScheduleError(
        f"--days: too few for {tokens:g} tokens with up to {tried} devices: {longest} (got {days:g}). Use more days, "
        f"fewer tokens, a larger --global-batch-size, or faster devices with more memory."
    )


def _rentable(least: float, most: float) -> Iterator[int]:
    """Yield the numbers of devices from ``least`` to ``most``, and one that is not below ``most``."""
    first = -(-math.ceil(least) // RANKS_PER_HOST) * RANKS_PER_HOST
    last = max(first, -(-math.ceil(most) // RANKS_PER_HOST) * RANKS_PER_HOST)
    yield from (devices for devices in (1, 2, 4) if devices >= least)
    yield from range(max(first, RANKS_PER_HOST), last + 1, RANKS_PER_HOST)
