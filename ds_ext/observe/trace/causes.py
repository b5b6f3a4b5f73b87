"""Causes of a measured bubble, and slow ranks.

The ops of some steps are replayed in their measured order, with more of what was measured each time: mean times, the
usual times of every stage on every rank, the time of each op, and messages. The bubble grows from one replay to the
next, and each difference has one cause. What the last replay lacks is work between the ops, or waiting for a core.

A rank is slow if it takes longer than others for the same ops: replicas, mirrors, and stages with as many parameters.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ...pipe_schedules import Op, Timetable

_SLOW = 1.1  # times the others' time for the same ops
_SLOW_STEPS = 0.75  # share of the steps in which a slow rank is slow
_UNEVEN = 1.05  # times the mean of all stages
_WHOLE_POINTS_FROM = 0.1  # bubble; a smaller one is shown with one decimal

Row = tuple[int, int]  # (pipeline group, device)


@dataclass(frozen=True)
class RowSteps:
    """Ops of one device of a pipeline group.

    Attributes:
        rank: its first rank with a trace.
        steps: step -> (op, microseconds) in order.
    """

    rank: int
    steps: dict[int, list[tuple[Op, float]]]


@dataclass(frozen=True)
class SlowRank:
    """Rank that takes ``ratio`` times as long as the ``others`` for the same ops, in ``steps`` of the steps."""

    rank: int
    ratio: float
    others: list[int]
    steps: int


@dataclass(frozen=True)
class Causes:
    """Causes of the bubble, as shares of the makespan that add up to ``bubble``.

    Attributes:
        schedule: with equal times and free messages.
        uneven: with the usual time of every stage on every rank.
        varying: with the measured time of each op.
        messages: with the usual time of every link.
        between: the rest.
        slowest_stage: stage with the longest time, and its time relative to the mean; None if all are about equal.
        slow_ranks: slow ranks, the slowest first.
        ranks_per_core: (ranks, cores) of a host with fewer cores than ranks; None: no such host, or unknown.
        steps: number of replayed steps.
    """

    bubble: float
    schedule: float
    uneven: float
    varying: float
    messages: float
    between: float
    slowest_stage: tuple[int, float] | None
    slow_ranks: list[SlowRank] = field(default_factory=list)
    ranks_per_core: tuple[int, float] | None = None
    steps: int = 0

    def sentence(self) -> str:
        """Return a sentence with the causes in points, which add up to the bubble."""
        uneven = "uneven ops"
        if self.slow_ranks and self.slow_ranks[0].ratio >= (self.slowest_stage or (0, 0.0))[1]:
            slow = self.slow_ranks[0]
            uneven += f" (rank {slow.rank} takes {slow.ratio:.2g} times as long as its peers)"
        elif self.slowest_stage is not None:
            uneven += " (stage {} is {:.2g} times the mean)".format(*self.slowest_stage)
        parts = [(self.schedule, "the schedule's"), (self.uneven, uneven), (self.messages, "messages")]
        if self.ranks_per_core is not None:
            ranks, cores = self.ranks_per_core
            parts.append(
                (self.varying + self.between, f"ranks that share cores ({ranks} ranks, {cores:g} cores)")
            )
        else:
            parts += [(self.varying, "ops of varying length"), (self.between, "work between ops")]
        decimals = 0 if self.bubble >= _WHOLE_POINTS_FROM else 1
        points = round_to_sum([100 * share for share, _ in parts], decimals)
        texts = [
            f"{value:.{decimals}f} {'are ' if name.startswith('the') else ''}{name}"
            for value, (_, name) in zip(points, parts, strict=True)
            if value > 0 or name.startswith("the")
        ]
        return f"Of {100 * self.bubble:.{decimals}f} points of bubble, {', '.join(texts)}."

    def slow_rank_lines(self) -> list[str]:
        """Return a sentence for every slow rank."""
        return [
            f"Rank {slow.rank} is slow: {slow.ratio:.2f} times the time of rank{'s' * (len(slow.others) > 1)} "
            f"{', '.join(map(str, slow.others))} for the same ops, in {slow.steps} of {self.steps} steps."
            for slow in self.slow_ranks
        ]


def round_to_sum(values: Sequence[float], decimals: int) -> list[float]:
    """Return the values rounded so that they add up to their rounded sum (largest remainders)."""
    scale = 10**decimals
    floors = [int(value * scale) for value in values]
    missing = round(sum(values) * scale) - sum(floors)
    by_remainder = sorted(range(len(values)), key=lambda i: floors[i] - values[i] * scale)
    for i in by_remainder[:missing]:
        floors[i] += 1
    return [value / scale for value in floors]


def find_causes(
    timetable: Timetable,
    rows: Mapping[Row, RowSteps],
    links_us: Mapping[tuple[int, int], float],
    bubble: float,
    *,
    stage_parameters: Mapping[int, int],
    ranks_per_core: tuple[int, float] | None,
) -> Causes | None:
    """Return the causes of a bubble; None without steps, or if the steps do not fit the timetable.

    Args:
        rows: ops of the same steps on all devices with a trace.
        links_us: (sender, receiver) -> usual time of a message between these ranks.
        bubble: measured bubble.
        stage_parameters: number of parameters of the stages, as far as it is known.
        ranks_per_core: see :class:`Causes`.
    """
    common = sorted(set.intersection(*(set(row.steps) for row in rows.values()))) if rows else []
    steps = [step for step in common if all(_fits(timetable, row.steps[step]) for row in rows.values())]
    usual = _usual_times(rows, steps)
    kinds: dict[str, list[float]] = defaultdict(list)
    for row in rows.values():
        for op, _ in (pair for step in steps for pair in row.steps[step]):
            kinds[op.kind].append(usual[op.kind, op.stage, row.rank])
    means = {kind: statistics.fmean(times) for kind, times in kinds.items()}
    replays: list[tuple[float, ...]] = []
    for step in steps:
        measured = {(row.rank, op): us for row in rows.values() for op, us in row.steps[step]}
        times: list[Callable[[int, Op], float]] = [
            lambda rank, op: means[op.kind],
            lambda rank, op: usual[op.kind, op.stage, rank],
            lambda rank, op, measured=measured: measured[rank, op],
        ]
        bubbles = [_replay(timetable, rows, step, time, {}) for time in times]
        bubbles.append(_replay(timetable, rows, step, times[-1], links_us))
        if None not in bubbles:
            replays.append(tuple(value for value in bubbles if value is not None))
    if not replays:
        return None
    levels = [0.0]
    for values in zip(*replays, strict=True):
        levels.append(min(max(levels[-1], statistics.fmean(values)), bubble))
    schedule, uneven, varying, messages = (after - before for before, after in pairwise(levels))
    return Causes(
        bubble,
        schedule,
        uneven,
        varying,
        messages,
        bubble - levels[-1],
        _slowest_stage(usual),
        _slow_ranks(rows, steps, stage_parameters),
        ranks_per_core,
        len(steps),
    )


def _fits(timetable: Timetable, ops: Sequence[tuple[Op, float]]) -> bool:
    stages, micro_batches = timetable.placement.stages, timetable.micro_batches
    return all(0 <= op.stage < stages and 0 <= op.micro_batch < micro_batches for op, _ in ops)


def _usual_times(rows: Mapping[Row, RowSteps], steps: Iterable[int]) -> dict[tuple[str, int, int], float]:
    """Return the median time of every kind of op at every stage on every rank, in microseconds."""
    times: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for step in steps:
        for row in rows.values():
            for op, us in row.steps[step]:
                times[op.kind, op.stage, row.rank].append(us)
    return {key: statistics.median(values) for key, values in times.items()}


def _replay(
    timetable: Timetable,
    rows: Mapping[Row, RowSteps],
    step: int,
    time: Callable[[int, Op], float],
    links_us: Mapping[tuple[int, int], float],
) -> float | None:
    """Return the bubble of a step whose ops start as early as their order and inputs permit; None if they cannot."""
    busy, makespan = 0.0, 0.0
    for group in {group for group, _ in rows}:
        devices = {device: row for (number, device), row in rows.items() if number == group}
        orders = {device: [op for op, _ in row.steps[step]] for device, row in devices.items()}
        known = {(op, device) for device, order in orders.items() for op in order}
        ends: dict[tuple[Op, int], float] = {}
        clocks, positions = dict.fromkeys(orders, 0.0), dict.fromkeys(orders, 0)
        progress = True
        while progress:
            progress = False
            for device, order in orders.items():
                rank = devices[device].rank
                while positions[device] < len(order):
                    op, start = order[positions[device]], clocks[device]
                    needs = [need for need in timetable.dependencies.needs(op) if need in known]
                    if any(need not in ends for need in needs):
                        break
                    for need, owner in needs:
                        link_us = links_us.get((devices[owner].rank, rank), 0.0) if owner != device else 0.0
                        start = max(start, ends[need, owner] + link_us)
                    duration = time(rank, op)
                    busy += duration
                    clocks[device] = ends[op, device] = start + duration
                    positions[device] += 1
                    progress = True
        if any(positions[device] < len(order) for device, order in orders.items()):
            return None
        makespan = max(makespan, *clocks.values())
    return 1 - busy / len(rows) / makespan if makespan else None


def _slowest_stage(usual: Mapping[tuple[str, int, int], float]) -> tuple[int, float] | None:
    """Return the stage with the longest time of all its kinds of ops, and its time relative to the mean."""
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    for (kind, stage, _), us in usual.items():
        times[stage, kind].append(us)
    stages: dict[int, float] = defaultdict(float)
    for (stage, _), values in times.items():
        stages[stage] += statistics.median(values)
    slowest = max(stages, key=stages.__getitem__)
    ratio = stages[slowest] / statistics.fmean(stages.values()) if stages[slowest] else 1.0
    return (slowest, ratio) if ratio >= _UNEVEN else None


def _slow_ranks(
    rows: Mapping[Row, RowSteps], steps: Sequence[int], stage_parameters: Mapping[int, int]
) -> list[SlowRank]:
    """Return the ranks that take longer than others for the same ops, the slowest first."""
    ratios: dict[int, list[float]] = defaultdict(list)  # rank -> ratio in every step
    others: dict[int, set[int]] = defaultdict(set)  # rank -> ranks with the same ops
    for step in steps:
        times: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row in rows.values():
            for op, us in row.steps[step]:
                size = stage_parameters.get(op.stage)
                alike = f"{size} parameters" if size else f"stage {op.stage}"
                times[op.kind, alike][row.rank].append(us)
        own_us: dict[int, float] = defaultdict(float)
        peer_us: dict[int, float] = defaultdict(float)
        for by_rank in times.values():
            medians = {rank: statistics.median(values) for rank, values in by_rank.items()}
            for rank, values in by_rank.items():
                peers = [us for other, us in medians.items() if other != rank]
                if peers:
                    own_us[rank] += len(values) * medians[rank]
                    peer_us[rank] += len(values) * statistics.median(peers)
                    others[rank].update(other for other in medians if other != rank)
        for rank, us in own_us.items():
            if peer_us[rank] > 0:
                ratios[rank].append(us / peer_us[rank])
    slow = []
    for rank, values in ratios.items():
        count = sum(value >= _SLOW for value in values)
        if count >= _SLOW_STEPS * len(values) and statistics.median(values) >= _SLOW:
            slow.append(SlowRank(rank, statistics.median(values), sorted(others[rank]), count))
    return sorted(slow, key=lambda rank: -rank.ratio)
