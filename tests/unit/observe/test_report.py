"""The report of a run: what it reads, its charts, and the numbers on the page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ext.__main__ import main
from ds_ext.errors import ConfigError
from ds_ext.observe.report.charts import Curve, bars, chart, number, thin, value_range
from ds_ext.observe.report.folder import read_run
from ds_ext.observe.report.page import report
from ds_ext.observe.run_record import RunRecord, record_file
from ds_ext.observe.trace.read import read_traces
from ds_ext.observe.trace.summary import summarize
from tests.report_runs import FACTS, MIB, metrics_row, write_rows, write_run
from tests.trace_folders import PRICED, write_traces


def cells(page: str, title: str) -> list[list[str]]:
    """Return the rows of the table in the section with that heading."""
    section = page.split(f">{title}</h2>")[1].split("</section>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", section, re.DOTALL)
    return [[unescape(re.sub("<.*?>", "", cell)) for cell in re.split(r"</t[hd]>", row)[:-1]] for row in rows]


def figures(page: str) -> dict[str, str]:
    found = re.findall(r"<div><dt>(.*?)</dt><dd>(.*?)</dd></div>", page.split("</dl>")[0])
    return {name: re.sub("<.*?>", "", value) for name, value in found}


def test_steps_that_ran_again_count_once(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path).parent)
    assert [[row["step"] for row in start.rows] for start in run.starts] == [
        list(range(1, 13)),
        list(range(11, 21)),
    ]
    assert [row["step"] for row in run.rows] == list(range(1, 21))
    assert [row["loss"] for row in run.rows[9:12]] == [8 / 10, 4 / 11, 4 / 12]
    assert run.facts["peak_memory_bytes"] == [(200 + 10 * rank) * MIB for rank in range(4)]
    assert run.traces is not None and sorted(run.traces.ranks) == [0, 1, 2, 3] and run.notes == []


def test_the_page_has_the_numbers_of_the_run(tmp_path: Path) -> None:
    page = report(read_run(write_run(tmp_path)))
    shown = figures(page)
    assert shown["last step"] == "20"
    assert shown["loss, last"] == "0.2" and shown["validation loss, last"] == "0.5"
    assert shown["tokens per second, median"] == "640"
    assert shown["bubble, median"] == f"{100 * PRICED.bubble:.1f}%"
    assert shown["bubble of ideal devices"] == "12.5%"
    assert shown["peak memory of the worst rank"] == "300MiB"
    assert not any(name.startswith("MFU") for name in shown)
    ran = dict(cells(page, "What ran"))
    assert ran["ranks"].startswith("4 = 4 ") and "16 samples" in ran["batch"]
    assert "8" in ran["model"] and "32" in ran["model"] and ran["parameters"].startswith("1,000 to 1,003")
    assert re.findall(r"node\d|\d to \d", ran["hosts"]) == ["node0", "0 to 1", "node1", "2 to 3"]
    head, *starts = cells(page, "Starts")
    assert [(row[4], row[5]) for row in starts] == [("1 to 12", ""), ("11 to 20", "2")]
    assert [row[2] for row in starts] == ["bitpipe"] * 2
    assert starts[1][6] == "/saved/step_10" and head[0] == "start"
    assert [row[:2] for row in cells(page, "Checkpoints")[1:]] == [["saved", "10"], ["loaded", "10"]]
    waits = cells(page, "Who waited for whom")
    assert [row[0] for row in waits[1:]] == [f"rank {rank}" for rank in range(4)]
    assert re.findall(r"<title>rank (\d): (\d+) MiB</title>", page) == [
        (str(rank), str(200 + 10 * rank)) for rank in range(4)
    ]
    assert re.findall(r'data-step="(\d+)"( hidden)?', page) == [("1", " hidden"), ("2", ""), ("3", " hidden")]
    assert "world 4 &lt;&amp;&gt;" in page and "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_figures_belong_to_one_start(tmp_path: Path) -> None:
    """The first start has another schedule and is slower; a third one has no step."""
    metrics = tmp_path / "metrics.jsonl"
    for schedule, steps, seconds in (
        ("1f1b", range(1, 31), 0.7),
        ("bitpipe", range(25, 31), 0.25),
        ("zb_v", (), 0),
    ):
        RunRecord(metrics, {**FACTS, "schedule": schedule}, [])
        times = {"iter_time_s": seconds, "schedule": schedule, "bubble_simulated": 0.1 * len(schedule)}
        write_rows(metrics, [metrics_row(step, **times) for step in steps])
    page = report(read_run(metrics))
    shown = figures(page)
    assert (shown["time per step, median"], shown["last step"]) == ("0.25s", "30")
    assert "<h1>bitpipe on 4 ranks</h1>" in page
    assert re.findall(r"<p>Figures of start (\d) of (\d): steps (\d+) to (\d+), (\w+)</p>", page) == [
        ("2", "3", "25", "30", "bitpipe")
    ]
    assert dict(cells(page, "What ran"))["schedule"] == "bitpipe"
    # Both starts are marked in each of the seven charts, and the bubble of ideal devices changes in a step.
    assert len(re.findall('<path class="start"', page)) == 7 * 2
    assert len(re.findall(">1: 1f1b</text>", page)) == len(re.findall(">2: bitpipe</text>", page)) == 7
    bubble = page.split("<b>Bubble</b>")[1].split("</figure>")[0]
    paths = re.findall(r'<path class="curve" d="M([^"]+)"', bubble)
    assert len(paths) == 2 and "H" in paths[1] and "L" not in paths[1]


def test_curves_and_timetables_come_before_the_tables(tmp_path: Path) -> None:
    page = report(read_run(write_run(tmp_path)))
    headings = re.findall(r'<h2 id="[a-z-]+">([^<]+)</h2>', page)
    assert headings == [
        *("Steps", "A step, planned and measured", "Who waited for whom", "Memory of every rank", "What ran"),
        *("Starts", "Checkpoints"),
    ]
    causes = summarize(read_traces(tmp_path / "traces")).causes
    assert causes is not None and causes.sentence().replace("'", "&#x27;") in page


def test_equal_bars_are_a_number(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    record = RunRecord(metrics, FACTS, [])
    write_rows(metrics, [metrics_row(1)])
    record.note_memory([300 * MIB] * 4)
    memory = report(read_run(metrics)).split(">Memory of every rank</h2>")[1].split("</section>")[0]
    assert "<rect" not in memory and "300 MiB on every rank" in memory and "1,000 to 1,003 per rank" in memory


def test_the_page_of_one_rank(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    RunRecord(metrics, {**FACTS, "world_size": 1, "parameters": 1000, "trained_parameters": 10}, [])
    write_rows(metrics, [metrics_row(1)])
    page = report(read_run(metrics))
    assert "<h1>bitpipe on 1 rank</h1>" in page and "1 ranks" not in page
    assert dict(cells(page, "What ran"))["parameters"].startswith("1,000, 10 of them trained")


@pytest.mark.parametrize("parts", ["metrics", "traces", "record"])
def test_a_part_alone_makes_a_page(tmp_path: Path, parts: str) -> None:
    metrics = write_run(tmp_path, traced=0)
    if parts == "metrics":
        record_file(metrics).unlink()
    if parts == "traces":
        metrics.unlink()
        record_file(metrics).unlink()
        write_traces(tmp_path, PRICED, steps=1)
    run = read_run(tmp_path)
    page = report(run)
    assert ("Loss" in page, "What ran" in page, 'id="step"' in page) == (
        parts != "traces",
        parts == "record",
        parts == "traces",
    )
    assert len(run.notes) == {"metrics": 2, "traces": 1, "record": 1}[parts]


def test_traces_of_another_run_are_noted(tmp_path: Path) -> None:
    metrics = write_run(tmp_path)
    assert "are not of this run" not in report(read_run(metrics))
    rows = [metrics_row(step, bubble_measured=0.9) for step in range(1, 4)]
    metrics.unlink()
    write_rows(metrics, rows)
    assert f"{PRICED.bubble:.1%}" in report(read_run(metrics)).split('class="notes"')[1]
    assert "90.0%" in report(read_run(metrics)).split('class="notes"')[1]


def test_damaged_lines_and_records_are_noted(tmp_path: Path) -> None:
    metrics = write_run(tmp_path)
    with metrics.open("a") as file:
        file.write('{"step": 21, "lo')
    record_file(metrics).write_text("{")
    run = read_run(tmp_path)
    assert len(run.rows) == 20 and len(run.notes) == 3 and all("metrics." in note for note in run.notes)


def test_values_that_are_not_finite_leave_gaps(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    write_rows(metrics, [metrics_row(1), metrics_row(2, loss=None, grad_norm=None), metrics_row(3)])
    page = report(read_run(metrics))
    (curves,) = re.findall(r"data-curves='(.*?)'><figcaption><b>Loss", page)
    assert [point[0] for point in json.loads(unescape(curves))["curves"][0][1]] == [1, 3]


def test_many_steps_are_thinned_and_the_slowest_timetable_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds_ext.observe.report.page._MOST_STEPS", 4)
    run = read_run(write_run(tmp_path, traced=9))
    assert len(re.findall("data-step=", report(run))) == 4
    monkeypatch.setattr("ds_ext.observe.report.page._MOST_INTERVALS", 1)
    assert len(re.findall("data-step=", report(run))) == 1


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("no such folder", "empty"):
        with pytest.raises(ConfigError, match=name):
            read_run(tmp_path / name)
    (tmp_path / "text.jsonl").write_text("a\nb\n")
    with pytest.raises(ConfigError, match="got 2"):
        read_run(tmp_path / "text.jsonl")
    two = tmp_path / "two"
    two.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        write_rows(two / name, [metrics_row(1)])
    with pytest.raises(ConfigError, match=r"got a.jsonl, b.jsonl"):
        read_run(two)
    assert [row["step"] for row in read_run(two / "b.jsonl").rows] == [1]
    for output in (tmp_path / "page.svg", tmp_path / "missing" / "page.html"):
        assert main(["report", str(two / "a.jsonl"), "-o", str(output)]) == 2
        assert str(output) in capsys.readouterr().err


def test_the_command_needs_no_torch(tmp_path: Path) -> None:
    write_run(tmp_path)
    code = "import sys, ds_ext.__main__ as m; status = m.main(sys.argv[1:]); print('torch' in sys.modules, status)"
    words = [sys.executable, "-c", code, "report", str(tmp_path), "-o", str(tmp_path / "page.html")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False 0" and (tmp_path / "page.html").stat().st_size > 20_000


# --- charts ---


def test_thinning_keeps_the_ends_and_the_extremes() -> None:
    points = [(step, float(step % 100)) for step in range(100_000)]
    points[54_321] = (54_321, 1e6)
    points[77_777] = (77_777, -1e6)
    kept = thin(points)
    assert len(kept) <= 1600 and kept == sorted(kept)
    assert {points[0], points[-1], points[54_321], points[77_777]} <= set(kept)
    assert thin(points[:1000]) == points[:1000]


def test_outliers_are_above_the_scale() -> None:
    assert value_range([1.0, 2.0, 3.0], from_zero=True, cut_outliers=True) == (0.0, pytest.approx(3.15))
    low, high = value_range([1.0] * 40 + [50.0], from_zero=True, cut_outliers=True)
    assert low == 0.0 and 1.0 < high < 2.0
    drawn = chart(
        "Time", [Curve("", [(s, 50.0 if s == 7 else 1.0) for s in range(1, 42)])], (1, 41), unit=" s"
    )
    note = drawn.split("<small>")[1]
    assert re.findall(r"\d+", note.split("</small>")[0]) == ["1", "50", "7"]
    low, high = value_range([5.0, 5.0], from_zero=False, cut_outliers=True)
    assert low < 5.0 < high
    assert (
        value_range([-2.0, 1.0], from_zero=True, cut_outliers=True)[0] == -2.0
    )  # nothing is below the scale
    assert value_range([-2.0, -1.0], from_zero=True, cut_outliers=False)[1] >= 0.0


@given(st.floats(1e-2, 1e6), st.floats(1e-5, 1e3), st.booleans())
def test_vertical_axes_have_at_least_two_different_ticks(low: float, spread: float, from_zero: bool) -> None:
    points = [(1, low * (1 + spread)), (2, low)]
    drawn = chart("Loss", [Curve("", points)], (1, 2), from_zero=from_zero)
    ticks = re.findall(r'<text class="e"[^>]*>([^<]*)</text>', drawn)[:-1]
    assert 2 <= len(ticks) <= 8 and len(set(ticks)) == len(ticks)


def test_the_bar_of_one_rank_is_drawn_to_scale() -> None:
    heights = re.findall(
        r'height="([\d.]+)" fill', bars("Memory", [100.0] * 7 + [300.0], unit=" MiB", summary="")
    )
    assert float(heights[-1]) == pytest.approx(3 * float(heights[0]), rel=1e-3)


def test_the_axis_shows_the_curve_after_a_high_start() -> None:
    points = [(step, 700.0 / step if step < 20 else 2.0 + 1 / step) for step in range(1, 201)]
    values, later = [value for _, value in points], [value for step, value in points if step > 40]
    low, high = value_range(values, from_zero=False, cut_outliers=True, later=later)
    assert low < 2.01 and high < 2.2
    drawn = chart("Loss", [Curve("", points)], (1, 200), from_zero=False)
    assert re.findall(r"\d+", drawn.split("<small>")[1].split("</small>")[0])[1] == "700"
    steady = [10 - step / 25 for step in range(201)]  # a usual decline is shown as a whole
    assert value_range(steady, from_zero=False, cut_outliers=True, later=steady[40:])[1] > 10


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (8.0, "8"),
        (0.125, "0.125"),
        (12345.6, "12,346"),
        (1e-5, "1e-05"),
        (99.996, "100"),
        (-0.5, "-0.5"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text
    assert number(value, "%") == f"{value:.1f}"


def test_charts_without_values_and_with_one(tmp_path: Path) -> None:
    assert chart("Loss", [Curve("a", [])], (1, 1)) == ""
    drawn = chart("Loss", [Curve("a", [(1, 2.0)])], (1, 1))
    assert drawn.count("<circle") == 1 and "NaN" not in drawn and "nan" not in drawn
    assert bars("Memory", [1.0], unit=" MiB", summary="1 MiB").count("<rect") == 0
    positions: list[Any] = re.findall(
        r'<rect x="([\d.]+)"', bars("Memory", [0.0] * 511 + [1.0], unit="", summary="")
    )
    assert len(positions) == 512 and [float(x) for x in positions] == sorted(map(float, positions))
