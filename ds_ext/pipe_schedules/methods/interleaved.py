"""Interleaved 1F1B: every device holds several stages, visited in a loop (arXiv 2104.04473, 2.2.2). ::

    rank 0  0 1 2 3 0 1 2 3 . . . . . . 0'- . 1'- . 2'- . 3'- 0'- 1'- 2'- 3'-
    rank 1  . 0 1 2 3 0 1 2 3 . . . 0'- . 1'- . 2'- . 3'- 0'- 1'- 2'- 3'- . .
    rank 2  . . 0 1 2 3 0 1 2 . 0'- 3 1'- . 2'- . 3'- 0'- 1'- 2'- 3'- . . . .
    rank 3  . . . 0 1 2 3 0 0'- 1 1'- 2 2'- 3 3'- 0'- 1'- 2'- 3'- . . . . . .

Here with two chunks a device: a micro-batch passes every device twice, and each visit is half as long.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ops import BACKWARD, FORWARD, Op
from ..placement import looped
from ..registry import Option, schedule


@schedule(
    "interleaved",
    place=looped,
    micro_batches_multiple_of_ranks=True,
    options={"chunks": Option(2, 1, "stages a device")},
    variants=lambda ranks, micro_batches: [{"chunks": chunks} for chunks in (2, 3, 4)],
)
def interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterator[Op]:
    """1F1B over D x chunks stages: the bubble shrinks by the number of chunks, messages grow by it."""
    total = micro_batches * chunks
    warmup = min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, total)
    for k in range(warmup):
        yield _forward(k, rank, ranks, chunks)
    for k in range(warmup, total):
        yield _forward(k, rank, ranks, chunks)
        yield _backward(k - warmup, rank, ranks, chunks)
    for k in range(total - warmup, total):
        yield _backward(k, rank, ranks, chunks)


def _forward(k: int, rank: int, ranks: int, chunks: int) -> Op:
    """The k-th forward of a device: D micro-batches through chunk 0, then these through chunk 1, and so on."""
    group, within = divmod(k, ranks * chunks)
    chunk, m = divmod(within, ranks)
    return Op(FORWARD, group * ranks + m, chunk * ranks + rank)


def _backward(k: int, rank: int, ranks: int, chunks: int) -> Op:
    """The k-th backward: as the k-th forward with the chunks in reverse order."""
    op = _forward(k, rank, ranks, chunks)
    chunk = op.stage // ranks
    return Op(BACKWARD, op.micro_batch, (chunks - 1 - chunk) * ranks + rank)
