"""Reader of traces. Files may be missing, truncated or from a different run; the rest is read."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...pipe_schedules import Op, Timetable
from ...pipe_schedules.files import read_timetable
from .clock import Alignment, Comparison
from .event import ASYNCHRONOUS
from .file import CLOCK, RUN, TIMETABLE, VERSION, rank_file, timetable_file

Event = dict[str, Any]
Row = tuple[int, int]  # (pipeline group, device)

_LIMIT = 1 << 20  # maximum for ranks and micro-batches
_MAX_MISSING_NOTES = 8
_COMPARISON_KEYS = ("at_us", "offset_us", "error_us")
_MESSAGE_KEYS = ("step", "micro_batch", "stage", "peer")
# Thread -> integers in the args of its spans.
_THREAD_KEYS = {"compute": _MESSAGE_KEYS[:3], "recv": _MESSAGE_KEYS, "send": _MESSAGE_KEYS}


@dataclass(frozen=True)
class RankTrace:
    """Trace of one rank. ``run`` is the description of the run in the file."""

    path: Path
    rank: int
    run: dict[str, Any]
    align: Alignment

    def events(self) -> Iterator[Event]:
        """Yield the events in file order by the rank's own clock, without the metadata events of ds_ext."""
        for event in _lines(self.path):
            if event is not None and event.get("name") not in (RUN, CLOCK):
                yield event

    def spans(self) -> Iterator[Event]:
        """Yield the spans that have ``args``, with "ts" and "dur" in microseconds."""
        return (event for event in self.events() if event.get("ph") == "X" and "args" in event)

    def steps(self) -> dict[int, list[Event]]:
        """Return the spans of the complete steps, first that of the step, then the others in file order.

        A step that runs again from a checkpoint replaces its first run.
        """
        whole: dict[int, Event] = {}
        others: dict[int, list[Event]] = defaultdict(list)
        for event in self.spans():
            step = event["args"].get("step")
            if step in whole and not is_asynchronous(event):
                del whole[step]
                others.pop(step, None)
            if event["cat"] == "step":
                whole[step] = event
            else:
                others[step].append(event)
        return {step: [event, *others[step]] for step, event in whole.items() if step is not None}

    def aligned(self, event: Event) -> Event:
        if "ts" not in event:
            return event
        begin_us = self.on_rank_0(event["ts"])
        aligned = {**event, "ts": round(begin_us, 3)}
        if "dur" in event:
            aligned["dur"] = round(self.on_rank_0(event["ts"] + event["dur"]) - begin_us, 3)
        return aligned

    def on_rank_0(self, us: float) -> float:
        """Convert a time of this rank, in microseconds, to rank 0's clock."""
        return 1e6 * self.align(us / 1e6)


@dataclass(frozen=True)
class Traces:
    """Traces of a run.

    Attributes:
        ranks: global rank -> its trace.
        run: description of the run, from the lowest rank.
        notes: missing and damaged files.
    """

    folder: Path
    ranks: dict[int, RankTrace]
    run: dict[str, Any]
    notes: tuple[str, ...]

    def rows(self) -> dict[Row, RankTrace]:
        """Return the trace of every device of every pipeline group: that of its first rank with one."""
        rows: dict[Row, RankTrace] = {}
        for trace in self.ranks.values():
            rows.setdefault((trace.run["data_parallel_rank"], trace.run["device"]), trace)
        return rows

    def timetable(self, micro_batches: int) -> Timetable | None:
        """Return the timetable of the steps with ``micro_batches`` micro-batches; None if the folder contains none."""
        for path in (self.folder / TIMETABLE, timetable_file(self.folder, micro_batches)):
            if path.exists():
                timetable = read_timetable(path)
                if timetable.micro_batches == micro_batches:
                    return timetable
        return None


def op_of(event: Event) -> Op:
    """Return the op of a span of the thread ``compute``."""
    return Op(event["name"][0], event["args"]["micro_batch"], event["args"]["stage"])


def is_asynchronous(event: Event) -> bool:
    """Return whether a span may overlap with the other ones of its rank."""
    return event["tid"].startswith(tuple(ASYNCHRONOUS))


def trace_folders(folder: Path) -> list[Path]:
    """Return the folders with traces among ``folder`` and its subfolders, ``folder`` first, then by name."""
    return [path for path in (folder, *sorted(folder.iterdir())) if rank_file(path, 0).is_file()]


def read_traces(folder: str | Path) -> Traces:
    """Read the traces in ``folder`` that belong to the same run as the lowest rank's."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: not a folder. Use the folder that ds_ext.trace.dir names in the DeepSpeed JSON."
        )
    traces: dict[int, RankTrace] = {}
    notes: list[str] = []
    numbers = (path.stem.removeprefix("rank") for path in folder.glob("rank*.json"))
    ranks = sorted(int(number) for number in numbers if number.isdecimal())
    run: dict[str, Any] = {}  # of the lowest rank
    for rank in ranks:
        trace = _read(rank_file(folder, rank), rank, notes)
        if trace is None:
            continue
        run = run or trace.run
        if trace.run["run"] == run["run"]:
            traces[rank] = trace
        else:
            notes.append(f"{trace.path.name}: run {trace.run['run']} instead of {run['run']}, skipped")
    if not traces:
        raise ConfigError(
            f"{folder}: no traces (files rank0.json, rank1.json, ...). Use the folder that ds_ext.trace.dir names in "
            f"the DeepSpeed JSON.{''.join(f' {note}.' for note in notes)}"
        )
    missing_ranks = sorted(set(range(run["world_size"])).difference(ranks))
    for rank in missing_ranks[:_MAX_MISSING_NOTES]:
        notes.append(f"{rank_file(folder, rank).name}: missing, skipped")
    if len(missing_ranks) > _MAX_MISSING_NOTES:
        notes.append(f"{len(missing_ranks) - _MAX_MISSING_NOTES} more ranks: missing, skipped")
    return Traces(folder, traces, run, tuple(notes))


def _read(path: Path, rank: int, notes: list[str]) -> RankTrace | None:
    """Return the trace in a file; None if it is not that of ``rank``. Add notes on missing and damaged parts."""
    run: dict[str, Any] | None = None
    comparisons: list[Comparison] = []
    damaged_lines = 0
    last_event: Event | None = None
    for event in _lines(path):
        last_event = event
        if event is None:
            damaged_lines += 1
        elif event.get("name") == RUN and run is None:
            run = event["args"]
        elif event.get("name") == CLOCK:
            values = event["args"]
            comparisons.append(Comparison(*(values[key] / 1e6 for key in _COMPARISON_KEYS)))
    if run is None or not _is_run(run, rank):
        notes.append(f"{path.name}: not a trace of rank {rank}, skipped")
        return None
    if last_event != {}:
        notes.append(f"{path.name}: truncated, as after a kill; read up to its last complete line")
        damaged_lines -= last_event is None  # do not count the truncated line
    if damaged_lines:
        notes.append(f"{path.name}: {damaged_lines} damaged line{'s' * (damaged_lines != 1)}, skipped")
    return RankTrace(path, rank, run, Alignment(comparisons))


def _is_run(run: Event, rank: int) -> bool:
    numbers = ("world_size", "pipeline_parallel_size", "micro_batches", "device", "data_parallel_rank")
    return (
        run.get("version") == VERSION
        and run.get("rank") == rank
        and all(isinstance(run.get(key), str) for key in ("run", "schedule"))
        and all(type(run.get(key)) is int and 0 <= run[key] < _LIMIT for key in numbers)
    )


def _is_valid(event: Event) -> bool:
    if not isinstance(event.get("args", {}), dict):
        return False
    if event.get("ph") == "X":
        return _is_valid_span(event)
    return event.get("name") != CLOCK or _has_numbers(event.get("args", {}), _COMPARISON_KEYS)


def _is_valid_span(event: Event) -> bool:
    if not all(isinstance(event.get(key), str) for key in ("name", "cat", "tid")) or not event["name"]:
        return False
    integers = list(_THREAD_KEYS.get(event["tid"], ())) if "args" in event else []
    if event["cat"] == "step":
        integers.append("micro_batches")
    values = event.get("args", {})
    return _has_numbers(event, ("ts", "dur")) and all(type(values.get(key)) is int for key in integers)


def _has_numbers(values: Event, keys: Iterable[str]) -> bool:
    numbers = (values.get(key) for key in keys)
    return all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)


def _lines(path: Path) -> Iterator[Event | None]:
    """Yield the events of a file, an empty event for its end, and None for a damaged line."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file):
            text = line.strip().rstrip(",")
            if not text or (number == 0 and text == "["):
                continue
            if text == "]":
                yield {}
                continue
            try:
                event = json.loads(text)
            except ValueError:
                event = None
            yield event if isinstance(event, dict) and _is_valid(event) else None
