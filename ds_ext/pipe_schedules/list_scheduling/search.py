"""Search for a short order under given costs, and a lower bound for all orders on a placement.

List scheduling (:mod:`.dispatch`) turns a guess of the entry times of the micro-batches into an order. The search tries
evenly spaced entries first, then random changes of the best guess.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from random import Random

from ...errors import ScheduleError
from ..costs import Costs
from ..definition import Orders
from ..events import Run, Workload
from ..fixed_orders import FixedOrders
from ..ops import BACKWARD, FORWARD
from ..placement import Placement
from ..simulation import peak_stages
from ..tick_rule import ticks
from .dispatch import backwards_first, by_due_date, fill_idle_time

# Between the micro-batches of a pipe, in forward + backward times.
_SPACINGS = (0.5, 1.0, 0.25, 0.75, 1.5, 2.0)
_MAX_OPS = 50_000  # in all runs together, about 0.2 s; the first guess is tried at any size
_ADMISSION_CHANGES = 0.3  # share of random changes that also change the admission limit
_SLOW_MESSAGE = 0.01  # time of a message on slow links, in forwards of 1/D of the model
# Live slices relative to those of Seq1F1B, and more slices in flight than half of them; a search of slices tries all.
_SHARES = (1.0, 1.3, 0.9, 1.15, 0.8, 1.5, 2.0)
_MORE_IN_FLIGHT = (0, 1, 2, -1, 3, -2)
_SLICE_RUNS = 3
_SLACK = 1e-9  # relative; sums of the same times in a different order differ by rounding
_is_brief = ContextVar("is_brief", default=False)


@dataclass(frozen=True)
class _Guess:
    """Entry time of every micro-batch, and the maximum number of stages of admitted micro-batches per device."""

    entries: tuple[float, ...]
    admitted: int


@contextmanager
def brief_search() -> Iterator[None]:
    """End searches after their first guesses. The orders are no shorter, and need hardly more memory."""
    token = _is_brief.set(True)
    try:
        yield
    finally:
        _is_brief.reset(token)


def _max_ops() -> int:
    return 0 if _is_brief.get() else _MAX_OPS


def plan(
    schedule: str,
    placement: Placement,
    micro_batches: int,
    costs: Costs,
    *,
    split: bool,
    max_activations: float,
    slices: int = 1,
) -> Orders:
    """Return the shortest orders found. Ties go to the orders least sensitive to message latency.

    ``schedule`` is a name for errors. ``max_activations`` limits the live activations per device; the unit is what 1/D
    of the model keeps for one micro-batch.
    """
    workload = Workload(placement, micro_batches, costs, split, slices=slices)
    unit = placement.num_devices / placement.stages / slices  # activations of a slice of one stage
    capacity = math.floor(min(max_activations / unit, placement.stages * micro_batches * slices) + 1e-9)
    least = slices * max(
        devices.count(d) for devices in placement.pipes for d in range(placement.num_devices)
    )
    # With slices, a micro-batch of every pipe at a time.
    first = backwards_first(workload, slices, slices) if slices > 1 else None
    least = least if first is None else _cost(first)[1]
    if capacity < least:
        raise ScheduleError(
            f"{schedule}: max_activations is too low for one micro-batch (got {max_activations:g}). "
            f"Use at least {least * unit:g} (units of 1/D of the model)."
        )
    if first is not None:
        return _plan_slices(workload, capacity, first).orders
    limits = [capacity, capacity + least, capacity + 2 * least]
    best, guess = _search(workload, capacity, limits)
    if not costs.free_messages:
        return best.orders
    slow = with_slow_links(workload)
    if split:
        return less_sensitive(workload, best.orders, fill_idle_time(slow, best.orders, capacity), capacity)
    return _search_less_sensitive(workload, slow, best.orders, guess, capacity, limits)


def _plan_slices(workload: Workload, capacity: int, best: Run) -> Run:
    """Return the shortest run found with at most ``capacity`` live slices of stages, preferably with fewer of them.

    ``best`` is a run that fits.
    """
    placement, slices = workload.placement, workload.slices
    filled = (
        (placement.num_devices - 1 + slices) * placement.stages / placement.num_devices
    )  # those of Seq1F1B
    target = lower_bound(workload) * (1 + _SLACK)
    num_ops = 0
    for in_flight, limit in _slice_guesses(workload, filled, capacity):
        if best.makespan <= target or num_ops >= _max_ops() * _SLICE_RUNS:
            break
        run = backwards_first(workload, in_flight, limit)
        num_ops += workload.num_ops
        if _cost(run)[1] <= capacity and _cost(run) < _cost(best):
            best = run
    return best


def _slice_guesses(workload: Workload, filled: float, capacity: int) -> Iterator[tuple[int, int]]:
    """Yield (slices in flight per pipe, live slices of stages per device), the most promising ones first."""
    seen: set[tuple[int, int]] = set()
    for more in _MORE_IN_FLIGHT:
        for share in _SHARES:
            limit = min(capacity, round(filled * share))
            in_flight = max(workload.slices, round(limit / 2 / workload.placement.replicas) + more)
            if (in_flight, limit) not in seen:
                seen.add((in_flight, limit))
                yield in_flight, limit


class _Guesses:
    """Guesses of a search: ``best`` if it is known, evenly spaced entries, then random changes of the best guess.

    The search sets the attribute ``best`` to the best guess so far.
    """

    def __init__(self, workload: Workload, limits: list[int], best: _Guess | None = None) -> None:
        even_guesses = list(_even_guesses(workload, limits))
        self._workload = workload
        self._limits = limits
        self._random = Random(0)
        self._planned = even_guesses if best is None else [best, *even_guesses]
        self.best = self._planned[0]
        self.count = 0

    def take(self) -> _Guess:
        self.count += 1
        if self.count <= len(self._planned):
            return self._planned[self.count - 1]
        return _change(self.best, self._workload, self._limits, self._random)


def _search(workload: Workload, capacity: int, limits: list[int]) -> tuple[Run, _Guess]:
    target = lower_bound(workload) * (1 + _SLACK)
    guesses = _Guesses(workload, limits)
    best = _tick_rule_run(workload, capacity)
    best_guess_time = math.inf
    while best is None or best.makespan > target:
        if best is not None and guesses.count and (guesses.count + 1) * workload.num_ops >= _max_ops():
            break
        guess = guesses.take()
        run = by_due_date(workload, guess.entries, capacity, guess.admitted)
        if run is None:
            continue  # deadlock
        if run.makespan <= best_guess_time:
            guesses.best = guess
            best_guess_time = run.makespan
        if best is None or _cost(run) < _cost(best):
            best = run
    return best, guesses.best


def _search_less_sensitive(
    workload: Workload, slow: Workload, orders: Orders, best_guess: _Guess, capacity: int, limits: list[int]
) -> Orders:
    """Return the orders that are shortest on slow links, among those as short as ``orders`` on free links."""
    guesses = _Guesses(workload, limits, best_guess)
    time_limit = _time(workload, orders) * (1 + _SLACK)
    slow_limit = _time(slow, orders)
    while guesses.count * workload.num_ops < _max_ops() // 2:
        guess = guesses.take()
        for is_slow in (False, True):
            run = by_due_date(slow if is_slow else workload, guess.entries, capacity, guess.admitted)
            if run is None or _cost(run)[1] > capacity:
                continue
            if run.makespan > (slow_limit if is_slow else time_limit):
                continue
            slow_time = _time(slow, run.orders)
            if slow_time < slow_limit * (1 - _SLACK) and _time(workload, run.orders) <= time_limit:
                orders = run.orders
                guesses.best = guess
                slow_limit = slow_time
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
    run = FixedOrders(workload.dependencies, orders).run(workload, {}, None)
    assert run is not None, "orders of a run do not deadlock"
    return run.makespan


def _cost(run: Run) -> tuple[float, int]:
    """Return the sort key of a run: its makespan, then its largest number of live activations, in stages."""
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


def _micro_batch_time(workload: Workload) -> float:
    """Return the time of a forward and a backward of 1/D of the model."""
    return sum(workload.costs.time(kind) for kind in (FORWARD, BACKWARD))


def _even_guesses(workload: Workload, limits: list[int]) -> Iterator[_Guess]:
    """Yield evenly spaced entries, first those that cannot deadlock."""
    unit = _micro_batch_time(workload)
    positions = [m - workload.pipes.index(pipe) for m, pipe in enumerate(workload.pipes)]  # in the pipe
    for admitted in limits:
        for spacing in _SPACINGS:
            yield _Guess(tuple(position * spacing * unit for position in positions), admitted)


def _change(guess: _Guess, workload: Workload, limits: list[int], random: Random) -> _Guess:
    """Return a guess with one to three random entry times changed, and sometimes the admission limit."""
    largest_change = _micro_batch_time(workload)
    entries = list(guess.entries)
    for _ in range(random.randint(1, 3)):
        entries[random.randrange(len(entries))] += random.uniform(-largest_change, largest_change)
    admitted = random.choice(limits) if random.random() < _ADMISSION_CHANGES else guess.admitted
    return replace(guess, entries=tuple(entries), admitted=admitted)


def lower_bound(workload: Workload) -> float:
    """Return a lower bound on the makespan of all orders on the placement.

    Each device gives a bound: the sum of the earliest arrival of a micro-batch, the work of the device, and the time
    back to stage 0. The time of a single micro-batch is another bound. The largest value counts.
    """
    placement = workload.placement
    counts = [workload.pipes.count(pipe) for pipe in range(placement.replicas)]
    last_starts = [
        starts[workload.gradient_kind][0]
        for starts, count in zip(workload.earliest_starts, counts, strict=True)
        if count
    ]
    single = (
        max(last_starts) + workload.times[BACKWARD][0] * workload.shortest_slice
    )  # up to its last backward for the weights
    return max(single, *(_device_bound(workload, device, counts) for device in range(placement.num_devices)))


def _device_bound(workload: Workload, device: int, counts: list[int]) -> float:
    """Return the bound of one device, 0 if it is idle. ``counts`` has the micro-batches of every pipe."""
    chunks = [(pipe, stage) for stage, pipe in workload.placement.chunks[device] if counts[pipe]]
    if not chunks:
        return 0.0
    times = workload.times
    busy = workload.slices * sum(
        counts[pipe] * times[kind][stage] for pipe, stage in chunks for kind in (FORWARD, BACKWARD)
    )
    stages = workload.placement.stages  # parts of the head start later
    start = min(workload.earliest_starts[pipe][FORWARD][stage] for pipe, stage in chunks if stage < stages)
    if workload.split or workload.placement.rows:
        return start + busy
    return start + busy + min(_time_to_stage_0(workload, pipe, stage) for pipe, stage in chunks)


def _time_to_stage_0(workload: Workload, pipe: int, stage: int) -> float:
    """Return the time from the end of the backward at ``stage`` to the end of the backward at stage 0."""
    starts = workload.earliest_starts[pipe][workload.gradient_kind]
    times = workload.times[workload.gradient_kind]

    def end(stage: int) -> float:
        return starts[stage] + times[stage] * workload.shortest_slice

    return end(0) - end(stage)
