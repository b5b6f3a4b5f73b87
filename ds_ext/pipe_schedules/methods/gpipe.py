"""GPipe: all forwards, then all backwards (arXiv 1811.06965, fig. 2c). ::

    device 0  0 1 2 3 . . . . . . . . . 0'- 1'- 2'- 3'-
    device 1  . 0 1 2 3 . . . . . . 0'- 1'- 2'- 3'- . .
    device 2  . . 0 1 2 3 . . . 0'- 1'- 2'- 3'- . . . .
    device 3  . . . 0 1 2 3 0'- 1'- 2'- 3'- . . . . . .

Every device keeps the activations of all micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ops import BACKWARD, FORWARD, Op
from ..placement import linear
from ..registry import schedule


@schedule("gpipe", place=linear)
def gpipe(device: int, num_devices: int, micro_batches: int) -> Iterator[Op]:
    """All forwards, then all backwards: N activations."""
    for m in range(micro_batches):
        yield Op(FORWARD, m, device)
    for m in range(micro_batches):
        yield Op(BACKWARD, m, device)
