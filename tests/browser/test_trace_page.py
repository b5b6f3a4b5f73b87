"""The page of ``trace view`` in a real browser: plan above run, on one scale, and what waits and reductions tell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from ds_ext.observe.trace.read import read_traces
from ds_ext.observe.trace.view import page
from ds_ext.pipe_schedules import timetable
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.draw.svg import KINDS, LIGHT
from ds_ext.pipe_schedules.simulation import simulate
from tests.trace_folders import UNIT_US, write_traces

from .window import Window, browser, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

RUN = simulate(timetable("bitpipe", 4, 8), Costs(1, 1.2, 0.8, 0.1))
PLAN = simulate(timetable("bitpipe", 4, 8), Costs(1, 1.2, 0.8))
MS = UNIT_US / 1e3


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Window]:
    """The page of a run, opened from its file."""
    folder = tmp_path_factory.mktemp("traces")
    write_traces(folder, RUN, steps=1)
    (folder / "page.html").write_text(page(read_traces(folder)), "utf-8")
    with browser(folder / "profile") as opened:
        opened.prefer(prefers_color_scheme="light")
        opened.open(folder / "page.html")
        settle(opened)
        yield opened
        assert opened.console() == []


def settle(window: Window) -> None:
    window.run("return new Promise((next) => requestAnimationFrame(() => requestAnimationFrame(next)))")


def point(window: Window, plot: int, rank: int, ms: float, below: bool = False) -> list[str]:
    """What the page says of a place."""
    x, y = window.run(
        "const p = plots[arguments[0]]; p.canvas.scrollIntoView({ block: 'center' });"
        "const box = p.canvas.getBoundingClientRect();"
        "return [box.left + toX(p, arguments[2]), box.top + TOP + (arguments[1] + arguments[3]) * p.height]",
        plot, rank, ms, 0.97 if below else 0.5,
    )  # fmt: skip
    window.move(x, y)
    settle(window)
    script = "const tip = document.getElementById('tip'); return tip.hidden ? '' : tip.innerText"
    text: str = window.run(script)
    return text.split("\n")


def test_plan_and_run_are_drawn_on_one_scale(window: Window) -> None:
    """Every computation of both is where it belongs, and read back from the screen in its colour."""
    names = window.run("return [...document.querySelectorAll('h2')].map((h) => h.firstChild.data)")
    assert names == ["bitpipe, planned with the op times of step 1", "bitpipe, measured, step 1"]
    for plot, simulation in enumerate((PLAN, RUN)):
        rows = window.run(
            "return plots[arguments[0]].rows.map((row) => row.map((op) => [name(op), op.start, op.end]))",
            plot,
        )
        for row, spans in zip(rows, simulation.spans, strict=True):
            assert [name for name, _, _ in row] == [str(op) for op, _, _ in spans]
            times = [time * MS for _, start, end in spans for time in (start, end)]
            assert [time for _, start, end in row for time in (start, end)] == pytest.approx(times, abs=0.01)
        places = [
            ((s + e) / 2 * MS, rank, op) for rank, spans in enumerate(simulation.spans) for op, s, e in spans
        ]
        seen = colors(window, plot, [(at, rank) for at, rank, _ in places])
        pipe = simulation.timetable.pipe
        assert seen == [LIGHT.kinds[pipe(op.micro_batch)][KINDS.index(op.kind)] for _, _, op in places]
    left, right = window.run("return plots.map((p) => toX(p, 100) - toX(p, 0))")
    assert left == right > 0


def colors(window: Window, plot: int, places: list[tuple[float, int]]) -> list[str]:
    """The colours drawn at (time, rank), near the upper edge of the row, where no number is."""
    found: Any = window.run(
        "const p = plots[arguments[0]], k = devicePixelRatio, { width, height } = p.canvas;"
        "const data = p.pen.getImageData(0, 0, width, height).data;"
        "return arguments[1].map(([time, rank]) => {"
        "  const x = Math.floor(toX(p, time) * k), y = Math.floor((TOP + rank * p.height + 5) * k);"
        "  const bytes = [...data.slice((y * width + x) * 4, (y * width + x) * 4 + 3)];"
        "  return '#' + bytes.map((byte) => byte.toString(16).padStart(2, '0')).join('');"
        "});",
        plot, places,
    )  # fmt: skip
    return found


def test_heading_units_and_table(window: Window) -> None:
    """The bubble of the step is the same in the figures, in the note and in the summary."""
    assert window.run("return document.querySelector('h1').innerText").startswith(
        "bitpipe on 4 ranks: step 1"
    )
    head, *rows = window.run("return document.querySelector('table').innerText").splitlines()
    assert head.split("\t")[-1] == "waits for" and len(rows) == 4
    assert all(re.search(r"\trank \d \d+\.\d%", row) for row in rows)
    figures = window.run("return [...document.querySelectorAll('dl')].map((dl) => dl.innerText)")[1].split(
        "\n"
    )
    assert figures[1] == f"{RUN.makespan * MS:.4g} ms" and figures[3] == f"{RUN.ideal * MS:.4g} ms"
    assert figures[5] == f"{RUN.bubble:.1%}"
    notes = window.run("return document.querySelector('main > p').innerText")
    assert f"over 4 ranks: {RUN.bubble:.1%}" in notes


def test_a_narrow_window_needs_no_scrolling_sideways(window: Window) -> None:
    window.resize(700, 900)
    settle(window)
    try:
        assert window.run("return document.documentElement.scrollWidth") <= 700
    finally:
        window.resize(1400, 900)
        settle(window)


def test_pointing_tells_computations_waits_and_reductions(window: Window) -> None:
    op, start, end = RUN.spans[1][3]
    said = point(window, 1, 1, (start + end) / 2 * MS)
    assert said[0] == str(op) and said[2] == f"pipe {RUN.timetable.pipe(op.micro_batch)}, rank 1"
    # The first computation of device 1 needs what device 0 sends.
    first, start, _ = RUN.spans[1][0]
    said = point(window, 1, 1, start / 2 * MS)
    assert said[0] == f"waits for rank 0: RecvActivation {first.micro_batch}@{first.stage}"
    assert said[2].startswith("start 0 ms, end ")
    assert point(window, 1, 2, RUN.makespan * MS - 1, below=True)[0].startswith("ReduceGrads @")
    assert point(window, 0, 1, PLAN.spans[1][0][1] / 2 * MS) == [
        ""
    ]  # the plan waits for nobody in particular
