"""Slices of a sequence: the tokens of each. Needs no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from ..errors import ConfigError

EQUAL, BALANCED = "equal", "balanced"


def balanced_lengths(
    work_until: Callable[[float], float], tokens: int, count: int, multiple: int
) -> list[int]:
    """Return the tokens of slices that take about equally long.

    Args:
        work_until: returns the work of the first tokens of a sample.
        multiple: every slice has a multiple of this many tokens.
    """
    places = range(0, tokens + 1, multiple)
    total = work_until(tokens)
    ends = [bisect_left(places, total * j / count, key=work_until) for j in range(count + 1)]
    lengths = [multiple * (end - start) for start, end in pairwise(ends)]
    if tokens % multiple or not all(lengths):
        raise ConfigError(
            f"slice_lengths: {count} balanced slices need samples of many times {multiple} tokens, and no remainder "
            f"(got {tokens}). Use longer samples, fewer slices or {EQUAL!r}."
        )
    return lengths


def slice_bounds(
    tokens: int, count: int, lengths: str | Sequence[int] = EQUAL, shards: int = 1
) -> list[tuple[int, int]]:
    """Return start and stop of every slice. Sequence parallelism distributes its tokens over ``shards`` ranks."""
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
