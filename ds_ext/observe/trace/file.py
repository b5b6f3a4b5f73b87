"""Trace file of a rank: a Chrome trace with one event per line, readable even if truncated.

The file is the array form of the Trace Event Format, whose closing bracket is optional. Events are spans (``"ph":
"X"``) with times in microseconds since the opening of the file, by the rank's clock. Two kinds of metadata events are
specific to ds_ext: the description of the run (RUN) and comparisons with rank 0's clock (CLOCK).
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
THREADS = ("step", "compute", "recv", "send", "reduce", "gather")
VERSION = 1
TIMETABLE = "timetable.txt"
_HEAD_BYTES = 1 << 16


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


def timetable_file(folder: Path, micro_batches: int) -> Path:
    """Return the path of the timetable of steps whose number of micro-batches differs from the first step's."""
    return folder / f"timetable_{micro_batches}.txt"


def metadata(name: str, rank: int, values: Mapping[str, Any], thread: str = THREADS[0]) -> str:
    return json.dumps({"name": name, "ph": "M", "pid": rank, "tid": thread, "args": dict(values)})


def thread_names(rank: int, threads: Iterable[str] = THREADS) -> list[str]:
    """Return the metadata events that name and order the rows in a viewer."""
    lines = [
        metadata("process_name", rank, {"name": f"rank {rank}"}),
        metadata("process_sort_index", rank, {"sort_index": rank}),
    ]
    for index, thread in enumerate(threads):
        lines.append(metadata("thread_name", rank, {"name": thread}, thread))
        lines.append(metadata("thread_sort_index", rank, {"sort_index": index}, thread))
    return lines


class TraceFile:
    """Trace file of one rank, opened for writing.

    Args:
        folder: trace folder, created if missing. Traces of an earlier run move into a subfolder with its name.
        run: description of the run for readers: its name ("run"), world_size, schedule and so on.
    """

    def __init__(self, folder: Path, rank: int, run: Mapping[str, Any]) -> None:
        self.path = rank_file(folder, rank)
        self._file: TextIO | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _move_earlier_run(folder, rank, run["world_size"])
            self._file = open(self.path, "x", encoding="utf-8")  # noqa: SIM115 (open for the whole run)
            self._file.write(f"[\n{metadata(RUN, rank, {**run, 'rank': rank, 'version': VERSION})}")
            self.append(thread_names(rank))
        except OSError as error:
            raise _unwritable(folder, rank, self.path, error) from None

    def append(self, events: Iterable[str]) -> None:
        """Append events, each a JSON object as text, and flush them to the operating system."""
        if self._file is not None:
            self._file.write("".join(f",\n{event}" for event in events))
            self._file.flush()

    def close(self) -> None:
        """Close the file as strict JSON."""
        if self._file is not None:
            self._file.write("\n]\n")
            self._file.close()
            self._file = None


def _unwritable(folder: Path, rank: int, path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"ds_ext.trace.dir: rank {rank} cannot write {path} (got {error.strerror}). Use a folder that every rank can "
        "write to."
    )


def write_timetable(folder: Path, timetable: Timetable, *, first: bool) -> None:
    """Write the timetable of the next steps, on rank 0. ``first``: they are the first traced steps."""
    path = folder / TIMETABLE if first else timetable_file(folder, timetable.micro_batches)
    try:
        path.write_text(dumps(timetable), encoding="utf-8")
    except OSError as error:
        raise _unwritable(folder, 0, path, error) from None


def _move_earlier_run(folder: Path, rank: int, world_size: int) -> None:
    """Move the files of an earlier run into a subfolder named after it.

    A rank moves its own file and those of ranks ``rank + k * world_size``, which may not exist in this run.
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
    """Return the name of the run that wrote a trace."""
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
            f"ds_ext.trace.dir: {path} exists and is not a trace. Move it, or use another folder."
        ) from None
