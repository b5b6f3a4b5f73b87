"""Parallel sizes of a cluster: all that fit are priced, and the job of each trains as priced."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ds_ext.config.batch_sizes import batch_sizes
from ds_ext.config.job import load_config
from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import get_schedule
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.simulation import simulate
from ds_ext.planner.job_plan import make_job_plan
from ds_ext.planner.memory import TrainingSizes
from ds_ext.planner.parallel_sizes import Cluster, ClusterPlan, plan_cluster
from ds_ext.planner.stage_costs import message_bytes
from ds_ext.planner.text import join_reasons
from tests.plans import placement_of

MODEL = TrainingSizes(
    num_layers=48, hidden_size=1024, num_attention_heads=16, vocab_size=32000, seq_length=1024
)
CLUSTER = Cluster(devices=8, memory_bytes=20 * 10**9, batch=16, flops=100e12, bandwidth=10e9)


def plan(**changes: Any) -> ClusterPlan:
    return plan_cluster(replace(CLUSTER, **changes), MODEL)


@pytest.fixture(scope="module")
def planned() -> ClusterPlan:
    """Plan for CLUSTER."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ds_ext.pipe_schedules.list_scheduling.search._MAX_OPS", 2_000)
        return plan()


def test_all_sizes_use_all_devices(planned: ClusterPlan) -> None:
    sizes = {(s.tensor, s.pipeline, s.data) for s in planned.ranked}
    assert sizes == {(t, p, 8 // t // p) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8) if 8 % (t * p) == 0}
    assert not planned.refused and all(s.micro_batches * s.data == 16 for s in planned.ranked)
    times = [s.step_s or 0.0 for s in planned.ranked if s.fits]
    assert times == pytest.approx(sorted(times), rel=1e-8) and len(times) > 3


def test_times_follow_from_operations_and_bandwidth(planned: ClusterPlan) -> None:
    # 24 x 1024^3 + 4 x 1024^3 operations per layer, and 2 x 1024 x 1024 x 32000 for the head.
    assert MODEL.forward_flops == 48 * 28 * 2**30 + 2 * 2**20 * 32000
    assert message_bytes(MODEL) == 2 * 2**20
    [sizes] = [s for s in planned.ranked if (s.tensor, s.pipeline, s.data) == (2, 4, 1)]
    assert sizes.forward_s == pytest.approx(MODEL.forward_flops / 4 / 2 / 100e12)
    assert sizes.candidate is not None
    assert sizes.candidate.costs.comm * sizes.forward_s == pytest.approx(
        message_bytes(MODEL) / 10e9, rel=1e-4
    )
    assert sizes.step_s == pytest.approx((sizes.candidate.time or 0.0) * sizes.forward_s)


def test_the_section_trains_as_planned(planned: ClusterPlan) -> None:
    for sizes in planned.ranked:
        if not sizes.fits or sizes.candidate is None:
            continue
        config = {
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 1,
            "ds_ext": json.loads(json.dumps(sizes.section(MODEL))),
        }
        job = load_config(config)
        batch = batch_sizes(config, placement_of(job).replicas, sizes.data)
        assert batch.micro_batches == sizes.micro_batches
        timetable = make_job_plan(job, sizes.tensor * sizes.pipeline * sizes.data).timetable
        assert simulate(timetable, sizes.candidate.costs).makespan == sizes.candidate.time


def test_refused_sizes_have_numbers() -> None:
    few_layers = replace(MODEL, num_layers=5)
    result = plan_cluster(replace(CLUSTER, devices=12, batch=30), few_layers)
    assert {s.tensor for s in result.ranked} == {1, 2, 4}
    assert {(s.pipeline, s.data) for s in result.ranked if s.tensor == 1} == {(2, 6), (4, 3)}
    joined = sorted(join_reasons(reason for _, reason in result.refused))
    assert [reason.rpartition("P ")[2] for reason in joined] == ["3, 6", "4, 12", "6, 12"]
    assert [reason.split()[0] for reason in joined] == ["16", "30", "5"]
    with pytest.raises(
        ScheduleError, match=r"got 7\)\. Use --devices 6 or 8, or --global-batch-size 14 or 21\."
    ):
        plan_cluster(replace(CLUSTER, devices=7), few_layers)
    assert plan_cluster(replace(CLUSTER, devices=7, batch=14), few_layers).ranked


def test_tensor_parallel_sizes_divide_the_mlp() -> None:
    """A job refuses other sizes, so no plan may contain them."""
    model = replace(MODEL, num_layers=2, ffn_hidden_size=1028)
    result = plan_cluster(CLUSTER, model)
    assert {s.tensor for s in result.ranked} == {1, 2, 4}
    (reason,) = join_reasons(reason for sizes, reason in result.refused if "1028" in reason)
    assert reason.split()[0] == "1028" and reason.endswith("TP 8")
    with pytest.raises(ScheduleError, match="ffn_hidden_size 1028"):
        replace(model, tensor_parallel=8)


def test_layers_make_room_for_the_head() -> None:
    """A head of 2.24 layers: the step is at least the work of the busiest device, and shorter than with even layers."""
    model = TrainingSizes(
        num_layers=32, hidden_size=4096, num_attention_heads=32, vocab_size=128256, seq_length=4096
    )
    result = plan_cluster(Cluster(8, 80 * 10**9, 32, tensor_parallel=1), model)
    head, total_s = 128256 / (12 * 4096 + 2 * 4096), model.forward_flops / 150e12
    priced = 0
    for sizes in result.ranked:
        row = sizes.candidate
        if row is None or row.layers is None or sizes.step_s is None:
            continue
        priced += 1
        assert sum(row.layers) == 32
        loads = [0.0] * sizes.pipeline
        placement = get_schedule(row.schedule).placement(sizes.pipeline, row.options)
        for pipe in placement.pipes:
            for stage, device in enumerate(pipe):
                loads[device] += row.layers[stage] + head * (stage == placement.stages - 1)
        share = max(loads) / placement.replicas / (32 + head)
        repeated = 4 / 3 if row.recompute == "full" else 1.0
        assert sizes.step_s >= share * sizes.micro_batches * 3 * total_s * (1 - 1e-6)
        even = (32 / sizes.pipeline + head) / (32 + head) * sizes.micro_batches * 3 * total_s
        assert sizes.pipeline == 1 or sizes.step_s < even * repeated
        given = sizes.section(model)["train"].get("stage_layers")
        assert given == (None if len(set(row.layers)) == 1 else ",".join(map(str, row.layers)))
    assert priced == 4


def test_one_tensor_parallel_size() -> None:
    assert {s.tensor for s in plan(tensor_parallel=8).ranked} == {8}
    with pytest.raises(ScheduleError, match=r"tensor_parallel: .*8 devices \(got 3\)"):
        plan(tensor_parallel=3)


def test_costs_are_ratios() -> None:
    cluster = replace(CLUSTER, tensor_parallel=4)
    one, other = (plan_cluster(cluster, MODEL, c) for c in (Costs(1, 1.5, 0.5), Costs(2, 3, 1)))
    assert one == other
    for wrong in (Costs(comm=1), Costs(links={(0, 1): 1.0}), Costs(stages=(1.0,)), Costs(forward=0)):
        with pytest.raises(ScheduleError, match=r"^costs: "):
            plan_cluster(cluster, MODEL, wrong)


@pytest.mark.parametrize("name", ["devices", "memory_bytes", "batch", "flops", "bandwidth"])
def test_sizes_of_a_cluster_are_positive(name: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{name}: .*got 0"):
        plan(**{name: 0})
