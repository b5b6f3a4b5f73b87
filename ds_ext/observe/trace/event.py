"""The text of a rank's events. A line is put together from parts that are kept, as a run repeats its instructions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...pipe_schedules.ops import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    FORWARD,
    RECOMPUTE,
    Instruction,
)

CATEGORIES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "backward input",
    BACKWARD_WEIGHT: "backward weight",
    RECOMPUTE: "recompute forward",
}
REDUCTIONS = ("ReduceGrads", "ReduceTiedGrads")
_MOST_KEPT = 100_000  # instructions; a timetable has fewer


class EventText:
    """Events of one rank as text.

    Args:
        rank: this global rank.
        peers: the global ranks that a message to or from a device goes to or comes from.
        eager: reductions run beside computations; what their instruction does is to wait for them.
    """

    def __init__(self, rank: int, peers: Callable[[int], Sequence[int]], *, eager: bool) -> None:
        self.rank, self._peers, self._eager = rank, peers, eager
        self._kept: dict[Instruction, tuple[str, str]] = {}

    def instruction(self, done: Instruction, begin_us: float, end_us: float, moved: int, step: int) -> str:
        """An executed instruction; ``moved``: the bytes of its message."""
        parts = self._kept.get(done)
        if parts is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            parts = self._kept[done] = self._parts(done)
        head, tail = parts
        size = f', "bytes": {moved}' if moved else ""
        return f'{head}{begin_us:.3f}, "dur": {end_us - begin_us:.3f}, "args": {{"step": {step}{size}{tail}'

    def _parts(self, done: Instruction) -> tuple[str, str]:
        thread, category = self._place(done)
        values: dict[str, Any] = {"micro_batch": done.micro_batch, "stage": done.stage, "pipe": done.pipe}
        if done.peer is not None:
            first, *more = self._peers(done.peer)
            values["peer"] = first
            if more:
                values["more_peers"] = more
        known = {key: value for key, value in values.items() if value is not None}
        head = json.dumps({"name": str(done), "cat": category, "ph": "X", "pid": self.rank, "tid": thread})
        tail = json.dumps(known)[1:]
        return f'{head[:-1]}, "ts": ', f"{', ' if known else ''}{tail}}}"

    def _place(self, done: Instruction) -> tuple[str, str]:
        """(thread, category) of an instruction."""
        if done.name in COMPUTE:
            return "compute", CATEGORIES[COMPUTE[done.name]]
        if done.name.startswith(("Send", "Recv")):
            kind = "gradient" if done.name.endswith("Grad") else "activation"
            return ("recv" if done.name.startswith("Recv") else "send"), kind
        if done.name in REDUCTIONS:
            return ("step" if self._eager else "reduce"), "reduction"
        return "step", done.name

    def step(self, step: int, begin_us: float, end_us: float, micro_batches: int) -> str:
        """A whole step, to the moment at which its loss is known."""
        values = {"step": step, "micro_batches": micro_batches}
        return _span(f"step {step}", "step", self.rank, "step", begin_us, end_us, values)

    def evaluation(self, begin_us: float, end_us: float) -> str:
        """An evaluation between two steps."""
        return _span("evaluation", "evaluation", self.rank, "step", begin_us, end_us, {})

    def failure(self, name: str, at_us: float) -> str:
        """Where a step ended."""
        event = {"name": f"failed: {name}", "ph": "i", "s": "p", "pid": self.rank, "tid": "step"}
        return json.dumps({**event, "ts": round(at_us, 3)})


def reduction_lanes(
    rank: int, step: int, reductions: Iterable[tuple[int | None, int, float, float]]
) -> list[str]:
    """Asynchronous reductions (stage, bytes, begin, end), None being tied weights of several stages.

    Spans of a thread must not overlap in part, so reductions that do get threads ``reduce 2`` and so on.
    """
    lines: list[str] = []
    ends: list[float] = []  # by lane
    for stage, size, begin_us, end_us in sorted(reductions, key=lambda reduction: reduction[2]):
        lane = next((i for i, end in enumerate(ends) if end <= begin_us), len(ends))
        thread = "reduce" if lane == 0 else f"reduce {lane + 1}"
        if lane == len(ends):
            ends.append(0.0)
        ends[lane] = end_us
        name = "ReduceGrads tied" if stage is None else f"ReduceGrads @{stage}"
        values: dict[str, Any] = {"step": step, "bytes": size}
        if stage is not None:
            values["stage"] = stage
        lines.append(_span(name, "reduction", rank, thread, begin_us, end_us, values))
    return lines


def _span(
    name: str, category: str, rank: int, thread: str, begin_us: float, end_us: float, values: dict[str, Any]
) -> str:
    event = {"name": name, "cat": category, "ph": "X", "pid": rank, "tid": thread}
    return json.dumps({**event, "ts": round(begin_us, 3), "dur": round(end_us - begin_us, 3), "args": values})
