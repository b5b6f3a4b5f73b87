"""Simulations as Chrome traces."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ds_ext.pipe_schedules import get_schedule, timetable
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.draw.perfetto import chrome_trace
from ds_ext.pipe_schedules.ports import Collective
from ds_ext.pipe_schedules.simulation import simulate


def events(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "bitpipe"])
def test_spans_are_the_simulation(name: str) -> None:
    simulation = simulate(timetable(name, 4, 8), Costs(1, 1.2, 0.8, 0.1))
    trace: dict[str, Any] = json.loads(json.dumps(chrome_trace(simulation)))
    found = {event["name"]: event for event in events(trace, "X")}
    assert len(found) == sum(map(len, simulation.timetable.orders))
    for rank, spans in enumerate(simulation.spans):
        for op, start, end in spans:
            event = found[str(op)]
            assert (event["pid"], event["tid"]) == (rank, 0)
            assert (event["ts"], event["ts"] + event["dur"]) == pytest.approx((start * 1000, end * 1000))
            pipe = simulation.timetable.pipe(op.micro_batch)
            assert event["args"] == {"micro_batch": op.micro_batch, "stage": op.stage, "pipe": pipe}


def test_slices_are_arguments() -> None:
    simulation = simulate(get_schedule("zb_v").timetable(2, 2, slices=3))
    trace: dict[str, Any] = json.loads(json.dumps(chrome_trace(simulation)))
    found = {event["name"]: event["args"] for event in events(trace, "X")}
    assert len(found) == sum(map(len, simulation.timetable.orders))
    for op in (op for order in simulation.timetable.orders for op in order):
        args = found[str(op)]
        assert (args["micro_batch"], args["stage"], args["slice"]) == op[1:]
    assert trace["otherData"]["slices"] == 3


def test_devices_and_threads_have_names() -> None:
    trace: dict[str, Any] = chrome_trace(simulate(timetable("1f1b", 2, 2)))
    names = [(e["pid"], e["name"], e["args"].get("name")) for e in events(trace, "M")]
    for rank in range(2):
        assert (rank, "process_name", f"device {rank}") in names
        assert (rank, "thread_name", "compute") in names
    assert trace["otherData"]["schedule"] == "1f1b" and trace["otherData"]["makespan"] == 9


def test_collectives_do_not_overlap_on_a_thread() -> None:
    rows = (
        ((Collective("gather@0"), 0.0, 3.0), (Collective("reduce@0"), 2.0, 4.0)),
        ((Collective("reduce"), 9.0, 11.0),),
    )
    trace: dict[str, Any] = chrome_trace(replace(simulate(timetable("1f1b", 2, 2)), collectives=rows))
    found = [e for e in events(trace, "X") if e["tid"]]
    assert [(e["name"], e["cat"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in found] == [
        ("gather@0", "gather", 0, 1, 0.0, 3000.0),
        ("reduce@0", "reduce", 0, 2, 2000.0, 2000.0),
        ("reduce", "reduce", 1, 1, 9000.0, 2000.0),
    ]
    assert {(e["pid"], e["tid"]) for e in events(trace, "M") if e["name"] == "thread_name"} >= {
        (0, 1),
        (0, 2),
        (1, 1),
    }


@pytest.mark.parametrize("name", ["1f1b", "bitpipe"])
def test_an_arrow_a_message(name: str) -> None:
    """An arrow starts inside the span of the sender and ends at the start of the receiver's span."""
    simulation = simulate(timetable(name, 4, 4), Costs(comm=0.25))
    trace: dict[str, Any] = chrome_trace(simulation)
    spans = {event["name"]: event for event in events(trace, "X")}
    starts = {event["id"]: event for event in events(trace, "s")}
    ends = {event["id"]: event for event in events(trace, "f")}
    assert len(starts) == len(ends) == simulation.messages
    for number, leaves in starts.items():
        arrives = ends[number]
        source, target = (spans[part] for part in leaves["name"].split(" -> "))
        assert (leaves["name"], leaves["cat"]) == (arrives["name"], arrives["cat"])
        assert leaves["pid"] == source["pid"] != target["pid"] == arrives["pid"]
        assert source["ts"] < leaves["ts"] < source["ts"] + source["dur"]
        assert arrives["ts"] == target["ts"] and arrives["bp"] == "e"
