"""One HTML page: the planned timetable above the measured one, on one time scale in milliseconds.

The plan is the timetable of the run priced with the run's own computing times, stage by stage, and messages that cost
nothing: what the measured picture has beside it are messages, waits and the noise of the machine.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...errors import ConfigError
from ...pipe_schedules import Op, Placement, Timetable
from ...pipe_schedules.costs import Costs
from ...pipe_schedules.draw.page import Mark, html
from ...pipe_schedules.ops import ALL_KINDS
from ...pipe_schedules.simulate import Simulation, peak_stages, simulate
from .read import Event, Traces
from .summary import Summary, summarize

AXIS = "time, in milliseconds"

Spans = list[tuple[Op, float, float]]


def page(traces: Traces, step: int | None = None) -> str:
    """The page for one step.

    Args:
        step: by default the one of median length.

    Raises:
        ConfigError: no step is complete, or not the one asked for; the folder does not hold the timetable.
    """
    found = summarize(traces)
    step = _choose(traces, found, step)
    timetable = _timetable(traces, step)
    groups = _measured(traces, step)
    devices = range(timetable.placement.ranks)
    planned = simulate(
        timetable, _costs(timetable, [row.spans for rows in groups.values() for row in rows.values()])
    )
    place = "rank" if traces.run["world_size"] == len(devices) else "device"
    names = [f"{place} {device}" for device in devices]
    pictures, marks, labels = [_named(planned, "planned")], [[[] for _ in devices]], [names]
    for data, rows in groups.items():
        group = f", pipeline group {data}" if len(groups) > 1 else ""
        pictures.append(_picture(timetable, rows, f"measured, step {step}{group}", planned))
        marks.append([rows[device].marks if device in rows else [] for device in devices])
        labels.append([f"{names[d]}{'' if d in rows else ', no trace'}" for d in devices])
    table = _table(found, {rank: trace.run["device"] for rank, trace in traces.ranks.items()}, place)
    return html(pictures, table, _notes(found, step, place), axis=AXIS, marks=marks, rows=labels)


def _choose(traces: Traces, found: Summary, step: int | None) -> int:
    steps = sorted(found.bubble_by_step)
    if not steps:
        raise ConfigError(f"{traces.folder}: no step is complete on every rank, so none can be drawn.")
    if step is None:
        lengths = found.makespan_by_step
        return sorted(steps, key=lambda s: lengths[s])[len(steps) // 2]
    if step not in found.bubble_by_step:
        raise ConfigError(
            f"--step {step}: the traces in {traces.folder} hold {len(steps)} complete steps, {steps[0]} to {steps[-1]}."
        )
    return step


def _timetable(traces: Traces, step: int) -> Timetable:
    micro_batches = traces.run["micro_batches"]
    for trace in traces.ranks.values():
        for event in trace.spans():
            if event["cat"] == "step" and event["args"]["step"] == step:
                micro_batches = event["args"]["micro_batches"]
        break
    timetable = traces.timetable(micro_batches)
    if timetable is None:
        raise ConfigError(
            f"{traces.folder} holds no timetable of {micro_batches} micro-batches, which rank 0 writes beside the "
            f"traces. Copy its timetable*.txt there."
        )
    return timetable


@dataclass
class _Row:
    """A device in a step: computations and what went on beside them, in milliseconds."""

    spans: Spans = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


def _measured(traces: Traces, step: int) -> dict[int, dict[int, _Row]]:
    """Pipeline group -> device -> what it did, in milliseconds from the start of the step, by rank 0's clock.

    With tensor parallelism a device is drawn by the first of its ranks that there is.
    """
    drawn: dict[tuple[int, int], list[Event]] = {}
    for trace in traces.ranks.values():
        place = trace.run["data_parallel_rank"], trace.run["device"]
        if place not in drawn:
            events = (e for e in trace.spans() if e.get("args", {}).get("step") == step)
            drawn[place] = [trace.aligned(event) for event in events]
    start = min(event["ts"] for events in drawn.values() for event in events if event["cat"] == "step")
    groups: dict[int, dict[int, _Row]] = defaultdict(dict)
    for (data, device), events in sorted(drawn.items()):
        row = groups[data][device] = _Row()
        for event in events:
            begin, end = ((time - start) / 1e3 for time in (event["ts"], event["ts"] + event["dur"]))
            values, thread = event["args"], event["tid"]
            if thread == "compute":
                row.spans.append((Op(event["name"][0], values["micro_batch"], values["stage"]), begin, end))
            elif thread == "recv":
                text = f"waits for rank {values['peer']}: {event['name'].partition(' from ')[0]}"
                row.marks.append(Mark(begin, end, below=False, text=text))
            elif event["cat"] != "step":
                row.marks.append(Mark(begin, end, below=thread.startswith("reduce"), text=event["name"]))
    return groups


@dataclass(frozen=True)
class _Measured(Costs):
    """Times as they were measured: every kind of computation has its own at every stage."""

    table: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)

    def durations(self, placement: Placement) -> dict[str, tuple[float, ...]]:
        """Kind of op -> its time at every stage."""
        return dict(self.table)


def _costs(timetable: Timetable, rows: Sequence[Spans]) -> Costs:
    """The mean time of every kind of computation at every stage."""
    took: dict[tuple[str, int], list[float]] = defaultdict(list)
    for spans in rows:
        for op, begin, end in spans:
            took[op.kind, op.stage].append(end - begin)
    stages = range(timetable.placement.stages)
    table = {kind: tuple(statistics.fmean(took.get((kind, s), [0.0])) for s in stages) for kind in ALL_KINDS}
    return _Measured(table=table)


def _named(simulation: Simulation, what: str) -> Simulation:
    timetable = simulation.timetable
    return replace(simulation, timetable=replace(timetable, schedule=f"{timetable.schedule}, {what}"))


def _picture(timetable: Timetable, found: Mapping[int, _Row], what: str, planned: Simulation) -> Simulation:
    """Measured computations in the form of a simulation, to be drawn as one.

    Its ideal, and with it the bubble, is of the devices that have a trace.
    """
    rows = [found[device].spans if device in found else [] for device in range(timetable.placement.ranks)]
    order = tuple(tuple(op for op, _, _ in spans) for spans in rows)
    made = replace(timetable, schedule=f"{timetable.schedule}, {what}", ranks=order)
    makespan = max((spans[-1][2] for spans in rows if spans), default=0.0)
    work = [sum(end - begin for _, begin, end in spans) for spans in rows]
    share = timetable.placement.width / timetable.placement.stages
    return Simulation(
        made,
        tuple(tuple(spans) for spans in rows),
        makespan,
        ideal=sum(work) / len(found),
        peak_activations=tuple(peak_stages(ops) * share for ops in order),
        messages=planned.messages,
        costs=planned.costs,
        busy=tuple(time / makespan if makespan else 0.0 for time in work),
    )


def _table(found: Summary, devices: Mapping[int, int], place: str) -> list[tuple[str, ...]]:
    head = ("rank", "busy", "bubble", "p2p", "reduction", "hidden", "optimizer")
    shares = [(r.busy, r.bubble, r.p2p, r.reduction, r.reduction_hidden, r.optimizer) for r in found.ranks]
    rows = zip(found.ranks, shares, strict=True)
    where = {rank: "" if place == "rank" else f" (device {device})" for rank, device in devices.items()}
    return [
        head,
        *((f"rank {r.rank}{where[r.rank]}", *(f"{share:.1%}" for share in values)) for r, values in rows),
    ]


def _notes(found: Summary, step: int, place: str) -> list[str]:
    ranks = f"{len(found.ranks)} rank{'s' * (len(found.ranks) != 1)}"
    notes = [
        f"Shares are means of {found.steps} step{'s' * (found.steps != 1)}; the bubble of step {step} over {ranks} is "
        f"{found.bubble_by_step[step]:.1%}.",
        "The plan has the computing times of this step, each stage's mean, and messages that take no time.",
    ]
    if place == "device":
        notes.append(
            "A row of the pictures is a device of a pipeline group, drawn by the first of its ranks; the pictures' "
            "bubbles are of these rows."
        )
    stage, link = found.slowest_stage, found.slowest_link
    if stage is not None:
        notes.append(f"Slowest stage: {stage.stage} on rank {stage.rank}, {stage.ms:.2f} ms a micro-batch.")
    if link is not None:
        notes.append(
            f"Slowest link: rank {link.sender} to {link.receiver}, {link.ms:.3f} ms for {link.bytes:,} bytes."
        )
    return [*notes, *found.notes]
