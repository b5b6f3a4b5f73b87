"""Progress lines and the metrics file."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import resource
import struct
import sys
import termios
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ds_ext.errors import ConfigError
from ds_ext.observe.metrics import Metrics, MetricsFile
from ds_ext.observe.progress import duration_text, print_line, progress_line
from ds_ext.observe.run_record import read_starts, record_file
from ds_ext.observe.step_metrics import StepMetrics
from ds_ext.pipe_schedules.costs import Costs

METRICS = StepMetrics(
    step=7,
    loss=2.345678,
    grad_norm=0.5,
    lr=1e-3,
    iter_time_s=0.25,
    samples_per_s=12.34,
    tokens_per_s=12345.6,
    tflops_per_device=98.7654,
    mfu=0.316,
    consumed_samples=56,
    schedule="bitpipe",
    transport="torch",
    peak_memory_bytes=1 << 20,
    bubble_measured=0.25,
    bubble_simulated=0.125,
)


def numbers(line: str) -> str:
    return " ".join(re.findall(r"[\d.,/e-]*\d%?", line))


def test_progress_line() -> None:
    assert numbers(progress_line([METRICS])[0]) == "7 2.3457 1.00e-03 0.500 0.25 12,346 1"
    assert numbers(progress_line([METRICS], 100)[0]) == "7/100 2.3457 1.00e-03 0.500 0.25 12,346"
    unknown = replace(METRICS, grad_norm=None, tokens_per_s=None)
    assert numbers(progress_line([unknown], 7)[0]) == "7/7 2.3457 1.00e-03 0.25 12.3 1"
    assert progress_line([unknown])[0].startswith("step 7 | loss ")
    parts = {"masked_words": 5.25, "sentence_order": 0.75}
    full = replace(unknown, losses=parts, samples_per_s=1234.5)
    assert numbers(progress_line([full], 7)[0]) == "7/7 2.3457 5.2500 0.7500 0.25 1,234"


def test_a_progress_line_has_means_and_rates_of_its_steps() -> None:
    steps = [
        replace(METRICS, step=8, loss=2.0, grad_norm=1.0, iter_time_s=1.0, tokens_per_s=100.0),
        replace(METRICS, step=9, loss=4.0, grad_norm=2.0, iter_time_s=3.0, tokens_per_s=300.0, lr=5e-4),
    ]
    # 1,000 tokens in 4 s; learning rate and memory of the last step.
    assert numbers(progress_line(steps, 10)[0]) == "9/10 3.0000 5.00e-04 1.500 2 250"


def test_a_progress_line_has_the_time_between_steps_if_it_is_long() -> None:
    """Step time and time between steps, times the remaining steps, are the time left."""
    line, _ = progress_line([METRICS], 107, 125.0, between_s=1.0)
    assert "| 0.25 + 1 s/step |" in line and line.endswith("| 2:05 left")
    assert "| 0.25 s/step |" in progress_line([METRICS], 107, 26.0, between_s=0.01)[0]


def test_a_progress_line_has_at_most_100_columns() -> None:
    long = replace(
        METRICS,
        step=99_999,
        grad_norm=1234.567,
        iter_time_s=123.4,
        tokens_per_s=1.2e7,
        peak_memory_bytes=80_000 << 20,
    )
    line, omitted = progress_line([long], 100_000, 90_061.0, "GPU")
    assert len(line) <= 100 and "1 d 01:01:01 left" in line and omitted == 3
    assert "12,000,000 tokens/s" in line and "norm" not in line
    short, omitted = progress_line([METRICS])
    assert len(short) <= 100 and "norm 0.500" in short and "RSS 1 MiB" in short and omitted == 0


def test_all_progress_lines_have_the_same_columns() -> None:
    """The first line has room for the time left, and columns that an earlier line omits do not return."""
    first = replace(METRICS, peak_memory_bytes=99_999 << 20, iter_time_s=1.25)
    line, omitted = progress_line([first], 1000)
    assert omitted == 1 and "norm" in line and "RSS" not in line and len(line) < 90
    assert len(progress_line([first], 1000, 1250.0, omitted=omitted)[0]) <= 100
    last, _ = progress_line([METRICS], 7, omitted=2)
    assert "norm" not in last and "RSS" not in last and "lr" in last


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00"), (90_061, "1 d 01:01:01")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


class Engine(SimpleNamespace):
    """Measurements of an engine with two ranks, whose steps take 2 s."""

    def __init__(self) -> None:
        super().__init__(
            plan=SimpleNamespace(
                timetable=SimpleNamespace(schedule="1f1b"),
                simulation=SimpleNamespace(bubble=0.125, costs=Costs()),
                overlaps_steps=False,
            ),
            transport=SimpleNamespace(name="shm"),
            device=torch.device("cpu"),
            global_rank=0,
            global_steps=0,
            global_samples=0,
            run_facts={"world_size": 2},
            checkpoint_events=SimpleNamespace(all=[], on_event=None),
        )

    def train_batch_size(self) -> int:
        return 8

    def step(self) -> float:
        self.global_steps += 1
        self.global_samples += 8
        ranks = SimpleNamespace(
            peak_memory_of_ranks=(100 << 20, (300 + self.global_steps) << 20),
            bubble=0.25,
            losses=SimpleNamespace(tokens=None, by_name=None),
            expert_load=None,
            idle_expert_share=None,
        )
        self.report = SimpleNamespace(
            seconds=2.0, lr=1e-3, grad_norm=1.0, gathered=ranks, snapshot_s=None, recovered_from=None
        )
        return float(self.global_steps)


def test_lines_cover_all_steps_and_a_summary_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr("ds_ext.observe.metrics.time.monotonic", lambda: clock[0])
    engine = Engine()
    file = tmp_path / "metrics.jsonl"
    metrics = Metrics(cast(Any, engine), total_steps=7, file=file, tokens_per_sample=16, log_interval=3)
    for _ in range(7):
        clock[0] += 10.0  # with what the script does between the steps
        loss = engine.step()
        if loss == 6:
            parts = {"masked_words": 4.5, "sentence_order": 0.5}
            metrics.log(
                loss, validation_loss=5.0, validation_losses=parts, validation_note=", perplexity 90.0"
            )
        else:
            metrics.log(loss)
    lines = capsys.readouterr().out.splitlines()
    assert numbers(lines.pop(3)) == "6 5.0000 4.5000 0.5000 90.0"
    assert [numbers(line.partition(" | lr")[0]) for line in lines] == [
        "1/7 1.0000",
        "3/7 2.5000",
        "6/7 5.0000",
        "7/7 7.0000",
    ]
    assert [re.findall(r"(\S+) left", line) for line in lines] == [[], ["0:40"], ["0:10"], []]
    assert all(
        ("2 + 8 s/step" if i else "2 s/step") in line and "64 tokens/s" in line and "norm" in line
        for i, line in enumerate(lines)
    )

    engine.checkpoint_events.all += [
        {"event": "saved", "path": "a/step_7"},
        {"event": "failed", "path": "a/step_8"},
    ]
    engine.plan.overlaps_steps = True
    metrics.print_summary()
    trained, amounts, memory, bubble, overlap, saved, report = capsys.readouterr().out.splitlines()
    assert re.findall(r"[\d:.]+", trained) == ["7", "1:10", "0:14", "2"]
    assert numbers(amounts) == "56 896 64" and numbers(memory) == "307 1" and numbers(bubble) == "25% 12%"
    assert "overlap_across_steps" in overlap
    assert saved.split() == ["saved", "a/step_7"] and f"report {file} -o report.html" in report
    # The record has the memory of the last row, although it has grown by less than 1 %.
    (start,) = read_starts(record_file(file))
    row = json.loads(file.read_text().splitlines()[-1])
    assert max(start["peak_memory_bytes"]) == row["peak_memory_bytes"] == 307 << 20


def test_only_the_last_line_in_place_stays_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    print_line("a", keep=False)
    print_line("b")
    assert capsys.readouterr().out == "b\n"  # a file gets the kept lines only
    reader, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
    monkeypatch.delenv("COLUMNS", raising=False)
    with open(terminal, "w") as stdout:
        for name in ("stdout", "__stdout__"):  # the terminal's size is that of the latter
            monkeypatch.setattr(sys, name, stdout)
        print_line("x" * 30, keep=False)
        print_line("kept " * 6)
        monkeypatch.undo()
        written = ""
        while not written.endswith("\n"):  # a terminal may pass on one write at a time
            written += os.read(reader, 200).decode()
    os.close(reader)
    in_place, _, kept = written.partition("\r")
    assert in_place.removeprefix("\x1b[2K") == "x" * 19  # does not wrap
    assert kept.removeprefix("\x1b[2K").rstrip("\r\n") == "kept " * 6 and kept.endswith("\n")


def test_file_has_one_object_per_line(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "metrics.jsonl"
    for step in (1, 2):
        MetricsFile(path).write(replace(METRICS, step=step))
        # A crash after this point does not lose the record.
        assert len(path.read_text().splitlines()) == step
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in written] == [1, 2]
    assert written[0] == {**METRICS.__dict__, "step": 1}


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    parts = {"masked_words": float("nan")}
    MetricsFile(path).write(replace(METRICS, loss=float("nan"), grad_norm=float("inf"), losses=parts))
    record = json.loads(path.read_text(), parse_constant=lambda name: f"not JSON: {name}")
    assert (
        record["loss"] is None and record["grad_norm"] is None and record["losses"] == {"masked_words": None}
    )
    assert record["lr"] == METRICS.lr


def test_a_full_disk_does_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A line that does not fit is not written, with one warning until a write succeeds."""
    path = tmp_path / "metrics.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        file = MetricsFile(path)
        with caplog.at_level(logging.WARNING):
            file.write(METRICS)
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
            for step in (8, 9):
                file.write(replace(METRICS, step=step))
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            file.write(replace(METRICS, step=10))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [7, 10]
    assert len(caplog.records) == 1 and "step 8" in caplog.text and str(path) in caplog.text


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^metrics file: .*{re.escape(str(tmp_path))}"):
        MetricsFile(tmp_path)
