"""``trace costs``: the costs of a run, and the step times that they predict for other schedules."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_ext.__main__ import main
from ds_ext.config.job import load_config
from ds_ext.errors import ConfigError, ScheduleError
from ds_ext.observe.trace.costs import BETWEEN, INSIDE, OVERHEAD, measure_costs
from ds_ext.observe.trace.file import TIMETABLE, rank_file
from ds_ext.observe.trace.read import read_traces
from ds_ext.pipe_schedules import get_schedule, timetable
from ds_ext.pipe_schedules.costs import Costs, load_costs
from ds_ext.pipe_schedules.ops import BACKWARD_WEIGHT, FORWARD
from ds_ext.pipe_schedules.simulation import simulate
from tests.plans import candidates_of
from tests.trace_folders import UNIT_US, write_traces

MS = UNIT_US / 1e3  # of a unit of the costs
# Of 8 stages on 4 devices; the last one has a head. Schedules with 4 stages join two of them.
STAGES = (*((1.0, 0.9, 1.1), (0.8, 1.0, 1.0)) * 3, (1.0, 1.0, 0.9), (1.6, 1.4, 1.2))
COSTS = Costs(1, 1.2, 0.8, 0.05, STAGES, overhead=0.02, measured={"devices": 4})
SCHEDULES = ("gpipe", "1f1b", "interleaved", "chimera", "bitpipe", "zb_h1", "zb_v", "bitpipe_zb", "dualpipev")


def trace(folder: Path, schedule: str, costs: Costs = COSTS, **run: Any) -> Path:
    write_traces(folder, simulate(timetable(schedule, 4, 8), costs), **run)
    return folder


def costs_file(tmp_path: Path, folder: Path) -> str:
    file = str(tmp_path / "costs.json")
    assert main(["trace", "costs", str(folder), "-o", file]) == 0
    return file


def test_the_file_has_the_times_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trace(tmp_path / "run", "zb_v", data_parallel_size=3)
    costs = load_costs(costs_file(tmp_path, folder))
    output, error = capsys.readouterr()
    assert not error
    placement = timetable("zb_v", 4, 8).placement
    for kind, times in COSTS.durations(placement).items():
        assert costs.durations(placement)[kind] == pytest.approx([MS * time for time in times], rel=1e-3)
    assert (costs.comm, costs.overhead) == (
        pytest.approx(0.05 * MS, abs=0.01),
        pytest.approx(0.02 * MS, abs=0.01),
    )
    assert costs.links == {}
    measured = {"devices": 4, "schedule": "zb_v", "steps": 2, "data_parallel_size": 3, "micro_batches": 8}
    assert measured.items() <= costs.measured.items()
    rows = [line.split() for line in output.splitlines()]
    mean = sum(factors[0] for factors in STAGES) / 8
    assert [float(row[2]) for row in rows[1:9]] == pytest.approx([MS / 2 * f for f, _, _ in STAGES], rel=1e-3)
    assert costs.forward == pytest.approx(MS * mean, rel=1e-3)


def test_a_time_is_a_median_over_steps_with_half_the_interquartile_range(tmp_path: Path) -> None:
    """Three steps, of which one is three times as long."""
    folder = trace(tmp_path, "1f1b", Costs(), steps=3)
    for rank in range(4):
        lines = rank_file(folder, rank).read_text().splitlines()
        for i, line in enumerate(lines):
            if '"step": 2' in line and '"tid": "compute"' in line:
                event = json.loads(line.rstrip(","))
                lines[i] = json.dumps({**event, "dur": 3 * event["dur"]}) + ","
        rank_file(folder, rank).write_text("\n".join(lines) + "\n")
    costs = measure_costs(read_traces(folder))
    assert costs.forward == pytest.approx(MS, rel=1e-3)
    # The quartiles of 1, 1 and 3 are 1 and 2. A half of a whole backward has half of its spread.
    assert costs.measured["spread"]["stages"][1] == pytest.approx([MS / 2] * 3, rel=1e-3)


def test_whole_backwards_give_each_half_half_the_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = load_costs(costs_file(tmp_path, trace(tmp_path / "run", "1f1b", Costs(1, 1.2, 0.8))))
    assert (costs.forward, costs.backward_input, costs.backward_weight) == pytest.approx(
        (MS, MS, MS), rel=1e-3
    )
    assert capsys.readouterr().err.startswith("note: backwards: ")


def test_parts_of_a_head_have_factors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = Costs(1, 1.2, 0.8, head=(2.0, 2.0, 5.0))
    parts = get_schedule("zb_v").dividing_head().timetable(4, 8, costs=costs)
    write_traces(tmp_path, simulate(parts, costs))
    measured = measure_costs(read_traces(tmp_path))
    for kind, times in costs.durations(parts.placement).items():
        found = measured.durations(parts.placement)[kind]
        if kind in (FORWARD, BACKWARD_WEIGHT):
            assert found == pytest.approx([MS * time for time in times], rel=1e-3)
    capsys.readouterr()
    costs_file(tmp_path, tmp_path)
    (row,) = re.findall(r"^head part +([\d.]+) .* ([\d.]+) \+- 0\.00$", capsys.readouterr().out, re.MULTILINE)
    # A quarter of twice f and b, and of five times w.
    assert [float(ms) for ms in row] == pytest.approx([MS * 2 * 2.2 / 4, MS * 5 * 0.8 / 4], rel=1e-3)


def test_forward_devices_do_not_count(tmp_path: Path) -> None:
    fbd = timetable("fbd", 2, 4, forward_slowdown=2.0)
    write_traces(tmp_path, simulate(fbd, Costs(1, 1.5, 0.5)))
    costs = measure_costs(read_traces(tmp_path))
    assert (costs.forward, costs.backward_input) == pytest.approx((MS, MS), rel=1e-3)


def test_links_by_kind(tmp_path: Path) -> None:
    """Devices 0 and 1 are on one host, 2 and 3 on another."""
    slow = {(a, b): 0.3 for a in range(4) for b in range(4) if (a < 2) != (b < 2)}
    folder = trace(tmp_path, "zb_v", replace(COSTS, links=slow), hosts="aabb")
    costs = measure_costs(read_traces(folder))
    assert costs.links == pytest.approx({link: 0.3 * MS for link in slow}, abs=0.01)
    assert costs.comm == pytest.approx(0.05 * MS, abs=0.01)
    assert {key for key, _ in (INSIDE, BETWEEN, OVERHEAD)} < costs.measured["spread"].keys()
    with pytest.raises(ScheduleError, match=r"4 devices \(got 2\)"):
        costs.fit(timetable("interleaved", 2, 4, chunks=4).placement)
    folder = trace(tmp_path / "far", "zb_v", replace(COSTS, comm=0.3), hosts="abcd")
    costs = measure_costs(read_traces(folder))
    assert costs.comm == pytest.approx(0.3 * MS, abs=0.01) and len(costs.links) == 12


def test_what_cannot_be_measured(folder: Path) -> None:
    (folder / TIMETABLE).rename(folder / "timetable_3.txt")
    with pytest.raises(ConfigError, match=r"timetable\.txt"):
        measure_costs(read_traces(folder))
    (folder / "timetable_3.txt").rename(folder / TIMETABLE)
    for rank in (0, 3):  # a stage of bitpipe is on two devices
        rank_file(folder, rank).unlink()
    with pytest.raises(ConfigError, match=r"\(got 0, 3, 4, 7\)"):
        measure_costs(read_traces(folder))


# --- predictions ---


def test_every_schedule_is_predicted_from_the_trace_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = costs_file(tmp_path, trace(tmp_path / "runs" / "zb_v", "zb_v"))
    for schedule in SCHEDULES:
        if schedule != "zb_v":
            trace(tmp_path / "runs" / schedule, schedule)
    capsys.readouterr()
    words = ["compare", "1f1b", "--num-devices", "4", "--micro-batches", "8", "--costs", file]
    assert main([*words, "--measured", str(tmp_path / "runs")]) == 0
    header, named, *rows, note = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header[:4] == ["schedule", "makespan", "measured", "error"]
    assert [row[0] for row in rows] == sorted(SCHEDULES)
    for row in rows:
        exact = MS * simulate(timetable(row[0], 4, 8), COSTS).makespan
        assert float(row[1]) == pytest.approx(exact, rel=2e-3)
        assert float(row[2]) == pytest.approx(exact, abs=MS * 0.03) and abs(float(row[3][:-1])) <= 0.2
    assert named[1] == next(row[1] for row in rows if row[0] == "1f1b")
    assert {"reductions", "optimizer"} <= set(note)


def test_a_run_of_other_sizes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs with traces in a subfolder. The two stages of 1f1b join four of the measured ones."""
    sizes: dict[str, Any] = {"micro_batch_size": 4, "stage_layers": [3, *[2] * 6, 3], "recomputes": False}
    file = costs_file(tmp_path, trace(tmp_path / "measured", "zb_v", **sizes))
    assert sizes.items() <= load_costs(file).measured.items()
    same, runs = {**sizes, "stage_layers": [5, 4, 4, 5]}, tmp_path / "runs"
    others = {"small": {"micro_batch_size": 2}, "uneven": {"stage_layers": [3, 6, 6, 3]}}
    for name, values in {"same": {}, **others, "tensor": {"tensor_parallel_size": 2}}.items():
        trace(runs / name / "traces", "1f1b", **{**same, **values})
    capsys.readouterr()
    assert main(["compare", "--costs", file, "--measured", str(runs)]) == 1
    _, *rows, _ = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["same", "small", "tensor", "uneven"]
    assert [row.split()[1] == "-" for row in rows] == [False, True, True, True]
    assert [re.findall(r"\d(?:[\d,]*\d)?", row) for row in rows[1:]] == [
        *(["2", "4"], ["2", "1"], ["3,6,6,3", "5,4,4,5"]),
    ]
    assert main(["compare", "--costs", file, "--measured", str(runs / "small")]) == 2
    assert re.findall(r"\d+", capsys.readouterr().err) == ["2", "4"]


@pytest.mark.parametrize(
    ("flags", "figures"),
    [
        (["--num-layers", "12", "--micro-batch-size", "4"], ["12", "20"]),
        (["--num-layers", "24", "--micro-batch-size", "4"], ["24", "20"]),
        (["--num-layers", "16", "--micro-batch-size", "2"], ["2", "4"]),
        (["--num-layers", "16", "--micro-batch-size", "4"], []),
    ],
)
def test_costs_of_another_model_are_refused(
    flags: list[str], figures: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Costs of 16 layers, and of two more at each end."""
    layers = [4, *[2] * 6, 4]
    file = costs_file(tmp_path, trace(tmp_path / "run", "zb_v", micro_batch_size=4, stage_layers=layers))
    model = "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 1000"
    words = ["compare", "1f1b", "--num-devices", "4", "--micro-batches", "8", "--costs", file, *model.split()]
    capsys.readouterr()
    assert main([*words, *flags]) == (2 if figures else 0)
    assert re.findall(r"\d+", capsys.readouterr().err) == figures


def test_runs_are_found_where_the_report_finds_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace folder; subfolders with traces, or with folders of them. Traces of earlier runs do not count."""
    file = costs_file(tmp_path, trace(tmp_path / "runs" / "first" / "traces", "zb_v"))
    for name in ("second", "second/earlier", "third/a", "third/b"):
        trace(tmp_path / "runs" / name, "1f1b")
    (tmp_path / "runs" / "metrics.jsonl").touch()
    for folder, names in (
        ("runs", ["first", "second", "third/a", "third/b"]),
        ("runs/first", ["traces"]),
        ("runs/second", ["second", "earlier"]),
    ):
        capsys.readouterr()
        assert main(["compare", "--costs", file, "--measured", str(tmp_path / folder)]) == 0
        _, *rows, _ = capsys.readouterr().out.splitlines()
        assert [row.split()[0] for row in rows] == names


def test_measured_without_costs_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(trace(tmp_path / "run", "1f1b"))
    for words in (["--measured", folder], ["--measured", folder, "--costs", "f=10"], []):
        assert main(["compare", *words]) == 2
        assert capsys.readouterr().err.startswith("error: " + ("--measured" if words else "NAME"))


def test_every_verb_accepts_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds_ext.pipe_schedules.list_scheduling.search._MAX_OPS", 2_000)
    file = costs_file(tmp_path, trace(tmp_path / "run", "zb_v", hosts="aabb"))
    sizes = ["--num-devices", "4", "--micro-batches", "8", "--costs", file]
    model = [
        "--num-layers",
        "16",
        "--hidden-size",
        "256",
        "--num-attention-heads",
        "4",
        "--seq-length",
        "128",
    ]
    model += ["--vocab-size", "1000"]
    capsys.readouterr()
    assert main(["simulate", "1f1b", *sizes, *model, "--json"]) == 0
    exact = simulate(timetable("1f1b", 4, 8), COSTS).makespan
    assert json.loads(capsys.readouterr().out)["makespan"] == pytest.approx(MS * exact, rel=2e-3)
    assert main(["simulate", "1f1b", *sizes, *model, "--hosts", "1x4"]) == 0  # uses the ratios
    assert main(["compare", "1f1b", "bitpipe_zb", *sizes]) == 0
    capsys.readouterr()
    plan = [
        "plan",
        "--devices",
        "4",
        "--memory",
        "1GB",
        "--global-batch-size",
        "8",
        *model,
        "--json",
        "--costs",
    ]
    assert main([*plan, file]) == 0
    from_file = json.loads(capsys.readouterr().out)
    costs = load_costs(file)
    assert main([*plan, f"f={costs.forward},b={costs.backward_input},w={costs.backward_weight}"]) == 0
    assert from_file == json.loads(capsys.readouterr().out)


def test_auto_accepts_the_file(tmp_path: Path) -> None:
    file = costs_file(tmp_path, trace(tmp_path / "run", "zb_v"))
    job = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "ds_ext": {"schedule": "auto", "pipeline_parallel_size": 4, "schedule_options": {"costs": file}},
    }
    rows = candidates_of(load_config(job)).ranked
    priced = {row.label: row.time for row in rows if not row.refusal}
    for name in ("gpipe", "1f1b", "zb_h1", "dualpipev"):
        exact = simulate(timetable(name, 4, 8), COSTS).makespan
        assert priced[name] == pytest.approx(MS * exact, rel=2e-3)
    refused = [row for row in rows if row.label == "interleaved chunks=4"]
    assert len(refused) == 1 and "8" in refused[0].refusal and "16" in refused[0].refusal
