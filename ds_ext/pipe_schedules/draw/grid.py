"""Grid over time, the output of ``show``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import TypeVar

from ..ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE, Op, slice_text
from ..simulation import Simulation
from ..timetables import Timetable
from .order import order_grid

Number = TypeVar("Number", int, float)
T = TypeVar("T")
LEGEND = "3 forward of micro-batch 3   3'- its backward   . waiting"
SPLIT_LEGEND = "3' its input gradient   3\" its weight gradient"
REPEATED_LEGEND = "3* its repeated forward, with the graph"
SLICE_LEGEND = "3.2 slice 2 of micro-batch 3"
COLLECTIVE_LEGEND = (
    "r2--- reduction of the gradients of stage 2, g2--- gather of its weights, g--- of all stages, t--- sum of the "
    "gradients of tied weights, r--- their reduction"
)
HEAD_LEGEND = '3h its part of the head, 3h" the weight gradient'

_MARKS = {FORWARD: "", BACKWARD: "'", BACKWARD_INPUT: "'", BACKWARD_WEIGHT: '"', RECOMPUTE: "*"}
_COLORS = ("36", "33", "35", "32")  # one terminal color per pipe
_MAX_WIDTH = 4000
_MAX_UNITS_PER_OP = 12


def time_grid(simulation: Simulation, *, labels: str = "micro-batch", color: bool = False) -> str:
    """Return one line per device: ``3`` is a forward of micro-batch 3, ``3'-`` its backward, ``.`` waiting.

    Below it are the collectives of the device: ``r2---`` is the reduction of stage 2, ``g2---`` its gather.

    If no op takes time, or lines would be too long, the result is the device x step grid.

    Args:
        labels: ``"micro-batch"``, or ``"op"`` for ``F3@1``.
        color: give each pipe a terminal color.
    """
    if not any(end > start for row in simulation.spans for _, start, end in row):
        return order_grid(simulation.timetable)
    unit = _time_unit(simulation)
    cells = [
        [(op, _column(start, unit), _column(end, unit)) for op, start, end in spans]
        for spans in simulation.spans
    ]
    stages = simulation.timetable.placement.stages
    texts = {op: str(op) if labels == "op" else _short(op, stages) for row in cells for op, _, _ in row}
    # Characters per unit of time: enough for the text of every op and a space.
    lengths = [(len(texts[op]) + 1, end - start) for row in cells for op, start, end in row if end > start]
    wide = max((math.ceil(length / units) for length, units in lengths), default=1)
    columns = max((end for row in cells for _, _, end in row), default=0)
    if max(columns, simulation.end / unit) * wide > _MAX_WIDTH:
        return order_grid(simulation.timetable)
    idle = ".".ljust(wide)
    width = len(str(len(cells) - 1))
    lines = []
    for device, row in enumerate(cells):
        line = ""
        column = 0
        for op, start, end in row:
            line += idle * (start - column)
            if end > start:
                line += _cell(op, texts[op], (end - start) * wide, simulation.timetable, color)
            column = end
        line += idle * (columns - column)
        lines.append(f"device {device:>{width}}  {line}".rstrip())
        for text in _collective_lines(simulation, device, wide / unit):
            lines.append(" " * (width + 9) + text)
    return "\n".join(lines)


def _collective_lines(simulation: Simulation, device: int, scale: float) -> list[str]:
    """Return the collectives of a device as text with ``scale`` characters per unit of time, on as few lines as fit."""
    spans = []
    for op, start, end in simulation.collectives[device] if simulation.collectives else ():
        kind, _, stage = op.name.partition("@")
        first = round(start * scale)
        text = f"{kind[0]}{stage}".ljust(round(end * scale) - first, "-")
        spans.append((first, first + len(text), text))
    lines = []
    for lane in in_lanes(spans):
        line = ""
        for first, _, text in lane:
            line = line.ljust(first) + text
        lines.append(line)
    return lines


def in_lanes(spans: Iterable[tuple[Number, Number, T]]) -> list[list[tuple[Number, Number, T]]]:
    """Return the (start, end, value) spans in as few rows as possible without overlaps."""
    lanes: list[list[tuple[Number, Number, T]]] = []
    for span in sorted(spans, key=lambda span: span[0]):
        lane = next((lane for lane in lanes if lane[-1][1] <= span[0]), None)
        if lane is None:
            lanes.append([span])
        else:
            lane.append(span)
    return lanes


def _cell(op: Op, text: str, width: int, timetable: Timetable, color: bool) -> str:
    """Return ``text`` padded to ``width`` characters; backwards are padded with dashes.

    ``color`` gives each pipe a color and reverses other ops than forwards, also repeated forwards without dashes.
    """
    body = text if op.kind in (FORWARD, RECOMPUTE) else text.ljust(width - 1, "-")
    gap = " " * (width - len(body))
    if color:
        code = _COLORS[timetable.pipe(op.micro_batch) % len(_COLORS)]
        body = f"\x1b[{code}{'' if op.kind == FORWARD else ';7'}m{body}\x1b[0m"
    return body + gap


def _short(op: Op, stages: int) -> str:
    head = "h" if op.stage >= stages else ""
    return f"{slice_text(op.micro_batch, op.slice)}{head}{_MARKS[op.kind]}"


def _column(time: float, unit: float) -> int:
    """Return the nearest column. Halves round up, so an op of one unit always gets one column."""
    return math.floor(time / unit + 0.5 + 1e-6)


def _time_unit(simulation: Simulation) -> float:
    """Return the time per column: the shortest time between two events, or more if lines would be very long."""
    spans = [(start, end) for row in simulation.spans for _, start, end in row if end > start]
    # Times that differ only by rounding count as one edge.
    scale = simulation.makespan
    edges = sorted({0.0, *(round(t / scale, 9) for span in spans for t in span)})
    shortest = min(b - a for a, b in itertools.pairwise(edges)) * scale
    durations = [end - start for start, end in spans]
    return shortest if max(durations) <= _MAX_UNITS_PER_OP * shortest else min(durations)
