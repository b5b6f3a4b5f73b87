"""How much of a large matrix of runs to run: a selection, or everything (``make test-all``)."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

EVERYTHING = bool(os.environ.get("DS_EXT_TEST_ALL"))


def select(everything: list[T], few: list[T]) -> list[T]:
    """``few`` of ``everything``, unless all is asked for."""
    return everything if EVERYTHING else few
