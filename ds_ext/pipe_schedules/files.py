"""Timetable files: what `show -o FILE.txt`, `optimise -o FILE` and `dump` write, torch's CSV, or written by hand."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ScheduleError
from .costs import Costs
from .dumped import read_dump
from .placement import Placement
from .registry import Orders, Schedule
from .text import loads
from .timetables import Timetable

_ENDINGS = (".txt", ".csv", ".json")


def is_timetable_file(name: str) -> bool:
    """Whether ``name``, where a schedule is asked for, means a file: it has a folder, or the ending of one."""
    return os.sep in name or Path(name).suffix in _ENDINGS


def read_timetable(path: str | Path) -> Timetable:
    """The timetable in a file. Raises ScheduleError with line and column, or when it cannot be read."""
    try:
        text = Path(path).read_text("utf-8-sig")  # as it is written, whatever the locale
    except OSError as error:
        raise ScheduleError(f"the timetable file {str(path)!r} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ScheduleError(f"the timetable file {str(path)!r} cannot be read: it is no text.") from None
    if text.lstrip().startswith("{"):
        return read_dump(text, f"timetable {path}")
    return loads(text, Path(path).stem, f"timetable {path}")


def schedule_of_file(path: str | Path) -> Schedule:
    """A schedule that is one timetable: it has the sizes of the file and no others. Raises ScheduleError."""
    made = read_timetable(path)
    if not made.trains:
        raise ScheduleError(f"the timetable in {path} has no backwards; a job needs one for every forward.")
    ranks, micro_batches = made.placement.ranks, made.micro_batches

    def place(asked: int) -> Placement:
        if asked != ranks:
            raise ScheduleError(
                f"the timetable in {path} is for {ranks} devices; got pipeline_parallel_size {asked}. Use {ranks}."
            )
        return made.placement

    def program(placement: Placement, asked: int, costs: Costs) -> Orders:
        if asked != micro_batches:
            steps, rest = divmod(micro_batches, placement.replicas)
            way = f"Use gradient_accumulation_steps {steps}."
            if rest:
                way = f"No job has that many: its {placement.replicas} pipes take equally many."
            raise ScheduleError(
                f"the timetable in {path} is for {micro_batches} micro-batches a step; got {asked}. {way}"
            )
        return made.ranks

    return Schedule(made.schedule, program, place, planned=True, file=str(path))
