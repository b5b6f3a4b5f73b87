"""Slices of sequences in ``plan`` and "auto": chosen where they pay, priced as their job runs, within their bounds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ds_ext.__main__ import main
from ds_ext.config.job import load_config
from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import SCHEDULES
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.events import Workload
from ds_ext.pipe_schedules.list_scheduling.search import lower_bound
from ds_ext.pipe_schedules.placement import linear
from ds_ext.pipe_schedules.reductions import eager_reductions
from ds_ext.pipe_schedules.simulation import simulate
from ds_ext.planner.job_plan import make_job_plan
from ds_ext.planner.memory import memory
from ds_ext.planner.parallel_sizes import Cluster, ClusterPlan, plan_cluster, unit_costs
from ds_ext.planner.request import Request
from ds_ext.planner.search import choose
from ds_ext.planner.stage_costs import slice_slowdown
from ds_ext.planner.step_time import NetworkStep, on_devices
from ds_ext.planner.traffic import traffic
from ds_ext.planner.training_sizes import TrainingSizes
from ds_ext.planner.variant import Shared, all_variants

MODEL = TrainingSizes(
    num_layers=32, hidden_size=4096, num_attention_heads=32, vocab_size=32000, seq_length=32768, zero_stage=1
)
CLUSTER = Cluster(devices=8, memory_bytes=150 * 10**9, batch=2, flops=400e12, tensor_parallel=1)


def plan(**changes: Any) -> ClusterPlan:
    return plan_cluster(replace(CLUSTER, **changes), MODEL)


def test_few_long_samples_are_sliced_and_train_as_planned() -> None:
    best = plan().best
    row = best.candidate
    assert row is not None and row.sizes is not None and row.slices > 1 and best.pipeline > 1
    whole = plan(slices=(1,)).best
    assert whole.candidate is not None and whole.candidate.slices == 1
    assert (best.step_s or 0.0) < 0.9 * (whole.step_s or 0.0)
    batch = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": row.sizes.micro_batch}
    section = json.loads(json.dumps(best.section()))
    assert section["sequence_slices"] == row.slices and "sequence_slices" not in whole.section()
    order = make_job_plan(load_config({**batch, "ds_ext": section}), 8)
    timetable, network = order.timetable, CLUSTER.links
    assert timetable.slices == row.slices
    _, unit_s = unit_costs(CLUSTER, row.sizes, Costs(), best.pipeline)
    unit_s *= slice_slowdown(row.sizes, row.slices)
    step = NetworkStep(
        timetable,
        on_devices(row.costs, row.sizes, network, best.pipeline, unit_s, row.slices),
        network,
        traffic(row.sizes, timetable.placement, timetable.micro_batches),
        unit_s,
        eager_reductions(simulate(timetable, row.costs)),
    ).time(order.layout)
    assert step.step_s == best.step_s
    lengths = section["slice_lengths"]
    assert sum(lengths) == 32768 and lengths == sorted(lengths, reverse=True)
    assert max(device.total for device in memory(timetable, row.sizes, lengths)) == row.memory_bytes


def test_many_micro_batches_need_no_slices() -> None:
    rows = [sizes.candidate for sizes in plan(batch=64, memory_bytes=10**12).ranked[:3] if sizes.fits]
    assert rows and all(row is not None and row.slices == 1 for row in rows)


def test_slices_fit_where_whole_sequences_do_not() -> None:
    small = replace(CLUSTER, devices=4, batch=4, memory_bytes=10**9)
    needs = []
    for k in (1, 4):
        smallest = plan_cluster(replace(small, slices=(k,)), MODEL).best.candidate
        assert smallest is not None and smallest.memory_bytes is not None and smallest.slices == k
        needs.append(smallest.memory_bytes)
    assert needs[1] < needs[0]
    limit = replace(small, memory_bytes=sum(needs) // 2)
    assert not plan_cluster(replace(limit, slices=(1,)), MODEL).best.fits
    best = plan_cluster(limit, MODEL).best
    assert best.fits and best.candidate is not None and best.candidate.slices > 1


def test_numbers_of_slices() -> None:
    assert CLUSTER.slice_numbers(32768, 8) == (1, 2, 4, 8) and CLUSTER.slice_numbers(32768, 1) == (1,)
    assert CLUSTER.slice_numbers(8192, 2) == (1, 2, 4) and CLUSTER.slice_numbers(2048, 8) == (1,)
    assert CLUSTER.slice_numbers(3 * 4096, 8) == (1, 2, 4)
    only = plan(slices=(2,))
    rows = [sizes for sizes in only.ranked if sizes.candidate is not None]
    assert {sizes.candidate.slices for sizes in rows if sizes.pipeline > 1 and sizes.candidate} == {2}
    with pytest.raises(ScheduleError, match=r"got 3\)"):
        plan(slices=(1, 3))


def test_sequence_parallelism_divides_slices() -> None:
    model = replace(MODEL, seq_length=32768 + 4, num_layers=4)
    cluster = replace(CLUSTER, tensor_parallel=4, sequence_parallel=True, slices=(1, 2))
    slices = {row.slices for sizes in plan_cluster(cluster, model).ranked for row in sizes.candidates.ranked}
    assert slices == {1}


@pytest.mark.parametrize(("flags", "status"), [("1", 0), ("2,4", 0), ("5", 2), ("0", 2), ("2,", 2), ("x", 2)])
def test_the_flag(flags: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 16384 --vocab-size 1000"
    words = f"plan --devices 4 --memory 80GB --global-batch-size 1 {sizes} --tensor-parallel 1 --json"
    assert main([*words.split(), "--sequence-slices", flags]) == status
    if status == 0:
        printed = json.loads(capsys.readouterr().out)
        assert {row.get("sequence_slices") for row in printed["best"] if row["fits"]} <= {
            *map(int, flags.split(","))
        }


def test_bounds_of_slices_hold() -> None:
    request = Request(4, 4, Costs(comm=0.3), replace(MODEL, attention_scores=True), slices=4)
    shared, count = Shared(), 0
    for variant in all_variants(request.with_recomputation("full", 1), shared):
        assert variant.schedule.has_slices
        if dict(variant.options).get("mode") == "unit":
            continue
        row = variant.price(simulate_large=True)
        count += 1
        assert (row.time or 0.0) >= variant.least_time
        tight = replace(variant, request=replace(variant.request, memory_bytes=1))
        assert tight.bound[0] == 1 and (row.memory_bytes or 0) >= tight.bound[1]
    assert count >= 6


def test_messages_of_slices_take_their_share_in_the_bound() -> None:
    workload = Workload(linear(4), 1, Costs(comm=2.0), split=False, slices=8)
    timetable = SCHEDULES["gpipe"].timetable(4, 1, slices=8)
    assert lower_bound(workload) <= simulate(timetable, Costs(comm=2.0)).makespan


def test_auto_evaluates_schedules_with_slices() -> None:
    train: dict[str, Any] = {
        "num_layers": 16,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "seq_length": 8192,
    }
    section = {"schedule": "auto", "pipeline_parallel_size": 4, "sequence_slices": 4, "train": train}
    job = load_config({"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "ds_ext": section})
    order = make_job_plan(job)
    candidates = order.candidates
    assert candidates is not None and candidates.best is not None and order.timetable.slices == 4
    assert {row.slices for row in candidates.ranked} == {4}
    assert {row.schedule for row in candidates.ranked} == {n for n, s in SCHEDULES.items() if s.has_slices}
    # Memory counts slices.
    sizes = TrainingSizes(**train, vocab_size=32000)
    whole, sliced = (choose(Request(4, 4, sizes=sizes, slices=k)) for k in (1, 4))
    needs = [
        next(
            row.memory_bytes
            for row in rows.ranked
            if row.label.startswith("1f1b") and row.recompute == "none"
        )
        for rows in (whole, sliced)
    ]
    assert None not in needs and (needs[1] or 0) < (needs[0] or 0)
