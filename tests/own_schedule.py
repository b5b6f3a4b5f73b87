"""A schedule of a user's own, as tests import it from a job's folder."""

from __future__ import annotations

from pathlib import Path

NAME = "breadth_first"
SOURCE = '''"""Breadth-first: all micro-batches through a chunk before the next chunk (arXiv 2211.05953)."""

from collections.abc import Iterator

from ds_ext.pipe_schedules import BACKWARD, FORWARD, Op, Option, looped, schedule


@schedule("breadth_first", place=looped, options={"chunks": Option(2, 1, "stages a device")})
def breadth_first(device: int, num_devices: int, micro_batches: int, chunks: int) -> Iterator[Op]:
    """All micro-batches through chunk 0, then chunk 1 and so on; backwards in reverse."""
    stages = range(device, num_devices * chunks, num_devices)
    for stage in stages:
        yield from (Op(FORWARD, m, stage) for m in range(micro_batches))
    for stage in reversed(stages):
        yield from (Op(BACKWARD, m, stage) for m in range(micro_batches))
'''


def write_own_schedule(folder: Path, module: str) -> None:
    (folder / f"{module}.py").write_text(SOURCE)
