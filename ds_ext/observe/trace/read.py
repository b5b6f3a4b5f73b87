"""Traces as they are found: some ranks' files may be missing, cut short, or of another run. What is there is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...pipe_schedules import Timetable
from ...pipe_schedules.files import read_timetable
from .clock import Alignment, Comparison
from .file import CLOCK, RUN, TIMETABLE, VERSION, rank_file, timetable_file

Event = dict[str, Any]

_MOST = 1 << 20  # ranks, micro-batches
_MOST_NAMED = 8  # ranks whose files are missing
_OF_A_COMPARISON = ("at_us", "offset_us", "error_us")
_OF_A_MESSAGE = ("step", "micro_batch", "stage", "peer")
_OF_A_THREAD = {
    "compute": _OF_A_MESSAGE[:3],
    "recv": _OF_A_MESSAGE,
    "send": _OF_A_MESSAGE,
}  # -> integers in its args


@dataclass(frozen=True)
class RankTrace:
    """One rank's file. ``run`` is what it says of the run; ``align`` takes its times to rank 0's clock."""

    path: Path
    rank: int
    run: dict[str, Any]
    align: Alignment

    def events(self) -> Iterator[Event]:
        """Its events in the order they were written, without those that are ours; times by its own clock."""
        for event in _lines(self.path):
            if event is not None and event.get("name") not in (RUN, CLOCK):
                yield event

    def spans(self) -> Iterator[Event]:
        """Its complete events with ``args``, as "ts" and "dur" in microseconds."""
        return (event for event in self.events() if event.get("ph") == "X" and "args" in event)

    def aligned(self, event: Event) -> Event:
        """The event with its times on rank 0's clock."""
        if "ts" not in event:
            return event
        begin_us = self.on_rank_0(event["ts"])
        moved = {**event, "ts": round(begin_us, 3)}
        if "dur" in event:
            moved["dur"] = round(self.on_rank_0(event["ts"] + event["dur"]) - begin_us, 3)
        return moved

    def on_rank_0(self, us: float) -> float:
        """A time of this rank, in microseconds, on rank 0's clock."""
        return 1e6 * self.align(us / 1e6)


@dataclass(frozen=True)
class Traces:
    """The traces of a run, by rank. ``notes`` are sentences about what is missing or damaged."""

    folder: Path
    ranks: dict[int, RankTrace]
    run: dict[str, Any]
    notes: tuple[str, ...]

    def timetable(self, micro_batches: int) -> Timetable | None:
        """The plan of the steps with that many micro-batches; None if it is not in the folder."""
        for path in (self.folder / TIMETABLE, timetable_file(self.folder, micro_batches)):
            if path.exists():
                made = read_timetable(path)
                if made.micro_batches == micro_batches:
                    return made
        return None


def read_traces(folder: str | Path) -> Traces:
    """The traces in ``folder``, of the run that rank 0 wrote (or the lowest rank that there is).

    Raises:
        ConfigError: there is no folder, or no trace in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is no folder with traces. They are where the JSON says: "
            f'"ds_ext": {{"trace": {{"dir": ...}}}}.'
        )
    found: dict[int, RankTrace] = {}
    notes: list[str] = []
    numbers = (path.stem.removeprefix("rank") for path in folder.glob("rank*.json"))
    for rank in sorted(int(number) for number in numbers if number.isdecimal()):
        trace = _read(rank_file(folder, rank), rank, notes)
        if trace is None:
            continue
        first = next(iter(found.values()), trace)
        if trace.run["run"] == first.run["run"]:
            found[rank] = trace
        else:
            notes.append(
                f"{trace.path.name} is of run {trace.run['run']}, not of {first.run['run']}: it is left out."
            )
    if not found:
        raise ConfigError(
            " ".join(
                [
                    f"{folder} holds no trace of a run: its files would be called rank0.json, rank1.json, ...",
                    *notes,
                ]
            )
        )
    run = next(iter(found.values())).run
    named = {note.split()[0] for note in notes}
    names = {rank: rank_file(folder, rank).name for rank in range(run["world_size"])}
    missing = [rank for rank, name in names.items() if rank not in found and name not in named]
    notes += [f"{names[rank]} is missing: rank {rank} is left out." for rank in missing[:_MOST_NAMED]]
    if len(missing) > _MOST_NAMED:
        notes.append(f"the files of {len(missing) - _MOST_NAMED} more ranks are missing: they are left out.")
    return Traces(folder, found, run, tuple(notes))


def _read(path: Path, rank: int, notes: list[str]) -> RankTrace | None:
    run: dict[str, Any] | None = None
    comparisons: list[Comparison] = []
    damaged, last = 0, None
    for event in _lines(path):
        last = event
        if event is None:
            damaged += 1
        elif event.get("name") == RUN and run is None:
            run = event["args"]
        elif event.get("name") == CLOCK:
            values = event["args"]
            comparisons.append(Comparison(*(values[key] / 1e6 for key in _OF_A_COMPARISON)))
    if run is None or not _is_run(run, rank):
        notes.append(f"{path.name} does not begin as the trace of rank {rank}: it is left out.")
        return None
    if last != {}:
        notes.append(f"{path.name} has no end, as that of a run that was killed: it is read up to there.")
        damaged -= last is None  # the line that breaks off
    if damaged:
        notes.append(f"{path.name} has {damaged} lines that cannot be read: they are left out.")
    return RankTrace(path, rank, run, Alignment(comparisons))


def _is_run(about: Event, rank: int) -> bool:
    """Whether this is what a rank's file begins with: the readers of all verbs rely on it."""
    numbers = ("world_size", "micro_batches", "device", "data_parallel_rank")
    return (
        about.get("version") == VERSION
        and about.get("rank") == rank
        and all(isinstance(about.get(key), str) for key in ("run", "schedule"))
        and all(type(about.get(key)) is int and 0 <= about[key] < _MOST for key in numbers)
    )


def _is_whole(event: Event) -> bool:
    """Whether an event has what its kind must have, of the right types; others are damaged or not ours."""
    values = event.get("args", {})
    if event.get("ph") != "X":
        needed = _OF_A_COMPARISON if event.get("name") == CLOCK else ()
        return isinstance(values, dict) and all(_is_number(values.get(key)) for key in needed)
    if not all(isinstance(event.get(key), str) for key in ("name", "cat", "tid")) or not event["name"]:
        return False
    needed = _OF_A_THREAD.get(event["tid"], ()) if "args" in event else ()
    return (
        isinstance(values, dict)
        and all(_is_number(event.get(key)) for key in ("ts", "dur"))
        and all(type(values.get(key)) is int for key in needed)
        and (event["cat"] != "step" or type(values.get("micro_batches")) is int)
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _lines(path: Path) -> Iterator[Event | None]:
    """The events of a file, an empty one for its end, and None for a line that cannot be read."""
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
            yield event if isinstance(event, dict) and _is_whole(event) else None
