"""SVG diagram of a timetable, and the colors, words and numbers that it shares with the HTML page."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from html import escape
from typing import NamedTuple

from ..ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE, Op, slice_text
from ..simulation import Simulation
from ..stage_kinds import HEAD_PART
from ..timetables import Timetable

WORDS = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "input gradient",
    BACKWARD_WEIGHT: "weight gradient",
    RECOMPUTE: "repeated forward",
}


class Theme(NamedTuple):
    """Colors of the light or the dark theme.

    ``kinds[p]`` are the colors of pipe p: forward, whole backward, input gradient, weight gradient. A repeated forward
    has the color of a forward and a star. Pipes differ in hue. The first two are blue and orange, which remain distinct
    with every kind of color blindness. Kinds differ in lightness, even when printed in gray. ``text`` is the color of
    labels on forwards, ``weight`` on weight gradients, ``inverse`` on the other two.
    """

    paper: str
    ink: str
    muted: str
    line: str
    hatch: str
    bar: str
    text: str
    weight: str
    inverse: str
    kinds: tuple[tuple[str, str, str, str], ...]


LIGHT = Theme(
    paper="#ffffff",
    ink="#1b2128",
    muted="#5d6875",
    line="#dfe4ea",
    hatch="#dde2e8",
    bar="#b4bcc6",
    text="#1b2128",
    weight="#1b2128",
    inverse="#ffffff",
    kinds=(
        ("#cce2f5", "#1a5287", "#3778b1", "#8dbbe2"),
        ("#fddcb8", "#8f3f04", "#b85a14", "#f2ab64"),
        ("#cbe9dd", "#086047", "#1a8364", "#84cbb0"),
        ("#eed8ea", "#7d3672", "#a35295", "#d7a2cc"),
    ),
)
DARK = Theme(
    paper="#14181d",
    ink="#e8edf2",
    muted="#9aa6b2",
    line="#2b323a",
    hatch="#242b33",
    bar="#55606c",
    text="#ffffff",
    weight="#10151a",
    inverse="#10151a",
    kinds=(
        ("#306899", "#b5d9f5", "#79b4e0", "#568fc1"),
        ("#8e5726", "#facc9e", "#e69e5a", "#c17a36"),
        ("#26705b", "#a1e1cc", "#5fbfa0", "#399b7e"),
        ("#8a5080", "#ebcbe4", "#d19ec7", "#af78a7"),
    ),
)
_MAX_LISTED = 16
HEAD = "3h: a part of the head"
BELOW = "reduction or gather, below the row"
LATER = "a later stage on the same device"
KINDS = FORWARD + BACKWARD + BACKWARD_INPUT + BACKWARD_WEIGHT  # in the order of a palette
DRAWN = KINDS + RECOMPUTE
# Color of the labels on a kind, as a field of the theme.
TONES = {
    FORWARD: "text",
    BACKWARD: "inverse",
    BACKWARD_INPUT: "inverse",
    BACKWARD_WEIGHT: "weight",
    RECOMPUTE: "text",
}
# Shades of the first and the last slice of a kind, as positions on the scale paper, forward, weight gradient, input
# gradient, backward, ink. Labels stay readable on every shade, and the shades of two kinds do not overlap.
_SHADES = {
    FORWARD: (0.75, 1.35),
    BACKWARD_WEIGHT: (1.7, 2.2),
    BACKWARD_INPUT: (3.0, 3.5),
    BACKWARD: (3.8, 4.5),
    RECOMPUTE: (0.75, 1.35),
}
_MOST_SHADES = 8


def shades(slices: int) -> int:
    return min(slices, _MOST_SHADES)


def color_class(op: Op, timetable: Timetable) -> str:
    """Return the kind and pipe of ``op``, such as ``F0``, and with slices its shade, such as ``F0-2-4`` for 2 of 4.

    Pipes beyond the palette reuse its colors.
    """
    name = f"{op.kind}{timetable.pipe(op.micro_batch) % len(LIGHT.kinds)}"
    count = shades(timetable.slices)
    return name if count == 1 else f"{name}-{op.slice * count // timetable.slices}-{count}"


def heading(timetable: Timetable) -> str:
    placement, n = timetable.placement, timetable.micro_batches
    stages = f"{placement.stages} stages on " if placement.forward_devices else ""
    devices = f"{placement.num_devices} device{'s' * (placement.num_devices != 1)}"
    slices = f" in {timetable.slices} slices" if timetable.slices > 1 else ""
    return f"{stages}{devices}, {n} micro-batch{'es' * (n != 1)}{slices}"


def numbers(simulation: Simulation, unit: str = "") -> list[tuple[str, str]]:
    peaks = [f"{peak:g}" for peak in simulation.peak_activations]
    if len(peaks) > _MAX_LISTED:
        peaks = [f"{min(simulation.peak_activations):g} to {max(simulation.peak_activations):g}"]
    return [
        ("makespan", f"{simulation.makespan:.4g} {unit}" if unit else f"{simulation.makespan:g}"),
        ("ideal", f"{simulation.ideal:.4g} {unit}" if unit else f"{simulation.ideal:g}"),
        ("bubble", f"{simulation.bubble:.1%}"),
        ("peak activations", " ".join(peaks)),
    ]


def shortest_time(simulations: Sequence[Simulation]) -> float:
    """Return the time that nine of ten ops take at least, ops that take no time aside; 1 if no op takes time.

    A few very short ops must not make a diagram much wider.
    """
    times = sorted(
        end - start for s in simulations for row in s.spans for _, start, end in row if end > start
    )
    return times[len(times) // 10] if times else 1.0


def widest_label(timetable: Timetable) -> float:
    """Return the pixels that an op needs for the label of the last slice of the last micro-batch."""
    return _label_width(slice_text(timetable.micro_batches - 1, timetable.slices - 1))


def _label_width(label: str) -> float:
    return 7 * len(label) - 3.5 * label.count(".") + 3  # a point is half as wide as a digit


def peak_unit(timetable: Timetable) -> str:
    """Return the unit of peak activations: what 1/D of the model keeps for one micro-batch."""
    devices = timetable.placement.devices_per_pipe
    return "of the model" if devices == 1 else f"of 1/{devices} model"


def axis_title(simulation: Simulation) -> str:
    """Return the title of the time axis, with the unit of time: a forward of 1/D of the model."""
    timetable = simulation.timetable
    devices = timetable.placement.devices_per_pipe
    kind = timetable.placement.graph_kind if timetable.trains else FORWARD
    stages = range(timetable.placement.stages)  # without parts of the head
    ops = (
        span for row in simulation.spans for span in row if span[0].kind == kind and span[0].stage in stages
    )
    forwards = sum(end - start for _, start, end in ops)
    forward = f"{forwards / (timetable.micro_batches * devices):.4g}"
    share = "the model" if devices == 1 else f"1/{devices} of the model"
    if forward == "1":
        return f"time, in forwards of {share}"
    return f"time (a forward of {share} takes {forward})"


def kinds_of(timetable: Timetable) -> list[str]:
    kinds = {op.kind for order in timetable.orders for op in order}
    return [kind for kind in DRAWN if kind in kinds]


def slices_text(slices: int) -> str:
    return f"slices 0 to {slices - 1}"


def legend(kind: str) -> str:
    """Return the legend of a kind. Only the star distinguishes a repeated forward from a forward."""
    return f"{WORDS[kind]}, 3*" if kind == RECOMPUTE else WORDS[kind]


def paints(theme: Theme, counts: Collection[int] = ()) -> Iterator[tuple[str, str]]:
    """Yield every class of :func:`color_class` with its color; ``counts`` are the numbers of shades that occur."""
    for pipe, colors in enumerate(theme.kinds):
        palette = dict(zip(KINDS, colors, strict=True)) | {RECOMPUTE: colors[KINDS.index(FORWARD)]}
        scale = (
            theme.paper,
            *map(palette.__getitem__, (FORWARD, BACKWARD_WEIGHT, BACKWARD_INPUT, BACKWARD)),
            theme.ink,
        )
        for kind, color in palette.items():
            yield f"{kind}{pipe}", color
            first, last = _SHADES[kind]
            for count in counts:
                for shade in range(count):
                    position = first + (last - first) * shade / (count - 1)
                    yield f"{kind}{pipe}-{shade}-{count}", _mix(scale, position)


def _mix(scale: tuple[str, ...], position: float) -> str:
    """Return the color at ``position`` between the colors of ``scale``, which are at 0, 1, 2, ..."""
    lower, share = int(position), position % 1
    channels = ((int(scale[lower][i : i + 2], 16), int(scale[lower + 1][i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in channels)


_ROW, _LEFT, _RIGHT, _TOP = 26, 80, 112, 90
_FONT = "system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"


def svg(*simulations: Simulation, axis: str | None = None, unit: str = "") -> str:
    """Return an SVG diagram with one row per device, to scale, in the viewer's light or dark theme.

    Several timetables are drawn one above the other, on one time scale.

    Args:
        axis: title of the time axis; by default the unit is a forward.
        unit: unit of times, such as ``ms``; empty: a forward.
    """
    longest = max(simulation.end for simulation in simulations)
    columns = longest / shortest_time(simulations)
    label = max(widest_label(s.timetable) for s in simulations)
    column = max(min(1200 / max(columns, 1), 26), label)
    # Not too wide for viewers. If no op takes time, any scale will do.
    scale = min(columns * column, 12000) / (longest or 1) or column
    width = max(_LEFT + longest * scale + _RIGHT, 560)
    blocks, labels, y = [], [], 0
    for simulation in simulations:
        name, sizes = escape(simulation.timetable.schedule), heading(simulation.timetable)
        costs = " · ".join(f"{key} {value}" for key, value in numbers(simulation, unit))
        bottom = _TOP + len(simulation.spans) * _ROW
        labels.append(f"{name}, {sizes}: {costs}")
        blocks += [
            f'<g transform="translate(0 {y})">',
            f'<text x="16" y="26" class="name">{name}<tspan class="muted sizes" dx="10">{sizes}</tspan></text>',
            f'<text x="16" y="46" class="muted">{costs}</text>',
            *_rows(simulation, scale),
            *_marks(simulation, scale, bottom, unit),
            *_axis(simulation, scale, bottom, axis),
            "</g>",
        ]
        y += bottom + 44
    most = max(simulations, key=lambda s: (s.timetable.placement.replicas, len(kinds_of(s.timetable))))
    keys, y = _legend(most.timetable, any(any(s.collectives) for s in simulations), width, y + 12)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {y}" width="{_n(width)}" '
        f'height="{y}" role="img" aria-label="{"; ".join(labels)}">',
        _style({count for s in simulations if (count := shades(s.timetable.slices)) > 1}),
        '<defs><pattern id="wait" width="6" height="6" patternUnits="userSpaceOnUse"><path d="M-1 7L7 -1M-1 1L1 '
        '-1M5 7L7 5" class="hatch"/></pattern></defs><rect class="paper" width="100%" height="100%"/>',
        *blocks,
        *keys,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _style(counts: Collection[int]) -> str:
    return (
        f"<style>text{{font:11px {_FONT}}}.name{{font-size:17px;font-weight:600}}.sizes{{font-size:13px;"
        f"font-weight:400}}.c{{text-anchor:middle}}.e{{text-anchor:end}}.hatch,.grid,.mark{{fill:none}}"
        f"{_colors(LIGHT, counts)}@media(prefers-color-scheme:dark){{{_colors(DARK, counts)}}}</style>"
    )


def _colors(theme: Theme, counts: Collection[int]) -> str:
    rules = {
        ".paper": f"fill:{theme.paper}",
        "text,.text": f"fill:{theme.text}",
        ".weight": f"fill:{theme.weight}",
        ".inverse": f"fill:{theme.inverse}",
        ".muted": f"fill:{theme.muted}",
        ".bar": f"fill:{theme.bar}",
        ".hatch,.grid": f"stroke:{theme.hatch}",
        ".mark": f"stroke:{theme.muted}",
    }
    rules |= {f".{name}": f"fill:{color}" for name, color in paints(theme, counts)}
    return "".join(f"{selector}{{{rule}}}" for selector, rule in rules.items())


def _rows(simulation: Simulation, scale: float) -> Iterator[str]:
    """Yield the ops of every device on a background of waiting, and a bar for its peak activations."""
    timetable, placement = simulation.timetable, simulation.timetable.placement
    most = max(simulation.peak_activations, default=0) or 1
    end_x = _LEFT + simulation.end * scale
    for text, y in (("peak activations", _TOP - 22), (peak_unit(timetable), _TOP - 7)):
        yield f'<text x="{_n(end_x + 12)}" y="{y}" class="muted">{text}</text>'
    for device, spans in enumerate(simulation.spans):
        y, peak = _TOP + device * _ROW, simulation.peak_activations[device]
        yield f'<text x="{_LEFT - 10}" y="{y + 17}" class="e">device {device}</text>'
        yield (
            f'<rect x="{_LEFT}" y="{y + 2}" width="{_n(simulation.end * scale)}" height="{_ROW - 4}" '
            f'fill="url(#wait)"/>'
        )
        for collective, start, end in simulation.collectives[device] if simulation.collectives else ():
            place = f'x="{_n(_LEFT + start * scale)}" y="{y + _ROW - 1.5}" height="3"'
            width = _n(max((end - start) * scale - 1, 0.5))
            tip = f"{collective.name}: {start:g} to {end:g}"
            yield f'<rect class="text" {place} width="{width}"><title>{tip}</title></rect>'
        for op, start, end in spans:
            pipe = timetable.pipe(op.micro_batch)
            visit = placement.visits.get((op.stage, pipe), 0), placement.pipes[pipe].count(device)
            yield _box(op, start, end, timetable, scale, y, visit)
        bar = f'<rect x="{_n(end_x + 12)}" y="{y + 9}" width="{_n(44 * peak / most)}" height="8" rx="2" '
        yield f'{bar}class="bar"/><text x="{_n(end_x + 86)}" y="{y + 17}" class="e">{peak:g}</text>'


def _box(
    op: Op, start: float, end: float, timetable: Timetable, scale: float, y: float, visit: tuple[int, int]
) -> str:
    """Return an op of the row at ``y``. ``visit`` has the number of earlier stages of the pipe there, and of all."""
    x, width = _LEFT + start * scale, (end - start) * scale
    mark = "h" if op.stage >= timetable.placement.stages else "*" * (op.kind == RECOMPUTE)
    label = f"{slice_text(op.micro_batch, op.slice)}{mark}"
    tone = TONES[op.kind]
    part = f", slice {op.slice}" if timetable.slices > 1 else ""
    tip = f"{op}: {WORDS[op.kind]}{part}, pipe {timetable.pipe(op.micro_batch)}, {start:g} to {end:g}"
    box = (
        f'<rect class="{color_class(op, timetable)}" x="{_n(x + 0.5)}" y="{y + 2}" width="{_n(max(width - 1, 0))}" '
        f'height="{_ROW - 4}" rx="2"><title>{tip}</title></rect>'
    )
    earlier, count = visit
    if earlier:
        bar = max((width - 5) * earlier / (count - 1), 0)
        position = f'x="{_n(x + 2.5)}" y="{y + _ROW - 6}" width="{_n(bar)}" height="2"'
        box += f'<rect class="{tone}" {position} opacity=".5"/>'
    if round(width, 2) >= _label_width(label):
        box += f'<text class="{tone} c" x="{_n(x + width / 2)}" y="{y + 16.5}" pointer-events="none">{label}</text>'
    return box


def _marks(simulation: Simulation, scale: float, bottom: float, unit: str) -> Iterator[str]:
    """Yield lines at the ideal and at the makespan; the bubble is between them."""
    marks = (
        ("makespan", simulation.makespan, "none", _TOP - 22),
        ("ideal", simulation.ideal, "3 3", _TOP - 7),
    )
    for name, time, dash, y in marks:
        label = f"{name} {time:.4g} {unit}" if unit else f"{name} {time:g}"
        x = _n(_LEFT + time * scale)
        yield f'<path class="mark" d="M{x} {y - 8}V{bottom + 4}" stroke-dasharray="{dash}"/>'
        yield f'<text class="muted e" x="{x}" dx="-4" y="{y}">{label}</text>'


def _axis(simulation: Simulation, scale: float, bottom: float, title: str | None) -> Iterator[str]:
    step = nice_step(48 / scale)
    for i in range(int(simulation.end / step + 1e-9) + 1):
        x = _n(_LEFT + i * step * scale)
        yield f'<path class="mark" d="M{x} {bottom}v4"/>'
        yield f'<text class="muted c" x="{x}" y="{bottom + 17}">{i * step:g}</text>'
    yield f'<text class="muted" x="{_LEFT}" y="{bottom + 34}">{title or axis_title(simulation)}</text>'


def nice_step(least: float) -> float:
    """Return the smallest of ..., 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, ... that is at least ``least``."""
    power = 1.0
    while power > least:
        power /= 10
    while power * 10 < least:
        power *= 10
    return next((power * factor for factor in (1, 2, 5) if power * factor >= least), power * 10)


def _legend(timetable: Timetable, has_collectives: bool, width: float, y: float) -> tuple[list[str], float]:
    """Return the legend from ``y`` on, in lines of at most ``width``, and the y below it."""
    items = list[tuple[str, int, str]]()  # swatch, its width, text
    for pipe in range(min(timetable.placement.replicas, len(LIGHT.kinds))):
        name = f"pipe {pipe}: " if timetable.placement.replicas > 1 else ""
        for kind in kinds_of(timetable):
            swatch = f'<rect class="{kind}{pipe}" width="13" height="11" rx="2"/>'
            items.append((swatch, 13, name + legend(kind)))
            name = ""
    items.append(('<rect width="13" height="11" fill="url(#wait)"/>', 13, "waiting"))
    if timetable.placement.stages > timetable.placement.num_devices:
        items.append(('<rect class="muted" y="7" width="13" height="2"/>', 13, LATER))
    if has_collectives:
        items.append(('<rect class="text" y="4" width="13" height="3"/>', 13, BELOW))
    if HEAD_PART in timetable.placement.stage_kinds:
        items.append(("", -5, HEAD))
    if timetable.slices > 1:
        count, kind = shades(timetable.slices), kinds_of(timetable)[0]
        swatches = (
            f'<rect class="{kind}0-{shade}-{count}" x="{9 * shade}" width="9" height="11"/>'
            for shade in range(count)
        )
        items.append(("".join(swatches), 9 * count, slices_text(timetable.slices)))
    parts, x = list[str](), 16.0
    for swatch, size, text in items:
        advance = size + 21 + 6.2 * len(text)
        if x + advance > width:
            x, y = 16.0, y + 18
        label = f'<text class="muted" x="{size + 5}" y="10">{text}</text>'
        parts.append(f'<g transform="translate({_n(x)} {_n(y)})">{swatch}{label}</g>')
        x += advance
    return parts, y + 18


def _n(value: float) -> str:
    """Return a coordinate with two decimals, which is finer than any screen."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
