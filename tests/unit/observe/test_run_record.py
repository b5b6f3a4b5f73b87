"""The record of a run: what it keeps over starts, kills and files that cannot be written."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ds_ext.observe.run_record import RunRecord, read_starts, record_file


def event(step: int, name: str = "saved") -> dict[str, Any]:
    return {"event": name, "path": f"/saved/step_{step}", "step": step, "seconds": 0.5, "at": 1e9 + step}


def test_a_start_has_its_facts_memory_and_checkpoints(tmp_path: Path) -> None:
    events = [{**event(3, "loaded"), "at": time.time()}]
    record = RunRecord(tmp_path / "metrics.jsonl", {"world_size": 2, "schedule": "1f1b"}, events)
    record.note_memory([100, 200])
    events.append(event(4))
    record.write()
    path = record_file(tmp_path / "metrics.jsonl")
    assert path.name == "metrics.run.json" and [file.name for file in tmp_path.iterdir()] == [path.name]
    (start,) = read_starts(path)
    assert (start["world_size"], start["schedule"], start["metrics_bytes"]) == (2, "1f1b", 0)
    assert start["peak_memory_bytes"] == [100, 200]
    assert 0 < start["at"] < events[0]["at"]  # a checkpoint is loaded before the record is opened
    assert [(item["event"], item["step"]) for item in start["checkpoints"]] == [("loaded", 3), ("saved", 4)]


def test_files_have_separate_records() -> None:
    names = ("metrics.jsonl", "steps", "run.1", "run.2", "a.b.jsonl")
    found = [record_file(Path("folder", name)) for name in names]
    wanted = ("metrics", "steps", "run.1", "run.2", "a.b")
    assert found == [Path("folder", f"{name}.run.json") for name in wanted]


def test_memory_is_written_again_only_if_it_has_grown(tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "metrics.jsonl", {}, [])
    path, seen = record_file(tmp_path / "metrics.jsonl"), []
    for peaks in ([1000, 2000], [1005, 2000], [1000, 2001], [1011, 2001], [900, 900]):
        record.note_memory(peaks)
        seen.append(read_starts(path)[0]["peak_memory_bytes"])
    assert seen == [[1000, 2000], [1000, 2000], [1000, 2001], [1011, 2001], [1011, 2001]]


def test_starts_are_kept_while_the_metrics_file_has_their_steps(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    RunRecord(metrics, {"world_size": 1}, [])
    metrics.write_text('{"step": 1}\n')
    RunRecord(metrics, {"world_size": 2}, [])
    starts = read_starts(record_file(metrics))
    assert [(start["world_size"], start["metrics_bytes"]) for start in starts] == [(1, 0), (2, 12)]
    metrics.unlink()  # another run with the same file
    RunRecord(metrics, {"world_size": 3}, [])
    assert [start["world_size"] for start in read_starts(record_file(metrics))] == [3]


@pytest.mark.parametrize(
    "damaged", ["", "[]", '{"version": 99, "starts": []}', '{"version": 1, "starts": [1]}']
)
def test_a_damaged_record_is_replaced_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: str
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n')
    record_file(metrics).write_text(damaged)
    with pytest.raises(ValueError):
        read_starts(record_file(metrics))
    with caplog.at_level(logging.WARNING):
        RunRecord(metrics, {"world_size": 2}, [])
    assert len(caplog.records) == 1 and str(record_file(metrics)) in caplog.text
    assert [start["world_size"] for start in read_starts(record_file(metrics))] == [2]


def test_a_record_that_cannot_be_written_does_not_stop_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    record_file(metrics).mkdir()
    with caplog.at_level(logging.WARNING):
        record = RunRecord(metrics, {}, [])
        record.write()
        assert len(caplog.records) == 1 and str(record_file(metrics)) in caplog.text
        record_file(metrics).rmdir()
        record.write()
    assert len(caplog.records) == 1 and len(read_starts(record_file(metrics))) == 1


def test_the_commit_is_that_of_the_scripts_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        names = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        command = ["git", "-C", str(tmp_path), *names, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit() -> str | None:
        RunRecord(tmp_path / "metrics.jsonl", {}, [])
        found: str | None = read_starts(record_file(tmp_path / "metrics.jsonl"))[0]["commit"]
        return found

    script = tmp_path / "train.py"
    script.write_text("")
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit() is None
    git("init")
    git("add", "train.py")
    git("commit", "-m", "one")
    head = git("rev-parse", "HEAD")
    assert commit() == head  # the metrics and the record are not tracked
    script.write_text("changed = True\n")
    assert commit() == f"{head}+"


def test_values_that_json_does_not_know_become_text(tmp_path: Path) -> None:
    RunRecord(tmp_path / "metrics.jsonl", {"config": {"dtype": Path("a")}}, [])
    text = record_file(tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text)["starts"][0]["config"] == {"dtype": "a"}
