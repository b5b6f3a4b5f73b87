"""1F1B, DeepSpeed's order (PipeDream-Flush; arXiv 2104.04473, section 2.2.1 and fig. 4). ::

    device 0  0 1 2 3 . . . . . . 0'- . 1'- . 2'- . 3'-
    device 1  . 0 1 2 . . . . 0'- 3 1'- . 2'- . 3'- . .
    device 2  . . 0 1 . . 0'- 2 1'- 3 2'- . 3'- . . . .
    device 3  . . . 0 0'- 1 1'- 2 2'- 3 3'- . . . . . .

It takes as long as GPipe and keeps D - device activations instead of N. Copy this file to add a schedule.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ops import BACKWARD, FORWARD, Op
from ..placement import linear
from ..registry import schedule


@schedule("1f1b", place=linear)
def one_f_one_b(device: int, num_devices: int, micro_batches: int) -> Iterator[Op]:
    """Warm-up, one forward one backward, cool-down: at most D - device activations."""
    warmup = min(num_devices - device - 1, micro_batches)
    for m in range(warmup):
        yield Op(FORWARD, m, device)
    for m in range(warmup, micro_batches):
        yield Op(FORWARD, m, device)
        yield Op(BACKWARD, m - warmup, device)
    for m in range(micro_batches - warmup, micro_batches):
        yield Op(BACKWARD, m, device)
