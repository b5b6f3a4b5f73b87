"""Traces without a run: the joined trace, the summary, the page, the command line; their files: test_trace_files.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ds_ext.__main__ import main
from ds_ext.errors import ConfigError
from ds_ext.observe.trace.file import rank_file
from ds_ext.observe.trace.merge import merge
from ds_ext.observe.trace.read import read_traces
from ds_ext.observe.trace.summary import summarize
from ds_ext.observe.trace.view import page
from ds_ext.pipe_schedules import timetable
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.simulate import simulate
from tests.trace_folders import BYTES, PRICED, SEND_US, UNIT_US, write_traces

# --- joined ---


def test_joined_times_are_those_of_the_simulation(whole: Path, tmp_path: Path) -> None:
    """Although every rank's clock shows another time."""
    merge(read_traces(whole), tmp_path / "all.json")
    joined = json.loads((tmp_path / "all.json").read_text())
    assert joined["otherData"]["world_size"] == 4 and len(joined["otherData"]["clocks"]) == 4
    found: dict[tuple[int, str], dict[str, Any]] = {
        (e["pid"], e["name"]): e
        for e in joined["traceEvents"]
        if e["ph"] == "X" and e["tid"] == "compute" and e["args"]["step"] == 1
    }
    assert len(found) == sum(map(len, PRICED.spans))
    for rank, spans in enumerate(PRICED.spans):
        for op, start, end in spans:
            event = found[rank, str(op)]
            assert event["ts"] == pytest.approx(start * UNIT_US, abs=0.01)
            assert event["dur"] == pytest.approx((end - start) * UNIT_US, abs=0.01)
            pipe = PRICED.timetable.pipe(op.micro_batch)
            about = {"step": 1, "micro_batch": op.micro_batch, "stage": op.stage, "pipe": pipe}
            assert event["args"] == about


def test_an_arrow_leads_from_every_send_to_its_receive(whole: Path, tmp_path: Path) -> None:
    merged = merge(read_traces(whole), tmp_path / "all.json")
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    assert merged.messages == 2 * PRICED.messages and not merged.ends and merged.early_us == 0
    arrows = {phase: {e["id"]: e for e in events if e["ph"] == phase} for phase in "sf"}
    assert len(arrows["s"]) == len(arrows["f"]) == merged.messages
    spans = {(e["pid"], e["tid"]): [] for e in events if e["ph"] == "X"}
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append(event)

    def around(flow: dict[str, Any]) -> dict[str, Any]:
        (span,) = (
            s
            for s in spans[flow["pid"], flow["tid"]]
            if s["ts"] <= flow["ts"] <= s["ts"] + s["dur"] and s["dur"]
        )
        return span

    for number, start in list(arrows["s"].items())[::7]:
        sent, received = around(start), around(arrows["f"][number])
        assert (sent["tid"], received["tid"], arrows["f"][number]["bp"]) == ("send", "recv", "e")
        assert sent["args"]["peer"] == received["pid"] and received["args"]["peer"] == sent["pid"]
        assert sent["args"]["micro_batch"] == received["args"]["micro_batch"]


# --- summed up ---


def test_the_summary_is_what_the_simulation_says(whole: Path) -> None:
    found = summarize(read_traces(whole))
    assert found.steps == 2 and found.schedule == "bitpipe" and not found.notes
    assert list(found.bubble_by_step.values()) == pytest.approx([PRICED.bubble] * 2, abs=1e-6)
    makespan_us = PRICED.makespan * UNIT_US
    for rank, spans in zip(found.ranks, PRICED.spans, strict=True):
        busy = sum(end - start for _, start, end in spans)
        assert rank.busy == pytest.approx(busy / PRICED.makespan, abs=1e-6)
        assert rank.bubble == pytest.approx(1 - rank.busy)
        idle = (spans[-1][2] - busy) / PRICED.makespan
        assert sum(rank.waits.values()) == pytest.approx(idle, abs=1e-3)
        assert rank.p2p == pytest.approx(sum(rank.waits.values()), abs=len(spans) * SEND_US / makespan_us)
        assert rank.reduction == pytest.approx(100 / makespan_us, rel=1e-3)
        assert rank.optimizer == pytest.approx(200 / makespan_us, rel=1e-3)
        hidden_us = sum(
            max(0.0, end * UNIT_US - max(start * UNIT_US, makespan_us - 2000)) for _, start, end in spans
        )
        assert rank.reduction_hidden == pytest.approx(4 * hidden_us / makespan_us, abs=1e-6)
    assert {peer for rank in found.ranks for peer in rank.waits} == {0, 1, 2, 3}


def test_the_summary_names_the_slow_stage_and_the_slow_link(tmp_path: Path) -> None:
    slow = Costs(comm=0.01, stages=(1, 1, 1, 1, 1, 1.5, 1, 1), links={(2, 3): 0.4})
    write_traces(tmp_path, simulate(timetable("bitpipe", 4, 8), slow))
    found = summarize(read_traces(tmp_path))
    assert found.slowest_stage is not None and found.slowest_stage.stage == 5
    assert found.slowest_stage.ms == pytest.approx(1.5 * 1.5 * UNIT_US / 1e3, rel=1e-6)
    assert found.slowest_link is not None and (found.slowest_link.sender, found.slowest_link.receiver) == (
        2,
        3,
    )
    assert found.slowest_link.ms >= 0.4 * UNIT_US / 1e3 - 0.001 and found.slowest_link.bytes == BYTES


def test_a_step_that_is_not_everywhere_is_not_counted(folder: Path) -> None:
    path = rank_file(folder, 3)
    lines = path.read_text().splitlines(keepends=True)
    cut = next(i for i, line in enumerate(lines) if '"name": "step 2"' in line)
    path.write_text("".join(lines[:cut]))
    assert list(summarize(read_traces(folder)).bubble_by_step) == [1]
    path.write_text("".join(lines[:30]))
    nothing = summarize(read_traces(folder))
    assert nothing.steps == 0 and "no step is complete on every rank." in nothing.notes


# --- drawn ---


def drawn(text: str) -> list[dict[str, Any]]:
    """What the page's script is given: a plot per picture."""
    found = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_page_has_the_plan_and_the_run_on_one_scale(whole: Path) -> None:
    text = page(read_traces(whole), 2)
    assert re.findall(r"<h2[^>]*>([^<]*)<", text) == ["bitpipe, planned", "bitpipe, measured, step 2"]
    assert not re.search(r"https?:|@import|url\(|\bsrc=", text)
    planned, measured = drawn(text)
    free = simulate(PRICED.timetable, Costs(1, 1.2, 0.8, 0))
    assert planned["makespan"] == pytest.approx(free.makespan * UNIT_US / 1e3, rel=1e-6)
    assert measured["makespan"] == pytest.approx(PRICED.makespan * UNIT_US / 1e3, rel=1e-6)
    assert planned["axis"] == measured["axis"] == "time, in milliseconds"
    waits = [mark for row in measured["marks"] for mark in row if not mark[2]]
    assert any(re.fullmatch(r"waits for rank \d: Recv(Activation|Grad) \d@\d", mark[3]) for mark in waits)
    assert sum(mark[2] for row in measured["marks"] for mark in row) == 4 * 4


def test_a_page_of_a_step_that_is_not_there(whole: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--step 7: the traces in .* hold 2 complete steps, 1 to 2"):
        page(read_traces(whole), 7)
    (folder / "timetable.txt").unlink()
    with pytest.raises(ConfigError, match="holds no timetable of 8 micro-batches"):
        page(read_traces(folder))


def test_a_rank_that_is_missing_has_an_empty_row(folder: Path) -> None:
    whole = drawn(page(read_traces(folder)))[1]
    rank_file(folder, 2).unlink()
    text = page(read_traces(folder))
    assert "rank2.json is missing" in text and "over 3 ranks is" in text
    planned, measured = drawn(text)
    assert planned["names"] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert measured["names"] == ["rank 0", "rank 1", "rank 2, no trace", "rank 3"]
    assert measured["ideal"] == pytest.approx(whole["ideal"], rel=0.2)  # its row is not counted as idle


def test_a_row_is_a_device_where_ranks_are_more(folder: Path) -> None:
    for rank in range(4):
        path = rank_file(folder, rank)
        path.write_text(path.read_text().replace('"world_size": 4', '"world_size": 8'))
    text = page(read_traces(folder))
    assert drawn(text)[0]["names"] == [f"device {device}" for device in range(4)]
    assert "rank 3 (device 3)" in text and "drawn by the first of its ranks" in text


def test_rows_that_only_compute_forwards_have_their_stage(tmp_path: Path) -> None:
    made = timetable("fbd", 2, 4)
    write_traces(tmp_path, simulate(made, Costs(1, 1, 1)), steps=1)
    assert made.placement.forward is not None
    for plot in drawn(page(read_traces(tmp_path))):
        assert plot["forward"] == list(made.placement.forward.devices)


# --- the command line ---


def test_the_three_verbs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rank_file(folder, 3).unlink()
    out = folder / "joined.json"
    assert main(["trace", "merge", str(folder), "-o", str(out)]) == 0
    said = capsys.readouterr()
    assert "3 of 4 ranks" in said.out and said.err == "note: rank3.json is missing: rank 3 is left out.\n"
    assert main(["trace", "summary", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"bitpipe, 2 steps of \S+ s \(3 of 4 ranks\): bubble ", lines[0])
    assert lines[2].split()[:3] == ["rank", "busy", "bubble"]
    assert main(["trace", "summary", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"bubble", "bubble_by_step", "ranks", "slowest_stage", "slowest_link", "notes"} <= set(found)
    assert main(["trace", "view", str(folder), "-o", str(folder / "page.html")]) == 0
    assert (folder / "page.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("verb", ["merge", "view"])
def test_a_place_that_cannot_be_written(whole: Path, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert main(["trace", verb, str(whole), "-o", str(whole / "no" / "folder")]) == 2
    assert "error: -o" in capsys.readouterr().err
    assert main(["trace", "merge", str(whole), "-o", str(rank_file(whole, 1))]) == 2
    assert "is one of the traces that are joined" in capsys.readouterr().err
