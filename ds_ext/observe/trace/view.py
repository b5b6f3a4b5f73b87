"""Drawings of measured steps: an HTML page with plan and run of one trace, and an SVG of one or several traces.

The page has the planned timetable above the measured one, on one time scale in milliseconds.

The plan is the timetable simulated with the mean measured time of every kind of op at every stage, and with messages
that take no time. Differences between the two diagrams therefore come from messages, waits and noise.

Makespan and bubble of a measured step have one definition, that of the summary and of the metrics: a rank's time counts
from its own start of the step.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ...errors import ConfigError
from ...pipe_schedules import Timetable
from ...pipe_schedules.draw.page import Mark, html
from ...pipe_schedules.draw.svg import svg
from ...pipe_schedules.ports import Collective
from ...pipe_schedules.simulation import Simulation, peak_stages, simulate
from .costs import Quantity, Spans, costs_of_ops
from .event import LOAD
from .read import Event, Row, Traces, is_asynchronous, op_of
from .summary import Summary, summarize, summary_table

AXIS = "time, in milliseconds"

StepEvents = dict[Row, list[Event]]  # of one step, first the one of the whole step


def page(traces: Traces, step: int | None = None) -> str:
    """Return the page for one step; None: the step with the median makespan."""
    summary = summarize(traces)
    step = _choose_step(traces, summary, step)
    drawing = draw_steps(traces, summary, [step])[step]
    world = traces.run["world_size"]
    title = f"{drawing.schedule} on {world} rank{'s' * (world != 1)}: step {step}, planned and measured"
    return html(
        drawing.pictures,
        waiting_table(traces, summary),
        notes(traces, summary, step),
        axis=AXIS,
        marks=drawing.marks,
        rows=drawing.rows,
        title=title,
        unit="ms",
    )


class DrawnStep(NamedTuple):
    """Planned timetable of a step, then the measured one of every pipeline group, for the page.

    ``marks`` has the waits of every row of every timetable, ``rows`` the names of these rows.
    """

    schedule: str
    pictures: list[Simulation]
    marks: list[list[list[Mark]]]
    rows: list[list[str]]


def draw_steps(traces: Traces, summary: Summary, steps: Collection[int]) -> dict[int, DrawnStep]:
    """Return step -> drawing, for complete steps."""
    unit = _unit(traces)
    return {
        step: _draw(traces, summary, step, events, unit) for step, events in _events(traces, steps).items()
    }


def _draw(traces: Traces, summary: Summary, step: int, events: StepEvents, unit: str) -> DrawnStep:
    timetable = _timetable(traces, events)
    groups = _rows(events, timetable.placement.num_devices)
    times: dict[Quantity, list[float]] = defaultdict(list)
    for op, begin, end in (span for rows in groups.values() for row in rows for span in row.spans):
        times[op.kind, op.stage].append(end - begin)
    means = {key: statistics.fmean(values) for key, values in times.items()}
    plan = simulate(timetable, costs_of_ops(means, timetable.placement))
    title = f"{timetable.schedule}, planned with the op times of step {step}"
    drawing = DrawnStep(
        timetable.schedule,
        [replace(plan, timetable=replace(timetable, schedule=title))],
        [[[] for _ in plan.spans]],
        [[f"{unit} {device}" for device in range(len(plan.spans))]],
    )
    makespan = summary.makespan_by_step[step] / 1e3
    for number, rows in groups.items():
        title = f"measured, step {step}" + (f", pipeline group {number}" if len(groups) > 1 else "")
        drawing.pictures.append(_measured_simulation(timetable, rows, title, plan, makespan))
        drawing.marks.append([row.marks for row in rows])
        notes = ("" if row.has_trace else ", no trace" for row in rows)
        drawing.rows.append([f"{unit} {device}{note}" for device, note in enumerate(notes)])
    return drawing


def _unit(traces: Traces) -> str:
    """Return the name for a row of the drawing: "rank" if each device has one rank, else "device"."""
    ranks, world = traces.ranks.items(), traces.run["world_size"]
    is_rank = world == traces.run["pipeline_parallel_size"] and all(
        rank == trace.run["device"] for rank, trace in ranks
    )
    return "rank" if is_rank else "device"


def picture(runs: Sequence[Traces], step: int | None = None) -> str:
    """Return an SVG of one step of every run, one above the other on one time scale. See page() for ``step``.

    It shows the first pipeline group of a run.
    """
    pictures = []
    for traces in runs:
        summary = summarize(traces)
        number = _choose_step(traces, summary, step)
        events = _events(traces, [number])[number]
        timetable = _timetable(traces, events)
        _, rows = min(_rows(events, timetable.placement.num_devices).items())
        makespan = summary.makespan_by_step[number] / 1e3
        pictures.append(_measured_simulation(timetable, rows, "measured", simulate(timetable), makespan))
    return svg(*pictures, axis=AXIS, unit="ms")


def _choose_step(traces: Traces, summary: Summary, step: int | None) -> int:
    steps = sorted(summary.bubble_by_step)
    if not steps:
        raise ConfigError(
            f"{traces.folder}: no step is complete on every rank. Trace at least one whole step."
        )
    if step is None:
        return median_step(summary)
    if step not in summary.bubble_by_step:
        raise ConfigError(
            f"--step: not a complete step of {traces.folder} (got {step}). Use one of its {len(steps)} complete steps, "
            f"{steps[0]} to {steps[-1]}."
        )
    return step


def median_step(summary: Summary) -> int:
    makespans = summary.makespan_by_step
    return sorted(sorted(makespans), key=lambda step: makespans[step])[len(makespans) // 2]


def _events(traces: Traces, steps: Collection[int]) -> dict[int, StepEvents]:
    """Return step -> (pipeline group, device) -> events on rank 0's clock, for the steps that have any.

    With tensor parallelism these are the events of the first rank of the device that has a trace.
    """
    events: dict[int, StepEvents] = {}
    for row, trace in traces.rows().items():
        for step, spans in trace.steps().items():
            if step in steps:
                events.setdefault(step, {})[row] = list(map(trace.aligned, spans))
    return events


def _timetable(traces: Traces, step_events: StepEvents) -> Timetable:
    micro_batches = next(iter(step_events.values()))[0]["args"]["micro_batches"]
    timetable = traces.timetable(micro_batches)
    if timetable is None:
        raise ConfigError(
            f"{traces.folder}: no timetable for {micro_batches} micro-batches. Copy timetable*.txt from rank 0's trace "
            "folder."
        )
    return timetable


@dataclass
class _Row:
    """One device in one step: ops, collectives, and marks for waits and other spans, in milliseconds."""

    has_trace: bool = False
    spans: Spans = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    collectives: list[tuple[Collective, float, float]] = field(default_factory=list)

    def add(self, event: Event, start_us: float) -> None:
        """Add a span of the step that starts at ``start_us``."""
        begin = (event["ts"] - start_us) / 1e3
        end = (event["ts"] + event["dur"] - start_us) / 1e3
        values, thread = event["args"], event["tid"]
        if thread == "compute":
            self.spans.append((op_of(event), begin, end))
        elif thread == "recv":
            text = f"waits for rank {values['peer']}: {event['name'].partition(' from ')[0]}"
            self.marks.append(Mark(begin, end, text))
        elif event["cat"] == LOAD:
            self.marks.append(Mark(begin, end, f"loads data: {event['name']}", data=True))
        elif is_asynchronous(event):
            self.collectives.append((Collective(event["name"]), begin, end))
        else:
            self.marks.append(Mark(begin, end, event["name"]))


def _rows(step_events: StepEvents, num_devices: int) -> dict[int, list[_Row]]:
    """Return pipeline group -> row of every device, in milliseconds from the start of the step."""
    start_us = min(whole["ts"] for whole, *_ in step_events.values())
    groups: dict[int, list[_Row]] = {}
    for (group, device), (_, *spans) in sorted(step_events.items()):
        row = groups.setdefault(group, [_Row() for _ in range(num_devices)])[device]
        row.has_trace = True
        for event in spans:
            row.add(event, start_us)
    return groups


def _measured_simulation(
    timetable: Timetable, rows: Sequence[_Row], title: str, plan: Simulation, makespan: float
) -> Simulation:
    """Return the measured ops as a simulation in milliseconds. Its ideal and bubble ignore devices without a trace."""
    placement = timetable.placement
    orders = tuple(tuple(op for op, _, _ in row.spans) for row in rows)
    busy_ms = [sum(end - begin for _, begin, end in row.spans) for row in rows]
    stage_share = placement.devices_per_pipe / placement.stages
    return Simulation(
        replace(timetable, schedule=f"{timetable.schedule}, {title}", orders=orders),
        tuple(tuple(row.spans) for row in rows),
        makespan,
        ideal=sum(busy_ms) / sum(row.has_trace for row in rows),
        peak_activations=tuple(peak_stages(ops, stages=placement.stages) * stage_share for ops in orders),
        messages=plan.messages,
        costs=plan.costs,
        busy=tuple(time / makespan if makespan else 0.0 for time in busy_ms),
        collectives=tuple(tuple(row.collectives) for row in rows),
    )


def waiting_table(traces: Traces, summary: Summary) -> list[tuple[str, ...]]:
    header, *rows = summary_table(summary)
    devices = {}
    if _unit(traces) == "device":
        devices = {f"{rank}": f" (device {trace.run['device']})" for rank, trace in traces.ranks.items()}
    return [header, *((f"rank {rank}{devices.get(rank, '')}", *cells) for rank, *cells in rows)]


def notes(traces: Traces, summary: Summary, step: int | None = None) -> list[str]:
    """Return the notes below the table; without ``step``, those that concern all steps."""
    ranks = f"{len(summary.ranks)} rank{'s' * (len(summary.ranks) != 1)}"
    bubble = (
        "" if step is None else f" Bubble of step {step} over {ranks}: {summary.bubble_by_step[step]:.1%}."
    )
    notes = [f"Shares are means over {summary.steps} step{'s' * (summary.steps != 1)}.{bubble}"]
    if step is not None:
        notes += notes_on_drawings(traces)
    stage, link = summary.slowest_stage, summary.slowest_link
    if stage is not None:
        notes.append(
            f"Slowest stage: {stage.name} on rank {stage.rank}, {stage.ms:.2f} ms per micro-batch (median)."
        )
    if link is not None:
        notes.append(
            f"Slowest link: rank {link.sender} to {link.receiver}, {link.ms:.3f} ms for {link.bytes:,} bytes (median)."
        )
    if summary.causes is not None:
        notes += summary.causes.lines()
    return [*notes, *summary.notes]


def notes_on_drawings(traces: Traces) -> list[str]:
    notes = [
        "The plan uses the mean measured time of every stage in this step, and messages that take no time. Its bubble "
        "is that of the schedule and of uneven stages in this step."
    ]
    if _unit(traces) == "device":
        notes.append(
            "A row is a device of a pipeline group and shows its first rank. The diagrams' bubbles refer to these rows."
        )
    return notes
