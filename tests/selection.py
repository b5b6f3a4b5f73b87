"""Size of a large matrix of runs: a selection, or everything with ``make test-all``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

EVERYTHING = bool(os.environ.get("DS_EXT_TEST_ALL"))
extensive = pytest.mark.skipif(not EVERYTHING, reason="make test-all")


def select(everything: list[T], few: list[T]) -> list[T]:
    """Return ``few`` of ``everything``, or everything with ``make test-all``."""
    return everything if EVERYTHING else few


def covering(cases: Iterable[T], strength: int, traits: Callable[[T], Any] = lambda case: case) -> list[T]:
    """Return the cases of :func:`cover`, or all with ``make test-all``."""
    cases = list(cases)
    return cases if EVERYTHING else cover(cases, strength, traits)


def cover(cases: Sequence[T], strength: int, traits: Callable[[T], Any] = lambda case: case) -> list[T]:
    """Return few of ``cases`` that contain every combination of values.

    The greedy algorithm always takes the first case with the most missing combinations.

    Args:
        cases: the cases.
        strength: number of factors of a combination: 1 covers every value, 2 every pair of values.
        traits: values of a case, one for each factor. By default the case is a tuple of them.
    """

    def combined(case: T) -> set[Any]:
        return set(combinations(enumerate(traits(case)), strength))

    combinations_of = [combined(case) for case in cases]
    missing, chosen = set[Any]().union(*combinations_of), []
    while missing:
        best = max(range(len(cases)), key=lambda number: len(combinations_of[number] & missing))
        chosen.append(cases[best])
        missing -= combinations_of[best]
    return chosen
