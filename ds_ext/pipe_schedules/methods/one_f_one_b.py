"""1F1B, DeepSpeed's order (PipeDream-Flush; arXiv 2104.04473, section 2.2.1 and fig. 4). ::

    device 0  0 1 2 3 . . . . . . 0'- . 1'- . 2'- . 3'-
    device 1  . 0 1 2 . . . . 0'- 3 1'- . 2'- . 3'- . .
    device 2  . . 0 1 . . 0'- 2 1'- 3 2'- . 3'- . . . .
    device 3  . . . 0 0'- 1 1'- 2 2'- 3 3'- . . . . . .

It takes as long as GPipe and keeps D - device activations instead of N. Copy this file to add a schedule.

With k slices of the sequence (Seq1F1B, arXiv 2406.03488, section 3.3), k - 1 more forwards precede the first backward,
which is that of the last slice. A step takes 3N + 3(D-1)/k forwards, and device 0 keeps (D-1+k)/k activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ..ops import BACKWARD, FORWARD, Op
from ..placement import linear
from ..registry import schedule


@schedule("1f1b", place=linear)
def one_f_one_b(device: int, num_devices: int, micro_batches: int, slices: int) -> Iterator[Op]:
    """Warm-up, one forward one backward, cool-down: at most D - device activations."""
    forwards = (Op(FORWARD, m, device, j) for m in range(micro_batches) for j in range(slices))
    backwards = (Op(BACKWARD, m, device, j) for m in range(micro_batches) for j in reversed(range(slices)))
    yield from islice(forwards, num_devices - device - 1 + slices - 1)
    for forward in forwards:
        yield forward
        yield next(backwards)
    yield from backwards
