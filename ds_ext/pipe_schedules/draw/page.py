"""Timetables as one self-contained HTML page: nothing is fetched, it works from a file and without a network."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from typing import NamedTuple

from ...errors import ScheduleError
from ..ops import Op
from ..simulate import Simulation
from .svg import DARK, DRAWN, LATER, LIGHT, Theme, axis_title, heading, kinds_of, legend, numbers, paints, svg

__all__ = ["html", "svg"]

Word = float | tuple[float, ...]


class Mark(NamedTuple):
    """Something that took time besides the computations: told where one points at it, a bar if it is ``below`` them."""

    start: float
    end: float
    below: bool
    text: str


_ROUNDING = 1e-8  # of a time: more than the ninth digits of all before it add up to
_BASE, _DIGIT, _LAST_DIGIT = 30, ord("="), ord("]")

_HINT = (
    "Point at a computation, or use the arrow keys, to see it and follow its micro-batch. The wheel and + − zoom, "
    "dragging moves, 0 shows all."
)


def html(
    simulations: Sequence[Simulation],
    table: Sequence[Sequence[str]] = (),
    notes: Sequence[str] = (),
    axis: str | None = None,
    marks: Sequence[Sequence[Sequence[Mark]]] = (),
    rows: Sequence[Sequence[str]] = (),
) -> str:
    """A page with the timetables under each other on one time scale.

    The computations are drawn by a script from a compact text, so the page stays small: one to six bytes each,
    unless jitter makes all times different.

    Args:
        table: to be shown above them: a head, then rows of equally many cells, the first of each a name.
        notes: sentences below the table.
        axis: what the time is; by default that it is in forwards.
        marks: what else is to be seen in each timetable's rows, beside or below the computations.
        rows: names of each timetable's rows; by default ``rank 0``, ``rank 1`` and so on.

    Raises:
        ScheduleError: if there is no timetable.
    """
    if not simulations:
        raise ScheduleError("a page needs at least one timetable; got none.")
    names = ", ".join(dict.fromkeys(s.timetable.schedule for s in simulations))
    title = f"{names}: {heading(simulations[0].timetable)}" if len(simulations) == 1 else names
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{_theme_css()}\n{_file('page.css')}</style>",
            f'<header>\n<ul class="legend" aria-label="Legend">{_legend(simulations, marks)}</ul>',
            f"{_tools()}\n</header>",
            "<main>",
            *_table(table, notes),
            *(_section(number, simulation) for number, simulation in enumerate(simulations)),
            f'</main>\n<footer>{_HINT}</footer>\n<div id="tip" role="tooltip" hidden></div>',
            '<p id="said" class="unseen" aria-live="polite"></p>',
            "<noscript>The timetables are drawn by a script, which this browser does not run.</noscript>",
            f'<script type="application/json" id="data">{_data(simulations, axis, marks, rows)}</script>',
            f"<script>\n{_file('page.js')}{_file('page_events.js')}</script>\n</html>\n",
        )
    )


def _file(name: str) -> str:
    return files("ds_ext.pipe_schedules.draw").joinpath(name).read_text("utf-8")


def _theme_css() -> str:
    def variables(theme: Theme) -> str:
        plain = theme._asdict()
        kinds = plain.pop("kinds")
        for pipe, colors in enumerate(kinds):
            plain |= {f"{kind}{pipe}": color for kind, color in paints(colors)}
        return ":root{" + ";".join(f"--{key}:{color}" for key, color in plain.items()) + "}"

    return f"{variables(LIGHT)}\n@media (prefers-color-scheme:dark){{{variables(DARK)}}}"


def _tools() -> str:
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
    if any(s.timetable.placement.stages > s.timetable.placement.num_devices for s in simulations):
        items.append(f'<span><i class="later"></i>{LATER}</span>')
    if any(mark.below for rows in marks for row in rows for mark in row):
        items.append('<span><i class="below"></i>reduction of gradients, below the row</span>')
    return "".join(f"<li>{item}</li>" for item in items)


def _section(number: int, simulation: Simulation) -> str:
    timetable = simulation.timetable
    name, sizes = escape(timetable.schedule), heading(timetable)
    costs = numbers(simulation)
    listed = "".join(f"<div><dt>{key}</dt><dd>{value}</dd></div>" for key, value in costs)
    label = f"{name}, {sizes}. " + ", ".join(f"{key} {value}" for key, value in costs)
    return (
        f'<section aria-labelledby="t{number}">\n<div class="title">'
        f'<h2 id="t{number}">{name}<small>{sizes}</small></h2><dl>{listed}</dl></div>\n'
        f'<canvas tabindex="0" role="application" aria-roledescription="timetable" '
        f'aria-label="{label}. Arrow keys walk through the computations." aria-describedby="said"></canvas>\n</section>'
    )


def _table(table: Sequence[Sequence[str]], notes: Sequence[str]) -> Iterator[str]:
    if table:
        head, *rows = table
        yield "<table>\n<thead><tr>" + "".join(f'<th scope="col">{escape(c)}</th>' for c in head)
        yield "</tr></thead>\n<tbody>"
        for name, *cells in rows:
            values = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            yield f'<tr><th scope="row">{escape(name)}</th>{values}</tr>'
        yield "</tbody>\n</table>"
    yield from (f"<p>{escape(note)}</p>" for note in notes)


def _data(
    simulations: Sequence[Simulation],
    axis: str | None,
    marks: Sequence[Sequence[Sequence[Mark]]],
    rows: Sequence[Sequence[str]],
) -> str:
    """What page.js reads; see :func:`_plot`."""
    plots = [_plot(simulation, axis) for simulation in simulations]
    for plot, listed in zip(plots, marks, strict=False):
        plot["marks"] = [[(_number(m.start), _number(m.end), m.below, m.text) for m in row] for row in listed]
    for plot, names in zip(plots, rows, strict=False):
        plot["names"] = names
    text = json.dumps(plots, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _plot(simulation: Simulation, axis: str | None) -> dict[str, object]:
    """``rows`` has a text a rank: the numbers, packed, of the words that its computations and waits are.

    A word is a wait, its time; or a computation: kind, how many stages and micro-batches it is from the rank's last
    one of that kind, and its time. An order repeats itself, so there are few; the commonest have the least numbers.
    """
    timetable = simulation.timetable
    rows = [_words(spans) for spans in simulation.spans]
    words = [word for word, _ in Counter(itertools.chain.from_iterable(rows)).most_common()]
    number = {word: _packed(i) for i, word in enumerate(words)}
    return {
        "makespan": _number(simulation.makespan),
        "ideal": _number(simulation.ideal),
        "peaks": [_number(peak) for peak in simulation.peak_activations],
        "axis": axis or axis_title(simulation),
        "pipes": timetable.placement.pipes,
        "forward": timetable.placement.forward_devices,
        "pipe": [timetable.pipe(m) for m in range(timetable.micro_batches)],
        "words": words,
        "rows": ["".join(map(number.__getitem__, row)) for row in rows],
    }


def _words(spans: Sequence[tuple[Op, float, float]]) -> list[Word]:
    """The waits and computations of a rank."""
    found: list[Word] = []
    last = {kind: (0, 0) for kind in DRAWN}
    at = 0.0
    for (kind, m, stage), start, end in spans:
        # The script adds up what it is given: rounding must not add up with it, and is no wait.
        wait = start - at
        if abs(wait) > _ROUNDING * start:
            found.append(_number(wait))
            at += _number(wait)
        before, duration = last[kind], _number(end - start)
        found.append((DRAWN.index(kind), stage - before[0], m - before[1], duration))
        last[kind] = (stage, m)
        at += duration
    return found


def _packed(number: int) -> str:
    """To the base 30, digits from ``=``; the last one, from ``]``, says that it is the last."""
    text = chr(_LAST_DIGIT + number % _BASE)
    while number >= _BASE:
        number //= _BASE
        text = chr(_DIGIT + number % _BASE) + text
    return text


def _number(value: float) -> float | int:
    """``value`` to nine digits: without those that only rounding errors have; whole numbers without a point."""
    rounded = float(f"{value:.9g}")
    return int(rounded) if rounded.is_integer() else rounded
