"""Pages and pictures in a real browser, light and dark, narrow and wide: labels have room and are not crossed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from ds_ext.observe.report.charts import Curve, bars, chart
from ds_ext.pipe_schedules import get_schedule, timetable
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.draw.page import document, html
from ds_ext.pipe_schedules.draw.svg import svg
from ds_ext.pipe_schedules.ports import Collective
from ds_ext.pipe_schedules.simulation import Simulation, simulate
from tests.colors import contrast, luminance

from .test_trace_page import settle
from .window import Window, browser, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

SIXTEEN = {name: simulate(timetable(name, 8, 16)) for name in ("1f1b", "bitpipe", "zb_v", "bitpipe_zb")}
WIDTHS = pytest.mark.parametrize("width", [700, 1400])


@pytest.fixture(scope="module")
def browser_window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Window]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def window(browser_window: Window) -> Iterator[Window]:
    """Window of the usual width in light; afterwards there must be nothing in the console."""
    browser_window.prefer(prefers_color_scheme="light")
    browser_window.resize(1400, 900)
    yield browser_window
    assert browser_window.console() == []


def show(window: Window, path: Path, text: str, width: int = 1400, scheme: str = "light") -> None:
    path.write_text(text, "utf-8")
    window.prefer(prefers_color_scheme=scheme)
    window.resize(width, 900)
    window.open(path)
    settle(window)


# What a redraw writes and which vertical lines it draws on every canvas.
_DRAWN = """
const prototype = CanvasRenderingContext2D.prototype, { fillText, moveTo, lineTo } = prototype;
const drawn = plots.map(() => ({ texts: [], lines: [] }));
const of = (pen) => drawn[plots.findIndex((plot) => plot.pen === pen)];
prototype.fillText = function (text, x, y) {
  const width = this.measureText(text).width, left = x - width * { left: 0, center: 0.5, right: 1 }[this.textAlign];
  const size = parseFloat(this.font);
  of(this)?.texts.push({ text, left, right: left + width, top: y - size / 2, bottom: y + size / 2, size });
  fillText.call(this, text, x, y);
};
let from = null;
prototype.moveTo = function (x, y) { from = [x, y]; moveTo.call(this, x, y); };
prototype.lineTo = function (x, y) {
  if (from[0] === x) of(this)?.lines.push({ x, top: Math.min(from[1], y), bottom: Math.max(from[1], y) });
  from = [x, y];
  lineTo.call(this, x, y);
};
redraw();
return new Promise((next) => requestAnimationFrame(() => requestAnimationFrame(next))).then(() => {
  Object.assign(prototype, { fillText, moveTo, lineTo });
  return drawn;
});
"""


def forwards_in_view(window: Window, plot: int = 0) -> int:
    """The forwards that are drawn as a whole."""
    count: int = window.run(
        "return plots[arguments[0]].rows.flat()"
        ".filter((op) => op.kind === 'F' && op.start >= view.from - 1e-6 && op.end <= view.to + 1e-6).length",
        plot,
    )
    return count


def labels_of_forwards(window: Window, drawn: dict[str, Any], plot: int = 0) -> int:
    """The forwards that have their number on them, inside their box."""
    boxes = window.run(
        "const p = plots[arguments[0]]; return p.rows.flatMap((ops, r) => ops.filter((op) => op.kind === 'F')"
        ".map((op) => [label(op), toX(p, op.start), toX(p, op.end), TOP + r * p.height, TOP + (r + 1) * p.height]))",
        plot,
    )
    left, right = window.run(
        "const p = plots[arguments[0]]; return [toX(p, view.from), toX(p, view.to)]", plot
    )
    return sum(
        any(
            text["text"] == name and x - 0.01 <= text["left"] and text["right"] <= end + 0.01
            and y < text["top"] and text["bottom"] < bottom and text["size"] >= 11
            for text in drawn["texts"]
        )
        for name, x, end, y, bottom in boxes
        if x >= left - 0.01 and end <= right + 0.01
    )  # fmt: skip


@WIDTHS
@pytest.mark.parametrize("name", SIXTEEN)
def test_forwards_have_numbers_at_every_place(window: Window, tmp_path: Path, name: str, width: int) -> None:
    """A timetable whose labels would not fit is wider than the window, and scrolls to its end."""
    show(window, tmp_path / "page.html", html([SIXTEEN[name]]), width)
    scroller = "const s = plots[0].canvas.closest('.scroll');"
    scrolls, whole = window.run(f"{scroller} return [s.scrollWidth > s.clientWidth, view.to === view.end]")
    assert scrolls is not whole and (scrolls or width == 1400)
    count = 0
    for _ in range(50):
        (drawn,) = window.run(_DRAWN)
        visible = forwards_in_view(window)
        assert labels_of_forwards(window, drawn) == visible
        count += visible
        if window.run("return view.to >= view.end * (1 - 1e-9)"):
            break
        window.run(f"{scroller} s.scrollLeft += s.clientWidth / 4")
        settle(window)
    else:
        pytest.fail("the end is never in view")
    assert count >= sum(op.kind == "F" for order in SIXTEEN[name].timetable.orders for op in order)
    assert any(text["text"].startswith("makespan") for text in drawn["texts"])
    assert window.run("return document.documentElement.scrollWidth") <= width


def test_timetables_scroll_together(window: Window, tmp_path: Path) -> None:
    show(window, tmp_path / "page.html", html(list(SIXTEEN.values())), 700)
    window.run("plots[1].canvas.closest('.scroll').scrollLeft = 300")
    settle(window)
    settle(window)
    places = window.run("return [...document.querySelectorAll('.scroll')].map((s) => s.scrollLeft)")
    assert places == pytest.approx([300] * 4, abs=1)
    start, per_pixel = window.run("return [view.from, timePerPixel(plots[0])]")
    assert start == pytest.approx(300 * per_pixel, rel=0.01)
    # Zooming moves the bar, and the bar does not move the view back.
    window.run("document.getElementById('in').click()")
    view = window.run("return [view.from, view.to]")
    settle(window)
    settle(window)
    assert window.run("return [view.from, view.to]") == view
    places = window.run(
        "return plots.map((p) => p.canvas.closest('.scroll').scrollLeft - view.from / timePerPixel(p))"
    )
    assert places == pytest.approx([0] * 4, abs=1)


def test_a_change_of_width_keeps_the_numbers(window: Window, tmp_path: Path) -> None:
    """Unless the reader has chosen the part that is shown."""
    show(window, tmp_path / "page.html", html([simulate(timetable("bitpipe", 4, 8))]))
    assert window.run("return view.to === view.end")
    window.resize(700, 900)
    settle(window)
    settle(window)
    (drawn,) = window.run(_DRAWN)
    assert window.run("return view.to < view.end")
    assert labels_of_forwards(window, drawn) == forwards_in_view(window) > 0
    window.run("document.getElementById('all').click()")
    window.resize(690, 900)
    settle(window)
    assert window.run("return [view.from, view.to === view.end]") == [0, True]
    assert (
        window.run("const s = document.querySelector('.scroll'); return s.scrollWidth - s.clientWidth") == 0
    )


@WIDTHS
def test_labels_of_axes_are_not_cut(window: Window, tmp_path: Path, width: int) -> None:
    interleaved = get_schedule("interleaved").timetable(8, 16, {"chunks": 5})
    shown = [
        simulate(interleaved, Costs(1.0 / 3.0, 0.7, 0.7)),
        SIXTEEN["bitpipe"],
        simulate(timetable("1f1b", 12, 4)),
    ]
    names = [[f"device {device}, no trace" for device in range(8)]]
    show(window, tmp_path / "page.html", html(shown, rows=names, unit="ms"), width)
    for press in ("in", "all"):
        window.run("document.getElementById(arguments[0]).click()", press)
        settle(window)
        for drawn, right in zip(
            window.run(_DRAWN), window.run("return plots.map((p) => p.canvas.clientWidth)"), strict=True
        ):
            top = window.run("return TOP")
            margin = [t for t in drawn["texts"] if t["top"] < top or not t["text"].isdigit()]
            assert len(margin) > 10
            assert [t for t in margin if t["left"] < 0 or t["right"] > right] == []
            rows = window.run("return view.left")
            assert all(t["right"] < rows for t in margin if t["text"].startswith(("device", "stage")))


@WIDTHS
@pytest.mark.parametrize("part", ["all", "in"])
def test_no_line_crosses_the_labels_of_lines(window: Window, tmp_path: Path, width: int, part: str) -> None:
    shown = [*SIXTEEN.values(), simulate(timetable("zb_h1", 4, 64)), simulate(timetable("1f1b", 2, 2))]
    show(window, tmp_path / "page.html", html(shown, unit="ms"), width)
    window.run("document.getElementById(arguments[0]).click(); pan(view.end)", part)
    settle(window)
    seen = 0
    for drawn in window.run(_DRAWN):
        labels = [text for text in drawn["texts"] if text["text"].startswith(("ideal", "makespan"))]
        seen += len(labels)
        for text, line in itertools.product(labels, drawn["lines"]):
            assert not (text["left"] < line["x"] < text["right"] and
                        text["top"] < line["bottom"] and line["top"] < text["bottom"]), (text, line)  # fmt: skip
        for one, other in itertools.combinations(labels, 2):
            assert one["bottom"] <= other["top"] or other["bottom"] <= one["top"]
    assert seen == 12 if part == "all" else seen > 0


_COLORS = """
const p = plots[0], k = devicePixelRatio, { width, height } = p.canvas;
const { data } = p.pen.getImageData(0, 0, width, height);
const color = ([x, y]) => {
  const at = 4 * (Math.floor(y * k) * width + Math.floor(x * k));
  return "#" + [...data.slice(at, at + 3)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
};
const waits = p.rows.flatMap((ops, r) =>
  ops.map((op, i) => ({ r, x: toX(p, i ? ops[i - 1].end : 0), to: toX(p, op.start) })));
const wait = waits.find(({ x, to }) => to - x > 16 && to < toX(p, view.to));
const x = wait.x + 2, y = TOP + wait.r * p.height + 6;
const tile = range(144).map((i) => [x + (i % 12), y + Math.floor(i / 12)]);
const forwards = p.rows.flatMap((ops, r) => ops.filter((op) => op.kind === "F" && op.end < view.to)
  .map((op) => [toX(p, (op.start + op.end) / 2), TOP + r * p.height + 4]));
return [tile.map(color), forwards.map(color)];
"""


@pytest.mark.parametrize(("slices", "from_paper", "from_hatch"), [(1, 3.0, 2.4), (4, 2.2, 1.75)])
def test_forwards_and_waiting_differ_in_dark(
    window: Window, tmp_path: Path, slices: int, from_paper: float, from_hatch: float
) -> None:
    """Contrast between waiting and the forwards of every pipe and slice, read back from the screen."""
    made = get_schedule("bitpipe").timetable(8, 16, {"mode": "greedy"}, slices=slices)
    show(window, tmp_path / "page.html", html([simulate(made)]), 1400, "dark")
    waiting, forwards = window.run(_COLORS)
    assert len(set(waiting)) > 1 and len(set(forwards)) == 2 * slices
    paper, hatch = max(set(waiting), key=waiting.count), max(set(waiting), key=luminance)
    assert min(contrast(forward, paper) for forward in set(forwards)) >= from_paper
    assert min(contrast(forward, hatch) for forward in set(forwards)) >= from_hatch


def pictures() -> list[Any]:
    collectives = ((Collective("gather@0"), 0.0, 3.0),), ((Collective("reduce"), 9.0, 11.0),)
    gathered = replace(simulate(timetable("1f1b", 2, 2)), collectives=collectives)
    return [
        *(pytest.param([simulation], id=name) for name, simulation in SIXTEEN.items()),
        pytest.param([simulate(timetable("bitpipe_zb", 2, 2))], id="small with many kinds"),
        pytest.param([gathered], id="collectives"),
        pytest.param([simulate(get_schedule("bitpipe_zb").timetable(2, 4, slices=8))], id="slices"),
        pytest.param([simulate(timetable("gpipe", 1, 1))], id="one device"),
        pytest.param([simulate(timetable("1f1b", 120, 2))], id="120 devices"),
        pytest.param(list(SIXTEEN.values()), id="one above the other"),
    ]


@pytest.mark.parametrize("simulations", pictures())
def test_pictures(window: Window, tmp_path: Path, simulations: list[Simulation]) -> None:
    """Texts are inside and apart, forwards have numbers, and lines do not cross their labels."""
    show(window, tmp_path / "picture.svg", svg(*simulations, unit="ms"))
    texts = window.run(
        "return [...document.querySelectorAll('text')].map((text) => {"
        "  const { left, right, top, bottom } = text.getBoundingClientRect();"
        "  return { text: text.textContent, left, right, top, bottom, style: text.getAttribute('class') };"
        "})"
    )
    width, height = window.run(
        "const { width, height } = document.rootElement; return [width.baseVal.value, height.baseVal.value]"
    )
    assert [t for t in texts if t["left"] < 0 or t["right"] > width or t["bottom"] > height] == []
    texts.sort(key=lambda t: t["left"])
    for index, one in enumerate(texts):
        for other in texts[index + 1 :]:
            if other["left"] >= one["right"] - 0.5:
                break
            assert one["bottom"] <= other["top"] + 3 or other["bottom"] <= one["top"] + 3, (one, other)
    forwards = sum(op.kind == "F" for s in simulations for order in s.timetable.orders for op in order)
    assert sum(t["style"] == "text c" for t in texts) == forwards
    lines = window.run(
        "return [...document.querySelectorAll('path.mark[stroke-dasharray]')]"
        ".map((path) => path.getBoundingClientRect().toJSON())"
    )
    labels = [
        t for t in texts if t["text"].startswith(("ideal ", "makespan ", "peak ")) and "·" not in t["text"]
    ]
    assert len(labels) == 3 * len(simulations) and len(lines) == 2 * len(simulations)
    for text, line in itertools.product(labels, lines):
        assert not (text["left"] < line["x"] < text["right"] and
                    text["top"] < line["bottom"] and line["top"] < text["bottom"]), (text, line)  # fmt: skip


CHARTS = {
    "falling": ([(step, 0.6 + 8.4 * (1 - step / 100)) for step in range(1, 101)], False),
    "nearly constant": ([(step, 10.8234 + 3e-4 * (step % 7) / 7) for step in range(100_000, 600_001, 1000)], False),
    "tokens": ([(step, 12_345_678 + step) for step in range(1_000_000, 6_000_001, 10_000)], True),
    "rate": ([(step, 6e-5 * step / 500) for step in range(1, 501)], True),
    "one": ([(7, 3.0)], False),
}  # fmt: skip


@WIDTHS
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axes_of_charts(window: Window, tmp_path: Path, width: int, scheme: str) -> None:
    """At least two different ticks, and labels inside the chart and apart."""
    charts = [
        chart(title, [Curve("", points)], (points[0][0], points[-1][0]), from_zero=from_zero)
        for title, (points, from_zero) in CHARTS.items()
    ]
    charts += [
        bars("Memory", [100.0 * rank for rank in range(1, count)], unit=" MiB", summary="")
        for count in (9, 513)
    ]
    page = document(
        "charts",
        ['<div class="charts">', *charts, "</div>"],
        [],
        css=files("ds_ext.observe.report").joinpath("report.css").read_text(),
    )
    show(window, tmp_path / "page.html", page, width, scheme)
    figures = window.run(
        "return [...document.querySelectorAll('figure svg')].map((svg) => [svg.getBoundingClientRect().toJSON(),"
        "  [...svg.querySelectorAll('text')].map((text) => ({ text: text.textContent,"
        "    style: text.getAttribute('class'), ...text.getBoundingClientRect().toJSON() }))])"
    )
    assert len(figures) == len(charts)
    for box, texts in figures:
        ticks = [t["text"] for t in texts if t["style"] == "e" and t["text"] not in ("step", "rank")]
        assert len(set(ticks)) == len(ticks) >= 2
        assert [t for t in texts if t["left"] < box["left"] or t["right"] > box["right"]] == []
        for one, other in itertools.combinations(texts, 2):
            apart = one["right"] <= other["left"] or other["right"] <= one["left"]
            assert apart or one["bottom"] <= other["top"] + 6 or other["bottom"] <= one["top"] + 6, (
                one,
                other,
            )
