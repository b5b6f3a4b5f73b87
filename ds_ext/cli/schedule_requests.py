"""A schedule as the command line asks for it: ``bitpipe``, ``bitpipe:mode=greedy``, or the path of a timetable file."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import ScheduleError
from ..pipe_schedules.files import is_timetable_file

_WITH_OPTIONS = re.compile(r"[\w-]+:\w+=")


def split_request(text: str) -> tuple[str, dict[str, Any]]:
    """The name or path, and the options behind it: ``"dpp:placement=v:policy=depth"``. A path has none.

    Raises:
        ScheduleError: what is behind a name is no option, or one is given twice.
    """
    if is_file(text):
        return text, {}
    name, *parts = text.split(":")
    return name, read_options(
        parts, lambda part: f"{text!r}", "bitpipe:mode=greedy", lambda key: f"{text!r} gives {key} twice"
    )


def read_options(
    words: Iterable[str], whole: Callable[[str], str], form: str, twice: Callable[[str], str]
) -> dict[str, Any]:
    """``chunks=3`` and the like as a dict. Raises ScheduleError.

    Args:
        whole: of a word, what the user has written.
        form: an example of the right form.
        twice: of a key, how the error begins that it is given twice.
    """
    options: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise ScheduleError(f"{whole(word)} is not of the form {form}.")
        if key in options:
            raise ScheduleError(f"{twice(key)}, {options[key]} and {value}; give it once.")
        options[key] = number_or_text(value)
    return options


def is_file(text: str) -> bool:
    """Whether ``text`` means a timetable file; a name with options does not, though a value may look like a path."""
    return os.path.isfile(text) or (is_timetable_file(text) and _WITH_OPTIONS.match(text) is None)


def number_or_text(value: str) -> int | float | str:
    """The value of an option as the schedules take it."""
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(value)
    return value
