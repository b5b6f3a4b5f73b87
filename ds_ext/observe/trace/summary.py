"""Where the time of a run went: per rank and step, and which stage and link were slowest.

Shares are of the time from the start of a step to the last computation of the slowest rank, as those of the measured
bubble; reductions that are waited for and the optimizer's step come after that time and are measured by it too.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from .event import REDUCTIONS
from .merge import Ends, in_order, messages_of
from .read import Event, RankTrace, Traces

# A receive that took less, or less of the message's way, may have found it there: when it came is not known.
_WAITED_US, _WAITED_SHARE = 20.0, 0.1

# (stage, rank) -> kind of computation -> how long each took, in microseconds
Computed = dict[tuple[int, int], dict[str, list[float]]]


@dataclass
class StepTimes:
    """What one rank did in one step, in microseconds. ``span`` ends with its last computation."""

    busy: float = 0.0
    span: float = 0.0
    whole: float = 0.0
    send: float = 0.0
    reduction: float = 0.0
    reduction_hidden: float = 0.0
    optimizer: float = 0.0
    waits: dict[int, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(frozen=True)
class RankSummary:
    """Mean shares of a rank: see the module. ``waits``: for whose messages it waited."""

    rank: int
    busy: float
    bubble: float
    p2p: float
    reduction: float
    reduction_hidden: float
    optimizer: float
    waits: dict[int, float]


@dataclass(frozen=True)
class StageSummary:
    """Median time of a stage for a micro-batch, forward and backward, where it is slowest; and the others' mean."""

    stage: int
    rank: int
    ms: float
    others_ms: float | None


@dataclass(frozen=True)
class LinkSummary:
    """Median time from the sending of a message to its arrival, of those that the receiver was waiting for."""

    sender: int
    receiver: int
    ms: float
    bytes: int
    messages: int


@dataclass(frozen=True)
class Summary:
    """What :func:`summarize` finds.

    ``bubble_by_step`` is what the metrics call ``bubble_measured``; ``makespan_by_step`` is in microseconds.
    """

    schedule: str
    world_size: int
    steps: int
    step_s: float
    bubble: float
    bubble_by_step: dict[int, float]
    makespan_by_step: dict[int, float]
    ranks: list[RankSummary]
    stages: list[StageSummary]
    links: list[LinkSummary]
    notes: list[str]

    @property
    def slowest_stage(self) -> StageSummary | None:
        """The stage that took longest for a micro-batch."""
        return max(self.stages, key=lambda stage: stage.ms, default=None)

    @property
    def slowest_link(self) -> LinkSummary | None:
        """The link whose messages took longest."""
        return max(self.links, key=lambda link: link.ms, default=None)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        found = asdict(self)
        for key, value in (("slowest_stage", self.slowest_stage), ("slowest_link", self.slowest_link)):
            found[key] = None if value is None else asdict(value)
        return found


def summarize(traces: Traces) -> Summary:
    """Sum up the steps that every rank has to its end."""
    times: dict[int, dict[int, StepTimes]] = {}
    computed: Computed = defaultdict(lambda: defaultdict(list))
    links = _Links()
    for rank, trace in traces.ranks.items():
        times[rank] = _RankSteps(trace, computed, links).complete()
    steps = sorted(set.intersection(*(set(of_rank) for of_rank in times.values())))
    makespan = {step: max(of_rank[step].span for of_rank in times.values()) for step in steps}
    steps = [step for step in steps if makespan[step] > 0]
    bubbles = {
        step: 1 - statistics.fmean(of_rank[step].busy for of_rank in times.values()) / makespan[step]
        for step in steps
    }
    notes = list(traces.notes)
    if not steps:
        notes.append("no step is complete on every rank.")
    return Summary(
        schedule=traces.run["schedule"],
        world_size=traces.run["world_size"],
        steps=len(steps),
        step_s=statistics.fmean(of[s].whole for of in times.values() for s in steps) / 1e6 if steps else 0.0,
        bubble=statistics.fmean(bubbles.values()) if bubbles else 0.0,
        bubble_by_step=bubbles,
        makespan_by_step={step: makespan[step] for step in steps},
        ranks=[_rank(rank, [(of[s], makespan[s]) for s in steps]) for rank, of in times.items()]
        if steps
        else [],
        stages=_stages(computed),
        links=links.summaries(),
        notes=notes,
    )


def _rank(rank: int, steps: list[tuple[StepTimes, float]]) -> RankSummary:
    def mean(values: Iterable[float]) -> float:
        return statistics.fmean(values)

    peers = sorted({peer for of_step, _ in steps for peer in of_step.waits})
    busy = mean(of_step.busy / whole for of_step, whole in steps)
    waits = {peer: mean(of_step.waits.get(peer, 0.0) / whole for of_step, whole in steps) for peer in peers}
    return RankSummary(
        rank,
        busy=busy,
        bubble=1 - busy,
        p2p=sum(waits.values()) + mean(of_step.send / whole for of_step, whole in steps),
        reduction=mean(of_step.reduction / whole for of_step, whole in steps),
        reduction_hidden=mean(of_step.reduction_hidden / whole for of_step, whole in steps),
        optimizer=mean(of_step.optimizer / whole for of_step, whole in steps),
        waits=waits,
    )


class _RankSteps:
    """Reads one rank's spans; on the way, how long its stages computed and its messages took."""

    def __init__(self, trace: RankTrace, computed: Computed, links: _Links) -> None:
        self._trace, self._computed, self._links = trace, computed, links
        self._steps: dict[int, StepTimes] = defaultdict(StepTimes)
        self._computations: dict[int, list[Event]] = defaultdict(list)
        self._reductions: dict[int, list[Event]] = defaultdict(list)
        self._first: dict[int, Event] = {}
        self._whole: dict[int, Event] = {}
        self._idle, self._idle_since = 0.0, 0.0  # since the last computation; and since when now

    def complete(self) -> dict[int, StepTimes]:
        """The steps that the rank has to their end."""
        for event in self._trace.spans():
            step = event.get("args", {}).get("step")
            if step is not None:
                self._take(event, step)
        return {step: self._closed(step, event) for step, event in self._whole.items()}

    def _take(self, event: Event, step: int) -> None:
        duration, thread = event["dur"], event["tid"]
        if step in self._whole and not thread.startswith("reduce"):
            self._forget(step)
        times = self._steps[step]
        if event["cat"] == "step":
            self._whole[step] = event
            return
        if not thread.startswith("reduce"):
            self._count_idle(event, step)
        if thread == "compute":
            times.busy += duration
            self._computations[step].append(event)
            self._computed[event["args"]["stage"], self._trace.rank][event["name"][0]].append(duration)
        elif thread == "recv":
            # A static order waits in the receive; one that is decided at run time in front of it.
            times.waits[event["args"]["peer"]] += duration + self._idle
            self._links.saw(self._trace.aligned(event), duration + self._idle)
        elif thread == "send":
            times.send += duration
            self._links.saw(self._trace.aligned(event))
        elif event["name"] in REDUCTIONS:
            times.reduction += duration
        elif thread.startswith("reduce"):
            self._reductions[step].append(event)
        elif event["name"] == "OptimizerStep":
            times.optimizer += duration
        if thread in ("compute", "recv"):
            self._idle = 0.0

    def _forget(self, step: int) -> None:
        """The step is run again, from a checkpoint: the last time counts."""
        for kept in (self._whole, self._steps, self._computations, self._reductions, self._first):
            kept.pop(step, None)

    def _count_idle(self, event: Event, step: int) -> None:
        """Spans of the rank itself come one after the other; between them it does nothing."""
        self._idle = self._idle + max(0.0, event["ts"] - self._idle_since) if step in self._first else 0.0
        self._first.setdefault(step, event)
        self._idle_since = event["ts"] + event["dur"]

    def _closed(self, step: int, whole: Event) -> StepTimes:
        times, mine, first = self._steps[step], self._computations[step], self._first.get(step)
        times.whole = whole["dur"]
        if first is not None and first["tid"] == "recv":
            times.waits[first["args"]["peer"]] += max(0.0, first["ts"] - whole["ts"])
        times.span = max((e["ts"] + e["dur"] for e in mine), default=whole["ts"]) - whole["ts"]
        times.reduction_hidden = sum(_overlap(reduction, mine) for reduction in self._reductions[step])
        return times


def _overlap(reduction: Event, computations: Iterable[Event]) -> float:
    """The time of a reduction in which its rank computed."""
    begin, end = reduction["ts"], reduction["ts"] + reduction["dur"]
    return sum(max(0.0, min(end, e["ts"] + e["dur"]) - max(begin, e["ts"])) for e in computations)


def _stages(computed: Computed) -> list[StageSummary]:
    means = {
        place: sum(statistics.median(durations) for durations in kinds.values()) / 1e3
        for place, kinds in computed.items()
    }
    slowest: dict[int, tuple[int, float]] = {}
    for (stage, rank), ms in means.items():
        if stage not in slowest or ms > slowest[stage][1]:
            slowest[stage] = rank, ms
    found = []
    for stage, (rank, ms) in sorted(slowest.items()):
        others = [other for (at, _), other in means.items() if at != stage]
        found.append(StageSummary(stage, rank, ms, statistics.fmean(others) if others else None))
    return found


class _Links:
    """Pairs the two ends of messages, and keeps how long those took that were waited for."""

    def __init__(self) -> None:
        self._ends: Ends[tuple[Event, float]] = Ends()
        self._took: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)

    def saw(self, event: Event, waited_us: float = 0.0) -> None:
        """One end of a message, on rank 0's clock, and how long its receiver waited for it."""
        for message in messages_of(event):
            other = self._ends.meet(message, event["tid"], (event, waited_us))
            if other is None:
                continue
            sent, received = in_order(event, other[0])
            took, waited = received["ts"] + received["dur"] - sent["ts"], max(waited_us, other[1])
            if took > 0 and waited > max(_WAITED_US, _WAITED_SHARE * took):
                self._took[message[1], message[2]].append((took, received["args"].get("bytes", 0)))

    def summaries(self) -> list[LinkSummary]:
        """By sender and receiver."""
        return [
            LinkSummary(
                sender,
                receiver,
                ms=statistics.median(took for took, _ in found) / 1e3,
                bytes=round(statistics.median(size for _, size in found)),
                messages=len(found),
            )
            for (sender, receiver), found in sorted(self._took.items())
        ]
