"""The page of ``report`` in a real browser: curves under the mouse, the picker of the step, dark and narrow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_ext.observe.report.folder import read_run
from ds_ext.observe.report.page import report
from ds_ext.pipe_schedules.draw.svg import DARK, LIGHT
from tests.report_runs import write_run
from tests.trace_folders import PRICED, UNIT_US

from .test_trace_page import settle
from .window import Window, browser, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Window]:
    """The page of a run with two starts and three traced steps, opened from its file."""
    folder = tmp_path_factory.mktemp("run")
    page = folder / "page.html"
    page.write_text(report(read_run(write_run(folder))), "utf-8")
    with browser(folder / "profile") as opened:
        opened.prefer(prefers_color_scheme="light")
        opened.open(page)
        settle(opened)
        yield opened
        assert opened.console() == []


def chart(window: Window, title: str) -> int:
    names: list[str] = window.run(
        "return [...document.querySelectorAll('figure[data-curves] b')].map((b) => b.innerText)"
    )
    return names.index(title)


def outputs(window: Window) -> list[str]:
    found: list[str] = window.run(
        "return [...document.querySelectorAll('figure[data-curves] output')].map((o) => o.innerText)"
    )
    return found


def test_the_mouse_reads_all_curves_at_one_step(window: Window) -> None:
    """Pointing at step 8 of one chart shows the values of all charts there; leaving shows the last values again."""
    last, loss, rate = outputs(window), chart(window, "Loss"), chart(window, "Learning rate")
    x, y = window.run(
        "const svg = document.querySelectorAll('figure[data-curves] svg')[arguments[0]];"
        "svg.scrollIntoView({ block: 'center' });"
        "const box = svg.getBoundingClientRect(), [low, high, left, right] = figures[arguments[0]].x;"
        "const at = left + ((8 - low) * (right - left)) / (high - low);"
        "return [box.left + (at * box.width) / svg.viewBox.baseVal.width, box.top + box.height / 2]",
        loss,
    )
    window.move(x, y)
    settle(window)
    shown = outputs(window)
    assert re.findall(r"[\d.]+", shown[loss])[:2] == ["1", "8"]  # loss 8 / 8 at step 8
    assert re.findall(r"[\d.]+", shown[rate]) == ["0.008", "8"]
    assert re.findall(r"[\d.]+", shown[loss])[2:] == ["0.5", "20"]  # the only validation
    window.move(5, y)
    settle(window)
    assert outputs(window) == last


def visible(window: Window) -> list[tuple[str, int]]:
    """Return the headings and the number of drawn pixels of the timetables that are shown."""
    found: Any = window.run(
        "return plots.filter((p) => p.canvas.offsetParent).map((p) => ["
        "  p.canvas.closest('section').querySelector('h2').firstChild.data,"
        "  p.pen.getImageData(0, 0, p.canvas.width, p.canvas.height).data.filter((byte) => byte).length])"
    )
    return [(name, count) for name, count in found]


def test_the_picker_shows_the_timetables_of_a_step(window: Window) -> None:
    ends = [option for option in window.run("return [...picker.options].map((o) => [o.value, o.text])")]
    assert [value for value, _ in ends] == ["1", "2", "3"]
    assert all(f"{PRICED.makespan * UNIT_US / 1e3:.4g} ms" in text for _, text in ends)
    for button, step, disabled in (("before", "1", [True, False]), ("after", "2", [False, False])):
        window.run("document.getElementById(arguments[0]).click()", button)
        settle(window)
        names, pixels = zip(*visible(window), strict=True)
        assert [name.rpartition(" ")[2] for name in names[1:]] == [step] and min(pixels) > 1000
        off = "return ['before', 'after'].map((id) => document.getElementById(id).disabled)"
        assert window.run(off) == disabled
    window.run("picker.value = '3'; picker.dispatchEvent(new Event('change'))")
    settle(window)
    assert [name for name, _ in visible(window)] == [
        "bitpipe, planned with the op times of step 3",
        "bitpipe, measured, step 3",
    ]
    assert window.run("return view.end") == pytest.approx(PRICED.makespan * UNIT_US / 1e3, rel=0.01)


# Heights of the labels on the screen: those of charts are scaled with them.
_LABEL_SIZES = """
return [...document.querySelectorAll('figure text')].map((text) =>
  parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a);
"""
# Numbers that are broken into lines, and toolbars whose buttons are not on one line.
_WRAPPED = """
const visible = (part) => part.offsetParent;
const numbers = [...document.querySelectorAll('dd')].filter(visible)
  .filter((dd) => dd.getBoundingClientRect().height > 1.9 * parseFloat(getComputedStyle(dd).fontSize));
const bars = [...document.querySelectorAll('.tools, .title dl, .picker')].filter(visible)
  .filter((bar) => new Set([...bar.children].map((child) => {
    const box = child.getBoundingClientRect();
    return Math.round((box.top + box.bottom) / 8);
  })).size > 1);
return [...numbers, ...bars].map((part) => part.textContent);
"""


@pytest.mark.parametrize(("scheme", "theme"), [("light", LIGHT), ("dark", DARK)])
@pytest.mark.parametrize("width", [1400, 700])
def test_every_width_and_theme(window: Window, scheme: str, theme: Any, width: int) -> None:
    """The page does not scroll sideways, text stays in its chart, and the colors are those of the theme."""
    window.prefer(prefers_color_scheme=scheme)
    window.resize(width, 900)
    settle(window)
    try:
        assert window.run("return document.documentElement.scrollWidth") <= width
        outside = window.run(
            "return [...document.querySelectorAll('figure')].flatMap((figure) => {"
            "  const box = figure.getBoundingClientRect();"
            "  return [...figure.querySelectorAll('text, output, b')].filter((part) => {"
            "    const own = part.getBoundingClientRect();"
            "    return own.left < box.left - 1 || own.right > box.right + 1;"
            "  }).map((part) => part.textContent);"
            "})"
        )
        assert outside == []
        assert min(window.run(_LABEL_SIZES)) >= 11
        assert window.run(_WRAPPED) == []
        colors = window.run(
            "const of = (s, p) => getComputedStyle(document.querySelector(s))[p];"
            "return [of('body', 'backgroundColor'), of('.curve', 'stroke'), of('select', 'color')]"
        )
        wanted = (theme.paper, theme.kinds[0][2], theme.ink)
        assert [tuple(map(int, re.findall(r"\d+", color))) for color in colors] == [
            tuple(bytes.fromhex(color[1:])) for color in wanted
        ]
    finally:
        window.prefer(prefers_color_scheme="light")
        window.resize(1400, 900)
        settle(window)


def test_the_page_is_self_contained(window: Window) -> None:
    """It loads nothing but itself."""
    assert window.run("return performance.getEntriesByType('resource').map((e) => e.name)") == []


def test_the_page_of_metrics_alone_has_no_errors(window: Window, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(report(read_run(write_run(tmp_path, traced=0))), "utf-8")
    back = window.run("return location.href")
    window.open(tmp_path / "page.html")
    settle(window)
    assert window.run("return [figures.length, document.querySelectorAll('canvas').length]") == [7, 0]
    assert window.console() == []
    window.run("location.href = arguments[0]", back)
