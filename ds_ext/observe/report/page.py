"""Page of a run: what ran, curves, memory, waits, checkpoints, and the timetable of a step, planned above measured."""

from __future__ import annotations

import datetime
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from itertools import chain
from typing import Any

from ...errors import ConfigError
from ...pipe_schedules.draw.page import document, plots, sections, table_html, tools
from ..trace.read import Traces
from ..trace.summary import Summary, summarize
from ..trace.view import AXIS, DrawnStep, draw_steps, median_step, notes, notes_on_drawings, waiting_table
from .charts import DOTS, LINE, STEPS, Curve, bars, chart, number
from .folder import Row, Run, Start

_MOST_STEPS = 60
_MOST_INTERVALS = 40_000  # computations and waits of all embedded steps, about 3 MB
_SAME_BUBBLE = 1e-3
_MIB = 1 << 20
_MEMORY = " MiB"
_FACTORS = {"%": 100.0, _MEMORY: 1 / _MIB}
# Name of a figure -> its key in the metrics, and its unit.
_FIGURES = {
    "loss, last": ("loss", ""),
    "validation loss, last": ("validation_loss", ""),
    "time per step, median": ("iter_time_s", "s"),
    "tokens per second, median": ("tokens_per_s", ""),
    "samples per second, median": ("samples_per_s", ""),
    "TFLOP/s per device, median": ("tflops_per_device", ""),
    "MFU, median": ("mfu", "%"),
    "bubble, median": ("bubble_measured", "%"),
    "bubble of ideal devices": ("bubble_simulated", "%"),
    "peak memory of the worst rank": ("peak_memory_bytes", _MEMORY),
}
_HASH_DIGITS = 12
_SIZES = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "seq_length": "sequence length",
    "vocab_size": "vocabulary",
}

Cells = list[tuple[str, ...]]


def report(run: Run) -> str:
    facts, starts, notes = run.facts, run.starts, list(run.notes)
    summary: Summary | None = None
    steps: dict[int, DrawnStep] = {}
    of_traces: list[str] = []
    if run.traces is not None:
        summary = summarize(run.traces)
        notes += _contradictions(run.rows, summary)
        steps = _draw(run.traces, summary, notes)
        of_traces = [*_timetables(steps, run.traces, summary), *_waits(run.traces, summary)]
    title = _title(run, summary)
    body = [
        f"<header><h1>{escape(title)}</h1></header><p>{escape(_subtitle(run))}</p>\n<main>",
        *(*_figures(run), *_curves(run), *of_traces, *_memory(facts), *_facts(facts)),
        *(*_starts(starts), *_recoveries(starts), *_checkpoints(starts), *_notes(notes), *_details(facts)),
        "</main>",
    ]
    drawn = (plots(step.pictures, AXIS, step.marks, step.rows, "ms") for step in steps.values())
    all_plots = [plot for step_plots in drawn for plot in step_plots]
    return document(title, body, all_plots, css=_file("report.css"), script=_file("report.js"))


def _file(name: str) -> str:
    return files("ds_ext.observe.report").joinpath(name).read_text("utf-8")


def _title(run: Run, summary: Summary | None) -> str:
    """Return "<schedule> on N ranks". Metrics and traces name the schedule that ran, facts that of the start."""
    rows, schedule = run.start.rows, run.facts.get("schedule")
    ranks = run.facts.get("world_size") or (summary and summary.world_size)
    if rows:
        schedule = rows[-1].get("schedule", schedule)
    elif summary is not None:
        schedule = summary.schedule
    return f"{schedule or run.name}" + (f" on {_count_text(ranks, 'rank')}" if ranks else "")


def _subtitle(run: Run) -> str:
    steps, total = len(run.rows), run.facts.get("total_steps")
    parts = [run.name, f"{_count_text(steps, 'step')}{f' of {total:,}' if total and total > steps else ''}"]
    if run.facts:
        parts += [f"last start {_time(run.facts.get('at'))}", _count_text(len(run.starts), "start")]
    return ", ".join(parts)


def _count_text(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _figures(run: Run) -> Iterator[str]:
    """Yield the most important numbers of one start. Rates are medians, which a slow first step does not change."""
    rows = run.start.rows
    if not rows:
        return
    first, last = rows[0], rows[-1]
    if len(run.starts) > 1:
        span = f"steps {first['step']:,} to {last['step']:,}, {last.get('schedule', '?')}"
        yield f"<p>Figures of start {run.number} of {len(run.starts)}: {escape(span)}</p>"
    yield f'<dl class="figures">\n<div><dt>last step</dt><dd>{last["step"]:,}</dd></div>'
    for name, (key, unit) in _FIGURES.items():
        if values := [value for _, value in _values(rows, key, unit)]:
            value = number(statistics.median(values) if name.endswith("median") else values[-1], unit)
            shown_unit = f"<small>{unit.strip()}</small>" if unit else ""
            yield f"<div><dt>{name}</dt><dd>{value}{shown_unit}</dd></div>"
    yield "</dl>"


def _values(rows: Sequence[Row], key: str, unit: str = "") -> list[tuple[int, float]]:
    """Return (step, value) of the steps with a finite number, in the unit."""
    factor = _FACTORS.get(unit, 1.0)
    return [
        (row["step"], factor * row[key])
        for row in rows
        if isinstance(row.get(key), int | float) and math.isfinite(row[key])
    ]


def _facts(facts: dict[str, Any]) -> Iterator[str]:
    if not facts:
        return
    ranks: list[dict[str, Any]] = facts.get("ranks", [])
    sizes = [f"{facts.get(f'{name}_parallel_size', '?')} {name}" for name in ("pipeline", "tensor", "data")]
    lines = {
        "schedule": facts.get("schedule"),
        "ranks": f"{facts.get('world_size', '?')} = {' × '.join(sizes)}",
        "batch": f"{facts.get('train_batch_size', '?')} samples per step: {facts.get('micro_batches', '?')} "
        f"micro-batches of {facts.get('micro_batch_size', '?')} per pipeline group",
        "model": _model_text(facts.get("model", {})),
        "parameters": _parameters_text(facts, ranks),
        "precision": f"{facts.get('precision', '?')}, ZeRO stage {facts.get('zero_stage', '?')}",
        "devices": ", ".join(sorted({str(rank["name"]) for rank in ranks})),
        "hosts": _hosts(ranks),
        "versions": ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items()),
        "commit": _commit_text(facts.get("commit")),
        "command": facts.get("command"),
    }
    rows = [
        f'<tr><th scope="row">{name}</th><td>{escape(str(text))}</td></tr>'
        for name, text in lines.items()
        if text
    ]
    yield from _section("ran", "What ran", ['<table class="facts"><tbody>', *rows, "</tbody></table>"])


def _parameters_text(facts: dict[str, Any], ranks: Sequence[dict[str, Any]]) -> str:
    total, trained = facts.get("parameters"), facts.get("trained_parameters")
    parts = [] if total is None else [f"{total:,}"]
    if total is not None and trained is not None and trained < total:
        parts.append(f"{trained:,} of them trained")
    return ", ".join(filter(None, [*parts, _range_text([rank["parameters"] for rank in ranks], "per rank")]))


def _model_text(model: dict[str, Any]) -> str:
    """Return the usual sizes of the model with their names, or all sizes if it has other ones."""
    sizes = {name: model[key] for key, name in _SIZES.items() if model.get(key) is not None}
    return ", ".join(f"{name} {_plain(value)}" for name, value in (sizes or model).items())


def _commit_text(commit: str | None) -> str:
    if not commit:
        return ""
    changes = ", with uncommitted changes" if commit.endswith("+") else ""
    return f"{commit.rstrip('+')[:_HASH_DIGITS]}{changes}"


def _plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _range_text(values: Sequence[int], suffix: str) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{high:,} {suffix}" if low == high else f"{low:,} to {high:,} {suffix}"


def _hosts(ranks: Sequence[dict[str, Any]]) -> str:
    """Return the hosts with their ranks, as "a (ranks 0 to 3), b (ranks 4 to 7)"."""
    numbers_by_host: dict[str, list[int]] = {}
    for rank, facts in enumerate(ranks):
        numbers_by_host.setdefault(str(facts["host"]), []).append(rank)
    texts = []
    for host, numbers in numbers_by_host.items():
        is_range = numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1
        text = f"{numbers[0]} to {numbers[-1]}" if is_range else ", ".join(map(str, numbers))
        texts.append(f"{host} (rank{'s' * (len(numbers) > 1)} {text})")
    return ", ".join(texts)


def _curves(run: Run) -> Iterator[str]:
    rows = run.rows
    if not rows:
        return
    ends = rows[0]["step"], rows[-1]["step"]
    starts = [
        (start.rows[0]["step"], f"{i}: {start.rows[0].get('schedule', '?')}")
        for i, start in enumerate(run.starts, 1)
        if start.rows
    ]
    marks = starts if len(starts) > 1 else []

    def curve(key: str, unit: str = "", name: str = "", form: str = LINE) -> Curve:
        return Curve(name, _values(rows, key, unit), form)

    rate = curve("tokens_per_s"), "Tokens per second"
    if not rate[0].points:
        rate = curve("samples_per_s"), "Samples per second"
    loss = curve("loss", name="training"), curve("validation_loss", name="validation", form=DOTS)
    bubble = curve("bubble_measured", "%", "measured"), curve("bubble_simulated", "%", "ideal devices", STEPS)
    memory = curve("peak_memory_bytes", _MEMORY, "worst rank")
    curves = [
        chart("Loss", loss, ends, marks, from_zero=False),
        chart("Learning rate", [curve("lr")], ends, marks),
        chart("Gradient norm", [curve("grad_norm")], ends, marks),
        chart(rate[1], [rate[0]], ends, marks),
        chart("Time per step", [curve("iter_time_s")], ends, marks, unit=" s"),
        chart("Bubble", bubble, ends, marks, unit="%"),
        chart("TFLOP/s per device", [curve("tflops_per_device")], ends, marks),
        chart("Peak memory of the worst rank", [memory], ends, marks, unit=_MEMORY),
    ]
    note = ["<p>Vertical lines mark the starts of the job, with their schedules.</p>"] if marks else []
    yield from _section("steps", "Steps", [*note, '<div class="charts">', *curves, "</div>"])


def _memory(facts: dict[str, Any]) -> Iterator[str]:
    peaks = [peak / _MIB for peak in facts.get("peak_memory_bytes", [])]
    if not peaks:
        return
    low, high = min(peaks), max(peaks)
    summary = f"rank {peaks.index(high)} needs {number(high)} MiB, rank {peaks.index(low)} {number(low)} MiB"
    if number(low) == number(high):
        summary = f"{number(high)} MiB" + " on every rank" * (len(peaks) > 1)
    ranks: list[dict[str, Any]] = facts.get("ranks", [])
    kind = "torch's allocations" if any(rank["name"] != "cpu" for rank in ranks) else "resident memory"
    charts = [bars(f"Peak: {kind}", peaks, unit=" MiB", summary=summary)]
    parameters = [rank["parameters"] for rank in ranks]
    if parameters:
        charts.append(bars("Parameters", parameters, unit="", summary=_range_text(parameters, "per rank")))
    yield from _section("memory", "Memory of every rank", charts, box="charts")


def _waits(traces: Traces, summary: Summary) -> Iterator[str]:
    if not summary.steps:
        return
    yield '<section aria-labelledby="waits"><h2 id="waits">Who waited for whom</h2><div class="wide">'
    yield from table_html(waiting_table(traces, summary))
    yield "</div>"
    yield from (f"<p>{escape(note)}</p>" for note in notes(traces, summary))
    yield "</section>"


def _starts(starts: Sequence[Start]) -> Iterator[str]:
    if len(starts) < 2:
        return
    table: Cells = [("start", "at", "schedule", "ranks", "steps", "steps that ran again", "from")]
    last_step: int | None = None  # of the earlier starts
    for index, start in enumerate(starts, 1):
        facts, steps = start.facts, [row["step"] for row in start.rows]
        repeats = max(0, last_step - steps[0] + 1) if steps and last_step is not None else 0
        loads = _events([start], "loaded", "recovered")
        cells = _time(facts.get("at")), str(facts.get("schedule", "?")), str(facts.get("world_size", "?"))
        range_text = f"{steps[0]:,} to {steps[-1]:,}" if steps else "none"
        again = f"{repeats:,}" if steps and index > 1 else ""
        table.append((f"{index}", *cells, range_text, again, loads[-1]["path"] if loads else "the beginning"))
        last_step = steps[-1] if steps else last_step
    yield from _section("starts", "Starts", table_html(table), box="wide")


def _events(starts: Sequence[Start], *kinds: str) -> list[dict[str, Any]]:
    events = (event for start in starts for event in start.facts.get("checkpoints", []))
    return [event for event in events if event["event"] in kinds]


def _recoveries(starts: Sequence[Start]) -> Iterator[str]:
    header = ("restart", "at", "exited", "step", "steps lost", "noticed after", "down", "set-up", "loading")
    table: Cells = [header]
    for event in _events(starts, "recovered"):
        ranks = ", ".join(map(str, event["exited"]))
        exited = f"rank{'s' * (len(event['exited']) > 1)} {ranks}" if ranks else "?"
        numbers = f"{event['step']:,}", f"{event['lost_steps']:,}"
        seconds = (event[key] for key in ("noticed_s", "down_s", "set_up_s", "seconds"))
        times = ("" if value is None else f"{number(value)} s" for value in seconds)
        table.append((f"{event['restart']}", _time(event["at"]), exited, *numbers, *times))
    if len(table) > 1:
        yield from _section("recoveries", "Recoveries", table_html(table), box="wide")


def _checkpoints(starts: Sequence[Start]) -> Iterator[str]:
    table: Cells = [("checkpoint", "step", "at", "took", "folder")]
    for event in _events(starts, "saved", "failed", "loaded"):
        took, path = f"{number(event['seconds'])} s", str(event["path"])
        table.append((event["event"], f"{event['step']:,}", _time(event["at"]), took, path))
    if len(table) > 1:
        yield from _section("checkpoints", "Checkpoints", table_html(table), box="wide")


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _draw(traces: Traces, summary: Summary, notes: list[str]) -> dict[int, DrawnStep]:
    """Return the drawings of the steps that the page embeds, and add a note on the omitted ones."""
    steps = sorted(summary.bubble_by_step)
    if not steps:
        return {}
    median = median_step(summary)
    try:
        drawing = draw_steps(traces, summary, [median])[median]
        rows = [row for picture in drawing.pictures for row in (*picture.spans, *picture.collectives)]
        intervals = sum(map(len, [*rows, *chain.from_iterable(drawing.marks)]))
        selection = _select_steps(summary, max(1, min(_MOST_STEPS, _MOST_INTERVALS // max(intervals, 1))))
        if len(selection) < len(steps):
            notes.append(
                f"The page has the timetables of {len(selection)} of {len(steps)} traced steps, the slowest among "
                f"them. `trace view --step K` draws any step."
            )
        return draw_steps(traces, summary, selection)
    except ConfigError as error:
        notes.append(str(error))
        return {}


def _select_steps(summary: Summary, count: int) -> list[int]:
    """Return ``count`` steps: the median one, the slowest, and others at equal distances."""
    steps = sorted(summary.bubble_by_step)
    if len(steps) <= count:
        return steps
    slowest = max(steps, key=summary.makespan_by_step.__getitem__)
    selection = set([median_step(summary), slowest][:count])
    candidates = [step for step in steps if step not in selection]
    remaining = count - len(selection)
    return sorted(selection.union(candidates[i * len(candidates) // remaining] for i in range(remaining)))


def _timetables(steps: dict[int, DrawnStep], traces: Traces, summary: Summary) -> Iterator[str]:
    """Yield the timetables of all steps, of which report.js shows one."""
    if not steps:
        return
    shown = median_step(summary)
    options = "".join(
        f'<option value="{step}"{" selected" * (step == shown)}>{step} '
        f"({summary.makespan_by_step[step] / 1e3:.4g} ms, bubble {summary.bubble_by_step[step]:.1%})</option>"
        for step in steps
    )
    pictures, marks = steps[shown].pictures, steps[shown].marks
    yield '<section aria-labelledby="step-title"><h2 id="step-title">A step, planned and measured</h2>'
    yield f'<div class="picker"><label for="step">Step</label> <select id="step">{options}</select>'
    yield '<button type="button" id="before" aria-label="Previous step">‹</button>'
    yield '<button type="button" id="after" aria-label="Next step">›</button></div>'
    yield f'<div class="head">{tools(pictures, marks)}</div>'
    first_picture = 0  # number of the step's first picture among those of all steps
    for step, drawing in steps.items():
        hidden = "" if step == shown else " hidden"
        yield f'<div class="step" data-step="{step}"{hidden}>'
        yield from sections(drawing.pictures, "ms", first_picture)
        yield "</div>"
        first_picture += len(drawing.pictures)
    yield from (f"<p>{escape(note)}</p>" for note in notes_on_drawings(traces))
    yield "</section>"


def _contradictions(rows: Sequence[Row], summary: Summary) -> list[str]:
    """Return a note if a step has different bubbles in traces and metrics: they are then of other runs or ranks."""
    bubbles = {row["step"]: row.get("bubble_measured") for row in rows}
    for step, trace_bubble in sorted(summary.bubble_by_step.items()):
        bubble = bubbles.get(step)
        if bubble is not None and abs(bubble - trace_bubble) > _SAME_BUBBLE:
            return [
                f"The traces are not of this run, or not of all its ranks: step {step} has a bubble of "
                f"{trace_bubble:.1%} in the traces and {bubble:.1%} in the metrics."
            ]
    return []


def _notes(lines: Sequence[str]) -> Iterator[str]:
    if lines:
        items = "".join(f"<li>{escape(line)}</li>" for line in lines)
        yield from _section("notes", "Notes", [f'<ul class="notes">{items}</ul>'])


def _section(key: str, title: str, body: Iterable[str], box: str | None = None) -> Iterator[str]:
    """Yield a section with a heading. ``key`` is the id of the heading, ``box`` a class of a div around the body."""
    yield f'<section aria-labelledby="{key}"><h2 id="{key}">{title}</h2>'
    if box is not None:
        yield f'<div class="{box}">'
    yield from body
    yield "</section>" if box is None else "</div></section>"


def _details(facts: dict[str, Any]) -> Iterator[str]:
    texts = {"Plan": facts.get("plan"), "JSON": facts.get("config"), "Model": facts.get("model")}
    for name, value in texts.items():
        if value:
            text = value if isinstance(value, str) else json.dumps(value, indent=2)
            yield f"<details><summary>{name}</summary><pre>{escape(text)}</pre></details>"
