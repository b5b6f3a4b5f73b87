"""Causes of a measured bubble, and slow ranks.

The ops of some steps are replayed in their measured order, with more of what was measured each time: mean times, the
usual times of every stage on every rank, the time of each op, loading of data, and messages. The bubble grows from one
replay to the next, and each difference has one cause. What the last replay lacks is work between the ops, or waiting
for a core.

A rank is slow if it takes longer than others for the same ops: replicas, mirrors, and stages with as many parameters.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from ...pipe_schedules import Op, Timetable
from .read import Row

_SLOW = 1.1  # times the others' time for the same ops
_SLOW_STEPS = 0.75  # share of the steps in which a slow rank is slow
_SLOW_STEPS_SHARED = 0.9  # the same where ranks share cores, in at least _LEAST_STEPS_SHARED steps
_LEAST_STEPS_SHARED = 6
_ADVICE_FROM = 0.05  # bubble of a cause; the largest one gets advice in any case
_SCHEDULE = "schedule"
_LARGER = "larger micro-batches"
_WHOLE_POINTS_FROM = 0.1  # bubble; a smaller one is shown with one decimal


@dataclass(frozen=True)
class RowSteps:
    """Ops of one device of a pipeline group, from ``rank``, its first rank with a trace.

    Attributes:
        steps: step -> (op, microseconds) in order.
        loads_us: step -> op -> time of loading its data, which precedes it; ops without data are missing.
    """

    rank: int
    steps: dict[int, list[tuple[Op, float]]]
    loads_us: dict[int, dict[Op, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class SlowRank:
    """Rank that takes ``ratio`` times as long as the ``others`` for the same ops, in ``steps`` of the steps."""

    rank: int
    ratio: float
    others: list[int]
    steps: int


class _Cause(NamedTuple):
    share: float
    name: str
    remedy: str
    detail: str = ""


@dataclass(frozen=True)
class Causes:
    """Causes of the bubble, as shares of the makespan that add up to ``bubble``.

    Attributes:
        schedule: with equal times and free messages.
        uneven: with the usual time of every stage on every rank.
        varying: with the measured time of each op.
        data: with the time of loading data.
        messages: with the usual time of every link.
        between: the rest.
        slowest_stage: stage with the longest time, and its time relative to the other stages; None if unknown.
        slow_ranks: slow ranks, the slowest first.
        ranks_per_core: (ranks, cores) of a host with fewer cores than ranks; None: no such host, or unknown.
        busy_ranks: mean number of busy ranks on that host.
        steps: numbers of the replayed steps.
        data_ranks: ranks that load data for the longest time, and at least half of it.
        sizes: devices and micro-batches of the timetable.
        last_stage: number of the last stage, which has the head.
        balanced: whether ``--stage-layers balanced`` would divide the layers as they are.
    """

    bubble: float
    schedule: float
    uneven: float
    varying: float
    data: float
    messages: float
    between: float
    slowest_stage: tuple[int, float] | None
    slow_ranks: list[SlowRank] = field(default_factory=list)
    ranks_per_core: tuple[int, float] | None = None
    busy_ranks: float = 0.0
    steps: list[int] = field(default_factory=list)
    data_ranks: list[int] = field(default_factory=list)
    sizes: tuple[int, int] = (1, 1)
    last_stage: int = 0
    balanced: bool = False

    def lines(self) -> list[str]:
        return [*self.slow_rank_lines(), *self._core_lines(), self.sentence(), *self.advice()]

    def sentence(self) -> str:
        """Return a sentence with the causes in points, which add up to the bubble."""
        texts = [
            f"{points} are the schedule's"
            if cause.name == _SCHEDULE
            else f"{points} {cause.name}{cause.detail}"
            for points, cause in self._points()
            if float(points) > 0 or cause.name == _SCHEDULE
        ]
        bubble = f"{100 * self.bubble:.{self._decimals}f} points of bubble"
        return f"Of {bubble} (replay of {self._steps_text()}), {', '.join(texts)}."

    def _steps_text(self) -> str:
        """Return ``step 3``, ``steps 1 to 8`` or ``8 of steps 1 to 20``."""
        first, last, count = self.steps[0], self.steps[-1], len(self.steps)
        if count == 1:
            return f"step {first}"
        return f"{'' if last - first == count - 1 else f'{count} of '}steps {first} to {last}"

    def advice(self) -> list[str]:
        """Return a line for every cause of at least five points, and for the largest one, in descending order."""
        points = sorted(self._points(), key=lambda pair: -pair[1].share)
        large = [(n, cause) for n, cause in points if cause.share >= _ADVICE_FROM] or points[:1]
        lines = [
            f"{cause.name}, {number} points: {cause.remedy}." for number, cause in large if cause.share > 0
        ]
        if any(cause.name == _SCHEDULE for _, cause in large) and any(_LARGER in c.remedy for _, c in large):
            lines.append(f"More micro-batches and {_LARGER} both need a larger train_batch_size.")
        return lines

    @property
    def _decimals(self) -> int:
        return 0 if self.bubble >= _WHOLE_POINTS_FROM else 1

    def _points(self) -> list[tuple[str, _Cause]]:
        causes, decimals = self._causes(), self._decimals
        points = round_to_sum([100 * cause.share for cause in causes], decimals)
        return [(f"{number:.{decimals}f}", cause) for number, cause in zip(points, causes, strict=True)]

    def _causes(self) -> list[_Cause]:
        devices, micro_batches = self.sizes
        compare = f"python -m ds_ext compare --num-devices {devices} --micro-batches {micro_batches}"
        causes = [
            _Cause(
                self.schedule,
                _SCHEDULE,
                f"use more than {micro_batches} micro-batches per step, or another schedule (`{compare}`)",
            ),
            self._uneven(),
            _Cause(
                self.data,
                "loading data",
                "prepare samples before training, or pass a DataLoader with num_workers to train_batch()",
                f" ({_ranks_text(self.data_ranks)})",
            ),
            _Cause(
                self.messages,
                "messages",
                f"keep the ranks of a pipeline on one host, or use a faster transport or {_LARGER}",
            ),
        ]
        if self.ranks_per_core is not None:
            ranks, cores = self.ranks_per_core
            name, detail = "ranks that share cores", f" ({ranks} ranks, {cores:g} cores)"
            share = self.varying + self.between
            return [*causes, _Cause(share, name, "use at most one rank per core", detail)]
        return [
            *causes,
            _Cause(self.varying, "ops of varying length", "look for other load, or for uneven samples"),
            _Cause(self.between, "work between ops", f"use {_LARGER}, whose ops take longer"),
        ]

    def _uneven(self) -> _Cause:
        """Return the cause "uneven ops". It names a slow rank that explains more than the layers of its stage."""
        detail, remedy = "", "move layers between stages (`--stage-layers` or `partition_method`)"
        stage, ratio = self.slowest_stage or (0, 1.0)
        if self.slow_ranks and self.slow_ranks[0].ratio ** 2 >= ratio:
            slow = self.slow_ranks[0]
            detail = f" (rank {slow.rank} takes {slow.ratio:.2g} times as long as its peers)"
            remedy = f"look for other load on the host of rank {slow.rank}, or for a slower clock"
        elif self.slowest_stage is not None:
            detail = f" (stage {stage} takes {ratio:.2g} times as long as the others)"
            flag = "a number per stage in `--stage-layers`" if self.balanced else "`--stage-layers balanced`"
            remedy = f"move layers from stage {stage} ({flag} or `partition_method`)"
            if stage == self.last_stage:
                remedy += "; if it has only the head, use fewer stages"
        return _Cause(self.uneven, "uneven ops", remedy, detail)

    def slow_rank_lines(self) -> list[str]:
        other_load = "" if self.ranks_per_core is None else " (or other load on its host)"
        return [
            f"Rank {slow.rank} is slow{other_load}: {slow.ratio:.2f} times the time of {_ranks_text(slow.others)} for "
            f"the same ops, in {slow.steps} of {len(self.steps)} steps."
            for slow in self.slow_ranks
        ]

    def _core_lines(self) -> list[str]:
        if self.ranks_per_core is None:
            return []
        ranks, cores = self.ranks_per_core
        longer = ", more than there are cores: all ops take longer" if self.busy_ranks > cores else ""
        return [
            f"Busy time includes waiting for a core: on {cores:g} cores, {self.busy_ranks:.1f} of {ranks} ranks are "
            f"busy on average{longer}."
        ]


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


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
    slowest_stage: tuple[int, float] | None = None,
    ranks_per_core: tuple[int, float] | None = None,
    busy_ranks: float = 0.0,
    balanced: bool = False,
) -> Causes | None:
    """Return the causes of a bubble; None without steps, or if the steps do not fit the timetable.

    Args:
        rows: ops of the same steps on all devices with a trace.
        links_us: (sender, receiver) -> usual time of a message between these ranks.
        stage_parameters: number of parameters of the stages, as far as it is known.
        slowest_stage, ranks_per_core, busy_ranks, balanced: see :class:`Causes`.
    """
    common = sorted(set.intersection(*(set(row.steps) for row in rows.values()))) if rows else []
    steps = [step for step in common if all(_fits(timetable, row.steps[step]) for row in rows.values())]
    all_times: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for row in rows.values():
        for op, us in (pair for step in steps for pair in row.steps[step]):
            all_times[op.kind, op.stage, row.rank].append(us)
    usual = {key: statistics.median(samples) for key, samples in all_times.items()}
    kinds: dict[str, list[float]] = defaultdict(list)
    for (kind, stage, rank), samples in all_times.items():
        kinds[kind] += [usual[kind, stage, rank]] * len(samples)
    means = {kind: statistics.fmean(samples) for kind, samples in kinds.items()}
    replays: list[tuple[float, ...]] = []
    for step in steps:
        measured = {(row.rank, op): us for row in rows.values() for op, us in row.steps[step]}
        times: list[Callable[[int, Op], float]] = [
            lambda rank, op: means[op.kind],
            lambda rank, op: usual[op.kind, op.stage, rank],
            lambda rank, op, measured=measured: measured[rank, op],
        ]
        loads_us = {row.rank: row.loads_us.get(step, {}) for row in rows.values()}
        bubbles = [_replay(timetable, rows, step, time, {}, {}) for time in times]
        bubbles += [_replay(timetable, rows, step, times[-1], loads_us, links) for links in ({}, links_us)]
        if None not in bubbles:
            replays.append(tuple(value for value in bubbles if value is not None))
    if not replays:
        return None
    levels = [0.0]
    for values in zip(*replays, strict=True):
        levels.append(min(max(levels[-1], statistics.fmean(values)), bubble))
    shares = [after - before for before, after in pairwise([*levels, bubble])]
    loading = {
        row.rank: sum(us for step in steps for us in row.loads_us.get(step, {}).values())
        for row in rows.values()
    }
    slow_ranks = _slow_ranks(rows, steps, stage_parameters)
    if ranks_per_core is not None:
        least = max(_LEAST_STEPS_SHARED, _SLOW_STEPS_SHARED * len(steps))
        slow_ranks = [slow for slow in slow_ranks if slow.steps >= least]
    return Causes(
        bubble,
        **dict(zip(("schedule", "uneven", "varying", "data", "messages", "between"), shares, strict=True)),
        slowest_stage=slowest_stage,
        slow_ranks=slow_ranks,
        ranks_per_core=ranks_per_core,
        busy_ranks=busy_ranks,
        steps=steps,
        data_ranks=[r for r, us in sorted(loading.items()) if us > 0 and us >= max(loading.values()) / 2],
        sizes=(timetable.placement.num_devices, timetable.micro_batches),
        last_stage=timetable.placement.stages - 1,
        balanced=balanced,
    )


def _fits(timetable: Timetable, ops: Sequence[tuple[Op, float]]) -> bool:
    stages, micro_batches = timetable.placement.op_stages, timetable.micro_batches
    return all(0 <= op.stage < stages and 0 <= op.micro_batch < micro_batches for op, _ in ops)


def _replay(
    timetable: Timetable,
    rows: Mapping[Row, RowSteps],
    step: int,
    time: Callable[[int, Op], float],
    loads_us: Mapping[int, Mapping[Op, float]],
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
                    op = order[positions[device]]
                    start = clocks[device] + loads_us.get(rank, {}).get(op, 0.0)
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


def _slow_ranks(
    rows: Mapping[Row, RowSteps], steps: Sequence[int], stage_parameters: Mapping[int, int]
) -> list[SlowRank]:
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
