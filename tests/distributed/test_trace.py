"""Traces of real runs: all instructions, on one clock, reductions beside computations, also of a killed run."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import MappingProxyType
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from benchmarks.rank_pool import RankFailure
from ds_ext.observe.trace.file import TIMETABLE
from ds_ext.observe.trace.merge import merge
from ds_ext.observe.trace.read import Event, RankTrace, Traces, read_traces
from ds_ext.observe.trace.summary import summarize, summary_table
from ds_ext.observe.trace.view import page
from ds_ext.pipe_schedules import Program, timetable
from ds_ext.pipe_schedules.files import read_timetable
from ds_ext.pipe_schedules.lowering import lower
from tests.engine_runs import MODEL, Job, StepBatches, batches_of, build
from tests.ranks import RankPool
from tests.selection import select


@dataclass(frozen=True)
class TracedJob(Job):
    """A run that writes traces."""

    trace: dict[str, Any] = dataclasses.field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        made = super().config()
        made["ds_ext"]["trace"] = self.trace
        return made


def job(folder: Path, schedule: str = "bitpipe", pp: int = 4, **given: Any) -> TracedJob:
    trace = {"dir": str(folder), "steps": given.pop("traced", None)}
    return TracedJob(schedule, pp, 1, given.pop("dp", 1), 8, MODEL, trace=trace, **given)


def clock_of(rank: int) -> tuple[float, float]:
    """(rate, offset in seconds) of the clock that a rank is given."""
    return 1 + 2e-5 * rank, 1000.0 * rank


def train_traced(rank: int, job: TracedJob) -> dict[str, Any]:
    """Train with a clock of this rank's own, evaluate between two steps, profile the last one."""
    engine, _ = build(job)
    rate, offset = clock_of(rank)
    engine.busy.clock = lambda: rate * time.perf_counter() + offset
    batches, bubbles = StepBatches(batches_of(job)), []
    profiler = profile(activities=[ProfilerActivity.CPU])
    for step in range(job.steps):
        with profiler if step == job.steps - 1 else nullcontext():
            engine.train_batch(batches)
        bubbles.append(engine.bubble_measured)
        if step == 0:
            engine.eval_batch(StepBatches(batches_of(job)))
    assert engine.tracer is not None and engine.tracer.times is not None
    engine.tracer.finish()
    engine.transport.close()
    return {
        "bubbles": bubbles,
        "opened": engine.tracer.times.opened,
        "profiled": names_of(profiler),
    }


def names_of(profiler: profile) -> set[str]:
    """The names in what the profiler exports. Its tables take R2@0 for a C++ name, of a reference, and show @0&."""
    with NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        return {event["name"] for event in json.loads(Path(file.name).read_text())["traceEvents"]}


def spans_of(trace: RankTrace, *threads: str) -> list[Event]:
    return [event for event in trace.spans() if event["tid"] in threads]


def overlapping(trace: RankTrace) -> list[tuple[str, str]]:
    """(reduction, computation) that began while the reduction was under way, or the other way round."""
    computations = spans_of(trace, "compute")
    reductions = [event for event in trace.spans() if event["tid"].startswith("reduce")]
    return [
        (reduction["name"], other["name"])
        for reduction in reductions
        for other in computations
        if reduction["ts"] < other["ts"] + other["dur"] and other["ts"] < reduction["ts"] + reduction["dur"]
    ]


def assert_has_every_instruction(
    traces: Traces, steps: list[int], options: Mapping[str, Any] = MappingProxyType({})
) -> Program:
    """Each once a step, under the name that dumps and errors have, with what it is about; the planned ones."""
    made = read_timetable(traces.folder / TIMETABLE)
    assert made == timetable(made.schedule, made.placement.devices_per_pipe, 8, **options)
    planned = lower(made)
    for trace in traces.ranks.values():
        mine = planned.instructions[trace.run["device"]]
        about = {str(instruction): instruction for instruction in mine}
        for step in steps:
            found = [e for e in trace.spans() if e["args"].get("step") == step and e["name"] in about]
            assert sorted(e["name"] for e in found) == sorted(map(str, mine))
            for event in found:
                known, values = about[event["name"]], event["args"]
                for key in ("micro_batch", "stage", "pipe"):
                    assert values.get(key) == getattr(known, key)
                assert ("peer" in values) == (known.peer is not None)
                assert ("bytes" in values) == known.name.startswith(("Send", "Recv"))
        whole = [e["name"] for e in spans_of(trace, "step") if e["cat"] == "step"]
        assert whole == [f"step {step}" for step in steps]
    return planned


def assert_is_on_one_clock(traces: Traces, opened: list[float]) -> None:
    """All clocks of a host are one, which the ranks' skewed ones are known functions of."""
    for rank, trace in traces.ranks.items():
        rate, offset = clock_of(rank)
        limit_us = max(100.0, 1e6 * trace.align.error_s)
        for event in trace.spans():
            true_s = (opened[rank] + event["ts"] / 1e6 - offset) / rate
            assert abs(trace.on_rank_0(event["ts"]) - 1e6 * (true_s - opened[0])) <= limit_us


def test_a_run_is_traced_whole(ranks4: RankPool, tmp_path: Path) -> None:
    """Every instruction once, the metrics' bubble, clocks that differ by minutes made one, an arrow a message."""
    answers = ranks4.run(train_traced, job(tmp_path, steps=3))
    traces = read_traces(tmp_path)
    assert traces.notes == () and sorted(traces.ranks) == [0, 1, 2, 3]
    assert read_timetable(tmp_path / TIMETABLE) == timetable("bitpipe", 4, 8)
    assert_has_every_instruction(traces, [1, 2, 3])
    assert_is_on_one_clock(traces, [answer["opened"] for answer in answers])
    for trace in traces.ranks.values():
        assert [e["name"] for e in trace.spans() if e["cat"] == "evaluation"] == ["evaluation"]

    measured = summarize(traces).bubble_by_step
    assert list(measured.values()) == pytest.approx(answers[0]["bubbles"], rel=0.01)

    joined = merge(traces, tmp_path / "all.json")
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    assert (
        joined.messages
        == 3 * 96
        == sum(e["ph"] == "s" for e in events)
        == sum(e["ph"] == "f" for e in events)
    )
    assert joined.early_us <= max(100.0, *(2e6 * trace.align.error_s for trace in traces.ranks.values()))

    named = {e["name"] for e in spans_of(traces.ranks[1], "compute", "send", "recv")}
    assert named <= answers[1]["profiled"]
    # A rank's reductions go on while it computes: the other holder of the stage ends at another time.
    assert any(overlapping(trace) for trace in traces.ranks.values())


@pytest.mark.parametrize(
    ("schedule", "pp", "options"),
    [
        *select([("1f1b", 4, {}), ("dpp", 4, {"placement": "interleaved"}), ("bitpipe_zb", 4, {})], []),
        ("dpp", 4, {"placement": "bidirectional_v", "backward": "split"}),
        ("fbd", 2, {}),
    ],
)
def test_every_op_once_and_the_bubble_of_the_metrics(
    ranks4: RankPool, tmp_path: Path, schedule: str, pp: int, options: dict[str, Any]
) -> None:
    """Also of an order that is decided at run time, and of forwards on ranks of their own."""
    answers = ranks4.run(train_traced, job(tmp_path, schedule, pp, steps=2, options=options))
    traces = read_traces(tmp_path)
    assert traces.notes == () and sorted(traces.ranks) == [0, 1, 2, 3]
    planned = assert_has_every_instruction(traces, [1, 2], options)
    measured = summarize(traces).bubble_by_step
    assert list(measured.values()) == pytest.approx(answers[0]["bubbles"], rel=0.01)
    joined = merge(traces, tmp_path / "all.json")
    sent = [i for instructions in planned.instructions for i in instructions if i.name.startswith("Send")]
    assert joined.messages == 2 * len(sent) and not joined.unpaired
    named = {event["name"] for event in spans_of(traces.ranks[1], "compute", "send", "recv")}
    assert named <= answers[1]["profiled"]
    assert f"{schedule}, measured, step 2" in page(traces, 2)


def test_reductions_after_the_last_backward_overlap_nothing(ranks4: RankPool, tmp_path: Path) -> None:
    ranks4.run(train_traced, job(tmp_path, steps=2, eager=False))
    traces = read_traces(tmp_path)
    assert_has_every_instruction(traces, [1, 2])
    for trace in traces.ranks.values():
        assert [e["name"] for e in spans_of(trace, "reduce")].count("ReduceGrads") == 2
        assert not overlapping(trace)


def test_gathers_last_from_their_step_to_a_wait_of_the_next(ranks4: RankPool, tmp_path: Path) -> None:
    zero = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    traced = job(tmp_path, "interleaved", 2, dp=2, deepspeed=zero, overlap=True)
    ranks4.run(train_traced, traced)
    traces = read_traces(tmp_path)
    summary = summarize(traces)
    for rank, trace in traces.ranks.items():
        waits = (event for event in trace.spans() if event["name"].startswith("WaitStage"))
        shares = sum(event["dur"] / summary.makespan_by_step[event["args"]["step"]] for event in waits)
        assert summary.ranks[rank].gather == pytest.approx(shares / traced.steps) != 0
    assert "gather" in summary_table(summary)[0]
    for trace in traces.ranks.values():
        begins: dict[tuple[str, int, int], float] = {}
        ends: dict[tuple[str, int, int], float] = {}
        for event in (event for event in trace.events() if event.get("ph") == "X"):
            name = event["name"].partition(" ")[0]
            key = name, event["args"].get("step", 0), event["args"].get("stage", -1)
            begins.setdefault(key, event["ts"])
            ends[key] = event["ts"] + event["dur"]
        gathers = [(step, stage) for name, step, stage in begins if name == "GatherWeights"]
        held = {stage for name, _, stage in begins if name.startswith("F")}
        assert {*gathers} == {(step, stage) for step in range(1, traced.steps + 1) for stage in held}
        for step, stage in gathers:
            assert begins["GatherWeights", step, stage] >= begins["OptimizerStep", step, -1]
            if step < traced.steps:
                end = ends["GatherWeights", step, stage]
                assert end <= ends["WaitStage", step + 1, stage] + 1000  # the callback has its own thread


def test_some_steps_of_several_pipeline_groups(ranks4: RankPool, tmp_path: Path) -> None:
    """The window; peers are global ranks; what an earlier run has left is kept in a folder with its name."""
    bounds = [0, 3, MODEL.num_layers + 4]
    wanted = job(tmp_path, "1f1b", 2, dp=2, steps=4, traced="2:3", partition_method=bounds)
    ranks4.run(train_traced, wanted)
    first = read_traces(tmp_path)
    assert_has_every_instruction(first, [2, 3])
    peers = {
        rank: {e["args"]["peer"] for e in spans_of(t, "send", "recv")} for rank, t in first.ranks.items()
    }
    assert peers == {0: {2}, 1: {3}, 2: {0}, 3: {1}}
    recomputed = dataclasses.replace(MODEL, recompute="full")
    ranks4.run(train_traced, dataclasses.replace(wanted, steps=2, model=recomputed))
    second = read_traces(tmp_path)
    assert second.run["run"] != first.run["run"]
    assert second.run["recomputes"] and not first.run["recomputes"]
    size = len(batches_of(wanted)[0][0][0])
    for trace in first.ranks.values():
        assert trace.run["stage_layers"] == [3, MODEL.num_layers + 1] and not trace.run["balanced"]
        assert trace.run["micro_batch_size"] == size
    earlier = read_traces(tmp_path / first.run["run"])
    assert earlier.run == first.run and sorted(earlier.ranks) == [0, 1, 2, 3]
    assert read_timetable(earlier.folder / TIMETABLE) == timetable("1f1b", 2, 8)


def die_in_step_2(rank: int, job: TracedJob) -> None:
    """Rank 1 is killed in the middle of its second step."""
    engine, _ = build(job)
    batches = StepBatches(batches_of(job))
    engine.train_batch(batches)
    if rank == 1:
        losses, loss_fn = [0], engine.module.loss_fn

        def deadly(outputs: Any, labels: Any) -> Any:
            losses[0] += 1
            if losses[0] == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return loss_fn(outputs, labels)

        engine.module.loss_fn = deadly
    engine.train_batch(batches)


def test_a_killed_run_leaves_its_steps(ranks2: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="exit code -9"):
        ranks2.run(die_in_step_2, job(tmp_path, "1f1b", 2, steps=2))
    traces = read_traces(tmp_path)
    assert_has_every_instruction(dataclasses.replace(traces, ranks={1: traces.ranks[1]}), [1])
    assert any(note.startswith("rank1.json: ") for note in traces.notes)
    assert summarize(traces).steps == 1
    # The other rank has noticed: the last thing in its trace is what it was doing.
    failed = [event["name"] for event in traces.ranks[0].events() if event.get("ph") == "i"]
    assert len(failed) == 1 and failed[0].startswith("failed: ")
