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

import pytest

from ds_ext.errors import ConfigError
from ds_ext.observe.metrics import MetricsFile, StepMetrics, print_line

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


def test_progress_line() -> None:
    def numbers(line: str) -> str:
        return " ".join(re.findall(r"[\d.,/e-]*\d%?", line))

    assert numbers(METRICS.line(100)) == "7/100 2.3457 1.00e-03 0.500 12.3 12,346 98.8 31.6% 1 25% 12%"
    unknown = {"grad_norm": None, "bubble_measured": None, "tokens_per_s": None}
    bare = replace(METRICS, tflops_per_device=None, mfu=None, **unknown)
    assert numbers(bare.line(7)) == "7/7 2.3457 1.00e-03 12.3 1 12%"
    assert bare.line().startswith("step 7 ")
    parts = {"masked_words": 5.25, "sentence_order": 0.75}
    full = replace(bare, losses=parts, validation_loss=6.5, samples_per_s=1234.5)
    assert numbers(full.line(7)) == "7/7 2.3457 5.2500 0.7500 6.5000 1.00e-03 1,234 1 12%"


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
