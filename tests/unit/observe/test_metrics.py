"""Progress lines and the metrics file."""

from __future__ import annotations

import json
import logging
import re
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ds_ext.errors import ConfigError
from ds_ext.observe.metrics import MetricsFile, StepMetrics, peak_memory_bytes

METRICS = StepMetrics(
    step=7,
    loss=2.345678,
    grad_norm=0.5,
    lr=1e-3,
    iter_time_s=0.25,
    tokens_per_s=12345.6,
    consumed_samples=56,
    schedule="bitpipe",
    transport="torch",
    peak_memory_bytes=1 << 20,
    bubble_measured=0.25,
    bubble_simulated=0.125,
)


def test_progress_line() -> None:
    labels = ("step", "loss", "lr", "grad norm")
    line = METRICS.line(100)
    assert all(label in line for label in labels)
    numbers = ("7/100", "2.3457", "1.00e-03", "0.500", "12,346", "25%", "12%")
    assert re.findall(r"[\d.,/e-]*\d%?", line) == list(numbers)
    line = replace(METRICS, grad_norm=None, bubble_measured=None).line(7)
    assert " 7/7 " in line and "grad norm - " in line and "bubble - " in line


def test_file_has_one_object_per_line(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "metrics.jsonl"
    for step in (1, 2):
        with MetricsFile(str(path)) as file:
            file.write(replace(METRICS, step=step))
            # A crash after this point does not lose the record.
            assert len(path.read_text().splitlines()) == step
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in written] == [1, 2]
    assert written[0] == {**METRICS.__dict__, "step": 1}


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(str(path)) as file:
        file.write(replace(METRICS, loss=float("nan"), grad_norm=float("inf")))
    record = json.loads(path.read_text(), parse_constant=lambda name: f"not JSON: {name}")
    assert record["loss"] is None and record["grad_norm"] is None and record["lr"] == METRICS.lr


def test_a_full_disk_does_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A line that does not fit is not written, with one warning until a write succeeds."""
    path = tmp_path / "metrics.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with MetricsFile(str(path)) as file, caplog.at_level(logging.WARNING):
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
    with (
        pytest.raises(ConfigError, match=f"^--metrics-file: .*{re.escape(str(tmp_path))}"),
        MetricsFile(str(tmp_path)),
    ):
        pass


def test_without_a_path_nothing_is_written(tmp_path: Path) -> None:
    with MetricsFile(None) as file:
        file.write(METRICS)
    assert list(tmp_path.iterdir()) == []


def test_peak_memory_includes_freed_memory() -> None:
    before = peak_memory_bytes(torch.device("cpu"))
    block = torch.ones(64 << 20, dtype=torch.uint8)
    del block
    assert 10 << 20 < before <= peak_memory_bytes(torch.device("cpu")) < 1 << 40
