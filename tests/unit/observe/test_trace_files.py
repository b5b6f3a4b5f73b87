"""Trace files: truncated, missing, damaged or foreign ones, and those of earlier runs."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from ds_ext.errors import ConfigError
from ds_ext.observe.trace.file import TraceFile, rank_file
from ds_ext.observe.trace.merge import merge
from ds_ext.observe.trace.read import read_traces
from ds_ext.observe.trace.summary import summarize
from ds_ext.observe.trace.view import page
from ds_ext.pipe_schedules import timetable
from ds_ext.pipe_schedules.simulation import simulate
from tests.trace_folders import PRICED, write_traces


def test_a_file_is_strict_json_with_one_event_per_line(whole: Path) -> None:
    text = rank_file(whole, 1).read_text()
    events = json.loads(text)
    assert len(events) == len(text.splitlines()) - 2
    assert all(event["pid"] == 1 for event in events)
    assert {event["tid"] for event in events} == {
        "step",
        "compute",
        "recv",
        "send",
        "reduce",
        "reduce 2",
        "reduce 3",
        "reduce 4",
        "gather",
    }


def test_a_truncated_file_is_read_up_to_its_end(tmp_path: Path) -> None:
    """Truncate the file at every byte of its last lines."""
    write_traces(tmp_path, simulate(timetable("1f1b", 2, 2)), steps=1)
    path = rank_file(tmp_path, 1)
    data = path.read_bytes()
    before = list(read_traces(tmp_path).ranks[1].events())
    for size in range(len(data) - 200, len(data) - 1):
        path.write_bytes(data[:size])
        traces = read_traces(tmp_path)
        events = list(traces.ranks[1].events())
        assert events == before[: len(events)]
        assert len(before) - len(events) <= data.count(b"\n", size) + 1
        assert [note.partition(": ")[0] for note in traces.notes] == ["rank1.json"]


def test_missing_and_foreign_files_are_noted_and_skipped(folder: Path) -> None:
    rank_file(folder, 1).unlink()
    rank_file(folder, 2).write_text("[\n{}\n]\n")
    other = folder / "other"
    write_traces(other, PRICED, run="20270101-000000-ffff")
    shutil.copy(rank_file(other, 3), rank_file(folder, 3))
    traces = read_traces(folder)
    assert list(traces.ranks) == [0]
    first, second, third = sorted(traces.notes)
    assert first.startswith("rank1.json: ") and second.startswith("rank2.json: ")
    assert re.match("rank3.json: .*20270101-000000-ffff.*20260101-000000-abcd", third)
    damaged = rank_file(folder, 0).read_text().splitlines()
    damaged[40] = damaged[40][:30]
    rank_file(folder, 0).write_text("\n".join(damaged) + "\n")
    assert any(note.startswith("rank0.json: 1 ") for note in read_traces(folder).notes)


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: "):
        read_traces(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"rank0\.json"):
        read_traces(tmp_path)


def test_files_of_an_earlier_run_move_into_a_subfolder(folder: Path) -> None:
    """Files of ranks that the new world does not have move too."""
    before = {path.name: path.read_text() for path in folder.iterdir()}
    small = simulate(timetable("1f1b", 2, 2))
    write_traces(folder, small, run="20270101-000000-ffff")
    assert sorted(path.name for path in folder.glob("*.*")) == ["rank0.json", "rank1.json", "timetable.txt"]
    assert {path.name: path.read_text() for path in (folder / "20260101-000000-abcd").iterdir()} == before


def test_a_file_that_is_not_a_trace_is_not_touched(tmp_path: Path) -> None:
    rank_file(tmp_path, 0).write_text("mine")
    with pytest.raises(ConfigError, match=r"^ds_ext\.trace\.dir: .*rank0\.json"):
        TraceFile(tmp_path, 0, {"run": "r", "world_size": 1})
    assert rank_file(tmp_path, 0).read_text() == "mine"


def test_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^ds_ext\.trace\.dir: rank 3 .*rank3\.json .*Not a directory"):
        TraceFile(tmp_path / "file" / "traces", 3, {"run": "r", "world_size": 4})


@pytest.mark.parametrize(
    "line",
    [
        '{"name": "F0@0", "cat": "forward", "ph": "X", "pid": 0, "tid": "compute", "ts": 1, "dur": 1, "args": {}}',
        '{"name": "F0@0", "cat": "forward", "ph": "X", "pid": 0, "tid": "compute", "dur": 1, "args": {"step": 1}}',
        '{"name": "s", "cat": "step", "ph": "X", "pid": 0, "tid": "step", "ts": 1, "dur": 1, "args": {"step": 1}}',
        '{"name": "ds_ext_clock", "ph": "M", "pid": 0, "tid": "step", "args": {"at_us": "noon"}}',
        '{"name": "S", "cat": "activation", "ph": "X", "pid": 0, "tid": "send", "ts": 1, "dur": 1, "args": [7]}',
    ],
)
def test_an_event_without_required_values_is_a_damaged_line(folder: Path, tmp_path: Path, line: str) -> None:
    expected = summarize(read_traces(folder))
    path = rank_file(folder, 0)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-2], f"{line},", *lines[-2:]]))
    traces = read_traces(folder)
    assert len(traces.notes) == 1 and traces.notes[0].startswith("rank0.json: 1 ")
    assert dataclasses.replace(summarize(traces), notes=[]) == expected
    merge(traces, tmp_path / "all.json")
    page(traces)


def test_a_run_name_with_a_path_is_refused(folder: Path) -> None:
    text = rank_file(folder, 0).read_text()
    rank_file(folder, 0).write_text(text.replace("20260101-000000-abcd", ".."))
    with pytest.raises(ConfigError, match=r"^ds_ext\.trace\.dir: .*rank0\.json"):
        TraceFile(folder, 0, {"run": "r", "world_size": 4})
    assert not (folder.parent / "rank0.json").exists()


def test_many_missing_ranks_are_counted(folder: Path) -> None:
    text = rank_file(folder, 0).read_text()
    rank_file(folder, 0).write_text(text.replace('"world_size": 4', '"world_size": 512'))
    notes = read_traces(folder).notes
    assert len(notes) == 9 and notes[-1].startswith("500 more ranks: ")


def test_a_repeated_step_counts_once(folder: Path, tmp_path: Path) -> None:
    """A run that resumes from a checkpoint repeats steps. The last run of a step counts; all messages have arrows."""
    expected = summarize(read_traces(folder))
    for rank in range(4):
        path = rank_file(folder, rank)
        lines = path.read_text().splitlines()
        repeated = [line.replace('"step": 2', '"step": 1').replace('"step 2"', '"step 1"') for line in lines]
        path.write_text("\n".join(repeated))
    traces = read_traces(folder)
    summary = summarize(traces)
    assert list(summary.bubble_by_step) == [1]
    assert summary.bubble_by_step[1] == pytest.approx(expected.bubble_by_step[2])
    merged = merge(traces, tmp_path / "all.json")
    assert merged.messages == 2 * PRICED.messages and not merged.unpaired and merged.early_us == 0
