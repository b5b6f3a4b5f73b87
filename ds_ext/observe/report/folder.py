"""Reader of what a run left in a folder: metrics, run record and traces. Each may be missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..run_record import SUFFIX, read_starts, record_file
from ..trace.read import Traces, read_traces, trace_folders

Row = dict[str, Any]

_REMEDY = "Train with --metrics-file FOLDER/metrics.jsonl, or ds_ext.Metrics(file=...)"


@dataclass(frozen=True)
class Start:
    """One start of the job. ``facts`` is its object in the run record: empty without a record."""

    facts: dict[str, Any]
    rows: list[Row]


@dataclass(frozen=True)
class Run:
    """Metrics, facts and traces of a run.

    Attributes:
        starts: starts of the job, at least one if there are metrics.
        traces: traces of the last traced start; None: none.
        notes: missing, damaged or contradictory data.
    """

    name: str
    starts: list[Start]
    traces: Traces | None
    notes: list[str]

    @property
    def rows(self) -> list[Row]:
        """Metrics of every step, in order of the steps. A step that ran again has those of its last run."""
        last = {row["step"]: row for start in self.starts for row in start.rows}
        return [last[step] for step in sorted(last)]

    @property
    def number(self) -> int:
        """Number of the last start with steps, from 1, or of the last start if none has any; 0 without starts."""
        return next((i for i in range(len(self.starts), 0, -1) if self.starts[i - 1].rows), len(self.starts))

    @property
    def start(self) -> Start:
        """Start of that :attr:`number`. All figures of the page belong to it."""
        return self.starts[self.number - 1] if self.starts else Start({}, [])

    @property
    def facts(self) -> dict[str, Any]:
        return self.start.facts


def read_run(path: Path) -> Run:
    """Read a metrics file, or a folder with one, with the record and the traces beside it."""
    if not path.exists():
        raise ConfigError(f"{path}: does not exist. {_REMEDY}, and use that folder.")
    folder = path if path.is_dir() else path.parent
    notes: list[str] = []
    metrics = _metrics_file(path)
    starts: list[Start] = []
    trace_dir = None
    if metrics is not None:
        starts = _starts(metrics, notes)
        trace_dir = starts[-1].facts.get("trace_dir")
    traces = _traces(folder, trace_dir, notes)
    if metrics is None and traces is None:
        raise ConfigError(
            f"{path}: contains neither metrics (*.jsonl) nor traces (rank*.json). {_REMEDY}, or with "
            f'"ds_ext": {{"trace": {{"dir": "FOLDER"}}}}.'
        )
    if metrics is None:
        notes.append(f"No metrics in {folder}: no curves. {_REMEDY}.")
    elif not starts[-1].facts:
        notes.append(f"No {record_file(metrics).name}: sizes, hosts, versions and checkpoints are unknown.")
    if traces is None:
        notes.append('No traces: no timetable. Trace some steps with "ds_ext": {"trace": {"dir": ...}}.')
    else:
        notes += traces.notes
    return Run((metrics or folder).name, starts, traces, notes)


def _metrics_file(path: Path) -> Path | None:
    if not path.is_dir():
        return path.with_name(path.name.removesuffix(SUFFIX) + ".jsonl") if SUFFIX in path.name else path
    files = sorted(file for file in path.glob("*.jsonl") if any(_lines(file)))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"{path}: has {len(files)} metrics files (got {names}). Name one: {files[0]}.")
    return files[0] if files else None


def _starts(metrics: Path, notes: list[str]) -> list[Start]:
    facts: list[dict[str, Any]] = []
    try:
        facts = read_starts(record_file(metrics))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        notes.append(f"{record_file(metrics).name}: not readable ({error}).")
    starts = [Start(start_facts, []) for start_facts in facts] or [Start({}, [])]
    damaged_lines = 0
    for offset, row in _lines(metrics):
        if row is None:
            damaged_lines += 1
        else:
            # Every start notes the size of the file when it began.
            earlier = [start for start in starts if start.facts.get("metrics_bytes", 0) <= offset]
            (earlier or starts[:1])[-1].rows.append(row)
    if not any(start.rows for start in starts):
        raise ConfigError(
            f"{metrics}: not a metrics file, or one without steps (got {damaged_lines} other lines). {_REMEDY}."
        )
    if damaged_lines:
        notes.append(f"{metrics.name}: {damaged_lines} damaged line{'s' * (damaged_lines != 1)}, skipped.")
    return starts


def _lines(path: Path) -> Iterator[tuple[int, Row | None]]:
    """Yield the byte offset of every line that is not empty, and its metrics; None for a damaged line."""
    offset = 0
    with open(path, "rb") as file:
        for line in file:
            if line.strip():
                yield offset, _row(line)
            offset += len(line)


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    is_row = isinstance(row, dict) and type(row.get("step")) is int and "loss" in row
    return row if is_row else None


def _traces(folder: Path, trace_dir: str | None, notes: list[str]) -> Traces | None:
    """Return the first readable traces; None if no traces can be read. Add notes on damaged and on further traces.

    They are in the folder or in its subfolders; with a ``trace_dir`` from the run record first in one of that name.
    """
    folders = trace_folders(folder)
    if trace_dir is not None:
        same_name = [path for path in folders if path.name == Path(trace_dir).name]
        folders = same_name or folders or [path for path in [Path(trace_dir)] if path.is_dir()]
    for path in folders:
        try:
            traces = read_traces(path)
        except ConfigError as error:
            notes.append(str(error))
            continue
        skipped = ", ".join(str(other) for other in folders if other != path)
        if skipped:
            notes.append(f"Traces of {path}; others are not shown: {skipped}.")
        return traces
    return None
