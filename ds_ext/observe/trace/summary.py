"""Summary of a run's traces: time of every rank by kind of work, causes of the bubble, slowest stage and slowest link.

Shares are relative to the makespan of a step: the time from its start to the last computation of the slowest rank, as
for the measured bubble. Exposed reductions and the optimizer step follow the makespan and are also given relative to
it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from typing import Any

from ...errors import DsExtError
from ...pipe_schedules import Op, Timetable
from ...pipe_schedules.ops import WAIT_STAGE
from .causes import Causes, RowSteps, find_causes
from .event import LOAD, REDUCTIONS
from .merge import UnpairedEnds
from .read import Event, RankTrace, Row, Traces, is_asynchronous, op_of

# A receive with a shorter wait, absolute or relative to the time since the send, counts as not waiting: the message may
# have arrived before.
_MIN_WAIT_US = 20.0
_MIN_WAIT_SHARE = 0.1
_REPLAYED_STEPS = 8  # at most; for the causes of the bubble
_UNEVEN = 1.05  # times the mean of the other stages
_FREE_LINK = 0.1  # quantile of the times of a link's messages that did not wait for a core

# (stage, rank) -> kind of op -> durations in microseconds
Durations = dict[tuple[int, int], dict[str, list[float]]]


@dataclass
class StepTimes:
    """Times of one rank in one step, in microseconds.

    Attributes:
        busy: sum of its computations.
        span: from the start of the step to the end of its last computation.
        whole: from the start to the end of the step.
        gather: sum of its waits for weights of the step before, with ``overlap_across_steps``.
        reduction: sum of its exposed reductions.
        reduction_hidden: sum of its reductions that overlap with computation.
        waits: rank -> time waited for its messages.
        ops: (op, time) in order.
        loads: op -> time of loading its data; ops without data are missing.
    """

    whole: float
    busy: float = 0.0
    span: float = 0.0
    send: float = 0.0
    data: float = 0.0
    gather: float = 0.0
    reduction: float = 0.0
    reduction_hidden: float = 0.0
    optimizer: float = 0.0
    waits: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    ops: list[tuple[Op, float]] = field(default_factory=list)
    loads: dict[Op, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RankSummary:
    """Mean shares of the makespan of one rank; ``waits`` maps a rank to the share waited for its messages."""

    rank: int
    busy: float
    bubble: float
    p2p: float
    data: float
    gather: float
    reduction: float
    reduction_hidden: float
    optimizer: float
    waits: dict[int, float]

    @property
    def waits_text(self) -> str:
        """Waits as ``rank 1 12.3%, rank 3 0.5%``, longest first."""
        longest = sorted(self.waits.items(), key=lambda item: -item[1])
        return ", ".join(f"rank {peer} {share:.1%}" for peer, share in longest if share >= 5e-4)


@dataclass(frozen=True)
class StageSummary:
    """Median forward plus backward time of a stage on its slowest rank, and the mean over ranks of other stages.

    ``name`` is the number of a stage, ``head part 0`` or ``loss``. Head parts are compared with head parts.
    """

    stage: int
    name: str
    rank: int
    ms: float
    others_ms: float | None


@dataclass(frozen=True)
class LinkSummary:
    """Median time from send to arrival of the messages for which the receiver waited.

    ``fast_ms`` is the time that a tenth of them do not exceed.
    """

    sender: int
    receiver: int
    ms: float
    bytes: int
    messages: int
    fast_ms: float


@dataclass(frozen=True)
class Summary:
    """Result of :func:`summarize`.

    ``bubble_by_step`` equals ``bubble_measured`` of the metrics. ``makespan_by_step`` is in microseconds.
    ``step_s`` is the sum of ``makespan_s`` and ``rest_s``: reduction, optimizer and other work, such as loss and norm.
    All three are means of the rank with the longest computations of each step.
    """

    schedule: str
    world_size: int
    steps: int
    step_s: float
    makespan_s: float
    rest_s: dict[str, float]
    bubble: float
    bubble_by_step: dict[int, float]
    makespan_by_step: dict[int, float]
    ranks: list[RankSummary]
    stages: list[StageSummary]
    links: list[LinkSummary]
    notes: list[str]
    causes: Causes | None = None

    @property
    def slowest_stage(self) -> StageSummary | None:
        return max(self.stages, key=lambda stage: stage.ms, default=None)

    @property
    def slowest_link(self) -> LinkSummary | None:
        return max(self.links, key=lambda link: link.ms, default=None)

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self)
        for key, value in (("slowest_stage", self.slowest_stage), ("slowest_link", self.slowest_link)):
            values[key] = None if value is None else asdict(value)
        return values


def summarize(traces: Traces) -> Summary:
    """Summarize the steps that are complete on every rank."""
    times: dict[int, dict[int, StepTimes]] = {}  # rank -> step -> times
    durations: Durations = defaultdict(lambda: defaultdict(list))
    rows: dict[Row, RowSteps] = {}
    links, replayed = _Links(), list[int]()
    row_of_rank = {trace.rank: row for row, trace in traces.rows().items()}
    for rank, trace in traces.ranks.items():
        steps = times[rank] = {
            step: _step_times(trace, spans, links) for step, spans in trace.steps().items()
        }
        for op, us in (pair for step_times in steps.values() for pair in step_times.ops):
            durations[op.stage, rank][op.kind].append(us)
        replayed = replayed or _spread(sorted(steps), _REPLAYED_STEPS)
        if rank in row_of_rank:
            own = {step: steps[step] for step in replayed if step in steps}
            ops = {step: step_times.ops for step, step_times in own.items()}
            rows[row_of_rank[rank]] = RowSteps(rank, ops, {step: t.loads for step, t in own.items()})
        for step_times in steps.values():  # the ops of a long trace need much memory
            step_times.ops, step_times.loads = [], {}
    makespans = _makespans(times.values())
    bubbles = {
        step: 1 - statistics.fmean(rank_times[step].busy for rank_times in times.values()) / makespan
        for step, makespan in makespans.items()
    }
    notes, timetable = list(traces.notes), _timetable(traces)
    if not makespans:
        notes.append("steps: no step is complete on every rank")
    bubble = statistics.fmean(bubbles.values()) if bubbles else 0.0
    summary = Summary(
        schedule=traces.run["schedule"],
        world_size=traces.run["world_size"],
        steps=len(makespans),
        **_step_parts(times.values(), makespans),
        bubble=bubble,
        bubble_by_step=bubbles,
        makespan_by_step=makespans,
        ranks=[_rank(rank, times[rank], makespans) for rank in times] if makespans else [],
        stages=_summarize_stages(durations, timetable),
        links=links.summaries(),
        notes=notes,
    )
    if timetable is None or not makespans:
        return summary
    return replace(summary, causes=_causes(traces, timetable, rows, summary))


def _spread(steps: list[int], count: int) -> list[int]:
    """Return at most ``count`` of the steps, at equal distances."""
    count = min(count, len(steps))
    return [steps[i * len(steps) // count] for i in range(count)]


def _timetable(traces: Traces) -> Timetable | None:
    try:
        return traces.timetable(traces.run["micro_batches"])
    except DsExtError:
        return None


def _causes(
    traces: Traces, timetable: Timetable, rows: dict[Row, RowSteps], summary: Summary
) -> Causes | None:
    stage_parameters: dict[int, int] = {}
    busy_by_host: dict[str, list[float]] = defaultdict(list)
    for rank in summary.ranks:
        run = traces.ranks[rank.rank].run
        stage_parameters |= {int(stage): size for stage, size in run.get("stage_parameters", {}).items()}
        busy_by_host[str(run.get("host"))].append(rank.busy)
    shared, busy_ranks = None, 0.0
    for trace in traces.ranks.values():
        busy, cores = busy_by_host[str(trace.run.get("host"))], trace.run.get("cores")
        if cores and len(busy) > cores:
            shared, busy_ranks = (len(busy), float(cores)), sum(busy)
    stages = [stage for stage in summary.stages if stage.stage < timetable.placement.stages]
    stage = max(stages, key=lambda stage: stage.ms, default=None)
    ratio = stage.ms / stage.others_ms if stage is not None and stage.others_ms else 1.0
    return find_causes(
        timetable,
        rows,
        {(link.sender, link.receiver): 1e3 * (link.fast_ms if shared else link.ms) for link in summary.links},
        summary.bubble,
        stage_parameters=stage_parameters,
        slowest_stage=(stage.stage, ratio) if stage is not None and ratio >= _UNEVEN else None,
        ranks_per_core=shared,
        busy_ranks=busy_ranks,
        balanced=bool(traces.run.get("balanced")),
    )


def summary_table(summary: Summary) -> list[tuple[str, ...]]:
    gathers = any(r.gather for r in summary.ranks)
    names = ("rank", "busy", "bubble", "p2p", "data", *(["gather"] if gathers else []), "reduction", "hidden")
    rows: list[tuple[str, ...]] = [(*names, "optimizer", "waits for")]
    for r in summary.ranks:
        waits = r.p2p, r.data, *([r.gather] if gathers else [])
        shares = (r.busy, r.bubble, *waits, r.reduction, r.reduction_hidden, r.optimizer)
        rows.append((str(r.rank), *(f"{share:.1%}" for share in shares), r.waits_text))
    return rows


def _makespans(times: Collection[Mapping[int, StepTimes]]) -> dict[int, float]:
    """Return step -> makespan in microseconds, for the steps that are complete on every rank."""
    steps = sorted(set.intersection(*(set(rank_times) for rank_times in times)))
    makespans = {step: max(rank_times[step].span for rank_times in times) for step in steps}
    return {step: makespan for step, makespan in makespans.items() if makespan > 0}


def _step_parts(times: Collection[Mapping[int, StepTimes]], makespans: Mapping[int, float]) -> dict[str, Any]:
    """Return ``step_s``, ``makespan_s`` and ``rest_s`` of a summary; 0 without complete steps."""
    last = [max((rank[step] for rank in times), key=lambda rank: rank.span) for step in makespans]

    def mean_s(microseconds: Callable[[StepTimes], float]) -> float:
        return statistics.fmean(map(microseconds, last)) / 1e6 if last else 0.0

    rest_s = {
        "reduction": mean_s(lambda step: step.reduction),
        "optimizer": mean_s(lambda step: step.optimizer),
        "other": mean_s(lambda step: step.whole - step.span - step.reduction - step.optimizer),
    }
    return {
        "step_s": mean_s(lambda step: step.whole),
        "makespan_s": mean_s(lambda step: step.span),
        "rest_s": rest_s,
    }


def _rank(rank: int, times: Mapping[int, StepTimes], makespans: Mapping[int, float]) -> RankSummary:
    def mean_share(microseconds: Callable[[StepTimes], float]) -> float:
        return statistics.fmean(microseconds(times[step]) / makespan for step, makespan in makespans.items())

    busy = mean_share(lambda step: step.busy)
    waits: dict[int, float] = {}
    for peer in sorted({peer for step in makespans for peer in times[step].waits}):
        waits[peer] = mean_share(lambda step, peer=peer: step.waits.get(peer, 0.0))
    names = ("data", "gather", "reduction", "reduction_hidden", "optimizer")
    return RankSummary(
        rank,
        busy=busy,
        bubble=1 - busy,
        p2p=sum(waits.values()) + mean_share(lambda step: step.send),
        **{name: mean_share(attrgetter(name)) for name in names},
        waits=waits,
    )


def _step_times(trace: RankTrace, spans: Sequence[Event], links: _Links) -> StepTimes:
    """Return the times of one step of a rank from its spans, that of the step first. Add its messages to ``links``."""
    whole, *others = spans
    times = StepTimes(whole["dur"])
    load_us = 0.0  # for the next computation
    idle_us = 0.0  # since the last computation or receive; a rank is idle between spans, which do not overlap
    first = next((event for event in others if not is_asynchronous(event)), whole)
    begin_us, end_us = whole["ts"], first["ts"]
    computations = [event for event in others if event["tid"] == "compute"]
    for event in others:
        duration, thread = event["dur"], event["tid"]
        if not is_asynchronous(event):
            idle_us += max(0.0, event["ts"] - end_us)
            end_us = event["ts"] + duration
        if thread == "compute":
            op = op_of(event)
            times.busy += duration
            times.ops.append((op, duration))
            if load_us:
                times.loads[op], load_us = load_us, 0.0
        elif thread == "recv":
            # A static order waits inside the receive, a dynamic order before it.
            times.waits[event["args"]["peer"]] += idle_us + duration
            links.add(trace.aligned(event), idle_us + duration)
        elif thread == "send":
            times.send += duration
            links.add(trace.aligned(event))
        elif event["name"] in REDUCTIONS:
            times.reduction += duration
        elif thread.startswith("reduce"):
            times.reduction_hidden += _overlap(event, computations)
        elif event["cat"] == LOAD:
            times.data += duration
            load_us += duration
        elif event["cat"] == WAIT_STAGE:
            times.gather += duration
        elif event["name"] == "OptimizerStep":
            times.optimizer += duration
        if thread in ("compute", "recv"):
            idle_us = 0.0
    if first["tid"] == "recv":
        times.waits[first["args"]["peer"]] += max(0.0, first["ts"] - begin_us)
    times.span = max((e["ts"] + e["dur"] for e in computations), default=begin_us) - begin_us
    return times


def _overlap(reduction: Event, computations: Iterable[Event]) -> float:
    begin, end = reduction["ts"], reduction["ts"] + reduction["dur"]
    return sum(max(0.0, min(end, e["ts"] + e["dur"]) - max(begin, e["ts"])) for e in computations)


def _summarize_stages(durations: Durations, timetable: Timetable | None) -> list[StageSummary]:
    """Return the stages in order, each with its slowest rank. The medians of all kinds of ops are added.

    Without a timetable, head parts are unknown.
    """
    times_ms: dict[int, dict[int, float]] = defaultdict(dict)  # stage -> rank -> time
    for (stage, rank), kinds in durations.items():
        times_ms[stage][rank] = sum(map(statistics.median, kinds.values())) / 1e3
    names = {stage: str(stage) for stage in times_ms}
    if timetable is not None:
        names = {stage: timetable.placement.stage_text(stage) for stage in times_ms}
    like = {stage: name.rstrip("0123456789") for stage, name in names.items()}
    stages = []
    for stage, by_rank in sorted(times_ms.items()):
        rank = max(by_rank, key=by_rank.__getitem__)
        peers = [other for other in times_ms if other != stage and like[other] == like[stage]]
        others_ms = [ms for other in peers for ms in times_ms[other].values()]
        mean_ms = statistics.fmean(others_ms) if others_ms else None
        stages.append(StageSummary(stage, names[stage], rank, by_rank[rank], mean_ms))
    return stages


class _Links:
    """Durations of the messages for which their receiver waited."""

    def __init__(self) -> None:
        self._unpaired = UnpairedEnds()
        # (sender, receiver) -> (microseconds, bytes) of every message
        self._messages: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)

    def add(self, event: Event, wait_us: float = 0.0) -> None:
        """Add one end of a message, on rank 0's clock, and the time for which its receiver waited."""
        for message, send, receive in self._unpaired.pairs({**event, "wait_us": wait_us}):
            duration_us = receive["ts"] + receive["dur"] - send["ts"]
            if duration_us > 0 and receive["wait_us"] > max(_MIN_WAIT_US, _MIN_WAIT_SHARE * duration_us):
                _, sender, receiver, *_ = message
                self._messages[sender, receiver].append((duration_us, receive["args"].get("bytes", 0)))

    def summaries(self) -> list[LinkSummary]:
        return [
            LinkSummary(
                sender,
                receiver,
                ms=statistics.median(duration for duration, _ in messages) / 1e3,
                bytes=round(statistics.median(size for _, size in messages)),
                messages=len(messages),
                fast_ms=sorted(duration for duration, _ in messages)[int(_FREE_LINK * len(messages))] / 1e3,
            )
            for (sender, receiver), messages in sorted(self._messages.items())
        ]
