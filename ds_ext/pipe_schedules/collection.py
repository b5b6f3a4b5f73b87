"""Garbage collection, paused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def without_collection(function: Callable[P, R]) -> Callable[P, R]:
    """No search for cycles while ``function`` runs.

    A large timetable is millions of tuples and no cycle; looking for some, again and again, would take half the time.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not gc.isenabled():
            return function(*args, **kwargs)
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            gc.enable()

    return run
