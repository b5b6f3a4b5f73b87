"""Chimera: two linear pipes in opposite directions (arXiv 2107.06925, fig. 2 and section 3.1). ::

    device 0  0 1 . 2 2'- 3 3'- . 0'- . . 1'-
    device 1  . 0 2 1 3 . 2'- 0'- 3'- 1'- . .
    device 2  . 2 0 3 1 . 0'- 2'- 1'- 3'- . .
    device 3  2 3 . 0 0'- 1 1'- . 2'- . . 3'-

The down pipe (micro-batches 0 and 1) runs from device 0 to device 3, the up pipe (2 and 3) from device 3 to device 0.
With N > D, units of D micro-batches follow each other and overlap (section 3.5, direct concatenation).
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ops import Op
from ..placement import bidirectional_linear
from ..registry import schedule
from ..tick_rule import whole_order


@schedule("chimera", place=bidirectional_linear, even_devices=True, micro_batches_multiple_of_devices=True)
def chimera(device: int, num_devices: int, micro_batches: int) -> Iterator[Op]:
    """Two linear pipes in opposite directions: bubble 2(D-2)/(3N+2(D-2)) at N = D, twice the weights."""
    return whole_order(device, bidirectional_linear(num_devices), micro_batches)
