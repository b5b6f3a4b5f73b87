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
def interleaved(device: int, num_devices: int, micro_batches: int, chunks: int) -> Iterator[Op]:
    """1F1B over D x chunks stages: 1/chunks of the bubble, chunks times the messages."""
    total = micro_batches * chunks
    warmup = min((num_devices - device - 1) * 2 + (chunks - 1) * num_devices, total)
    for k in range(warmup):
        yield _forward(k, device, num_devices, chunks)
    for k in range(warmup, total):
        yield _forward(k, device, num_devices, chunks)
        yield _backward(k - warmup, device, num_devices, chunks)
    for k in range(total - warmup, total):
        yield _backward(k, device, num_devices, chunks)


def _forward(k: int, device: int, num_devices: int, chunks: int) -> Op:
    """Return the k-th forward of a device: D micro-batches through chunk 0, then the same D through chunk 1, ..."""
    group, within = divmod(k, num_devices * chunks)
    chunk, m = divmod(within, num_devices)
    return Op(FORWARD, group * num_devices + m, chunk * num_devices + device)


def _backward(k: int, device: int, num_devices: int, chunks: int) -> Op:
    """Return the k-th backward: the k-th forward with the chunks in reverse order."""
    op = _forward(k, device, num_devices, chunks)
    chunk = op.stage // num_devices
    return Op(BACKWARD, op.micro_batch, (chunks - 1 - chunk) * num_devices + device)
