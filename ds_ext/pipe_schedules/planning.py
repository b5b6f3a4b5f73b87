"""The best order for given costs, from a few candidates, and the bound that no order can beat."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..errors import ScheduleError
from .costs import Costs
from .dispatch import Run, Work, by_due_date, fill_waits
from .ops import BACKWARD, FORWARD
from .placement import Placement
from .registry import Orders
from .simulate import peak_stages
from .slots import slots

# Micro-batches of a pipe should enter this many times the work of one apart; the rest follows from what arrives.
_SPACINGS = (0.5, 1.0, 0.25, 0.75, 1.5, 2.0)
_MOST_OPS = 1_000_000  # that all candidates together may take: some ten seconds


def plan(
    schedule: str,
    placement: Placement,
    micro_batches: int,
    costs: Costs,
    *,
    split: bool,
    max_activations: float,
) -> Orders:
    """The order of every rank with the least time found; among equals the one that keeps the least.

    Args:
        schedule: its name, for errors.
        split: whether backwards are split into input and weight gradient.
        max_activations: most that a device keeps, in D-ths of the model for one micro-batch.

    Raises:
        ScheduleError: when that is less than one micro-batch needs.
    """
    work = Work(placement, micro_batches, costs, split)
    everything = placement.stages * micro_batches
    room = math.floor(min(max_activations * placement.stages / placement.ranks, everything) + 1e-9)
    least = max(devices.count(d) for devices in placement.pipes for d in range(placement.ranks))
    if room < least:
        raise ScheduleError(
            f"{schedule}: max_activations {max_activations:g} has no room for one micro-batch, which needs "
            f"{least * placement.ranks / placement.stages:g} (D-ths of the model). Use at least that."
        )
    floor, best, done = lower_bound(work), None, 0
    for run in _candidates(work, room):
        peak = max(map(peak_stages, run.orders))
        if peak <= room and (best is None or (run.makespan, peak) < best[:2]):
            best = (run.makespan, peak, run)
        done += sum(map(len, run.orders))
        if best is not None and (best[0] <= floor * (1 + 1e-9) or done >= _MOST_OPS):
            break
    assert best is not None, "list scheduling keeps to the room it is given"
    return best[2].orders


def _candidates(work: Work, room: int) -> Iterator[Run]:
    placement, n = work.placement, work.micro_batches
    if n % placement.ranks == 0:
        yield fill_waits(work, [[op for _, op in slots(r, placement, n, work.gradient)]
                                for r in range(placement.ranks)], room)  # fmt: skip
    one = sum(work.costs.of(kind) for kind in (FORWARD, BACKWARD))
    first = [work.pipes.index(pipe) for pipe in work.pipes]
    for spacing in _SPACINGS:
        run = by_due_date(work, [(m - first[m]) * spacing * one for m in range(n)], room)
        yield run
        if work.split:
            yield fill_waits(work, run.orders, room)


def lower_bound(work: Work) -> float:
    """Least time of any order on the placement: a device's first arrival, its work, and what must follow it."""
    placement, work_kinds = work.placement, (FORWARD, BACKWARD)
    counts = [work.pipes.count(pipe) for pipe in range(placement.replicas)]
    # The way of one micro-batch, and the weight gradient that comes after it.
    ways = [walk[work.gradient][0] for walk, count in zip(work.walks, counts, strict=True) if count]
    bound = max(ways) + work.times[BACKWARD][0]
    for device in range(placement.ranks):
        mine = [
            (pipe, stage)
            for pipe, devices in enumerate(placement.pipes)
            for stage, at in enumerate(devices)
            if at == device and counts[pipe]
        ]
        if not mine:
            continue
        busy = sum(counts[pipe] * work.times[kind][stage] for pipe, stage in mine for kind in work_kinds)
        start = min(work.walks[pipe][FORWARD][stage] for pipe, stage in mine)
        end = 0.0 if work.split else min(_way_home(work, pipe, stage) for pipe, stage in mine)
        bound = max(bound, start + busy + end)
    return bound


def _way_home(work: Work, pipe: int, stage: int) -> float:
    """From the end of the backward at ``stage`` to the end of the backward at stage 0."""
    walk, times = work.walks[pipe][work.gradient], work.times[work.gradient]
    return walk[0] + times[0] - (walk[stage] + times[stage])
