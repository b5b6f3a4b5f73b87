"""A rank's timeline on disk: a Chrome trace of one event a line, so that a file cut anywhere is read up to there.

It is the array form of the Trace Event Format, whose closing bracket may be missing. Events are spans (``"ph": "X"``)
with times in microseconds from the opening of the file, by the rank's own clock; two kinds of metadata events are ours:
what the run is (RUN) and comparisons with rank 0's clock (CLOCK).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from ...errors import ConfigError
from ...pipe_schedules import Timetable
from ...pipe_schedules.text import dumps

RUN, CLOCK = "ds_ext_run", "ds_ext_clock"
THREADS = ("step", "compute", "recv", "send", "reduce")
VERSION = 1
TIMETABLE = "timetable.txt"
_HEAD_BYTES = 1 << 16


def rank_file(folder: Path, rank: int) -> Path:
    """Where a rank writes."""
    return folder / f"rank{rank}.json"


def timetable_file(folder: Path, micro_batches: int) -> Path:
    """Where the plan of further steps stands, that have another number of micro-batches than the first."""
    return folder / f"timetable_{micro_batches}.txt"


def metadata(name: str, rank: int, values: Mapping[str, Any], thread: str = THREADS[0]) -> str:
    """The text of a metadata event."""
    return json.dumps({"name": name, "ph": "M", "pid": rank, "tid": thread, "args": dict(values)})


def thread_names(rank: int, threads: Iterable[str] = THREADS) -> list[str]:
    """Events that name the rows of a viewer and say their order."""
    lines = [
        metadata("process_name", rank, {"name": f"rank {rank}"}),
        metadata("process_sort_index", rank, {"sort_index": rank}),
    ]
    for place, thread in enumerate(threads):
        lines.append(metadata("thread_name", rank, {"name": thread}, thread))
        lines.append(metadata("thread_sort_index", rank, {"sort_index": place}, thread))
    return lines


class TraceFile:
    """Events of one rank, appended.

    Args:
        folder: made when it is missing; a trace of an earlier run in it is moved into a folder with that run's name.
        rank: this global rank.
        run: what readers must know of the run: its name ("run"), world_size, schedule, and so on.

    Raises:
        ConfigError: the folder or the file cannot be made, or a file is in the way that is no trace.
    """

    def __init__(self, folder: Path, rank: int, run: Mapping[str, Any]) -> None:
        self.path, self._file = rank_file(folder, rank), None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            set_earlier_aside(folder, rank, run["world_size"])
            self._file: TextIO | None = open(self.path, "x", encoding="utf-8")  # noqa: SIM115 (a run long)
            self._file.write(f"[\n{metadata(RUN, rank, {**run, 'rank': rank, 'version': VERSION})}")
            self.append(thread_names(rank))
        except OSError as error:
            raise _unwritable(folder, rank, self.path, error) from None

    def append(self, events: Iterable[str]) -> None:
        """Write events, each the text of a JSON object, through to the operating system."""
        if self._file is not None:
            self._file.write("".join(f",\n{event}" for event in events))
            self._file.flush()

    def close(self) -> None:
        """End the file as strict JSON."""
        if self._file is not None:
            self._file.write("\n]\n")
            self._file.close()
            self._file = None


def _unwritable(folder: Path, rank: int, path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f'"trace": {{"dir": {str(folder)!r}}}: rank {rank} cannot write {path}: {error.strerror}. '
        f"Give a folder that every rank can write to."
    )


def write_timetable(folder: Path, timetable: Timetable, *, first: bool) -> None:
    """Keep the plan beside the traces: a timetable file, which every verb about schedules reads as well.

    Called on rank 0. Raises ConfigError when the file cannot be written.
    """
    path = folder / TIMETABLE if first else timetable_file(folder, timetable.micro_batches)
    try:
        path.write_text(dumps(timetable), encoding="utf-8")
    except OSError as error:
        raise _unwritable(folder, 0, path, error) from None


def set_earlier_aside(folder: Path, rank: int, world_size: int) -> None:
    """Move what an earlier run has written for this rank, and for ranks that this world does not have.

    They go into a folder called like that run: nothing is lost, and DIR itself always holds the last run.
    """
    for path in folder.glob("rank*.json"):
        number = path.stem.removeprefix("rank")
        if not number.isdecimal() or int(number) % world_size != rank:
            continue
        earlier = folder / _run_of(path)
        earlier.mkdir(exist_ok=True)
        os.replace(path, earlier / path.name)
        if rank == 0:
            for table in folder.glob("timetable*.txt"):
                os.replace(table, earlier / table.name)


def _run_of(path: Path) -> str:
    """The name of the run that wrote a file."""
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.read(_HEAD_BYTES).splitlines()
    try:
        event = json.loads(lines[1].rstrip().rstrip(","))
        name = event["args"]["run"]
        if event["name"] != RUN or not re.fullmatch(r"[\w-]+", name):
            raise ValueError(name)
        return name
    except (IndexError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f'"trace": {{"dir": {str(path.parent)!r}}}: {path.name} is there already and is no trace of a rank. '
            f"Move it, or give another folder."
        ) from None
