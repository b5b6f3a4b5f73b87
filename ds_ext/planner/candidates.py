"""The answer of :mod:`.search`: a table of schedules, the best of them, and why."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ScheduleError
from ..pipe_schedules.costs import Costs, factors_text

SAME = 1e-7  # times closer than this are equal: factors of stages are rounded to 1e-8
_REASONS = 3  # of a choice that has nothing to choose from


@dataclass(frozen=True)
class Candidate:
    """A row of the table. ``refusal`` says in a sentence why it is not taken, "" where it could be.

    ``time`` is of a step, in the costs' unit; ``memory_bytes`` of the worst rank; the model is cut into ``stages``.
    What was not priced has no time, and what has no model or was not priced no bytes. ``layers`` are those of every
    stage; ``unpriced`` says that only a bound kept it from being looked at.
    """

    schedule: str
    options: Mapping[str, Any]
    recompute: str
    costs: Costs
    planned: bool
    refusal: str = ""
    time: float | None = None
    bubble: float | None = None
    memory_bytes: int | None = None
    weights: int = 1
    activations: float = 0.0
    stages: int = 0
    layers: tuple[int, ...] | None = None
    unpriced: bool = False

    @property
    def label(self) -> str:
        """``interleaved chunks=3``."""
        return " ".join([self.schedule, *(f"{key}={_short(value)}" for key, value in self.options.items())])

    @property
    def settings(self) -> dict[str, Any]:
        """The "schedule_options" of a job: the options, and for a planned order the costs it was planned for."""
        if self.planned and self.costs != Costs():
            return {**self.options, "costs": costs_text(self.costs)}
        return dict(self.options)

    @property
    def weight(self) -> tuple[float, ...]:
        """Less is less memory: bytes, or without a model copies of the weights, then activations."""
        if self.memory_bytes is not None:
            return (self.memory_bytes,)
        return (self.weights, self.activations)

    @property
    def order(self) -> tuple[object, ...]:
        """Of equals in time: least memory; as large, the simplest, cut into fewest stages; then by name."""
        return (*self.weight, self.stages, self.schedule)


@dataclass(frozen=True)
class Choice:
    """The table: what could be taken, by time; then what does not fit, by bytes; then what was not priced.

    ``limit`` is what a device has, in bytes; None for no limit. ``margin``: what saves less was not looked for.
    """

    table: tuple[Candidate, ...]
    limit: int | None = None
    margin: float = 0.0

    @property
    def best(self) -> Candidate | None:
        """The least time that fits, among equals the least memory; None when nothing fits."""
        return self.table[0] if self.table and not self.table[0].refusal else None

    @property
    def fitting(self) -> tuple[Candidate, ...]:
        """All that could be taken."""
        return tuple(c for c in self.table if not c.refusal)

    @property
    def nearest(self) -> Candidate | None:
        """Of those too large, the one that needs least memory."""
        large = [c for c in self.table if c.refusal and c.memory_bytes is not None]
        return min(large, key=lambda c: c.order, default=None)

    def reason(self) -> str:
        """Why the best one, in a sentence; or what is nearest."""
        if self.best is None:
            return self._nothing()
        time, others = (
            self.best.time or 0.0,
            [c for c in self.fitting[1:] if c.schedule != self.best.schedule],
        )
        if not others:
            return self._only(self.best)
        second = min(others, key=lambda c: (c.time, c.order))
        if (second.time or 0.0) > time * (1 + SAME):
            longer = (second.time or 0.0) / time
            gain = f"{longer - 1:.1%}" if longer < 2 else f"{longer:.2f} times"
            how = f"takes {gain} longer" if longer < 2 else f"takes {gain} as long"
            return f"{self.best.label} takes the least time; the next schedule priced, {second.label}, {how}."
        return f"{self.best.label} takes as little time as {second.label} and needs no more memory."

    def _only(self, best: Candidate) -> str:
        """Of a best one without a second."""
        if any(c.unpriced for c in self.table):
            gain = f"{self.margin:.0%} less time" if self.margin else "less time"
            return f"{best.label} is the best one priced; no other can take {gain}."
        if self.limit is not None:
            return f"{best.label} is the only schedule that fits {format_bytes(self.limit)}."
        return f"{best.label} is the only schedule that is possible."

    def _nothing(self) -> str:
        near, limit = self.nearest, self.limit
        if near is None or near.memory_bytes is None or limit is None:
            reasons = _joined(c.refusal.removesuffix(".") for c in self.table)
            more = f"; and {len(reasons) - _REASONS} more reasons" if len(reasons) > _REASONS else ""
            return f"no schedule is possible: {'; '.join(reasons[:_REASONS])}{more}."
        again = "" if near.recompute == "none" else f" with {near.recompute} recomputation"
        return (
            f"no schedule fits {format_bytes(limit)}; the nearest, {near.label}{again}, needs "
            f"{format_bytes(near.memory_bytes)}, {format_bytes(near.memory_bytes - limit)} too much."
        )


def describe_rows(rows: Sequence[Candidate], unit: float = 1.0, digits: int = 4) -> list[str]:
    """The rows as lines: schedule, recomputation, time (times ``unit``), bubble, memory of the worst rank, refusal."""
    cells = [("schedule", "recompute", "time", "bubble", "memory", "")]
    for row in rows:
        time = "-" if row.time is None else f"{row.time * unit:.{digits}g}"
        bubble = "-" if row.bubble is None else f"{row.bubble:.1%}"
        size = "-" if row.memory_bytes is None else format_bytes(row.memory_bytes)
        cells.append((row.label, row.recompute, time, bubble, size, row.refusal))
    return aligned(cells, left=(0, 1, 5))


def aligned(cells: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Rows of equally many cells as lines, columns flush right but for ``left``; one that is empty is left out."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            if width
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def _joined(reasons: Iterable[str]) -> list[str]:
    """Each once; those that differ in one number as one: "3 layers are fewer than the 4, 8 stages"."""
    joined: dict[tuple[str, ...], set[int]] = {}
    for reason in sorted(set(reasons)):
        words = re.split(r"(?<= )(\d+)(?= )", reason)
        # The last number between two words; a reason without one stands for itself.
        last = len(words) - 2
        numbers = joined.setdefault(tuple(w for i, w in enumerate(words) if i != last), set())
        if last > 0:
            numbers.add(int(words[last]))
    found = []
    for words, numbers in joined.items():
        *start, end = words
        found.append(f"{''.join(start)}{', '.join(map(str, sorted(numbers)))}{end}")
    return found


def costs_text(costs: Costs) -> str:
    """``Costs`` as ``--costs`` and the option "costs" take them. Raises ScheduleError for what these cannot say."""
    if costs.links:
        raise ScheduleError("costs of single links cannot be written as text; give the job a costs file.")
    times = {"f": costs.forward, "b": costs.backward_input, "w": costs.backward_weight, "comm": costs.comm}
    if costs.jitter:
        times |= {"jitter": costs.jitter, "seed": costs.seed}
    text = ",".join(f"{key}={_short(value)}" for key, value in times.items())
    return text if costs.stages is None else f"{text},stages={factors_text(costs.stages)}"


def describe_costs(costs: Costs) -> str:
    """``Costs`` in words for people: "f=1,b=1.2,w=0.8,comm=0.1, each stage by its work"."""
    text = costs_text(replace(costs, stages=None, links={}))
    stages = "" if costs.stages is None else ", stages by their factors"
    return f"{text}{stages}{', links by their own times' if costs.links else ''}"


def parse_bytes(text: str) -> int:
    """``"80GB"`` (10^9) or ``"80GiB"`` (2^30) -> bytes. Raises ScheduleError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)\s*", text, re.IGNORECASE)
    size = 0
    if found is not None:
        power = " KMGT".index((found[2] or " ").upper())
        size = int(float(found[1]) * (1024 if found[3] else 1000) ** power)
    if size < 1:
        raise ScheduleError(f"a size in bytes is written 80GB, 512MB or 16GiB; got {text!r}.")
    return size


def format_bytes(size: float) -> str:
    """``"12.3 GB"``, of 10^9 bytes."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size:.0f} B"


def _short(value: object) -> str:
    """Numbers without needless digits: 12.0 as 12; every digit that counts."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return repr(value) if isinstance(value, float) else str(value)
