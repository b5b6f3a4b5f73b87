"""Summary of a run's traces: time of every rank by kind of work, slowest stage and slowest link.

Shares are relative to the makespan of a step: the time from its start to the last computation of the slowest rank, as
for the measured bubble. Exposed reductions and the optimizer step follow the makespan and are also given relative to
it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from .event import REDUCTIONS
from .merge import UnpairedEnds, in_order, messages_of
from .read import Event, RankTrace, Traces

# A receive with a shorter wait, absolute or relative to the time since the send, counts as not waiting: the message may
# have arrived before.
_MIN_WAIT_US, _MIN_WAIT_SHARE = 20.0, 0.1

# (stage, rank) -> kind of op -> durations in microseconds
Durations = dict[tuple[int, int], dict[str, list[float]]]


@dataclass
class StepTimes:
    """Times of one rank in one step, in microseconds.

    Attributes:
        busy: sum of its computations.
        span: from the start of the step to the end of its last computation.
        whole: from the start to the end of the step.
        send: sum of its sends.
        reduction: sum of its exposed reductions.
        reduction_hidden: sum of its reductions that overlap with computation.
        optimizer: optimizer step.
        waits: rank -> time waited for its messages.
    """

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
    """Mean shares of the makespan of one rank; ``waits`` maps a rank to the share waited for its messages."""

    rank: int
    busy: float
    bubble: float
    p2p: float
    reduction: float
    reduction_hidden: float
    optimizer: float
    waits: dict[int, float]

    @property
    def waits_text(self) -> str:
        """Return ``rank 1 12.3%, rank 3 0.5%``, longest first."""
        longest = sorted(self.waits.items(), key=lambda item: -item[1])
        return ", ".join(f"rank {peer} {share:.1%}" for peer, share in longest if share >= 5e-4)


@dataclass(frozen=True)
class StageSummary:
    """Median forward plus backward time of a stage on its slowest rank, and the mean over the other stages."""

    stage: int
    rank: int
    ms: float
    others_ms: float | None


@dataclass(frozen=True)
class LinkSummary:
    """Median time from send to arrival of the messages for which the receiver waited."""

    sender: int
    receiver: int
    ms: float
    bytes: int
    messages: int


@dataclass(frozen=True)
class Summary:
    """Result of :func:`summarize`.

    ``bubble_by_step`` equals ``bubble_measured`` of the metrics. ``makespan_by_step`` is in microseconds.
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
        """Stage with the longest time per micro-batch; None without stages."""
        return max(self.stages, key=lambda stage: stage.ms, default=None)

    @property
    def slowest_link(self) -> LinkSummary | None:
        """Link with the longest message time; None without links."""
        return max(self.links, key=lambda link: link.ms, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        values = asdict(self)
        for key, value in (("slowest_stage", self.slowest_stage), ("slowest_link", self.slowest_link)):
            values[key] = None if value is None else asdict(value)
        return values


def summarize(traces: Traces) -> Summary:
    """Summarize the steps that are complete on every rank."""
    times: dict[int, dict[int, StepTimes]] = {}
    durations: Durations = defaultdict(lambda: defaultdict(list))
    links = _Links()
    for rank, trace in traces.ranks.items():
        times[rank] = _RankSteps(trace, durations, links).complete()
    steps = sorted(set.intersection(*(set(of_rank) for of_rank in times.values())))
    makespan = {step: max(of_rank[step].span for of_rank in times.values()) for step in steps}
    steps = [step for step in steps if makespan[step] > 0]
    bubbles = {
        step: 1 - statistics.fmean(of_rank[step].busy for of_rank in times.values()) / makespan[step]
        for step in steps
    }
    notes = list(traces.notes)
    if not steps:
        notes.append("steps: no step is complete on every rank")
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
        stages=_stages(durations),
        links=links.summaries(),
        notes=notes,
    )


def _rank(rank: int, steps: list[tuple[StepTimes, float]]) -> RankSummary:
    def mean(values: Iterable[float]) -> float:
        return statistics.fmean(values)

    peers = sorted({peer for times, _ in steps for peer in times.waits})
    busy = mean(times.busy / makespan for times, makespan in steps)
    waits = {peer: mean(times.waits.get(peer, 0.0) / makespan for times, makespan in steps) for peer in peers}
    return RankSummary(
        rank,
        busy=busy,
        bubble=1 - busy,
        p2p=sum(waits.values()) + mean(times.send / makespan for times, makespan in steps),
        reduction=mean(times.reduction / makespan for times, makespan in steps),
        reduction_hidden=mean(times.reduction_hidden / makespan for times, makespan in steps),
        optimizer=mean(times.optimizer / makespan for times, makespan in steps),
        waits=waits,
    )


class _RankSteps:
    """Reader of one rank's spans, which also collects the durations of its ops and its messages."""

    def __init__(self, trace: RankTrace, durations: Durations, links: _Links) -> None:
        self._trace, self._durations, self._links = trace, durations, links
        self._steps: dict[int, StepTimes] = defaultdict(StepTimes)
        self._computations: dict[int, list[Event]] = defaultdict(list)
        self._reductions: dict[int, list[Event]] = defaultdict(list)
        self._first: dict[int, Event] = {}
        self._whole: dict[int, Event] = {}
        self._idle, self._idle_since = 0.0, 0.0  # idle time since the last computation, end of the last span

    def complete(self) -> dict[int, StepTimes]:
        """Return the times of the steps that the rank completed."""
        for event in self._trace.spans():
            step = event.get("args", {}).get("step")
            if step is not None:
                self._add(event, step)
        return {step: self._finished(step, event) for step, event in self._whole.items()}

    def _add(self, event: Event, step: int) -> None:
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
            self._durations[event["args"]["stage"], self._trace.rank][event["name"][0]].append(duration)
        elif thread == "recv":
            # A static order waits inside the receive, a dynamic order before it.
            times.waits[event["args"]["peer"]] += duration + self._idle
            self._links.add(self._trace.aligned(event), duration + self._idle)
        elif thread == "send":
            times.send += duration
            self._links.add(self._trace.aligned(event))
        elif event["name"] in REDUCTIONS:
            times.reduction += duration
        elif thread.startswith("reduce"):
            self._reductions[step].append(event)
        elif event["name"] == "OptimizerStep":
            times.optimizer += duration
        if thread in ("compute", "recv"):
            self._idle = 0.0

    def _forget(self, step: int) -> None:
        """Drop the times of a step that runs again from a checkpoint."""
        for table in (self._whole, self._steps, self._computations, self._reductions, self._first):
            table.pop(step, None)

    def _count_idle(self, event: Event, step: int) -> None:
        """Add the gap since the previous span. The rank is idle between spans, which do not overlap."""
        self._idle = self._idle + max(0.0, event["ts"] - self._idle_since) if step in self._first else 0.0
        self._first.setdefault(step, event)
        self._idle_since = event["ts"] + event["dur"]

    def _finished(self, step: int, whole: Event) -> StepTimes:
        times, computations, first = self._steps[step], self._computations[step], self._first.get(step)
        times.whole = whole["dur"]
        if first is not None and first["tid"] == "recv":
            times.waits[first["args"]["peer"]] += max(0.0, first["ts"] - whole["ts"])
        times.span = max((e["ts"] + e["dur"] for e in computations), default=whole["ts"]) - whole["ts"]
        times.reduction_hidden = sum(
            _overlap(reduction, computations) for reduction in self._reductions[step]
        )
        return times


def _overlap(reduction: Event, computations: Iterable[Event]) -> float:
    """Return the time of a reduction that overlaps with computations of its rank."""
    begin, end = reduction["ts"], reduction["ts"] + reduction["dur"]
    return sum(max(0.0, min(end, e["ts"] + e["dur"]) - max(begin, e["ts"])) for e in computations)


def _stages(durations: Durations) -> list[StageSummary]:
    times = {
        stage_and_rank: sum(statistics.median(of_kind) for of_kind in kinds.values()) / 1e3
        for stage_and_rank, kinds in durations.items()
    }
    slowest: dict[int, tuple[int, float]] = {}
    for (stage, rank), ms in times.items():
        if stage not in slowest or ms > slowest[stage][1]:
            slowest[stage] = rank, ms
    stages = []
    for stage, (rank, ms) in sorted(slowest.items()):
        others = [other_ms for (other, _), other_ms in times.items() if other != stage]
        stages.append(StageSummary(stage, rank, ms, statistics.fmean(others) if others else None))
    return stages


class _Links:
    """Durations of the messages for which their receiver waited."""

    def __init__(self) -> None:
        self._unpaired: UnpairedEnds[tuple[Event, float]] = UnpairedEnds()
        # (sender, receiver) -> (microseconds, bytes) of every message
        self._messages: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)

    def add(self, event: Event, waited_us: float = 0.0) -> None:
        """Add one end of a message, on rank 0's clock, and the time for which its receiver waited."""
        for message in messages_of(event):
            other = self._unpaired.pair(message, event["tid"], (event, waited_us))
            if other is None:
                continue
            sent, received = in_order(event, other[0])
            duration, waited = received["ts"] + received["dur"] - sent["ts"], max(waited_us, other[1])
            if duration > 0 and waited > max(_MIN_WAIT_US, _MIN_WAIT_SHARE * duration):
                self._messages[message[1], message[2]].append((duration, received["args"].get("bytes", 0)))

    def summaries(self) -> list[LinkSummary]:
        """Return the links, sorted by sender and receiver."""
        return [
            LinkSummary(
                sender,
                receiver,
                ms=statistics.median(duration for duration, _ in messages) / 1e3,
                bytes=round(statistics.median(size for _, size in messages)),
                messages=len(messages),
            )
            for (sender, receiver), messages in sorted(self._messages.items())
        ]
