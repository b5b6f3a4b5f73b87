"""Timetables as one self-contained HTML page, which needs no network."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from typing import NamedTuple, cast

from ...errors import ScheduleError
from ..ops import Op
from ..simulation import Simulation
from ..stage_kinds import HEAD_PART
from .svg import (
    BELOW,
    DARK,
    DRAWN,
    HEAD,
    LATER,
    LIGHT,
    Theme,
    axis_title,
    heading,
    kinds_of,
    legend,
    numbers,
    paints,
    peak_unit,
    shades,
    shortest_time,
    slices_text,
    svg,
    widest_label,
)

__all__ = ["html", "svg"]

Word = float | tuple[float, ...]
Plot = dict[str, object]


class Mark(NamedTuple):
    """Interval of a row that is not a computation, with its tooltip; ``data`` fills it as loading of data."""

    start: float
    end: float
    text: str
    data: bool = False


_ROUNDING = 1e-8  # relative; larger than the accumulated error of rounding to nine digits
_BASE, _DIGIT, _LAST_DIGIT = 30, ord("="), ord("]")

_HINT = (
    "Point at a computation, or use the arrow keys, to see it and follow its micro-batch. The wheel and + − zoom, "
    "dragging and scrolling move, 0 shows all."
)


def html(
    simulations: Sequence[Simulation],
    table: Sequence[Sequence[str]] = (),
    notes: Sequence[str] = (),
    axis: str | None = None,
    marks: Sequence[Sequence[Sequence[Mark]]] = (),
    rows: Sequence[Sequence[str]] = (),
    title: str | None = None,
    unit: str = "",
) -> str:
    """Return a page with all timetables on one time scale.

    A script draws the ops from a compact encoding of one to six bytes per op, or more with jitter. If the window is too
    narrow for the labels of the ops, the page shows the first part and scrolls.

    Args:
        table: header and rows of a table above the timetables. The first cell of a row is its name.
        notes: sentences below the table.
        axis: title of the time axis; by default the unit is a forward.
        marks: additional intervals, for every row of every timetable.
        rows: names of the rows of every timetable; by default ``device 0``, ``device 1`` and so on.
        title: heading of the page; None: no heading, and the names of the schedules as the title of the window.
        unit: unit of times, such as ``ms``; empty: a forward.
    """
    if not simulations:
        raise ScheduleError("page: needs at least 1 timetable (got 0).")
    names = ", ".join(dict.fromkeys(s.timetable.schedule for s in simulations))
    window = f"{names}: {heading(simulations[0].timetable)}" if len(simulations) == 1 else names
    header = f"<header>\n{'' if title is None else f'<h1>{escape(title)}</h1>'}{tools(simulations, marks)}\n</header>"
    main = [header, "<main>", *table_html(table, notes), *sections(simulations, unit), "</main>"]
    return document(title or window, main, plots(simulations, axis, marks, rows, unit))


def document(
    title: str, body: Iterable[str], drawn: Sequence[Plot], *, css: str = "", script: str = ""
) -> str:
    """Return a page whose script draws the timetables of its :func:`sections`.

    ``drawn`` are their data, from :func:`plots`, in the same order. ``title`` is that of the window. ``script`` runs
    after the timetables are drawn.
    """
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{_theme_css(drawn)}\n{_file('page.css')}{css}</style>",
            *body,
            *(_drawing(drawn) if drawn else ()),
            f"<script>\n{script}</script>\n</html>\n",
        )
    )


def _drawing(drawn: Sequence[Plot]) -> Iterator[str]:
    yield f'<footer>{_HINT}</footer>\n<div id="tip" role="tooltip" hidden></div>'
    yield '<p id="said" class="unseen" aria-live="polite"></p>'
    yield "<noscript>The timetables are drawn by a script, which this browser does not run.</noscript>"
    data = json.dumps(drawn, separators=(",", ":")).replace("<", "\\u003c")
    yield f'<script type="application/json" id="data">{data}</script>'
    yield f"<script>\n{_file('page.js')}{_file('page_events.js')}</script>"


def tools(simulations: Sequence[Simulation], marks: Sequence[Sequence[Sequence[Mark]]] = ()) -> str:
    return f'<ul class="legend" aria-label="Legend">{_legend(simulations, marks)}</ul>\n{_buttons()}'


def sections(simulations: Sequence[Simulation], unit: str = "", first: int = 0) -> Iterator[str]:
    """Yield a section with heading and canvas for every timetable; ``first`` is the number of the first one."""
    for number, simulation in enumerate(simulations, first):
        yield _section(number, simulation, unit)


def plots(
    simulations: Sequence[Simulation],
    axis: str | None = None,
    marks: Sequence[Sequence[Sequence[Mark]]] = (),
    rows: Sequence[Sequence[str]] = (),
    unit: str = "",
) -> list[Plot]:
    """Return the data that page.js reads; see :func:`_plot`. Arguments as for :func:`html`."""
    drawn = [_plot(simulation, axis, unit) for simulation in simulations]
    for number, (plot, simulation) in enumerate(zip(drawn, simulations, strict=True)):
        plot["marks"] = _intervals(simulation, marks[number] if marks else ())
    for plot, names in zip(drawn, rows, strict=False):
        plot["names"] = names
    return drawn


def _intervals(simulation: Simulation, marks: Sequence[Sequence[Mark]]) -> list[list[tuple[object, ...]]]:
    """Return the marks and the collectives of every row: start, end, whether it is below the row, text, 1 for data."""
    rows: list[list[tuple[object, ...]]] = [[] for _ in simulation.spans]
    for row, of_row in zip(rows, marks, strict=False):
        row += [(_number(m.start), _number(m.end), False, m.text, *([1] if m.data else [])) for m in of_row]
    for row, collectives in zip(rows, simulation.collectives, strict=False):
        row += [(_number(start), _number(end), True, op.name) for op, start, end in collectives]
    return rows


def _file(name: str) -> str:
    return files("ds_ext.pipe_schedules.draw").joinpath(name).read_text("utf-8")


def _theme_css(drawn: Sequence[Plot]) -> str:
    shade_counts = sorted({cast(int, plot["shades"]) for plot in drawn if "shades" in plot})

    def variables(theme: Theme) -> str:
        colors = {key: color for key, color in theme._asdict().items() if key != "kinds"}
        colors |= dict(paints(theme, shade_counts))
        return ":root{" + ";".join(f"--{key}:{color}" for key, color in colors.items()) + "}"

    return f"{variables(LIGHT)}\n@media (prefers-color-scheme:dark){{{variables(DARK)}}}"


def _buttons() -> str:
    buttons = (("out", "Zoom out", "−"), ("in", "Zoom in", "+"), ("all", "Show all", "Show all"))
    out, zoom_in, show_all = (
        f'<button type="button" id="{key}" aria-label="{label}">{text}</button>'
        for key, label, text in buttons
    )
    zoom = '<output id="zoom" aria-label="Zoom">1×</output>'
    return f'<div class="tools" role="toolbar" aria-label="Zoom">{out}{zoom}{zoom_in}{show_all}</div>'


def _legend(simulations: Sequence[Simulation], marks: Sequence[Sequence[Sequence[Mark]]]) -> str:
    used = {kind for s in simulations for kind in kinds_of(s.timetable)}
    kinds = [kind for kind in DRAWN if kind in used]
    pipes = min(max(s.timetable.placement.replicas for s in simulations), len(LIGHT.kinds))
    items = []
    for pipe in range(pipes):
        swatches = (
            f'<span><i style="background:var(--{kind}{pipe})"></i>{legend(kind)}</span>' for kind in kinds
        )
        items.append((f"<b>pipe {pipe}</b> " if pipes > 1 else "") + "".join(swatches))
    items.append('<span><i class="wait"></i>waiting</span>')
    if any(mark.data for rows in marks for row in rows for mark in row):
        items.append('<span><i class="data"></i>loading data</span>')
    if any(s.timetable.placement.stages > s.timetable.placement.num_devices for s in simulations):
        items.append(f'<span><i class="later"></i>{LATER}</span>')
    if any(HEAD_PART in s.timetable.placement.stage_kinds for s in simulations):
        items.append(f"<span>{HEAD}</span>")
    for slices in sorted({s.timetable.slices for s in simulations} - {1}):
        count = shades(slices)
        colors = ",".join(f"var(--{kinds[0]}0-{shade}-{count})" for shade in range(count))
        items.append(
            f'<span><i style="background:linear-gradient(90deg,{colors})"></i>{slices_text(slices)}</span>'
        )
    if any(any(s.collectives) for s in simulations):
        items.append(f'<span><i class="below"></i>{BELOW}</span>')
    return "".join(f"<li>{item}</li>" for item in items)


def _section(number: int, simulation: Simulation, unit: str) -> str:
    timetable = simulation.timetable
    name, sizes = escape(timetable.schedule), heading(timetable)
    costs = numbers(simulation, unit)
    terms = "".join(f"<div><dt>{key}</dt><dd>{value}</dd></div>" for key, value in costs)
    label = f"{name}, {sizes}. " + ", ".join(f"{key} {value}" for key, value in costs)
    return (
        f'<section aria-labelledby="t{number}">\n<div class="title">'
        f'<h2 id="t{number}">{name}<small>{sizes}</small></h2><dl>{terms}</dl></div>\n'
        f'<div class="scroll"><div><canvas tabindex="0" role="application" aria-roledescription="timetable" '
        f'aria-label="{label}. Arrow keys walk through the computations." aria-describedby="said"></canvas></div>'
        "</div>\n</section>"
    )


def table_html(table: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> Iterator[str]:
    if table:
        head, *rows = table
        yield "<table>\n<thead><tr>" + "".join(f'<th scope="col">{escape(c)}</th>' for c in head)
        yield "</tr></thead>\n<tbody>"
        for name, *cells in rows:
            values = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            yield f'<tr><th scope="row">{escape(name)}</th>{values}</tr>'
        yield "</tbody>\n</table>"
    yield from (f"<p>{escape(note)}</p>" for note in notes)


def _plot(simulation: Simulation, axis: str | None, unit: str) -> Plot:
    """Return the data of one timetable. ``rows`` has one string per device: the packed numbers of its words.

    A word is the time of a wait, or an op: its kind, the difference in stage and micro-batch from the previous op of
    that kind on the device, and its time; with slices also the difference in slice. Orders are repetitive, so there are
    few words. The most frequent ones have the smallest numbers.
    """
    timetable = simulation.timetable
    rows = [_words(spans, timetable.slices) for spans in simulation.spans]
    words = [word for word, _ in Counter(itertools.chain.from_iterable(rows)).most_common()]
    number = {word: _packed(i) for i, word in enumerate(words)}
    return {
        "makespan": _number(simulation.makespan),
        "end": _number(simulation.end),
        "ideal": _number(simulation.ideal),
        "shortest": _number(shortest_time([simulation])),
        "label": widest_label(timetable),
        "peaks": [_number(peak) for peak in simulation.peak_activations],
        "axis": axis or axis_title(simulation),
        "unit": unit and f" {unit}",
        "peak_unit": peak_unit(timetable),
        "pipes": timetable.placement.pipes,
        "forward": timetable.placement.forward_devices,
        "pipe": [timetable.pipe(m) for m in range(timetable.micro_batches)],
        **({"slices": timetable.slices, "shades": shades(timetable.slices)} if timetable.slices > 1 else {}),
        "words": words,
        "rows": ["".join(map(number.__getitem__, row)) for row in rows],
    }


def _words(spans: Sequence[tuple[Op, float, float]], slices: int) -> list[Word]:
    words: list[Word] = []
    previous = {kind: (0, 0, 0) for kind in DRAWN}  # stage, micro-batch and slice
    now = 0.0
    for (kind, m, stage, j), start, end in spans:
        # The script adds up the words, so rounding errors must not accumulate, and must not appear as waits.
        wait = start - now
        if abs(wait) > _ROUNDING * start:
            words.append(_number(wait))
            now += _number(wait)
        previous_stage, previous_m, previous_j = previous[kind]
        duration = _number(end - start)
        word = (DRAWN.index(kind), stage - previous_stage, m - previous_m, duration)
        words.append(word if slices == 1 else (*word, j - previous_j))
        previous[kind] = (stage, m, j)
        now += duration
    return words


def _packed(number: int) -> str:
    """Return ``number`` in base 30, with digits starting at ``=``, or at ``]`` for the last digit."""
    text = chr(_LAST_DIGIT + number % _BASE)
    while number >= _BASE:
        number //= _BASE
        text = chr(_DIGIT + number % _BASE) + text
    return text


def _number(value: float) -> float | int:
    rounded = float(f"{value:.9g}")
    return int(rounded) if rounded.is_integer() else rounded
