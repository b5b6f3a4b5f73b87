"""Runs of a number of tokens: MFU, days, GPU-hours and cost, and the fewest devices that meet a deadline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import ScheduleError
from ..pipe_schedules.costs import Costs
from ..pipe_schedules.placement import linear
from .parallel_sizes import MOST_TENSOR_PARALLEL, RANKS_PER_HOST, Cluster, ClusterPlan, plan_cluster
from .text import format_bytes
from .training_sizes import TrainingSizes

_DAY_S = 86400
STEP_TIME_ERROR = 0.16  # by which measured steps were longer at most (docs/clusters.md)
_ADAM_BYTES = 16  # per parameter in half precision, with fp32 states
_MOST = 4  # times the devices that the work and the states need at least


def figures_of_run(
    plan: ClusterPlan,
    cluster: Cluster,
    sizes: TrainingSizes,
    peak_flops: float | None,
    tokens: float | None,
    price: float | None,
) -> dict[str, Any]:
    """Return the devices, rates, days, GPU-hours and cost of a run with the best sizes of a plan, which must fit.

    ``model_flops`` are those per second and device, without recomputation. ``mfu`` is their share of the peak rate:
    model FLOPs utilization (arXiv 2204.02311, appendix B). Figures that need a missing argument are None.
    """
    samples_per_s = cluster.batch / (plan.best.step_s or math.inf)
    flops = samples_per_s * sizes.flops_per_sample / cluster.devices
    days = tokens and tokens / (samples_per_s * sizes.seq_length) / _DAY_S
    hours = days and 24 * days * cluster.devices
    return {
        "devices": cluster.devices,
        "tokens_per_s": samples_per_s * sizes.seq_length,
        "model_flops": flops,
        "mfu": peak_flops and flops / peak_flops,
        "days": days,
        "gpu_hours": hours,
        "cost": price and hours and hours * price,
    }


def tokens_within(plan: ClusterPlan, cluster: Cluster, sizes: TrainingSizes, days: float) -> float:
    """Return the tokens that the best sizes of a plan train in ``days``, with steps by STEP_TIME_ERROR longer."""
    rate = cluster.batch * sizes.seq_length / (plan.best.step_s or math.inf)
    tokens = rate * days * _DAY_S / (1 + STEP_TIME_ERROR)
    unit = 10.0 ** (math.floor(math.log10(tokens)) - 2)  # of the third digit, so that they are done in time
    return float(f"{math.floor(tokens / unit) * unit:g}")


def fewer_devices(devices: int, batch: int, share: float) -> tuple[int, int] | None:
    """Return fewer devices that may do, on hosts of 8, and a batch that they divide; None if there are none.

    ``share`` is that of the deadline that ``devices`` take at most, with a batch that they may not divide well.
    """
    fewer = math.ceil(devices * share / RANKS_PER_HOST) * RANKS_PER_HOST
    return (fewer, fewer * max(1, round(batch / fewer))) if fewer < devices else None


def plan_for_deadline(
    cluster: Cluster,
    sizes: TrainingSizes,
    ratios: Costs,
    tokens: float,
    days: float,
    progress: Callable[[int, int, int], None] = lambda devices, done, total: None,
) -> tuple[Cluster, ClusterPlan, dict[int, float]]:
    """Return the fewest devices that train ``tokens`` in ``days`` with steps by STEP_TIME_ERROR longer, and their plan.

    ``cluster`` may have any number of devices, because those of :func:`_rentable` are tried. Sizes that miss the
    deadline are not evaluated. Last come the days that fewer devices take at least, infinite without memory for them.
    """
    limit_s = cluster.batch * sizes.seq_length * days * _DAY_S / tokens / (1 + STEP_TIME_ERROR)
    passes = 1 + (ratios.backward_input + ratios.backward_weight) / (ratios.forward or 1.0)
    work_s = cluster.batch * sizes.forward_flops * passes * (1 - ratios.jitter) / cluster.flops
    least = work_s / limit_s
    states = sizes.device_parameters(linear(1), 0) * _ADAM_BYTES / cluster.memory_bytes
    # Devices that can be busy with one slice of a sample each. More only overlap the passes of its layers.
    slices = max(cluster.slice_numbers(sizes.seq_length, 2))
    busy = (cluster.tensor_parallel or MOST_TENSOR_PARALLEL) * cluster.batch * slices
    if least > busy * passes and not cluster.head_parts:
        raise _missed(tokens, days, busy, least / busy / passes)
    late: dict[int, float] = {}
    refusal, tried = None, 0
    for tried in _rentable(least, _MOST * max(least, states)):
        variant = cluster.resized(tried, cluster.memory_bytes, cluster.flops)
        try:
            plan = plan_cluster(variant, sizes, ratios, progress, limit_s)
        except ScheduleError as error:
            refusal = error
            continue
        if plan.best.fits and (plan.best.step_s or 0.0) <= limit_s:
            return variant, plan, late
        shortest_s = min((row.step_s or math.inf) if row.fits else row.least_s for row in plan.ranked)
        late[tried] = days * shortest_s / limit_s
    if refusal is not None and not late:
        raise refusal
    if math.isinf(least_days := min(late.values())):
        raise ScheduleError(
            f"--memory: too small for the model on up to {tried:,} devices (got {format_bytes(cluster.memory_bytes)} "
            "without the headroom). Use devices with more memory."
        )
    raise _missed(tokens, days, tried, least_days / days)


def _missed(tokens: float, days: float, devices: int, excess: float) -> ScheduleError:
    """Return the error for a deadline when up to ``devices`` take at least ``excess`` times as long."""
    return ScheduleError(
        f"--days: must be at least {excess * days:.4g} for {tokens:g} tokens on up to {devices:,} devices, with steps "
        f"{STEP_TIME_ERROR:.0%} longer than planned (got {days:g}). Use more days, fewer tokens, a larger "
        "--global-batch-size, or faster devices."
    )


def _rentable(least: float, most: float) -> Iterator[int]:
    """Yield the numbers of devices to try: 1, 2, 4 or hosts of 8, the first from ``least``, the last from ``most`` on.

    Up to 16 hosts every number of them; then 18, 20, ..., 32, 36, ..., which most batches and layers can divide.
    """
    devices = 1
    while devices < max(least, most):
        if devices >= least:
            yield devices
        step = max(1, 2 ** (devices.bit_length() - 7)) * RANKS_PER_HOST
        devices = 2 * devices if devices < RANKS_PER_HOST else devices + step
    yield devices
