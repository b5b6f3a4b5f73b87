"""GPipe: all forwards, then all backwards (arXiv 1811.06965, fig. 2c). ::

    device 0  0 1 2 3 . . . . . . . . . 0'- 1'- 2'- 3'-
    device 1  . 0 1 2 3 . . . . . . 0'- 1'- 2'- 3'- . .
    device 2  . . 0 1 2 3 . . . 0'- 1'- 2'- 3'- . . . .
    device 3  . . . 0 1 2 3 0'- 1'- 2'- 3'- . . . . . .

Every device keeps the activations of all micro-batches. With k slices the fill and the drain take 1/k of the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ..ops import BACKWARD, FORWARD, Op
from ..placement import linear
from ..registry import schedule


@schedule("gpipe", place=linear)
def gpipe(device: int, num_devices: int, micro_batches: int, slices: int) -> Iterator[Op]:
    """All forwards, then all backwards: N activations."""
    for m, j in product(range(micro_batches), range(slices)):
        yield Op(FORWARD, m, device, j)
    for m, j in product(range(micro_batches), reversed(range(slices))):
        yield Op(BACKWARD, m, device, j)
