"""Who was slow, against whom, and what it cost: from what the ranks of a dynamic schedule have measured.

A stage is compared with the median of the other stages, and with its own past; a link likewise. What slowness costs is
found by simulation: the run of the same rules when every stage and link takes the usual time, against the run when each
takes what was measured. The regret is the time of the order that was run less that of the plan, both at measured times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from ..costs import Costs
from ..ops import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Timetable
from ..placement import Placement
from ..simulate import simulate

SLOW = 1.25  # times the usual, from which on a stage or a link is named
_LEAST_S = 1e-9
_HINT = (
    "Stage {} is the last one, which has the head and the loss besides its layers: give it fewer of these, by "
    '--stage-layers balanced or with their numbers, --stage-layers A,B,.. ("train": {{"stage_layers": ...}}).'
)
_REMEMBERED = 100  # reports
_TOLD = 3  # of the slow stages and links, in words


def _ms(seconds: float) -> str:
    """In milliseconds, to three figures: 2,270."""
    return f"{float(f'{1000 * seconds:.3g}'):,g}"


@dataclass
class Sums:
    """How often something was measured, and the seconds of all times together, by what it was."""

    found: dict[Any, tuple[int, float]] = field(default_factory=dict)

    def add(self, key: Any, seconds: float) -> None:
        """One more measurement."""
        count, total = self.found.get(key, (0, 0.0))
        self.found[key] = count + 1, total + seconds

    def means(self) -> dict[Any, float]:
        """Seconds a time."""
        return {key: total / count for key, (count, total) in self.found.items()}


@dataclass(frozen=True)
class Measured:
    """Mean seconds of a pipeline group in some steps: ``stages[kind, stage]`` and ``links[sender, receiver]``."""

    stages: Mapping[tuple[str, int], float]
    links: Mapping[tuple[int, int], float]

    @staticmethod
    def of(stages: Sequence[Sums], waits: Sequence[Sums], hosts: Sequence[str]) -> Measured:
        """From what each device has computed, by (kind, stage), and waited for, by the sending device.

        A message's time is by the clocks of both ends. Those of two hosts differ by a time that nobody knows, but the
        two ways between them together do not have it: each gets half of both. With one way alone nothing is known.

        Args:
            hosts: of every device.
        """
        together = Sums()
        for key, (count, total) in (item for mine in stages for item in mine.found.items()):
            before = together.found.get(key, (0, 0.0))
            together.found[key] = before[0] + count, before[1] + total
        ways = {(sender, to): s for to, mine in enumerate(waits) for sender, s in mine.means().items()}
        links = {}
        for (sender, to), seconds in ways.items():
            back = seconds if hosts[sender] == hosts[to] else ways.get((to, sender))
            if back is not None:
                links[sender, to] = max((seconds + back) / 2, 0.0)
        return Measured(together.means(), links)

    def work(self, stage: int) -> float:
        """Seconds of all that is computed of a micro-batch at a stage."""
        return sum(seconds for (_, at), seconds in self.stages.items() if at == stage)

    def costs(self, placement: Placement, *, usual: bool) -> Costs:
        """The same as costs; ``usual``: as if every stage and link took what the median one does."""
        share, stages = placement.stages / placement.ranks, range(placement.stages)
        middle = median(self.work(stage) for stage in stages)
        kinds = {kind for kind, _ in self.stages}
        means = {
            kind: fmean(self.stages.get((kind, stage), 0.0) for stage in stages) * share for kind in kinds
        }
        whole = means.get("B", 0.0) / 2
        scale = middle / max(fmean(self.work(stage) for stage in stages), _LEAST_S)
        link = median(self.links.values()) if self.links else 0.0
        return Costs(
            means.get(FORWARD, 0.0) * scale,
            means.get(BACKWARD_INPUT, whole) * scale,
            means.get(BACKWARD_WEIGHT, whole) * scale,
            link,
            stages=None if usual else tuple(self.work(stage) / max(middle, _LEAST_S) for stage in stages),
            links={} if usual else self.links,
        )


@dataclass(frozen=True)
class Slow:
    """A stage (``where`` is its number) or a link ((sender, receiver), devices) that took longer than usual.

    ``ranks`` are the global ranks of the link's ends, where they are not the devices' numbers.
    """

    where: int | tuple[int, int]
    seconds: float
    peers: float
    past: float | None
    ranks: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """``stage 2``, or ``link 1>2``, where ranks have other numbers ``link 1>2 (ranks 2>4)``."""
        if isinstance(self.where, int):
            return f"stage {self.where}"
        ends = None if self.ranks == self.where else self.ranks
        ranks = "" if ends is None else f" (ranks {ends[0]}>{ends[1]})"
        return f"link {self.where[0]}>{self.where[1]}{ranks}"

    @property
    def of_peers(self) -> float:
        """Times what the others took."""
        return self.seconds / max(self.peers, _LEAST_S)

    def __str__(self) -> str:
        own = "" if self.past is None else f", {self.seconds / max(self.past, _LEAST_S):.2f} x its own past"
        return (
            f"{self.name}: {_ms(self.seconds)} ms a micro-batch, {self.of_peers:.2f} x the others' "
            f"{_ms(self.peers)} ms{own}"
        )


@dataclass(frozen=True)
class Report:
    """What some steps were like.

    Args:
        slow: the stages and links that were slower than their peers or their own past, the slowest first.
        cost_s: what that cost a step, in seconds.
        regret_s: seconds that a step took longer than the plan's order would have; negative: it was shorter.
        step_s: seconds of a step, by simulation at measured times.
        last_stage: the stage with the head and the loss; None: not known.
    """

    slow: tuple[Slow, ...]
    cost_s: float
    regret_s: float
    step_s: float
    last_stage: int | None = None

    def __str__(self) -> str:
        who = "; ".join(map(str, self.slow[:_TOLD])) or "no stage and no link was slow"
        if len(self.slow) > _TOLD:
            who += f"; and {len(self.slow) - _TOLD} more"
        told = (
            f"{who}. That cost {_ms(self.cost_s)} of {_ms(self.step_s)} ms a step; the regret against the "
            f"plan is {_ms(self.regret_s)} ms."
        )
        if any(not isinstance(slow.where, int) for slow in self.slow):
            told += " (A link 0>1 is from device 0 of the pipeline to device 1.)"
        # Slow beside the others: an end that is slower than it was is no matter of layers.
        heavy = [slow for slow in self.slow if slow.where == self.last_stage and slow.of_peers >= SLOW]
        return f"{told} {_HINT.format(self.last_stage)}" if heavy and self.last_stage else told


@dataclass
class Observer:
    """Keeps the past of a pipeline group, and reports.

    Args:
        plan: the order that would have been run without decisions.
    """

    plan: Timetable
    _past: deque[Measured] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def report(
        self, now: Measured, ran: Timetable, expected: Timetable, ranks: Sequence[int] | None = None
    ) -> Report:
        """Compare steps with their peers and with the past, which they then belong to.

        Args:
            ran: the order of the last of the steps.
            expected: the order that the same rules come to at usual times.
            ranks: the global rank of every device, to name them by; None: as the devices.
        """
        placement = self.plan.placement
        links = [replace(link, ranks=_ends(link.where, ranks)) for link in self._slow_links(now)]
        slow = [*self._slow_stages(now), *links]
        self._past.append(now)
        measured, usual = now.costs(placement, usual=False), now.costs(placement, usual=True)
        took = simulate(ran, measured).makespan
        cost = took - simulate(expected, usual).makespan if slow else 0.0
        regret = took - simulate(self.plan, measured).makespan
        slow.sort(key=lambda s: s.seconds / max(s.peers, _LEAST_S), reverse=True)
        return Report(tuple(slow), max(cost, 0.0), regret, took, placement.stages - 1)

    def _slow_stages(self, now: Measured) -> list[Slow]:
        stages = range(self.plan.placement.stages)
        works = {stage: now.work(stage) for stage in stages}
        pasts = {stage: [before.work(stage) for before in self._past] for stage in stages}
        return [s for s in (_slow(stage, works, pasts[stage]) for stage in stages) if s is not None]

    def _slow_links(self, now: Measured) -> list[Slow]:
        pasts = {link: [p.links[link] for p in self._past if link in p.links] for link in now.links}
        return [
            s for s in (_slow(link, now.links, pasts[link]) for link in sorted(now.links)) if s is not None
        ]


def _ends(where: int | tuple[int, int], ranks: Sequence[int] | None) -> tuple[int, int] | None:
    return None if ranks is None or isinstance(where, int) else (ranks[where[0]], ranks[where[1]])


def _slow(where: int | tuple[int, int], now: Mapping[Any, float], past: Sequence[float]) -> Slow | None:
    others = [seconds for key, seconds in now.items() if key != where]
    seconds, peers = now[where], median(others) if others else now[where]
    before = median(past) if past else None
    # What is slower than it was, and still as fast as the others, keeps nobody waiting.
    slower_than_before = before is not None and seconds >= max(SLOW * before, peers)
    if seconds < SLOW * peers and not slower_than_before:
        return None
    return Slow(where, seconds, peers, before)
