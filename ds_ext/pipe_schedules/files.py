"""Timetable files: what `show -o FILE.txt`, `optimise -o FILE` and `dump` write, torch's CSV, or written by hand."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..errors import ScheduleError
from .costs import Costs
from .ops import COMPUTE, Op
from .placement import Placement
from .registry import Orders, Schedule, check_size
from .text import loads
from .timetables import Timetable

_ENDINGS = (".txt", ".csv", ".json")
_MOST = 1_000_000  # micro-batches, and chunks


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
    ranks, micro_batches = made.placement.num_devices, made.micro_batches

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
        return made.orders

    return Schedule(made.schedule, program, place, planned=True, file=str(path))


def read_dump(text: str, source: str) -> Timetable:
    """The timetable whose dump ``text`` is; messages and loads are left out, as lowering inserts them again.

    :func:`.check.program.check` decides whether it can run. Raises ScheduleError with ``source`` and the problem.
    """
    try:
        found = json.loads(text)
        name, micro_batches = found["schedule"], found["micro_batches"]
        if not (isinstance(name, str) and type(micro_batches) is int and 0 < micro_batches <= _MOST):
            raise ValueError(f"schedule {name!r}, micro_batches {micro_batches!r}")
        placement = _placement(found["chunks"], found["stages"])
        check_size(name, placement, micro_batches)
        ranks = tuple(tuple(_ops(rank)) for rank in found["ranks"])
    except RecursionError:
        raise ScheduleError(f"{source}: nested too deeply for a dump of a timetable.") from None
    except ScheduleError as error:
        raise ScheduleError(f"{source}: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        missing = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise ScheduleError(
            f"{source} is no dump of a timetable ({missing}); `python -m ds_ext dump NAME --stages D --micro-batches "
            f"N` prints one, with the 5 keys schedule, stages, micro_batches, chunks and ranks."
        ) from None
    if len(ranks) != placement.num_devices:
        raise ScheduleError(
            f"{source} has {len(ranks)} ranks, and its chunks are on {placement.num_devices}."
        )
    return Timetable(name, placement, micro_batches, ranks)


def _placement(chunks: list[dict[str, Any]], devices: int) -> Placement:
    if any("role" in chunk for chunk in chunks):
        raise ValueError("forward and backward devices cannot be read back")
    where = {(int(chunk["pipe"]), int(chunk["stage"])): int(chunk["rank"]) for chunk in chunks}
    pipes, stages = (1 + max(key[i] for key in where) for i in (0, 1))
    if len(where) != len(chunks) or len(where) != pipes * stages or min(map(min, where)) < 0:
        raise ValueError(f"{len(chunks)} chunks are not {pipes} pipes of {stages} stages")
    if not all(0 <= rank < devices for rank in where.values()):
        raise ValueError(f"a chunk is on none of the {devices} ranks")
    return Placement(tuple(tuple(where[pipe, stage] for stage in range(stages)) for pipe in range(pipes)))


def _ops(instructions: list[dict[str, Any]]) -> list[Op]:
    return [
        Op(COMPUTE[i["op"]], int(i["micro_batch"]), int(i["stage"]))
        for i in instructions
        if i["op"] in COMPUTE
    ]
