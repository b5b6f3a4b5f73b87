"""Parallel sizes of a cluster: all that fit are priced, and the job of each trains as priced."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ds_ext.config.batch_sizes import batch_sizes
from ds_ext.config.job import load_config
from ds_ext.errors import ScheduleError
from ds_ext.parallel.hosts import Hosts
from ds_ext.parallel.network import Link, Network
from ds_ext.pipe_schedules import get_schedule
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.reductions import eager_reductions
from ds_ext.pipe_schedules.simulation import simulate
from ds_ext.planner.candidates import Candidate
from ds_ext.planner.job_plan import make_job_plan
from ds_ext.planner.memory import memory
from ds_ext.planner.named_models import named_model
from ds_ext.planner.parallel_sizes import (
    BETWEEN,
    INSIDE,
    Cluster,
    ClusterPlan,
    default_hosts,
    plan_cluster,
    unit_costs,
)
from ds_ext.planner.stage_costs import message_bytes
from ds_ext.planner.step_time import NetworkStep, on_devices
from ds_ext.planner.text import join_reasons
from ds_ext.planner.traffic import traffic
from ds_ext.planner.training_sizes import TrainingSizes
from ds_ext.planner.variant import Variant
from tests.plans import placement_of
from tests.selection import select

MODEL = TrainingSizes(
    num_layers=48, hidden_size=1024, num_attention_heads=16, vocab_size=32000, seq_length=1024
)
CLUSTER = Cluster(devices=8, memory_bytes=20 * 10**9, batch=16, flops=100e12)


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
    assert not planned.refused
    for row in planned.ranked:
        if row.candidate is not None and row.candidate.sizes is not None:
            assert row.candidate.micro_batches * row.candidate.sizes.micro_batch * row.data == 16
    times = [s.step_s or 0.0 for s in planned.ranked[1:] if s.fits]
    assert times == pytest.approx(sorted(times), rel=1e-8) and len(times) > 1
    assert (planned.best.step_s or 0.0) <= 1.01 * times[0]


def test_times_follow_from_operations() -> None:
    # 24 x 1024^3 + 4 x 1024^3 operations per layer, and 2 x 1024 x 1024 x 32000 for the head.
    assert MODEL.forward_flops == 48 * 28 * 2**30 + 2 * 2**20 * 32000
    assert message_bytes(MODEL) == 2 * 2**20
    one = plan(devices=1, batch=4)
    assert one.best.step_s == pytest.approx(4 * 3 * MODEL.forward_flops / 100e12)
    _, forward_s = unit_costs(CLUSTER, replace(MODEL, tensor_parallel=2), Costs(), 4)
    assert forward_s == pytest.approx(MODEL.forward_flops / 4 / 2 / 100e12)


def test_the_section_trains_as_planned(planned: ClusterPlan) -> None:
    for sizes in planned.ranked:
        row = sizes.candidate
        if not sizes.fits or row is None or row.sizes is None:
            continue
        config = {
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": row.sizes.micro_batch,
            "ds_ext": json.loads(json.dumps(sizes.section())),
        }
        job = load_config(config)
        assert config["ds_ext"].get("sequence_parallel", False) is (sizes.tensor > 1)
        batch = batch_sizes(config, placement_of(job).replicas, sizes.data)
        assert batch.micro_batches == row.micro_batches
        order = make_job_plan(job, sizes.tensor * sizes.pipeline * sizes.data)
        timetable, network = order.timetable, CLUSTER.links
        _, forward_s = unit_costs(CLUSTER, row.sizes, Costs(), sizes.pipeline)
        step = NetworkStep(
            timetable,
            on_devices(row.costs, row.sizes, network, sizes.pipeline, forward_s),
            network,
            traffic(row.sizes, timetable.placement, timetable.micro_batches),
            forward_s,
            eager_reductions(simulate(timetable, row.costs)),
        ).time(order.layout)
        assert step.step_s == sizes.step_s
        assert max(device.total for device in memory(timetable, row.sizes)) == row.memory_bytes


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
        if row is None or row.layers is None or sizes.step_s is None or row.sizes is None:
            continue
        samples = row.micro_batches * row.sizes.micro_batch
        priced += 1
        assert sum(row.layers) == 32
        loads = [0.0] * sizes.pipeline
        placement = get_schedule(row.schedule).placement(sizes.pipeline, row.options)
        for pipe in placement.pipes:
            for stage, device in enumerate(pipe):
                loads[device] += row.layers[stage] + head * (stage == placement.stages - 1)
        share = max(loads) / placement.replicas / (32 + head)
        repeated = 1 + row.sizes.repeated_share / 3
        assert sizes.step_s >= share * samples * 3 * total_s * (1 - 1e-6)
        even = (32 / sizes.pipeline + head) / (32 + head) * samples * 3 * total_s
        assert sizes.pipeline == 1 or sizes.step_s < even * repeated
        given = sizes.section()["train"].get("stage_layers")
        assert given == (None if len(set(row.layers)) == 1 else ",".join(map(str, row.layers)))
    assert priced > 1


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


@pytest.mark.parametrize("name", ["devices", "memory_bytes", "batch", "flops", "interval"])
def test_sizes_of_a_cluster_are_positive(name: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{name}: .*got 0"):
        plan(**{name: 0})


def best(**changes: Any) -> Candidate:
    candidate = plan(**changes).best.candidate
    assert candidate is not None and candidate.sizes is not None
    return candidate


def test_the_simplest_sizes_win() -> None:
    """Links price tensor parallelism, and a pipeline must save more than one percent."""
    model = TrainingSizes.of_model(named_model("gpt-124m"), zero_stage=1)
    result = plan_cluster(Cluster(8, 80 * 10**9, 512), model)
    row = result.best.candidate
    assert str(result.best) == "TP 1 x PP 1 x DP 8" and row is not None and row.sizes is not None
    assert (row.schedule, row.recompute, row.stages) == ("1f1b", "none", 1)
    # All micro-batch sizes take as long; the largest needs the fewest passes.
    assert (row.sizes.micro_batch, row.micro_batches) == (64, 1)


def test_sequence_parallelism_saves_memory_and_takes_time() -> None:
    """It is chosen only where its memory is needed."""
    settings = {"tensor_parallel": 8, "micro_batch": 1}
    with_it, without = (best(**settings, sequence_parallel=sequence) for sequence in (True, False))
    assert (with_it.memory_bytes or 0) < (without.memory_bytes or 0)
    assert (with_it.time or 0) > (without.time or 0)
    chosen = [best(**settings, memory_bytes=(c.memory_bytes or 0) * 10 // 9) for c in (with_it, without)]
    assert [c.sizes and c.sizes.sequence_parallel for c in chosen] == [True, False]
    odd = replace(MODEL, seq_length=1023)
    rows = plan_cluster(replace(CLUSTER, tensor_parallel=8), odd).ranked
    assert not any(
        row.candidate.sizes.sequence_parallel for row in rows if row.candidate and row.candidate.sizes
    )
    refused = plan_cluster(replace(CLUSTER, sequence_parallel=True), odd).refused
    assert any("1023" in reason for _, reason in refused)


def test_rows_have_planned_orders() -> None:
    """Here a planned order is the shortest for TP 1 x PP 6."""
    model = TrainingSizes(
        num_layers=12,
        hidden_size=4096,
        num_attention_heads=8,
        seq_length=1024,
        vocab_size=50257,
        zero_stage=1,
    )
    cluster = Cluster(6, 16 * 10**9, 8)
    among_all, alone = (
        next(row for row in plan_cluster(c, model).ranked if (row.tensor, row.pipeline) == (1, 6))
        for c in (cluster, replace(cluster, tensor_parallel=1))
    )
    assert among_all.fits and among_all.candidate is not None and among_all.candidate.planned
    assert among_all.step_s == alone.step_s


def test_rows_whose_planned_orders_are_not_evaluated_are_bounds() -> None:
    """A large vocabulary and slow links; among all sizes, zb_v is not planned for TP 2 x PP 2."""
    model = TrainingSizes(
        num_layers=5,
        hidden_size=512,
        num_attention_heads=8,
        seq_length=2048,
        vocab_size=500_000,
        zero_stage=1,
    )
    network = Network(Hosts((4, 1, 3)), INSIDE, Link(1e9, 10e-6))
    cluster = Cluster(8, 16 * 10**9, 4, network=network)
    among_all = plan_cluster(cluster, model)
    alone = {str(row): row for row in plan_cluster(replace(cluster, tensor_parallel=2), model).ranked}
    for row in among_all.ranked:
        exact = alone.get(str(row))
        if exact is not None and exact.fits and exact.step_s is not None:
            least = row.step_s if row.fits else row.least_s
            assert least is not None and least * (1 - 0.01) <= exact.step_s
    second = among_all.second
    bounds = [row.least_s for row in among_all.ranked if not row.fits]
    assert second is None or (second.step_s or 0.0) * 0.99 <= min(bounds)


@pytest.mark.parametrize(
    ("cluster", "model"),
    [
        (
            Cluster(20, 72 * 10**9, 60, network=Network(Hosts((8, 8, 4)), INSIDE, BETWEEN)),
            TrainingSizes.of_model(named_model("llama-3-70b"), zero_stage=1),
        ),
        (
            Cluster(16, 45 * 10**7, 32),
            TrainingSizes(
                num_layers=24,
                hidden_size=2048,
                num_attention_heads=8,
                seq_length=512,
                vocab_size=1000,
                precision="fp32",
                zero_stage=1,
            ),
        ),
    ],
    ids=["close", "far"],
)
def test_few_orders_are_planned_if_nothing_fits(
    cluster: Cluster, model: TrainingSizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full searches for an order; brief ones take a fortieth of the time."""
    planned: list[str] = []
    order = Variant.price
    monkeypatch.setattr(
        Variant, "price", lambda v, **k: planned.extend(["x"] * v.slow_to_plan) or order(v, **k)
    )
    result = plan_cluster(cluster, model)
    assert not result.best.fits and result.best.candidate is not None and len(planned) <= 12
    assert result.best.step_s is not None
    needs = [row.candidate.memory_bytes or 0 for row in result.shown if row.candidate is not None]
    assert needs == sorted(needs) and len(needs) >= 2


def test_one_copy_of_the_weights_has_no_zero() -> None:
    """In fp32, ZeRO-1 has master weights and buckets; a single copy of the weights is planned without it."""
    model = replace(MODEL, precision="fp32", zero_stage=1)
    one, stage0 = (
        plan_cluster(replace(CLUSTER, devices=1, batch=4), m).best.candidate
        for m in (model, replace(model, zero_stage=0))
    )
    assert one is not None and stage0 is not None and one.sizes is not None
    assert (one.memory_bytes, one.sizes.zero_stage) == (stage0.memory_bytes, 0)
    several = plan_cluster(replace(CLUSTER, tensor_parallel=1, memory_bytes=10**12), model).ranked
    stages = {
        row.data * row.candidate.replicas > 1: row.candidate.sizes.zero_stage
        for row in several
        if row.candidate and row.candidate.sizes
    }
    assert stages.get(True) == 1 and stages.get(False, 0) == 0


def test_partial_recomputation_fits_between_none_and_all() -> None:
    fixed: dict[str, Any] = {"devices": 1, "batch": 16, "micro_batch": 8}
    none, full = best(memory_bytes=10**12, **fixed), best(memory_bytes=1, **fixed)
    assert (none.recompute, full.recompute_text) == ("none", "full")
    low, high = full.memory_bytes or 0, none.memory_bytes or 0
    limit = low + (high - low) * 3 // 5
    partial = best(memory_bytes=limit, **fixed)
    assert partial.sizes and partial.recompute_text == "full/2"
    assert low < (partial.memory_bytes or 0) <= limit
    assert (none.time or 0.0) < (partial.time or 0.0) < (full.time or 0.0)
    row = plan(memory_bytes=limit, **fixed).best
    assert row.section()["train"]["recompute_interval"] == 2
    only = best(memory_bytes=limit, interval=1, **fixed)
    assert only.recompute_text == "full"


def test_micro_batch_sizes() -> None:
    rows = plan(micro_batch=2).ranked
    assert {row.candidate.sizes.micro_batch for row in rows if row.candidate and row.candidate.sizes} == {2}
    assert best(devices=1, batch=12, memory_bytes=10**12).micro_batches == 3
    assert any("micro-batches of 3" in reason for _, reason in plan(batch=12, micro_batch=3).refused)


def test_rows_fit_or_have_a_bound_below_their_time(planned: ClusterPlan) -> None:
    shown = planned.shown
    assert all(row.fits or row.candidate is None for row in shown)
    bounds = [row for row in shown if not row.fits]
    for row in bounds[:1]:
        alone = plan_cluster(replace(CLUSTER, tensor_parallel=row.tensor), MODEL)
        [same] = [r for r in alone.ranked if r.pipeline == row.pipeline]
        assert same.least_s == row.least_s or row.least_s <= (same.step_s or 0.0)
    nothing = plan(memory_bytes=10**9)
    assert not nothing.best.fits and len(nothing.shown) > 1


def test_few_orders_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """For 64 devices, at most 12 orders are evaluated in full, planned or not."""
    prices: list[bool] = []
    price = Variant.price
    monkeypatch.setattr(Variant, "price", lambda v, **k: prices.append(v.slow_to_plan) or price(v, **k))
    model = TrainingSizes.of_model(named_model("llama-3-70b"), zero_stage=1)
    result = plan_cluster(Cluster(64, 80 * 10**9, 256), model)
    assert result.best.fits and len(result.ranked) > 20
    assert len(prices) <= 12


@pytest.mark.parametrize("memory_gb", [12, 16, 40])
@pytest.mark.parametrize(
    "model", [MODEL, replace(MODEL, num_layers=24, vocab_size=128_000)], ids=["even", "head"]
)
def test_previews_exclude_no_winner(
    model: TrainingSizes, memory_gb: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orders for few micro-batches rule out only sizes and schedules that cannot be the choice."""
    monkeypatch.setattr("ds_ext.pipe_schedules.list_scheduling.search._MAX_OPS", 2_000)
    cluster = replace(CLUSTER, memory_bytes=memory_gb * 10**9, batch=64)

    def choice() -> tuple[object, ...]:
        best = plan_cluster(cluster, model).best
        c = best.candidates.best
        assert c is not None
        return str(best), c.label, c.recompute_text, c.time, c.memory_bytes

    with_previews = choice()
    monkeypatch.setattr("ds_ext.planner.variant.PREVIEWED", 10**6)
    assert with_previews == choice()


@pytest.mark.parametrize("bandwidth", select([1e9, 5e9, 25e9], [25e9]))
def test_previews_on_slow_ports_exclude_no_winner(bandwidth: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs of head parts occupy the port of the last stage, so that waits grow with the micro-batches."""
    monkeypatch.setattr("ds_ext.pipe_schedules.list_scheduling.search._MAX_OPS", 2_000)
    network = Network(Hosts((2,) * 2), Link(1e11, 2e-6), Link(bandwidth, 1e-5))
    cluster = replace(CLUSTER, devices=4, network=network, batch=48, head_parts=True, tensor_parallel=1)
    model = replace(MODEL, num_layers=24, vocab_size=128_000)

    def choice() -> tuple[object, ...]:
        best = plan_cluster(cluster, model).best
        assert best.candidate is not None
        return str(best), best.candidate.label, best.candidate.time

    with_previews = choice()
    monkeypatch.setattr("ds_ext.planner.variant.PREVIEWED", 10**6)
    assert with_previews == choice()


def test_hosts_by_default() -> None:
    assert [default_hosts(n).slots for n in (6, 8, 20)] == [(6,), (8,), (8, 8, 4)]
    assert CLUSTER.resized(16, 10**9, 1e12).links.hosts.slots == (8, 8)
