"""Slices of a sequence: the tokens of each. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from ..errors import ConfigError

EQUAL = "equal"


def slice_bounds(
    tokens: int, count: int, lengths: str | Sequence[int] = EQUAL, shards: int = 1
) -> list[tuple[int, int]]:
    """Return start and stop of every slice of a sequence.

    Args:
        tokens: length of the sequence.
        count: number of slices.
        lengths: tokens of every slice.
        shards: ranks over which sequence parallelism distributes the tokens of a slice.

    Raises:
        ConfigError: the slices do not fit the sequence, or the ranks.
    """
    sizes = [tokens // count] * count if lengths == EQUAL else [*map(int, lengths)]
    if sum(sizes) != tokens:
        needed = f"a multiple of {count}" if lengths == EQUAL else f"{sum(sizes)}, the sum of slice_lengths"
        raise ConfigError(
            f"sequence_slices: the tokens of a sample must be {needed} (got {tokens}). Change the samples, "
            f"sequence_slices or slice_lengths."
        )
    odd = next((size for size in sizes if size % shards), None)
    if odd is not None:
        raise ConfigError(
            f"sequence_slices: sequence parallelism needs slices of a multiple of {shards} tokens (got {odd}). Change "
            f"sequence_slices, or remove sequence_parallel."
        )
    return list(pairwise(accumulate(sizes, initial=0)))
