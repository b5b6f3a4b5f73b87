"""``plan --forward-devices``: the best ``fbd`` job, and whether it pays."""

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
from ds_ext.pipe_schedules.simulation import simulate
from ds_ext.planner.fbd import compare_with_fbd, fbd_candidates, step_seconds
from ds_ext.planner.named_models import named_model
from ds_ext.planner.parallel_sizes import Cluster, plan_cluster
from ds_ext.planner.stage_costs import message_bytes
from ds_ext.planner.training_sizes import TrainingSizes
from tests.plans import placement_of

PLAN = [
    *("plan", "--devices", "4", "--model", "gpt-6.7b", "--global-batch-size", "64"),
    *("--tensor-parallel", "1", "--micro-batch-size", "2", "--headroom", "0"),
]


def plan(capsys: pytest.CaptureFixture[str], memory: str, *flags: str) -> dict[str, Any]:
    main([*PLAN, "--memory", memory, "--json", *flags])
    return json.loads(capsys.readouterr().out)


def test_fbd_pays_if_plain_pipelines_would_recompute(capsys: pytest.CaptureFixture[str]) -> None:
    """With more memory it does not pay; with less than a stage needs it is not possible."""
    slow = ("--forward-devices", "4", "--forward-slowdown", "2", "--forward-memory", "16GB")
    pays = plan(capsys, "44GB", *slow)
    found, alone = pays["fbd"], pays["best"][0]
    assert found["pays"] and alone["recompute"] == "full" and found["step_s"] < alone["step_s"]
    assert f"{1 - found['step_s'] / alone['step_s']:.1%}" in found["reason"]
    assert found["memory_bytes"] <= 44e9 and found["forward_memory_bytes"] <= 16e9

    # The section is that of a job with this step time.
    settings = parse_section(found["ds_ext"])
    layout = make_layout(placement_of(found), settings.tensor_parallel_size, 1)
    assert isinstance(layout, DisaggregatedLayout) and layout.world_size == 8
    sizes = TrainingSizes.of_model(named_model("gpt-6.7b"), micro_batch=2)
    forward_s = sizes.micro_batch * sizes.forward_flops / 4 / 150e12
    timetable = get_schedule(settings.schedule).timetable(
        4, found["micro_batches"], {"forward_slowdown": 2.0, **found["ds_ext"]["schedule_options"]}
    )
    # Uneven layers make the worst stage a little longer than the mean.
    least = simulate(timetable, Costs(comm=message_bytes(sizes) / 25e9 / forward_s)).makespan * forward_s
    assert least < found["step_s"] < 1.1 * least + found["forward_memory_bytes"] / 25e9

    assert not plan(capsys, "80GB", *slow)["fbd"]["pays"]
    refused = plan(capsys, "34GB", *slow)["fbd"]
    assert not refused["pays"] and "41.9 GB" in refused["reason"] and "step_s" not in refused
    odd = plan(capsys, "44GB", "--forward-devices", "3")["fbd"]
    assert not odd["pays"] and "step_s" not in odd
    cluster = Cluster(4, 44 * 10**9, 64, tensor_parallel=1)
    for count, possible in ((1, False), (2, True), (3, False), (4, True)):
        assert any(fbd_candidates(cluster, replace(cluster, devices=count), sizes)) == possible
    assert "fbd" not in plan(capsys, "44GB")


def test_fbd_does_not_pay_on_equal_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--memory", "80GB", "--forward-devices", "4"]) == 0
    shown = capsys.readouterr().out
    found = plan(capsys, "80GB", "--forward-devices", "4")["fbd"]
    assert not found["pays"] and f"\n{found['reason']}\n" in shown
    assert "  4 devices: " in shown and "  8 devices: " in shown


@pytest.mark.parametrize("memory_gb", [30, 1.5])
def test_the_best_candidate_is_the_best_of_all(memory_gb: float) -> None:
    cluster = Cluster(8, int(memory_gb * 1e9), 32)
    forward = replace(cluster, devices=4, memory_bytes=10**9, flops=cluster.flops / 1.5)
    sizes = TrainingSizes(
        num_layers=16,
        hidden_size=1024,
        num_attention_heads=16,
        vocab_size=32000,
        seq_length=1024,
        zero_stage=1,
    )
    candidates = list(fbd_candidates(cluster, forward, sizes))
    assert {c.sizes.tensor_parallel for c in candidates} == {1, 2}
    assert {c.merged for c in candidates} == {True, False}
    for c in candidates:
        groups, tensor = c.sizes.data_parallel, c.sizes.tensor_parallel
        forward_ranks = groups * c.pipeline * (1 if c.merged else tensor)
        assert (forward_ranks, groups * c.pipeline * c.backward_per_forward * tensor) == (4, 8)
    best = compare_with_fbd(cluster, forward, sizes, Costs(), plan_cluster(cluster, sizes))
    assert best["memory_bytes"] <= cluster.memory_bytes
    assert best["forward_memory_bytes"] <= forward.memory_bytes
    # The head is heavy, so the layers are uneven.
    assert best["ds_ext"]["train"]["stage_layers"] == "9,7"
    for c in candidates:
        need, forward_need = c.memory()
        if need <= cluster.memory_bytes and forward_need <= forward.memory_bytes:
            assert best["step_s"] <= step_seconds(c, cluster, forward, Costs())


@pytest.mark.parametrize(("stages", "k", "n"), [(2, 1, 4), (4, 1, 8), (4, 3, 12), (3, 2, 10)])
@pytest.mark.parametrize("slowdown", [1.0, 3.0])
@pytest.mark.parametrize("comm", [0.0, 0.5])
def test_split_backwards_take_no_more_time_or_memory(
    stages: int, k: int, n: int, slowdown: float, comm: float
) -> None:
    """`plan` considers no whole backwards."""
    costs, options = Costs(comm=comm), {"backward_per_forward": k, "forward_slowdown": slowdown}
    whole, split = (
        simulate(get_schedule("fbd").timetable(stages, n, {**options, "backward": kind}), costs)
        for kind in ("whole", "split")
    )
    assert split.makespan <= whole.makespan and split.peak_activations == whole.peak_activations


@pytest.mark.parametrize(
    "flags",
    [
        ["--forward-devices", "0"],
        ["--forward-devices", "4", "--forward-slowdown", "0"],
        ["--forward-slowdown", "3"],
        ["--forward-memory", "8GB"],
    ],
)
def test_wrong_forward_devices(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--memory", "80GB", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and flags[-2] in captured.err and captured.err.count("\n") == 1
