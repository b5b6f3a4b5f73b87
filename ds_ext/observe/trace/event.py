"""JSON text of trace events. The parts of an instruction that do not change are cached."""

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
    MessageKind,
)

CATEGORIES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "backward input",
    BACKWARD_WEIGHT: "backward weight",
    RECOMPUTE: "recompute forward",
}
LOAD = "LoadMicroBatch"
REDUCTIONS = ("ReduceGrads", "ReduceTiedGrads")
# Thread of collectives beside the instructions of a step -> their name and category.
ASYNCHRONOUS = {"reduce": ("ReduceGrads", "reduction"), "gather": ("GatherWeights", "gather")}
_CACHE_LIMIT = 100_000  # instructions; more than any timetable has


class EventText:
    """Formatter of the events of one rank.

    Args:
        peers: function that maps a device to the global ranks with which this rank exchanges messages.
        eager: reductions overlap with computation, and their instruction only waits for them.
    """

    def __init__(self, rank: int, peers: Callable[[int], Sequence[int]], *, eager: bool) -> None:
        self.rank, self._peers, self._eager = rank, peers, eager
        self._cache: dict[Instruction, tuple[str, str, str, dict[str, Any]]] = {}

    def instruction(
        self, instruction: Instruction, begin_us: float, end_us: float, message_bytes: int, step: int
    ) -> str:
        fixed = self._cache.get(instruction)
        if fixed is None:
            if len(self._cache) >= _CACHE_LIMIT:
                self._cache.clear()
            fixed = self._cache[instruction] = self._fixed(instruction)
        name, thread, category, arguments = fixed
        values = {"step": step, **({"bytes": message_bytes} if message_bytes else {}), **arguments}
        return _span(name, category, self.rank, thread, begin_us, end_us, values)

    def _fixed(self, instruction: Instruction) -> tuple[str, str, str, dict[str, Any]]:
        """Return the parts of an event that do not change: name, thread, category, arguments."""
        keys = ("micro_batch", "stage", "pipe", "other_stage")
        arguments = {key: value for key in keys if (value := getattr(instruction, key)) is not None}
        if instruction.peer is not None:
            arguments["peer"], *others = self._peers(instruction.peer)
            if others:
                arguments["more_peers"] = others
        return (str(instruction), *self._thread_and_category(instruction), arguments)

    def _thread_and_category(self, instruction: Instruction) -> tuple[str, str]:
        name = instruction.name
        if name in COMPUTE:
            return "compute", CATEGORIES[COMPUTE[name]]
        if name.startswith(("Send", "Recv")):
            kind = next(kind for kind in MessageKind if name.endswith(kind.suffix))
            return ("recv" if name.startswith("Recv") else "send"), kind.name.lower()
        if name in REDUCTIONS:
            return ("step" if self._eager else "reduce"), "reduction"
        return "step", name

    def step(self, step: int, begin_us: float, end_us: float, micro_batches: int) -> str:
        """Return the event of a whole step, which ends when its loss is available."""
        values = {"step": step, "micro_batches": micro_batches}
        return _span(f"step {step}", "step", self.rank, "step", begin_us, end_us, values)

    def evaluation(self, begin_us: float, end_us: float) -> str:
        return _span("evaluation", "evaluation", self.rank, "step", begin_us, end_us, {})

    def failure(self, name: str, at_us: float) -> str:
        event = {"name": f"failed: {name}", "ph": "i", "s": "p", "pid": self.rank, "tid": "step"}
        return json.dumps({**event, "ts": round(at_us, 3)})


def collective_lanes(
    rank: int, thread: str, collectives: Iterable[tuple[int, int | None, int, float, float]]
) -> list[str]:
    """Return the events of asynchronous reductions (thread ``reduce``) or gathers of weights (``gather``).

    Spans of one thread must not overlap partially, so overlapping ones get the threads ``reduce 2`` and so on.

    Args:
        thread: one of ``ASYNCHRONOUS``.
        collectives: (step, stage, bytes, begin, end) of each, in microseconds; stage None for weights tied between
            stages. A gather belongs to the step whose weights it gathers.
    """
    lines: list[str] = []
    ends: list[float] = []  # of every lane
    instruction, category = ASYNCHRONOUS[thread]
    for step, stage, size, begin_us, end_us in sorted(collectives, key=lambda one: one[3]):
        lane = next((i for i, end in enumerate(ends) if end <= begin_us), len(ends))
        lane_thread = thread if lane == 0 else f"{thread} {lane + 1}"
        if lane == len(ends):
            ends.append(0.0)
        ends[lane] = end_us
        name = f"{instruction} tied" if stage is None else f"{instruction} @{stage}"
        values: dict[str, Any] = {"step": step, "bytes": size}
        if stage is not None:
            values["stage"] = stage
        lines.append(_span(name, category, rank, lane_thread, begin_us, end_us, values))
    return lines


def _span(
    name: str, category: str, rank: int, thread: str, begin_us: float, end_us: float, values: dict[str, Any]
) -> str:
    event = {"name": name, "cat": category, "ph": "X", "pid": rank, "tid": thread}
    return json.dumps({**event, "ts": round(begin_us, 3), "dur": round(end_us - begin_us, 3), "args": values})
