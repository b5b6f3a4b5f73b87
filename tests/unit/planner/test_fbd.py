"""``plan --forward-devices``: whether FBD on two kinds of devices pays, against a look at every way."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ds_ext.__main__ import main
from ds_ext.config.job import parse_section
from ds_ext.parallel.fbd import DisaggregatedLayout, make_layout
from ds_ext.pipe_schedules import get_schedule
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.list_scheduling import search as planning
from ds_ext.pipe_schedules.simulate import simulate
from ds_ext.planner.fbd import ForwardDevices, best_way, memory_of, step_seconds, ways_to_cut
from ds_ext.planner.memory import ModelSizes, model_sizes
from ds_ext.planner.parallel_sizes import Cluster, forward_flops, message_bytes
from tests.plans import placement_of

PLAN = [
    *("plan", "--devices", "4", "--model", "gpt-6.7b", "--global-batch-size", "64"),
    *("--tensor-parallel", "1", "--micro-batch-size", "2"),
]


@pytest.fixture(autouse=True)
def a_short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned orders that are not the best that are known, in a tenth of the time."""
    monkeypatch.setattr(planning, "_MOST_OPS", 2_000)


def plan(capsys: pytest.CaptureFixture[str], memory: str, *flags: str) -> dict[str, Any]:
    main([*PLAN, "--memory", memory, "--json", *flags])
    return json.loads(capsys.readouterr().out)


def test_it_pays_where_the_others_would_compute_forwards_again(capsys: pytest.CaptureFixture[str]) -> None:
    """With room for activations it does not; and with less than a stage needs it is not possible."""
    slow = ("--forward-devices", "4", "--forward-slowdown", "2", "--forward-memory", "16GB")
    pays = plan(capsys, "36GB", *slow)
    found, alone = pays["fbd"], pays["best"][0]
    assert found["pays"] and alone["recompute"] == "full" and found["step_s"] < alone["step_s"]
    share = 1 - found["step_s"] / alone["step_s"]
    assert (
        f"it pays: {share:.1%} less time than the 4 devices alone, {alone['step_s']:.4g} s" in found["reason"]
    )
    assert found["memory_bytes"] <= 36e9 and found["forward_memory_bytes"] <= 16e9

    # The section is a job's, whose timetable takes that long.
    settings = parse_section(found["ds_ext"])
    layout = make_layout(placement_of(found), settings.tensor_parallel_size, 1)
    assert isinstance(layout, DisaggregatedLayout) and layout.world_size == 8
    sizes = replace(model_sizes("gpt-6.7b"), micro_batch=2)
    forward_s = forward_flops(sizes) / 4 / 150e12
    made = get_schedule(settings.schedule).timetable(
        4, found["micro_batches"], {"forward_slowdown": 2.0, **found["ds_ext"]["schedule_options"]}
    )
    # Layers are cut as evenly as they divide, so the mean stage is a little less than the worst.
    least = simulate(made, Costs(comm=message_bytes(sizes) / 25e9 / forward_s)).makespan * forward_s
    assert least < found["step_s"] < 1.1 * least + found["forward_memory_bytes"] / 25e9

    assert "it does not pay: it takes " in plan(capsys, "80GB", *slow)["fbd"]["reason"]
    refused = plan(capsys, "28GB", *slow)["fbd"]
    assert (
        not refused["pays"] and "it needs at least 30.2 GB a backward device (28.0 GB)" in refused["reason"]
    )
    odd = plan(capsys, "36GB", "--forward-devices", "3")["fbd"]
    assert "3 forward and 4 backward devices cannot be cut into" in odd["reason"]
    assert "each; use 2 or 4 forward devices" in odd["reason"]
    for count, possible in ((1, False), (2, True), (3, False), (4, True)):
        cluster = Cluster(4, 36 * 10**9, 64, tensor_parallel=1)
        assert any(ways_to_cut(cluster, ForwardDevices(count, 1.0, 10**10), sizes)) == possible
    assert "fbd" not in plan(capsys, "36GB")


def test_in_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Equal devices, all of which could train without roles."""
    assert main([*PLAN, "--memory", "80GB", "--forward-devices", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(
        number for number, line in enumerate(lines) if line.startswith("with 4 forward devices besides")
    )
    assert "(as fast, 80.0 GB): fbd, TP 1 x PP " in lines[at] and " a forward device" in lines[at]
    assert lines[at + 1].startswith("  it does not pay: it takes ")
    assert "the better of the 4 devices alone, " in lines[at + 1]
    assert " and all 8 without roles, " in lines[at + 1] and "slowest" not in lines[at + 1]


@pytest.mark.parametrize("memory_gb", [30, 1.0, 0.77])
def test_the_best_way_is_the_best_of_all(memory_gb: float) -> None:
    cluster = Cluster(8, int(memory_gb * 1e9), 64)
    forward = ForwardDevices(4, 1.5, 10**9)
    sizes = ModelSizes(layers=16, hidden=1024, heads=16, vocab=32000, seq=1024, zero_stage=1)
    ways = list(ways_to_cut(cluster, forward, sizes))
    assert {way.tensor for way in ways} == {1, 2} and {way.merged for way in ways} == {True, False}
    for way in ways:
        forwards = way.groups * way.pipeline * (1 if way.merged else way.tensor)
        backwards = way.groups * way.pipeline * way.backward_per_forward * way.tensor
        assert (forwards, backwards) == (4, 8)
    best, reason = best_way(cluster, forward, sizes, Costs())
    assert best is not None and not reason
    assert best.memory_bytes <= cluster.memory_bytes and best.forward_memory_bytes <= forward.memory_bytes
    # The head is heavy: the job is to be cut as it was priced.
    assert best.layers == (9, 7) and best.section["train"]["stage_layers"] == "9,7"
    for way in ways:
        need, forward_need = memory_of(way, sizes)
        if need <= cluster.memory_bytes and forward_need <= forward.memory_bytes:
            assert best.step_s <= step_seconds(way, cluster, forward, sizes, Costs())


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--forward-devices", "0"], "plan: count of forward devices must be more than 0; got 0"),
        (
            ["--forward-devices", "4", "--forward-slowdown", "0"],
            "plan: slowdown of forward devices must be more",
        ),
        (
            ["--forward-slowdown", "3"],
            "--forward-slowdown is of forward devices: say how many with --forward-devices",
        ),
        (["--forward-memory", "8GB"], "--forward-memory is of forward devices"),
    ],
)
def test_wrong_forward_devices(flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--memory", "80GB", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and sentence in captured.err and captured.err.count("\n") == 1
