"""Plain text for tables, sizes in bytes, costs and reasons."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from ..errors import ScheduleError
from ..pipe_schedules.costs import Costs, factors_text

HEADROOM = 0.1  # share of the memory for what a plan does not count


def aligned(cells: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Return a table as lines, without its empty columns.

    ``left`` are the columns to align left; all others are aligned right.
    """
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            if width
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def parse_bytes(text: str, name: str = "size in bytes", examples: str = "80GB, 512MB or 16GiB") -> int:
    """Return the bytes of ``"80GB"`` (10^9) or ``"80GiB"`` (2^30); ``name`` and ``examples`` are for the error."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([kKMGTmgt])(i?)B?|B)\s*", text)
    if match is None:
        bits = " A lower-case b means bits." if re.search(r"[0-9]\s*[kmgt]i?b", text, re.IGNORECASE) else ""
        raise ScheduleError(
            f"{name}: not a number with a unit of bytes (got {text!r}).{bits} Use {examples}."
        )
    power = " KMGT".index((match[2] or " ").upper())
    size = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if size < 1:
        raise ScheduleError(f"{name}: must be at least 1 byte (got {text!r}). Use {examples}.")
    return size


def usable_bytes(size: int, headroom: float, name: str) -> int:
    if not 0 <= headroom < 1:
        raise ScheduleError(f"{name}: must be at least 0 and below 1 (got {headroom:g}). Use 0.1.")
    return int(size * (1 - headroom))


def format_count(number: float) -> str:
    """Return a number such as ``"1.32 billion"``, ``"98.30 million"`` or ``"12,345"``."""
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if number >= unit / 10:
            return f"{number / unit:,.2f} {name}"
    return f"{number:,.0f}"


def format_bytes(size: float) -> str:
    """Return a size in decimal units, such as ``"12.3 GB"``."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size:.0f} B"


def format_number(value: object) -> str:
    """Return a number with all its digits, without a trailing ``.0``; any other value as ``str``."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    return str(value)


def costs_text(costs: Costs) -> str:
    """Return costs in the form of ``--costs`` and the option "costs"."""
    if costs.links:
        raise ScheduleError(
            f"costs: link times cannot be written as text (got {len(costs.links)} links). Use a costs file."
        )
    times = {"f": costs.forward, "b": costs.backward_input, "w": costs.backward_weight, "comm": costs.comm}
    if costs.overhead:
        times["overhead"] = costs.overhead
    if costs.jitter:
        times |= {"jitter": costs.jitter, "seed": costs.seed}
    text = ",".join(f"{key}={format_number(value)}" for key, value in times.items())
    head = (costs.head,) if costs.head else None
    lists = {"stages": costs.stages, "head": head, "slices": costs.slices}
    return ",".join([text, *(f"{key}={factors_text(v)}" for key, v in lists.items() if v is not None)])


def describe_costs(costs: Costs) -> str:
    """Return a short description of costs, such as ``"f=1,b=1.2,w=0.8,comm=0.1, factors per stage"``."""
    text = costs_text(replace(costs, stages=None, head=0.0, slices=None, links={}))
    stages = "" if costs.stages is None else ", factors per stage"
    stages += ", a factor of the head" if costs.head else ""
    slices = "" if costs.slices is None else ", times per slice"
    return f"{text}{stages}{slices}{', times per link' if costs.links else ''}"


def join_reasons(reasons: Iterable[str]) -> list[str]:
    """Return each reason once, and merge those that differ only in their last number.

    "4 heads are not divisible by TP 3" and "4 heads are not divisible by TP 5" become
    "4 heads are not divisible by TP 3, 5".
    """
    joined: dict[tuple[str, str], set[int]] = {}
    for reason in reasons:
        match = re.fullmatch(r"(.* )(\d+)( .*)?", reason)
        start, number, end = match.groups("") if match else (reason, "", "")
        numbers = joined.setdefault((start, end), set())
        if number:
            numbers.add(int(number))
    return [f"{start}{', '.join(map(str, sorted(numbers)))}{end}" for (start, end), numbers in joined.items()]


def join_words(words: Iterable[object], conjunction: str = "or") -> str:
    """Return ``"1, 2 or 4"``."""
    *first_words, last_word = map(str, words)
    return f"{', '.join(first_words)} {conjunction} {last_word}" if first_words else last_word
