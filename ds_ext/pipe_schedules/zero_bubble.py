"""Zero bubble: the backward is split, and weight gradients fill the waits (arXiv 2401.10241, 2405.15362).

``2'`` is the input gradient (I) of micro-batch 2, which the previous stage waits for, ``2"`` its weight gradient (W),
which nobody waits for. All three are the slot rule of :mod:`.slots` on a placement, with at most D activations on a
device. `zb_h1`, one linear pipe (2401.10241, section 2.2)::

    rank 0  0  1  2  3  .  .  .  0' 0" 1' 1" 2' 2" 3' 3"
    rank 1  .  0  1  2  .  .  0' 3  1' 0" 2' 1" 3' 2" 3"
    rank 2  .  .  0  1  .  0' 2  1' 3  2' 0" 3' 1" 2" 3"
    rank 3  .  .  .  0  0' 1  1' 2  2' 3  3' 0" 1" 2" 3"

`zb_v`, one V-shaped pipe, so that the loss is on rank 0 and all ranks keep equally much (2405.15362, section 3)::

    rank 0  0  1  2  3  .  .  .  0  0' 1  1' 2  2' 3  3' 0' 0" 1' 1" 2' 2" 3' 3" 0" 1" 2" 3"
    rank 1  .  0  1  2  .  .  0  3  1  0' 2  1' 3  2' 0' 3' 1' 0" 2' 1" 3' 2" 0" 3" 1" 2" 3"
    rank 2  .  .  0  1  .  0  2  1  3  2  0' 3  1' 0' 2' 1' 3' 2' 0" 3' 1" 0" 2" 1" 3" 2" 3"
    rank 3  .  .  .  0  0  1  1  2  2  3  3  0' 0' 1' 1' 2' 2' 3' 3' 0" 0" 1" 1" 2" 2" 3" 3"

`bitpipe_zb`, BitPipe's two V-shaped pipes::

    rank 0  0  1  .  2  2  3  3  0  0' 1  1' 2' 2' 3' 3' 0' 0" 1' 1" 2" 2" 3" 3" 0" 1"
    rank 1  .  0  2  1  3  2  0  3  1  0' 2' 1' 3' 2' 0' 3' 1' 0" 2" 1" 3" 2" 0" 3" 1"
    rank 2  .  2  0  3  1  0  2  1  3  2' 0' 3' 1' 0' 2' 1' 3' 2" 0" 3" 1" 0" 2" 1" 3"
    rank 3  2  3  .  0  0  1  1  2  2' 3  3' 0' 0' 1' 1' 2' 2" 3' 3" 0" 0" 1" 1" 2" 3"
"""

from __future__ import annotations

from collections.abc import Iterator

from .ops import Op
from .placement import bidirectional_v, linear, v
from .registry import Option, schedule
from .slots import split_order


@schedule("zb_h1", place=linear)
def zb_h1(rank: int, ranks: int, micro_batches: int) -> Iterator[Op]:
    """1F1B with split backwards: (D-1)F beyond ideal when F = I = W, a third of 1F1B's, for D activations."""
    return split_order(rank, linear(ranks), micro_batches)


@schedule("zb_v", place=v, micro_batches_multiple_of_ranks=True)
def zb_v(rank: int, ranks: int, micro_batches: int) -> Iterator[Op]:
    """A V-shaped pipe with split backwards: (D-1)F/2 beyond ideal when F = I = W, for D activations."""
    return split_order(rank, v(ranks), micro_batches)


@schedule(
    "bitpipe_zb",
    place=bidirectional_v,
    even_ranks=True,
    micro_batches_multiple_of_ranks=True,
    options={"waves": Option(1, 1, "times a pipe goes there and back over the devices")},
)
def bitpipe_zb(rank: int, ranks: int, micro_batches: int, waves: int) -> Iterator[Op]:
    """BitPipe with split backwards: (D-2)F/4 beyond ideal when F = I = W, over waves; twice the weights."""
    return split_order(rank, bidirectional_v(ranks, waves), micro_batches)
