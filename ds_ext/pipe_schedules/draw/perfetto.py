"""Simulated timetable as a Chrome trace, for ui.perfetto.dev or chrome://tracing.

The format is the same as for traces of real runs: one process per device, one thread for computations, and events named
after ops.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE
from ..simulation import Simulation
from .grid import in_lanes

_CATEGORY = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "backward input",
    BACKWARD_WEIGHT: "backward weight",
    RECOMPUTE: "recompute",
}
_COMPUTE_THREAD = 0
_UNIT_US = 1000.0  # microseconds per unit of time of the simulation

Event = dict[str, object]


def chrome_trace(simulation: Simulation) -> dict[str, object]:
    """Return the simulation in the Trace Event Format (JSON object form): spans, and arrows between devices."""
    timetable = simulation.timetable
    events = [
        *_names(len(timetable.orders)),
        *_spans(simulation),
        *_collectives(simulation),
        *_arrows(simulation),
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "schedule": timetable.schedule,
            "stages": timetable.placement.devices_per_pipe,
            "micro_batches": timetable.micro_batches,
            **({"slices": timetable.slices} if timetable.slices > 1 else {}),
            **simulation.as_dict(),
        },
    }


def _names(devices: int) -> Iterator[Event]:
    for device in range(devices):
        process = {"ph": "M", "pid": device, "tid": _COMPUTE_THREAD}
        yield {**process, "name": "process_name", "args": {"name": f"device {device}"}}
        yield {**process, "name": "process_sort_index", "args": {"sort_index": device}}
        yield {**process, "name": "thread_name", "args": {"name": "compute"}}


def _spans(simulation: Simulation) -> Iterator[Event]:
    timetable = simulation.timetable
    for device, spans in enumerate(simulation.spans):
        for op, start, end in spans:
            slice_argument = {"slice": op.slice} if timetable.slices > 1 else {}
            yield {
                "name": str(op),
                "cat": _CATEGORY[op.kind],
                "ph": "X",
                "ts": start * _UNIT_US,
                "dur": (end - start) * _UNIT_US,
                "pid": device,
                "tid": _COMPUTE_THREAD,
                "args": {
                    "micro_batch": op.micro_batch,
                    **slice_argument,
                    "stage": op.stage,
                    "pipe": timetable.pipe(op.micro_batch),
                },
            }


def _collectives(simulation: Simulation) -> Iterator[Event]:
    """Yield the collectives of every device on further threads, because spans of one thread must not overlap."""
    for device, row in enumerate(simulation.collectives):
        lanes = in_lanes((start, end, op.name) for op, start, end in row)
        for thread, lane in enumerate(lanes, _COMPUTE_THREAD + 1):
            process = {"pid": device, "tid": thread}
            yield {**process, "ph": "M", "name": "thread_name", "args": {"name": f"collectives {thread}"}}
            for start, end, name in lane:
                times = {"ts": start * _UNIT_US, "dur": (end - start) * _UNIT_US}
                yield {**process, "ph": "X", "name": name, "cat": name.partition("@")[0], **times}


def _arrows(simulation: Simulation) -> Iterator[Event]:
    """Yield a flow for every message: from the end of the sender's op to the start of the receiver's."""
    times = {op: (start, end) for spans in simulation.spans for op, start, end in spans}
    number = 0
    for device, spans in enumerate(simulation.spans):
        for op, start, _ in spans:
            for need, owner in simulation.timetable.dependencies.needs(op):
                if owner == device:
                    continue
                number += 1
                need_start, need_end = times[need]
                flow = {"name": f"{need} -> {op}", "cat": "message", "id": number, "tid": _COMPUTE_THREAD}
                # A flow belongs to the span that contains its time; a span does not contain its own end.
                leaves = need_end - (need_end - need_start) * 1e-3
                yield {**flow, "ph": "s", "pid": owner, "ts": leaves * _UNIT_US}
                yield {**flow, "ph": "f", "bp": "e", "pid": device, "ts": start * _UNIT_US}
