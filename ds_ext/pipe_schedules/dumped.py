"""A timetable read back from its dump, the JSON of ``python -m ds_ext dump`` and of recorded orders."""

from __future__ import annotations

import json
from typing import Any

from ..errors import ScheduleError
from .ops import COMPUTE, Op
from .placement import Placement
from .registry import check_size
from .timetables import Timetable

_MOST = 1_000_000  # micro-batches, and chunks


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
    if len(ranks) != placement.ranks:
        raise ScheduleError(f"{source} has {len(ranks)} ranks, and its chunks are on {placement.ranks}.")
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
