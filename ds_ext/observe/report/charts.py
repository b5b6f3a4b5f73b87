"""Charts of the report: curves over the steps and bars over the ranks, as SVG that report.js makes interactive."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from ...pipe_schedules.draw.svg import nice_step

_WIDTH, _HEIGHT = 560, 196
_LEFT, _RIGHT, _TOP, _BOTTOM = 88, 14, 22, 26
_COLORS = ("I0", "I1")  # of the page's theme
_BUCKETS = 400  # of a curve; each bucket keeps its first, last, lowest and highest point
_OUTLIERS_FROM = 5  # points
_USUAL_SHARE = 0.95  # of the values are usual
_OUTLIER_FACTOR = 2.0  # an outlier is so much higher above the axis' low end than the usual values
_HEADROOM = 0.2  # above the usual values, where outliers are cut
_MARGIN = 0.05
_START_SHARE = 0.2  # of the steps may be a high start
_START_FACTOR = 4.0  # an axis that shows it is so much longer than one that does not
_EQUAL = 1.01  # largest ratio of values that one number describes
_LETTER, _DIGIT = 7.5, 8.6  # mean width of a letter, width of a digit
_FLAT = 1e-6  # relative range of values that are drawn as equal
LINE, DOTS, STEPS = "line", "dots", "steps"

Point = tuple[int, float]


class Curve(NamedTuple):
    """Values over the steps, drawn as a LINE, as DOTS, or as STEPS that keep a value until the next one."""

    name: str
    points: Sequence[Point]
    form: str = LINE


class Scale(NamedTuple):
    """Linear scale of one axis, from values to SVG coordinates."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value. Values outside the axis are drawn at its edge."""
        share = (value - self.low) / (self.high - self.low or 1.0)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)


def chart(
    title: str,
    curves: Sequence[Curve],
    steps: tuple[int, int],
    marks: Sequence[tuple[int, str]] = (),
    *,
    unit: str = "",
    from_zero: bool = True,
) -> str:
    """Return curves over one range of steps; an empty text without points.

    Args:
        steps: first and last step of the horizontal axis.
        marks: (step, label) of vertical lines.
        from_zero: the vertical axis starts at 0.
    """
    curves = [curve._replace(points=thin(curve.points)) for curve in curves if curve.points]
    if not curves:
        return ""
    values = [value for curve in curves for _, value in curve.points]
    later_from = steps[0] + _START_SHARE * (steps[1] - steps[0])
    later = [value for curve in curves for step, value in curve.points if step >= later_from]
    low, high = value_range(values, from_zero, cut_outliers=True, later=later)
    first, last = steps if steps[1] > steps[0] else (steps[0] - 1, steps[1] + 1)
    x = Scale(first, last, _LEFT, _WIDTH - _RIGHT)
    y = Scale(low, high, _HEIGHT - _BOTTOM, _TOP)
    lines = [_curve(curve, x, y, color) for curve, color in zip(curves, _COLORS, strict=False)]
    is_named = len(curves) > 1
    last_values = ", ".join(
        f"{f'{curve.name} ' if is_named else ''}{number(curve.points[-1][1], unit)}{unit}" for curve in curves
    )
    data = {
        "unit": unit,
        "x": [x.low, x.high, x.start, x.end],
        "curves": [[curve.name, curve.points] for curve in curves],
    }
    return _figure(
        title,
        _legend(curves) if is_named else "",
        f"last: {last_values}",
        _outlier_note(curves, high, unit),
        f"{_grid(y, unit)}{_axis(x, 'step')}{_marks(marks, x)}{''.join(lines)}",
        f"{title}, {last_values} at the end; lowest {number(min(values), unit)}, highest {number(max(values), unit)}",
        f" data-curves='{escape(json.dumps(data, separators=(',', ':')))}'",
    )


def _legend(curves: Sequence[Curve]) -> str:
    return "".join(
        f'<span><i style="background:var(--{color})"></i>{escape(curve.name)}</span>'
        for curve, color in zip(curves, _COLORS, strict=False)
    )


def _outlier_note(curves: Sequence[Curve], high: float, unit: str) -> str:
    outliers = [point for curve in curves for point in curve.points if point[1] > high]
    if not outliers:
        return ""
    step, value = max(outliers, key=lambda point: point[1])
    count = f"{len(outliers)} value{'s' * (len(outliers) != 1)}"
    return f"<small>{count} above the scale, up to {number(value, unit)}{unit} at step {step}</small>"


def bars(title: str, values: Sequence[float], *, unit: str, summary: str) -> str:
    """Return one bar per rank with ``summary`` beside the title, which is all if the values are about equal."""
    if max(values) <= _EQUAL * min(values):
        return f"<figure><figcaption><b>{escape(title)}</b><output>{escape(summary)}</output></figcaption></figure>"
    x = Scale(-0.5, len(values) - 0.5, _LEFT, _WIDTH - _RIGHT)
    y = Scale(0.0, value_range(values, True, cut_outliers=False)[1], _HEIGHT - _BOTTOM, _TOP)
    width = x(1) - x(0) if len(values) > 1 else 40.0
    thick = min(0.8 * width, 40.0)
    rectangles = "".join(
        f'<rect x="{x(rank) - thick / 2:.2f}" y="{y(value):.2f}" width="{thick:.2f}" '
        f'height="{y.start - y(value):.2f}" fill="var(--I0)"><title>rank {rank}: {number(value)}{unit}</title></rect>'
        for rank, value in enumerate(values)
    )
    label = f"{title}: {summary}"
    return _figure(title, "", summary, "", f"{_grid(y, unit)}{_axis(x, 'rank')}{rectangles}", label, "")


def number(value: float, unit: str = "", digits: int = 4) -> str:
    """Return a value with significant digits and a separator of thousands; percentages with one decimal."""
    if unit == "%":
        return f"{value:.1f}"
    if value and abs(value) < 1e-3:
        return f"{value:.{digits - 1}g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def thin(points: Sequence[Point]) -> list[Point]:
    """Return at most four points for each of the curve's buckets: first, last, lowest and highest."""
    size = -(-len(points) // _BUCKETS)
    if size <= 4:
        return list(points)
    extremes: list[Point] = []
    for begin in range(0, len(points), size):
        bucket = points[begin : begin + size]
        low = min(bucket, key=lambda point: point[1])
        high = max(bucket, key=lambda point: point[1])
        extremes += sorted({bucket[0], low, high, bucket[-1]})
    return extremes


def value_range(
    values: Sequence[float], from_zero: bool, *, cut_outliers: bool, later: Sequence[float] = ()
) -> tuple[float, float]:
    """Return the ends of the vertical axis.

    Args:
        from_zero: the axis contains 0.
        cut_outliers: a few high values, such as a slow first step, are above the axis. The caller notes them.
        later: values after the start, to which the axis is scaled if those before are much higher.
    """
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if cut_outliers and len(values) >= _OUTLIERS_FROM:
        usual = sorted(values)[int(_USUAL_SHARE * (len(values) - 1))]
        if usual > low and high - low > _OUTLIER_FACTOR * (usual - low):
            high = usual + _HEADROOM * (usual - low)
        if later and max(later) > low and high - low > _START_FACTOR * (max(later) - low):
            high = max(later) + _HEADROOM * (max(later) - low)
    if high - low <= _FLAT * abs(high):
        return (low, low + 1.0) if from_zero else (low - 0.5, low + 0.5)
    margin = _MARGIN * (high - low)
    return (low if from_zero else low - margin), high + margin


def _curve(curve: Curve, x: Scale, y: Scale, color: str) -> str:
    places = [f"{x(step):.2f} {y(value):.2f}" for step, value in curve.points]
    if curve.form == DOTS or len(places) == 1:
        circles = (
            '<circle cx="{}" cy="{}" r="3.2" fill="var(--{})"/>'.format(*place.split(), color)
            for place in places
        )
        return "".join(circles)
    path = f"M{'L'.join(places)}"
    if curve.form == STEPS:
        path = f"M{places[0]}" + "".join("H{}V{}".format(*place.split()) for place in places[1:])
    return f'<path class="curve" d="{path}" stroke="var(--{color})"/>'


def _marks(marks: Sequence[tuple[int, str]], x: Scale) -> str:
    """Return vertical lines with labels above the curves; a label without room beside the one before is left out."""
    texts, free = [], 0.0
    for step, label in marks:
        texts.append(f'<path class="start" d="M{x(step):.2f} {_TOP - 4}V{_HEIGHT - _BOTTOM}"/>')
        width = _LETTER * len(label)
        left = min(x(step), _WIDTH - width)
        if left >= free:
            texts.append(f'<text x="{left:.2f}" y="{_TOP - 8}">{escape(label)}</text>')
            free = left + width + _LETTER
    return "".join(texts)


def _grid(y: Scale, unit: str) -> str:
    # Ticks of a narrow range differ in later digits.
    digits = max(4, math.ceil(math.log10(max(abs(y.low), abs(y.high)) / (y.high - y.low))) + 2)
    lines = (
        f'<path class="line" d="M{_LEFT} {y(value):.2f}H{_WIDTH - _RIGHT}"/>'
        f'<text class="e" x="{_LEFT - 7}" y="{y(value) + 4:.2f}">{number(value, digits=digits)}'
        f"{unit if unit == '%' else ''}</text>"
        for value in _ticks(y.low, y.high, (y.high - y.low) / 6)
    )
    return "".join(lines)


def _axis(x: Scale, name: str) -> str:
    bottom, ticks = _HEIGHT - _BOTTOM, list[str]()
    most = min(9.0, (x.end - x.start) / (_DIGIT * (len(f"{x.high:,.0f}") + 3)))
    for value in _ticks(x.low, x.high, max(1.0, (x.high - x.low) / most)):
        half = _DIGIT / 2 * len(f"{value:,.0f}")
        label_x = min(max(x(value), _LEFT - _DIGIT / 2 + half), _WIDTH - half)
        ticks.append(
            f'<path class="line" d="M{x(value):.2f} {bottom}v4"/>'
            f'<text class="m" x="{label_x:.2f}" y="{bottom + 16}">{value:,.0f}</text>'
        )
    return f'{"".join(ticks)}<text class="e" x="{_LEFT - 7}" y="{bottom + 16}">{name}</text>'


def _ticks(low: float, high: float, least: float) -> Iterator[float]:
    """Yield round values from ``low`` to ``high`` that are at least ``least`` apart."""
    step = nice_step(least)
    for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1):
        yield i * step


def _figure(title: str, keys: str, value: str, note: str, drawing: str, label: str, data: str) -> str:
    return (
        f"<figure{data}><figcaption><b>{escape(title)}</b>{keys}<output>{escape(value)}</output></figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">{drawing}</svg>{note}</figure>'
    )
