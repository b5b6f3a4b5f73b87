"""Merged trace, summary, page and commands for traces that are written from a simulation."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ds_ext.__main__ import main
from ds_ext.cli.trace_verbs import run_view
from ds_ext.errors import ConfigError
from ds_ext.observe.trace.causes import Causes, Row, RowSteps, find_causes
from ds_ext.observe.trace.file import rank_file
from ds_ext.observe.trace.merge import merge
from ds_ext.observe.trace.read import read_traces
from ds_ext.observe.trace.summary import summarize
from ds_ext.observe.trace.view import AXIS, page, picture
from ds_ext.pipe_schedules import Placement, get_schedule, timetable
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.simulation import Simulation, simulate
from tests.trace_folders import BYTES, PRICED, SEND_US, UNIT_US, write_traces

# --- merge ---


def test_merged_times_equal_the_simulation(whole: Path, tmp_path: Path) -> None:
    """Every rank's clock has a different offset."""
    merge(read_traces(whole), tmp_path / "all.json")
    joined = json.loads((tmp_path / "all.json").read_text())
    assert joined["otherData"]["world_size"] == 4 and len(joined["otherData"]["clocks"]) == 4
    events: dict[tuple[int, str], dict[str, Any]] = {
        (e["pid"], e["name"]): e
        for e in joined["traceEvents"]
        if e["ph"] == "X" and e["tid"] == "compute" and e["args"]["step"] == 1
    }
    assert len(events) == sum(map(len, PRICED.spans))
    for rank, spans in enumerate(PRICED.spans):
        for op, start, end in spans:
            event = events[rank, str(op)]
            assert event["ts"] == pytest.approx(start * UNIT_US, abs=0.01)
            assert event["dur"] == pytest.approx((end - start) * UNIT_US, abs=0.01)
            pipe = PRICED.timetable.pipe(op.micro_batch)
            args = {"step": 1, "micro_batch": op.micro_batch, "stage": op.stage, "pipe": pipe}
            assert event["args"] == args


def test_every_message_has_an_arrow(whole: Path, tmp_path: Path) -> None:
    merged = merge(read_traces(whole), tmp_path / "all.json")
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    assert merged.messages == 2 * PRICED.messages and not merged.unpaired and merged.early_us == 0
    arrows = {phase: {e["id"]: e for e in events if e["ph"] == phase} for phase in "sf"}
    assert len(arrows["s"]) == len(arrows["f"]) == merged.messages
    spans = {(e["pid"], e["tid"]): [] for e in events if e["ph"] == "X"}
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append(event)

    def around(flow: dict[str, Any]) -> dict[str, Any]:
        (span,) = (
            s
            for s in spans[flow["pid"], flow["tid"]]
            if s["ts"] <= flow["ts"] <= s["ts"] + s["dur"] and s["dur"]
        )
        return span

    for number, start in list(arrows["s"].items())[::7]:
        sent, received = around(start), around(arrows["f"][number])
        assert (sent["tid"], received["tid"], arrows["f"][number]["bp"]) == ("send", "recv", "e")
        assert sent["args"]["peer"] == received["pid"] and received["args"]["peer"] == sent["pid"]
        assert sent["args"]["micro_batch"] == received["args"]["micro_batch"]


def test_messages_of_head_parts_have_arrows_and_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = Costs(1, 1.2, 0.8, 0.05, head=20.0)
    for name in ("1f1b", "bitpipe_zb"):
        simulation = simulate(get_schedule(name).dividing_head().timetable(4, 8, costs=costs), costs)
        folder, stages = tmp_path / name, simulation.timetable.placement.stages
        write_traces(folder, simulation)
        merged = merge(read_traces(folder), tmp_path / "all.json")
        assert merged.messages == 2 * simulation.messages and not merged.unpaired and merged.early_us == 0
        summary = summarize(read_traces(folder))
        names = [*map(str, range(stages)), *(f"head part {i}" for i in range(4)), "loss"]
        assert [stage.name for stage in summary.stages] == names
        assert summary.slowest_stage is not None and summary.slowest_stage.name.startswith("head part")
        # Parts are compared with parts, stages with stages.
        ratios = [stage.ms / stage.others_ms for stage in summary.stages if stage.others_ms]
        assert ratios == pytest.approx([1.0] * (stages + 4), rel=1e-3)
        assert main(["trace", "summary", str(folder)]) == 0
        assert re.search(r"^slowest stage +head part \d on rank", capsys.readouterr().out, re.MULTILINE)


# --- summary ---


def test_the_summary_equals_the_simulation(whole: Path) -> None:
    summary = summarize(read_traces(whole))
    assert summary.steps == 2 and summary.schedule == "bitpipe" and not summary.notes
    assert list(summary.bubble_by_step.values()) == pytest.approx([PRICED.bubble] * 2, abs=1e-6)
    makespan_us = PRICED.makespan * UNIT_US
    for rank, spans in zip(summary.ranks, PRICED.spans, strict=True):
        busy = sum(end - start for _, start, end in spans)
        assert rank.busy == pytest.approx(busy / PRICED.makespan, abs=1e-6)
        assert rank.bubble == pytest.approx(1 - rank.busy)
        idle = (spans[-1][2] - busy) / PRICED.makespan
        assert sum(rank.waits.values()) == pytest.approx(idle, abs=1e-3)
        assert rank.p2p == pytest.approx(sum(rank.waits.values()), abs=len(spans) * SEND_US / makespan_us)
        assert rank.reduction == pytest.approx(100 / makespan_us, rel=1e-3)
        assert rank.optimizer == pytest.approx(200 / makespan_us, rel=1e-3)
        hidden_us = sum(
            max(0.0, end * UNIT_US - max(start * UNIT_US, makespan_us - 2000)) for _, start, end in spans
        )
        assert rank.reduction_hidden == pytest.approx(4 * hidden_us / makespan_us, abs=1e-6)
    assert {peer for rank in summary.ranks for peer in rank.waits} == {0, 1, 2, 3}


def test_the_summary_names_the_slow_stage_and_the_slow_link(tmp_path: Path) -> None:
    slow = Costs(comm=0.01, stages=(1, 1, 1, 1, 1, 1.5, 1, 1), links={(2, 3): 0.4})
    write_traces(tmp_path, simulate(timetable("bitpipe", 4, 8), slow))
    summary = summarize(read_traces(tmp_path))
    stage, link = summary.slowest_stage, summary.slowest_link
    assert stage is not None and stage.stage == 5
    assert stage.ms == pytest.approx(1.5 * 1.5 * UNIT_US / 1e3, rel=1e-6)
    assert link is not None and (link.sender, link.receiver) == (2, 3)
    assert link.ms >= 0.4 * UNIT_US / 1e3 - 0.001 and link.bytes == BYTES


def test_a_step_incomplete_on_one_rank_does_not_count(folder: Path) -> None:
    path = rank_file(folder, 3)
    lines = path.read_text().splitlines(keepends=True)
    cut = next(i for i, line in enumerate(lines) if '"name": "step 2"' in line)
    path.write_text("".join(lines[:cut]))
    assert list(summarize(read_traces(folder)).bubble_by_step) == [1]
    path.write_text("".join(lines[:30]))
    summary = summarize(read_traces(folder))
    assert summary.steps == 0 and summary.notes[-1].startswith("steps: ")


# --- causes of the bubble ---


def rows_of(
    simulations: Sequence[Simulation], *, slow: int | None = None, steps: int = 4
) -> dict[Row, RowSteps]:
    """Return the ops of a simulation per pipeline group, on ranks group * D + device. Rank ``slow`` takes 1.5 times."""
    rows = {}
    for group, simulation in enumerate(simulations):
        for device, spans in enumerate(simulation.spans):
            rank = group * len(simulation.spans) + device
            ops = [(op, (end - start) * (1.5 if rank == slow else 1.0)) for op, start, end in spans]
            rows[group, device] = RowSteps(rank, dict.fromkeys(range(1, steps + 1), ops))
    return rows


def causes_of(simulations: Sequence[Simulation], bubble: float, **options: Any) -> Causes:
    links_us, parameters = options.pop("links_us", {}), options.pop("stage_parameters", {})
    shared = options.pop("ranks_per_core", None)
    causes = find_causes(
        simulations[0].timetable,
        rows_of(simulations, **options),
        links_us,
        bubble,
        stage_parameters=parameters,
        ranks_per_core=shared,
    )
    assert causes is not None
    parts = (*(causes.schedule, causes.uneven, causes.varying, causes.data, causes.messages, causes.between),)
    assert sum(parts) == pytest.approx(causes.bubble) and min(parts) >= 0
    return causes


def test_the_causes_of_a_bubble_equal_simulations_without_them() -> None:
    """Stage 2 is slow, and every message takes half a forward: three simulations differ by one cause each."""
    made, stages = timetable("1f1b", 4, 8), (1, 1, 1.6, 1)
    equal = simulate(made, Costs(1, 2, 0))
    uneven = simulate(made, Costs(1, 2, 0, stages=stages))
    links = {(device, other): 0.5 for device in range(4) for other in range(4)}
    whole = simulate(made, Costs(1, 2, 0, comm=0.5, stages=stages))
    causes = causes_of([whole], whole.bubble + 0.05, links_us=links)
    assert causes.schedule == pytest.approx(equal.bubble)
    assert causes.schedule + causes.uneven == pytest.approx(uneven.bubble)
    assert causes.messages == pytest.approx(whole.bubble - uneven.bubble)
    assert (causes.varying, causes.between) == (0.0, pytest.approx(0.05))
    assert causes.slow_ranks == []


@dataclass(frozen=True)
class SlowFirstForwards(Costs):
    """Forwards at stage 0 take twice the time."""

    def durations(self, placement: Placement, slices: int = 1) -> dict[str, tuple[float, ...]]:
        durations = super().durations(placement, slices)
        return durations | {"F": (2 * durations["F"][0], *durations["F"][1:])}


def test_loading_data_is_a_cause(tmp_path: Path) -> None:
    """Half of every forward at stage 0 loads data."""
    made = timetable("1f1b", 4, 8)
    loading, free = simulate(made, SlowFirstForwards(1, 2, 0)), simulate(made, Costs(1, 2, 0))
    write_traces(tmp_path, loading, load_share=0.5)
    summary = summarize(read_traces(tmp_path))
    assert [rank.data for rank in summary.ranks] == pytest.approx([8 / loading.makespan, 0, 0, 0])
    causes = summary.causes
    assert causes is not None and causes.data_ranks == [0]
    assert causes.bubble == pytest.approx(1 - 24 / loading.makespan)
    assert causes.schedule == pytest.approx(free.bubble)
    assert causes.data == pytest.approx(causes.bubble - free.bubble, abs=1e-3) and causes.data > 0.09
    measured = drawn(page(read_traces(tmp_path)))[1]["marks"]
    assert [len([mark for mark in row if mark[4:]]) for row in measured] == [8, 0, 0, 0]


def test_the_slowest_stage_is_compared_with_the_others(tmp_path: Path) -> None:
    write_traces(tmp_path, simulate(timetable("1f1b", 4, 8), Costs(1, 2, 0, stages=(1, 1, 1, 12))))
    summary = summarize(read_traces(tmp_path))
    stage, causes = summary.slowest_stage, summary.causes
    assert stage is not None and stage.others_ms is not None and causes is not None
    assert causes.slowest_stage == (3, pytest.approx(12)) and stage.ms / stage.others_ms == pytest.approx(12)


def test_advice_is_on_the_largest_causes_first() -> None:
    causes = Causes(0.6, 0.2, 0.3, 0.0, 0.06, 0.04, 0.0, (3, 2.0), steps=[1, 2], sizes=(4, 8))
    assert [re.findall(r"(\w+), (\d+) points: ", line) for line in causes.advice()] == [
        *([("ops", "30")], [("schedule", "20")], [("data", "6")]),
    ]


@pytest.mark.parametrize(
    ("stage", "balanced", "words"),
    [
        (0, False, {"balanced", "partition_method"}),
        (0, True, {"partition_method"}),
        (3, False, {"balanced", "partition_method", "head"}),
        (3, True, {"partition_method", "head"}),
    ],
)
def test_advice_is_not_what_the_run_has(tmp_path: Path, stage: int, balanced: bool, words: set[str]) -> None:
    """A run with balanced layers needs other numbers; only the last stage has the head."""
    stages = tuple(3.0 if stage == i else 1.0 for i in range(4))
    simulation = simulate(timetable("1f1b", 4, 8), Costs(1, 2, 0, stages=stages))
    write_traces(tmp_path, simulation, balanced=balanced)
    causes = summarize(read_traces(tmp_path)).causes
    assert causes is not None
    (line,) = (line for line in causes.advice() if line.startswith("uneven"))
    assert set(re.findall(r"balanced|partition_method|head", line)) == words


@pytest.mark.parametrize(
    ("schedule", "messages", "between", "lines"),
    [(0.2, 0.0, 0.1, 3), (0.2, 0.1, 0.1, 4), (0.2, 0.1, 0.0, 3), (0.2, 0.0, 0.0, 1), (0.01, 0.0, 0.1, 1)],
)
def test_more_and_larger_micro_batches_need_a_larger_batch(
    schedule: float, messages: float, between: float, lines: int
) -> None:
    """One line for both, if both are advised."""
    causes = Causes(
        schedule + messages + between, schedule, 0.0, 0.0, 0.0, messages, between, None, steps=[1]
    )
    advice = causes.advice()
    assert len(advice) == lines and sum("train_batch_size" in line for line in advice) == (lines > 1)


def test_the_parts_of_a_step_add_up(whole: Path) -> None:
    """A traced step ends 400 us after its makespan, of which the reduction takes 100 and the optimizer 200."""
    values = summarize(read_traces(whole)).as_dict()
    assert values["makespan_s"] == pytest.approx(PRICED.makespan * UNIT_US / 1e6)
    assert values["rest_s"] == pytest.approx({"reduction": 1e-4, "optimizer": 2e-4, "other": 1e-4}, abs=1e-6)
    assert values["makespan_s"] + sum(values["rest_s"].values()) == pytest.approx(values["step_s"])


def test_ops_of_varying_length_are_a_cause() -> None:
    made = timetable("1f1b", 4, 8)
    jittered = simulate(made, Costs(1, 2, 0, jitter=0.5, seed=3))
    causes = causes_of([jittered], jittered.bubble)
    assert causes.varying > 0.02 and causes.between == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "groups", "parameters", "others"),
    [
        ("1f1b", 2, {}, [6]),  # the same device of the other pipeline group
        ("bitpipe", 1, {}, [1]),  # its mirror
        ("1f1b", 1, {0: 9, 1: 5, 2: 5, 3: 5}, [1, 3]),  # stages with as many parameters
        ("1f1b", 1, {}, None),  # nothing to compare with
    ],
)
def test_a_slow_rank_is_found_by_its_peers(
    name: str, groups: int, parameters: dict[int, int], others: list[int] | None
) -> None:
    simulations = [simulate(timetable(name, 4, 8), Costs(1, 2, 0))] * groups
    causes = causes_of(simulations, 0.6, slow=2, stage_parameters=parameters)
    found = [(rank.rank, rank.others, rank.steps) for rank in causes.slow_ranks]
    assert found == ([] if others is None else [(2, others, 4)])
    if found:
        assert causes.slow_ranks[0].ratio == pytest.approx(1.5) and causes.uneven > 0.05
        assert "rank 2 takes 1.5 times" in causes.sentence() and "Rank 2 " in causes.slow_rank_lines()[0]


def test_a_rank_that_is_slow_in_few_steps_is_not_named() -> None:
    simulations = [simulate(timetable("1f1b", 4, 8), Costs(1, 2, 0))] * 2
    rows, slow = rows_of(simulations), rows_of(simulations, slow=2)
    for step in (1, 2):
        rows[0, 2].steps[step] = slow[0, 2].steps[step]
    found = find_causes(simulations[0].timetable, rows, {}, 0.5, stage_parameters={})
    assert found is not None and found.slow_ranks == []


@pytest.mark.parametrize(("steps", "count"), [(4, 0), (8, 1)])
def test_ranks_that_share_cores_need_more_steps_to_be_slow(steps: int, count: int) -> None:
    simulations = [simulate(timetable("1f1b", 4, 8), Costs(1, 2, 0))] * 2
    shared = causes_of(simulations, 0.6, slow=2, steps=steps, ranks_per_core=(8, 2.0))
    assert len(shared.slow_ranks) == count
    assert len(causes_of(simulations, 0.6, slow=2, steps=steps).slow_ranks) == 1


@pytest.mark.parametrize("bubble", [0.0, 0.034, 0.366, 0.5])
@pytest.mark.parametrize("cores", [None, (4, 2.0)])
def test_the_points_of_the_sentence_add_up(bubble: float, cores: tuple[int, float] | None) -> None:
    schedule, uneven, varying, messages = (bubble * share for share in (0.234, 0.333, 0.111, 0.222))
    between = bubble - schedule - uneven - varying - messages
    data = between / 2
    parts = schedule, uneven, varying, data, messages, between - data
    causes = Causes(bubble, *parts, (5, 1.3), [], cores, 1.5, [1, 2, 3], [0, 3])
    total, *points = re.findall(
        r"[\d.]+(?= points| are the| uneven| loading| messages| ranks that| ops of| work)",
        causes.sentence(),
    )
    assert sum(map(float, points)) == pytest.approx(float(total), abs=1e-9)
    assert float(total) == pytest.approx(100 * bubble, abs=0.5)
    assert ("4 ranks, 2 cores" in causes.sentence()) == (cores is not None and bubble > 0)


def test_the_summary_ends_with_the_causes(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    causes = summarize(read_traces(whole)).causes
    free = simulate(PRICED.timetable, Costs(1, 1.2, 0.8))
    assert causes is not None and causes.bubble == pytest.approx(PRICED.bubble, abs=1e-6)
    assert causes.schedule == pytest.approx(free.bubble, abs=1e-3) and causes.slow_ranks == []
    assert causes.messages > 0 and causes.uneven == pytest.approx(0, abs=1e-3)
    assert main(["trace", "summary", str(whole)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-len(causes.lines()) :] == causes.lines() and causes.sentence() in lines
    assert main(["trace", "summary", str(whole), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["causes"]["schedule"] == causes.schedule


def test_ranks_that_share_cores_are_known_from_the_traces(folder: Path) -> None:
    for rank in range(4):
        path = rank_file(folder, rank)
        path.write_text(path.read_text().replace('"device": ', '"host": "a", "cores": 2, "device": ', 1))
    summary = summarize(read_traces(folder))
    causes = summary.causes
    assert causes is not None and causes.ranks_per_core == (4, 2.0)
    assert causes.busy_ranks == pytest.approx(sum(rank.busy for rank in summary.ranks))


def test_without_a_timetable_the_causes_are_unknown(folder: Path) -> None:
    (folder / "timetable.txt").unlink()
    assert summarize(read_traces(folder)).causes is None


# --- page ---


def drawn(text: str) -> list[dict[str, Any]]:
    """Return the data of the page's script, one plot per picture."""
    match = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert match
    return json.loads(match[1])


def test_the_page_has_the_plan_and_the_run_on_one_scale(whole: Path) -> None:
    text = page(read_traces(whole), 2)
    assert re.findall(r"<h2[^>]*>([^<]*)<", text) == [
        "bitpipe, planned with the op times of step 2",
        "bitpipe, measured, step 2",
    ]
    assert not re.search(r"https?:|@import|url\(|\bsrc=", text)
    planned, measured = drawn(text)
    free = simulate(PRICED.timetable, Costs(1, 1.2, 0.8, 0))
    assert planned["makespan"] == pytest.approx(free.makespan * UNIT_US / 1e3, rel=1e-6)
    assert measured["makespan"] == pytest.approx(PRICED.makespan * UNIT_US / 1e3, rel=1e-6)
    assert planned["axis"] == measured["axis"] == AXIS
    waits = [mark for row in measured["marks"] for mark in row if not mark[2]]
    assert any(re.search(r"rank \d.*Recv(Activation|Grad) \d@\d", mark[3]) for mark in waits)
    assert sum(mark[2] for row in measured["marks"] for mark in row) == 4 * 4


def test_page_and_summary_have_one_bubble_if_ranks_start_at_different_times(folder: Path) -> None:
    """Rank 1 waited for 7 ms before the others started the step."""
    path, lines = rank_file(folder, 1), []
    for line in path.read_text().splitlines():
        if '"cat": "step"' in line or '"cat":"step"' in line:
            event = json.loads(line.rstrip(","))
            event["ts"], event["dur"] = event["ts"] - 7_000.0, event["dur"] + 7_000.0
            line = json.dumps(event) + ","
        lines.append(line)
    path.write_text("\n".join(lines) + "\n")
    traces = read_traces(folder)
    summary, (_, measured) = summarize(traces), drawn(page(traces, 1))
    assert summary.makespan_by_step[1] == pytest.approx(
        PRICED.makespan * UNIT_US
    )  # from the own start of rank 0
    assert measured["makespan"] == pytest.approx(summary.makespan_by_step[1] / 1e3, rel=1e-6)
    assert 1 - measured["ideal"] / measured["makespan"] == pytest.approx(summary.bubble_by_step[1], rel=1e-6)
    reduced = max(mark[1] for row in measured["marks"] for mark in row if mark[2])
    assert measured["end"] == pytest.approx(max(measured["makespan"] + 7, reduced))
    drawing = picture([traces], 1)
    ops = re.findall(r'<rect class="\w+" x="([\d.]+)" y="\d+" width="([\d.]+)"[^>]*><title>', drawing)
    peaks = re.findall(r'<rect x="([\d.]+)"[^>]*class="bar"', drawing)
    assert len(ops) == sum(map(len, PRICED.spans)) and len(peaks) == 4
    assert max(float(x) + float(width) for x, width in ops) < min(map(float, peaks))


def test_a_page_of_a_missing_step_or_timetable(whole: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--step: .*7.* 2 .*1 to 2"):
        page(read_traces(whole), 7)
    (folder / "timetable.txt").unlink()
    with pytest.raises(ConfigError, match=r" 8 .*timetable\*\.txt"):
        page(read_traces(folder))


def test_a_missing_rank_has_an_empty_row(folder: Path) -> None:
    whole = drawn(page(read_traces(folder)))[1]
    rank_file(folder, 2).unlink()
    text = page(read_traces(folder))
    assert "rank2.json: " in text and "over 3 ranks: " in text
    planned, measured = drawn(text)
    assert planned["names"] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert measured["names"] == ["rank 0", "rank 1", "rank 2, no trace", "rank 3"]
    assert measured["ideal"] == pytest.approx(whole["ideal"], rel=0.2)  # the empty row does not count as idle


def test_a_row_is_a_device_if_it_has_several_ranks(folder: Path) -> None:
    for rank in range(4):
        path = rank_file(folder, rank)
        path.write_text(path.read_text().replace('"world_size": 4', '"world_size": 8'))
    text = page(read_traces(folder))
    assert drawn(text)[0]["names"] == [f"device {device}" for device in range(4)]
    assert "rank 3 (device 3)" in text


def test_a_row_is_a_device_if_ranks_have_another_order(whole: Path) -> None:
    traces = read_traces(whole)
    for rank, device in enumerate((0, 3, 1, 2)):
        traces.ranks[rank].run["device"] = device
    text = page(traces)
    assert drawn(text)[0]["names"] == [f"device {device}" for device in range(4)]
    assert "rank 1 (device 3)" in text


def test_forward_devices_have_their_stage(tmp_path: Path) -> None:
    fbd = timetable("fbd", 2, 4)
    write_traces(tmp_path, simulate(fbd, Costs(1, 1, 1)), steps=1)
    assert fbd.placement.forward is not None
    for plot in drawn(page(read_traces(tmp_path))):
        assert plot["forward"] == list(fbd.placement.forward.devices)


# --- the command line ---


def test_the_three_verbs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rank_file(folder, 3).unlink()
    out = folder / "joined.json"
    assert main(["trace", "merge", str(folder), "-o", str(out)]) == 0
    output, error = capsys.readouterr()
    assert "3 of 4 ranks" in output
    assert error.startswith("note: rank3.json: ") and error.count("\n") == 1
    assert main(["trace", "summary", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"bitpipe, 2 steps of \S+ s \(3 of 4 ranks\): bubble ", lines[0])
    assert lines[2].split()[:3] == ["rank", "busy", "bubble"]
    assert main(["trace", "summary", str(folder), "--json"]) == 0
    keys = {"bubble", "bubble_by_step", "ranks", "slowest_stage", "slowest_link", "notes"}
    assert keys <= set(json.loads(capsys.readouterr().out))
    assert main(["trace", "view", str(folder), "-o", str(folder / "page.html")]) == 0
    assert (folder / "page.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("verb", ["merge", "view"])
def test_an_output_that_cannot_be_written(whole: Path, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert main(["trace", verb, str(whole), "-o", str(whole / "no" / "folder")]) == 2
    assert "error: -o" in capsys.readouterr().err
    assert main(["trace", "merge", str(whole), "-o", str(rank_file(whole, 1))]) == 2
    assert capsys.readouterr().err.startswith("error: -o")


def test_a_picture_has_several_runs_on_one_scale(whole: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_traces(other, simulate(timetable("1f1b", 4, 8), Costs(1, 1.2, 0.8)), steps=1)
    out = tmp_path / "runs.svg"
    assert main(["trace", "view", str(other), str(whole), "-o", str(out)]) == 0
    text = out.read_text()
    root = ElementTree.fromstring(text)
    assert re.findall(r'class="name">([^<]*)<', text) == ["1f1b, measured", "bitpipe, measured"]
    ticks = [
        [float(x) for x in re.findall(r'class="mark" d="M([\d.]+) \d+v4"', part)]
        for part in text.split("<g ")
    ]
    assert ticks[1][:5] == ticks[2][:5] and len(ticks[1]) > 5
    assert "bubble" in root.attrib["aria-label"]
    with pytest.raises(ConfigError, match=r"^-o: .*2 folders"):
        run_view(argparse.Namespace(folder=[other, whole], output=tmp_path / "runs.html", step=None))
