"""The order that a step has found, as a timetable file that can be run again."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from ...errors import ConfigError
from ...parallel.layout import ParallelLayout
from ...pipe_schedules import Op, Timetable
from ...pipe_schedules.lower import dump, lower
from ...pipe_schedules.text import dumps


def record(path: str, timetable: Timetable, ran: Sequence[Op], layout: ParallelLayout) -> None:
    """Write what the devices of the first pipeline group have run; a collective call of all ranks.

    A file that is there is replaced at once, so that a reader sees one step or the next. Raises ConfigError on every
    rank when rank 0 cannot write it.
    """
    everyone = [list(ran)] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(list(ran), everyone)
    problem: list[str | None] = [None]
    if everyone is not None:
        orders = (everyone[layout.rank(device, 0, 0)] for device in range(layout.placement.ranks))
        problem[0] = _write(path, replace(timetable, ranks=tuple(map(tuple, orders))))
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        error = ConfigError(
            f'"schedule_options": record {path!r} cannot be written: {problem[0]}. Give a file in a folder that exists.'
        )
        error.reported_by = 0
        raise error


def _write(path: str, made: Timetable) -> str | None:
    """Why the file could not be written; None if it was."""
    text = json.dumps(dump(lower(made))) if path.endswith(".json") else dumps(made)
    beside = f"{path}.{os.getpid()}.new"
    try:
        Path(beside).write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        return error.strerror or str(error)
    return None
