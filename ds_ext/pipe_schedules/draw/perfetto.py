"""A simulated timetable as a Chrome trace, to be opened at ui.perfetto.dev or chrome://tracing.

It has the shape of the traces of real runs (a process a rank, a thread for computing, events named like the
timetable's ops), so that plan and run can be looked at with the same tool.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE
from ..simulate import Simulation

_CATEGORY = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "backward input",
    BACKWARD_WEIGHT: "backward weight",
    RECOMPUTE: "recompute",
}
_COMPUTE_THREAD = 0

Event = dict[str, object]


def chrome_trace(simulation: Simulation, unit_us: float = 1000.0) -> dict[str, object]:
    """The simulation in the Trace Event Format (JSON object form): spans, and arrows between ranks.

    Args:
        unit_us: microseconds that one unit of the simulation's time is drawn as.
    """
    timetable = simulation.timetable
    events = [*_names(len(timetable.orders)), *_spans(simulation, unit_us), *_arrows(simulation, unit_us)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "schedule": timetable.schedule,
            "stages": timetable.placement.devices_per_pipe,
            "micro_batches": timetable.micro_batches,
            **simulation.as_dict(),
        },
    }


def _names(ranks: int) -> Iterator[Event]:
    for rank in range(ranks):
        process = {"ph": "M", "pid": rank, "tid": _COMPUTE_THREAD}
        yield {**process, "name": "process_name", "args": {"name": f"rank {rank}"}}
        yield {**process, "name": "process_sort_index", "args": {"sort_index": rank}}
        yield {**process, "name": "thread_name", "args": {"name": "compute"}}


def _spans(simulation: Simulation, unit_us: float) -> Iterator[Event]:
    for rank, spans in enumerate(simulation.spans):
        for op, start, end in spans:
            pipe = simulation.timetable.pipe(op.micro_batch)
            yield {
                "name": str(op),
                "cat": _CATEGORY[op.kind],
                "ph": "X",
                "ts": start * unit_us,
                "dur": (end - start) * unit_us,
                "pid": rank,
                "tid": _COMPUTE_THREAD,
                "args": {"micro_batch": op.micro_batch, "stage": op.stage, "pipe": pipe},
            }


def _arrows(simulation: Simulation, unit_us: float) -> Iterator[Event]:
    """A flow from the end of what is sent to the start of what needs it, for every pair on different ranks."""
    times = {op: (start, end) for spans in simulation.spans for op, start, end in spans}
    number = 0
    for rank, spans in enumerate(simulation.spans):
        for op, start, _ in spans:
            for need, owner in simulation.timetable.dependencies.of(op):
                if owner == rank:
                    continue
                number += 1
                need_start, need_end = times[need]
                flow = {"name": f"{need} -> {op}", "cat": "message", "id": number, "tid": _COMPUTE_THREAD}
                # A flow belongs to the span that its time falls into, and a span does not contain its own end.
                leaves = need_end - (need_end - need_start) * 1e-3
                yield {**flow, "ph": "s", "pid": owner, "ts": leaves * unit_us}
                yield {**flow, "ph": "f", "bp": "e", "pid": rank, "ts": start * unit_us}
