"""Interleaved 1F1B: every device holds several stages (arXiv 2104.04473, section 2.2.2 and fig. 4). ::

    device 0  0 1 2 3 0 1 2 3 . . . . . . 0'- . 1'- . 2'- . 3'- 0'- 1'- 2'- 3'-
    device 1  . 0 1 2 3 0 1 2 3 . . . 0'- . 1'- . 2'- . 3'- 0'- 1'- 2'- 3'- . .
    device 2  . . 0 1 2 3 0 1 2 . 0'- 3 1'- . 2'- . 3'- 0'- 1'- 2'- 3'- . . . .
    device 3  . . . 0 1 2 3 0 0'- 1 1'- 2 2'- 3 3'- 0'- 1'- 2'- 3'- . . . . . .

In the diagram each device holds two chunks. A micro-batch passes through every device twice, and each visit is half as
long.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ..definition import Option
from ..ops import BACKWARD, FORWARD, Op
from ..placement import looped
from ..registry import schedule


@schedule(
    "interleaved",
    place=looped,
    micro_batches_multiple_of_devices=True,
    options={"chunks": Option(2, 1, "stages per device")},
    variants=lambda num_devices, micro_batches: [{"chunks": chunks} for chunks in (2, 3, 4)],
)
def interleaved(device: int, num_devices: int, micro_batches: int, chunks: int, slices: int) -> Iterator[Op]:
    """1F1B over D x chunks stages: 1/chunks of the bubble, chunks times the messages."""
    # At least D slices of whole micro-batches pass through a chunk before the next one.
    group = next(
        n for n in range(1, micro_batches + 1) if micro_batches % n == 0 and n * slices >= num_devices
    )
    stages = range(device, num_devices * chunks, num_devices)
    groups = range(0, micro_batches, group)
    forwards = (
        Op(FORWARD, m, stage, j)
        for first in groups
        for stage in stages
        for m in range(first, first + group)
        for j in range(slices)
    )
    backwards = (
        Op(BACKWARD, m, stage, j)
        for first in groups
        for stage in reversed(stages)
        for m in range(first, first + group)
        for j in reversed(range(slices))
    )
    yield from islice(forwards, (num_devices - device - 1) * 2 + (chunks - 1) * group * slices + slices - 1)
    for forward in forwards:
        yield forward
        yield next(backwards)
    yield from backwards
