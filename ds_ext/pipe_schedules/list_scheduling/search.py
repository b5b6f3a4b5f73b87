"""Search for a short order under given costs, and a lower bound for all orders on a placement.

List scheduling (:mod:`.dispatch`) turns a guess of the entry times of the micro-batches into an order. The search tries
evenly spaced entries first, then random changes of the best guess.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from ...errors import ScheduleError
from ..costs import Costs
from ..definition import Orders
from ..events import Run, Workload
from ..ops import BACKWARD, FORWARD
from ..placement import Placement
from ..simulation import peak_stages, run_orders
from ..tick_rule import ticks
from .dispatch import by_due_date, fill_idle_time

_SPACINGS = (
    0.5,
    1.0,
    0.25,
    0.75,
    1.5,
    2.0,
)  # between the micro-batches of a pipe, in forward + backward times
_MAX_OPS = 50_000  # in all runs together, about 0.2 s; the first guess is tried at any size
_ADMISSION_CHANGES = 0.3  # share of random changes that also change the admission limit
_SLOW_MESSAGE = 0.01  # time of a message on slow links, in forwards of 1/D of the model
_SLACK = 1e-9  # relative; sums of the same times in a different order differ by rounding


@dataclass(frozen=True)
class _Guess:
    """Entry time of every micro-batch, and the maximum number of stages of admitted micro-batches per device."""

    entries: tuple[float, ...]
    admitted: int


def plan(
    schedule: str,
    placement: Placement,
    micro_batches: int,
    costs: Costs,
    *,
    split: bool,
    max_activations: float,
) -> Orders:
    """Return the shortest orders found. Ties go to the orders least sensitive to message latency.

    Args:
        schedule: name of the schedule, for errors.
        split: True to split backwards.
        max_activations: limit on live activations per device; the unit is what 1/D of the model keeps for one
            micro-batch.

    Raises:
        ScheduleError: the limit is too low for one micro-batch.
    """
    workload = Workload(placement, micro_batches, costs, split)
    unit = placement.num_devices / placement.stages  # activations of one stage
    capacity = math.floor(min(max_activations / unit, placement.stages * micro_batches) + 1e-9)
    least = max(devices.count(d) for devices in placement.pipes for d in range(placement.num_devices))
    if capacity < least:
        raise ScheduleError(
            f"{schedule}: max_activations is too low for one micro-batch (got {max_activations:g}). "
            f"Use at least {least * unit:g} (units of 1/D of the model)."
        )
    limits = [capacity, capacity + least, capacity + 2 * least]
    best, guess = _search(workload, capacity, limits)
    if not costs.free_messages:
        return best.orders
    slow = with_slow_links(workload)
    if split:
        return less_sensitive(workload, best.orders, fill_idle_time(slow, best.orders, capacity), capacity)
    return _search_less_sensitive(workload, slow, best.orders, guess, capacity, limits)


def _search(workload: Workload, capacity: int, limits: list[int]) -> tuple[Run, _Guess]:
    """Return the shortest run, and the best guess."""
    bound, random, guesses = lower_bound(workload), Random(0), list(_even_guesses(workload, limits))
    best, best_guess, best_time, tried = _tick_rule_run(workload, capacity), guesses[0], math.inf, 0
    while best is None or best.makespan > bound * (1 + _SLACK):
        if best is not None and tried and (tried + 1) * workload.num_ops >= _MAX_OPS:
            break
        guess = guesses[tried] if tried < len(guesses) else _change(best_guess, workload, limits, random)
        run, tried = by_due_date(workload, guess.entries, capacity, guess.admitted), tried + 1
        if run is None:
            continue  # deadlock
        if run.makespan <= best_time:
            best_guess, best_time = guess, run.makespan
        if best is None or _cost(run) < _cost(best):
            best = run
    return best, best_guess


def _search_less_sensitive(
    workload: Workload, slow: Workload, orders: Orders, best_guess: _Guess, capacity: int, limits: list[int]
) -> Orders:
    """Return the orders that are shortest on slow links, among those as short as ``orders`` on free links."""
    guesses, random, tried = [best_guess, *_even_guesses(workload, limits)], Random(0), 0
    limit, slow_limit = _time(workload, orders) * (1 + _SLACK), _time(slow, orders)
    while tried * workload.num_ops < _MAX_OPS // 2:
        guess = guesses[tried] if tried < len(guesses) else _change(best_guess, workload, limits, random)
        tried += 1
        for each in (workload, slow):
            run = by_due_date(each, guess.entries, capacity, guess.admitted)
            if run is None or _cost(run)[1] > capacity:
                continue
            if run.makespan > (limit if each is workload else slow_limit):
                continue
            slow_time = _time(slow, run.orders)
            if slow_time < slow_limit * (1 - _SLACK) and _time(workload, run.orders) <= limit:
                orders, best_guess, slow_limit = run.orders, guess, slow_time
    return orders


def with_slow_links(workload: Workload) -> Workload:
    """Return the workload with a small message time instead of free messages.

    On free links many orders have the same makespan. In most of them each result is needed as soon as it is computed,
    so real messages would delay the step.
    """
    costs = workload.costs
    return replace(workload, costs=replace(costs, comm=_SLOW_MESSAGE * costs.forward))


def less_sensitive(workload: Workload, orders: Orders, slow_run: Run | None, capacity: int) -> Orders:
    """Return the orders of ``slow_run`` if they fit the capacity and are as short as ``orders`` on free links."""
    if slow_run is None or _cost(slow_run)[1] > capacity:
        return orders
    as_short = _time(workload, slow_run.orders) <= _time(workload, orders) * (1 + _SLACK)
    return slow_run.orders if as_short else orders


def _time(workload: Workload, orders: Orders) -> float:
    return run_orders(workload, orders).makespan


def _cost(run: Run) -> tuple[float, int]:
    return run.makespan, max(map(peak_stages, run.orders))


def _tick_rule_run(workload: Workload, capacity: int) -> Run | None:
    """Run the order of :mod:`..tick_rule`, which is optimal for equal costs; None if it exceeds the capacity."""
    placement, n = workload.placement, workload.micro_batches
    orders = [
        [op for _, op in ticks(device, placement, n, workload.gradient_kind)]
        for device in range(placement.num_devices)
    ]
    run = fill_idle_time(workload, orders, capacity)
    return run if run is not None and _cost(run)[1] <= capacity else None


def _one_micro_batch(workload: Workload) -> float:
    """Return the time of a forward and a backward of 1/D of the model."""
    return sum(workload.costs.time(kind) for kind in (FORWARD, BACKWARD))


def _even_guesses(workload: Workload, limits: list[int]) -> Iterator[_Guess]:
    """Yield evenly spaced entries, first those that cannot deadlock."""
    one = _one_micro_batch(workload)
    first = [workload.pipes.index(pipe) for pipe in workload.pipes]
    for admitted in limits:
        for spacing in _SPACINGS:
            entries = tuple((m - first[m]) * spacing * one for m in range(workload.micro_batches))
            yield _Guess(entries, admitted)


def _change(guess: _Guess, workload: Workload, limits: list[int], random: Random) -> _Guess:
    """Return a guess with one to three random entry times changed, and sometimes the admission limit."""
    one = _one_micro_batch(workload)
    entries = list(guess.entries)
    for _ in range(random.randint(1, 3)):
        entries[random.randrange(len(entries))] += random.uniform(-one, one)
    admitted = random.choice(limits) if random.random() < _ADMISSION_CHANGES else guess.admitted
    return replace(guess, entries=tuple(entries), admitted=admitted)


def lower_bound(workload: Workload) -> float:
    """Return a lower bound on the makespan of all orders on the placement.

    Each device gives a bound: the sum of the earliest arrival of a micro-batch, the work of the device, and the time
    back to stage 0. The time of a single micro-batch is another bound. The largest value counts.
    """
    placement, kinds = workload.placement, (FORWARD, BACKWARD)
    counts = [workload.pipes.count(pipe) for pipe in range(placement.replicas)]
    # One micro-batch, up to its last backward for the weights.
    last_starts = [
        starts[workload.gradient_kind][0]
        for starts, count in zip(workload.earliest_starts, counts, strict=True)
        if count
    ]
    bound = max(last_starts) + workload.times[BACKWARD][0]
    for device in range(placement.num_devices):
        chunks = [
            (pipe, stage)
            for pipe, devices in enumerate(placement.pipes)
            for stage, at in enumerate(devices)
            if at == device and counts[pipe]
        ]
        if not chunks:
            continue
        busy = sum(counts[pipe] * workload.times[kind][stage] for pipe, stage in chunks for kind in kinds)
        start = min(workload.earliest_starts[pipe][FORWARD][stage] for pipe, stage in chunks)
        end = (
            0.0 if workload.split else min(_time_to_stage_0(workload, pipe, stage) for pipe, stage in chunks)
        )
        bound = max(bound, start + busy + end)
    return bound


def _time_to_stage_0(workload: Workload, pipe: int, stage: int) -> float:
    """Return the time from the end of the backward at ``stage`` to the end of the backward at stage 0."""
    starts = workload.earliest_starts[pipe][workload.gradient_kind]
    times = workload.times[workload.gradient_kind]
    return starts[0] + times[0] - (starts[stage] + times[stage])
