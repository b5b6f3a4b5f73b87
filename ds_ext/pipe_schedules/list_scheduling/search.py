"""The best order for given costs that a short search finds, and the bound that no order can beat.

List scheduling by due dates (:mod:`.dispatch`) makes an order of every guess at when the micro-batches should enter;
the search is over those guesses: some evenly spaced ones, then random changes of the best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from ...errors import ScheduleError
from ..costs import Costs
from ..events import Run, Work
from ..ops import BACKWARD, FORWARD
from ..placement import Placement
from ..registry import Orders
from ..simulate import in_order, peak_stages
from ..tick_rule import slots
from .dispatch import by_due_date, fill_waits

# Micro-batches of a pipe should enter this many times the work of one apart; the rest follows from what arrives.
_SPACINGS = (0.5, 1.0, 0.25, 0.75, 1.5, 2.0)
_MOST_OPS = 50_000  # that all runs together may take, about 0.2 s; one guess is tried at any size
_OFTEN = 0.3  # how often a change is also one of how much is admitted
_LITTLE = 0.01  # of a forward of one D-th of the model
_SLACK = 1e-9  # sums of the same times in another order differ by rounding


@dataclass(frozen=True)
class _Guess:
    """When each micro-batch enters, and how many stages of admitted ones a device may hold."""

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
    """The order of every rank with the least time found; among equals one that bears it when messages take a little.

    Args:
        schedule: its name, for errors.
        split: whether backwards are split into input and weight gradient.
        max_activations: most that a device keeps, in D-ths of the model for one micro-batch.

    Raises:
        ScheduleError: when that is less than one micro-batch needs.
    """
    work = Work(placement, micro_batches, costs, split)
    everything = placement.stages * micro_batches
    room = math.floor(min(max_activations * placement.stages / placement.num_devices, everything) + 1e-9)
    least = max(devices.count(d) for devices in placement.pipes for d in range(placement.num_devices))
    if room < least:
        raise ScheduleError(
            f"{schedule}: max_activations {max_activations:g} has no room for one micro-batch, which needs "
            f"{least * placement.num_devices / placement.stages:g} (D-ths of the model). Use at least that."
        )
    limits = [room, room + least, room + 2 * least]
    (best, leader), slow = _search(work, room, limits), slow_links(work)
    if slow is None:
        return best.orders
    if split:
        return unhurried(work, best.orders, fill_waits(slow, best.orders, room), room)
    return _search_unhurried(work, slow, best.orders, leader, room, limits)


def _search(work: Work, room: int, limits: list[int]) -> tuple[Run, _Guess]:
    """The best order found, and the best of the guesses."""
    floor, random, guesses = lower_bound(work), Random(0), list(_even_guesses(work, limits))
    best, leader, its_time, tried = _slot_rule(work, room), guesses[0], math.inf, 0
    while best is None or best.makespan > floor * (1 + _SLACK):
        if best is not None and tried and (tried + 1) * work.ops >= _MOST_OPS:
            break
        guess = guesses[tried] if tried < len(guesses) else _change(leader, work, limits, random)
        run, tried = by_due_date(work, guess.entries, room, guess.admitted), tried + 1
        if run is None:
            continue  # more was admitted than there was room for
        if run.makespan <= its_time:
            leader, its_time = guess, run.makespan
        if best is None or _cost(run) < _cost(best):
            best = run
    return best, leader


def _search_unhurried(
    work: Work, slow: Work, orders: Orders, leader: _Guess, room: int, limits: list[int]
) -> Orders:
    """Of the orders that take no longer than ``orders``, the one that takes least when messages take a little."""
    guesses, random, tried = [leader, *_even_guesses(work, limits)], Random(0), 0
    most, least = _time(work, orders) * (1 + _SLACK), _time(slow, orders)
    while tried * work.ops < _MOST_OPS // 2:
        guess = guesses[tried] if tried < len(guesses) else _change(leader, work, limits, random)
        tried += 1
        for times in (work, slow):
            run = by_due_date(times, guess.entries, room, guess.admitted)
            if run is None or _cost(run)[1] > room or run.makespan > (most if times is work else least):
                continue
            late = _time(slow, run.orders)
            if late < least * (1 - _SLACK) and _time(work, run.orders) <= most:
                orders, leader, least = run.orders, guess, late
    return orders


def slow_links(work: Work) -> Work | None:
    """The same with messages that take a little time, as they always do; None where links are not free.

    At free links many orders take the same time, and in most of them every result is needed the moment it is there:
    then each message delays the step.
    """
    costs = work.costs
    if costs.comm or any(costs.links.values()):
        return None
    return replace(work, costs=replace(costs, comm=_LITTLE * costs.forward))


def unhurried(work: Work, orders: Orders, other: Run | None, room: int) -> Orders:
    """The orders found with slow links, if with free ones they take no longer than ``orders`` and have the room."""
    if other is None or _cost(other)[1] > room:
        return orders
    as_given, slower = (_time(work, each) for each in (orders, other.orders))
    return other.orders if slower <= as_given * (1 + _SLACK) else orders


def _time(work: Work, orders: Orders) -> float:
    return in_order(work, orders).makespan


def _cost(run: Run) -> tuple[float, int]:
    return run.makespan, max(map(peak_stages, run.orders))


def _slot_rule(work: Work, room: int) -> Run | None:
    """The rule of :mod:`..tick_rule`, which at equal costs is the best there is, with these costs."""
    placement, n = work.placement, work.micro_batches
    orders = [
        [op for _, op in slots(rank, placement, n, work.gradient)] for rank in range(placement.num_devices)
    ]
    run = fill_waits(work, orders, room)
    return run if run is not None and _cost(run)[1] <= room else None


def _even_guesses(work: Work, limits: list[int]) -> Iterator[_Guess]:
    """Micro-batches at equal distances; first what cannot make devices wait for each other."""
    one = sum(work.costs.of(kind) for kind in (FORWARD, BACKWARD))
    first = [work.pipes.index(pipe) for pipe in work.pipes]
    for admitted in limits:
        for spacing in _SPACINGS:
            entries = tuple((m - first[m]) * spacing * one for m in range(work.micro_batches))
            yield _Guess(entries, admitted)


def _change(guess: _Guess, work: Work, limits: list[int], random: Random) -> _Guess:
    """One to three micro-batches enter earlier or later, and sometimes more or fewer at once."""
    one = sum(work.costs.of(kind) for kind in (FORWARD, BACKWARD))
    entries = list(guess.entries)
    for _ in range(random.randint(1, 3)):
        entries[random.randrange(len(entries))] += random.uniform(-one, one)
    admitted = random.choice(limits) if random.random() < _OFTEN else guess.admitted
    return replace(guess, entries=tuple(entries), admitted=admitted)


def lower_bound(work: Work) -> float:
    """Least time of any order on the placement: a device's first arrival, its work, and what must follow it."""
    placement, work_kinds = work.placement, (FORWARD, BACKWARD)
    counts = [work.pipes.count(pipe) for pipe in range(placement.replicas)]
    # The way of one micro-batch, and the weight gradient that comes after it.
    ways = [walk[work.gradient][0] for walk, count in zip(work.walks, counts, strict=True) if count]
    bound = max(ways) + work.times[BACKWARD][0]
    for device in range(placement.num_devices):
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
