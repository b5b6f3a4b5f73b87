"""GPUs by name, the figures of a run, the fewest devices for a deadline, and the headroom of the choice."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ds_ext.errors import ScheduleError
from ds_ext.gpus import BANDWIDTH_SHARE, GPUS, MATRIX_SHARE
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.planner.candidates import ESTIMATE_ERROR, Candidate, rank_candidates
from ds_ext.planner.named_models import named_model
from ds_ext.planner.parallel_sizes import Cluster, plan_cluster
from ds_ext.planner.rental import (
    STEP_TIME_ERROR,
    _rentable,
    fewer_devices,
    figures_of_run,
    plan_for_deadline,
)
from ds_ext.planner.text import parse_bytes
from ds_ext.planner.training_sizes import TrainingSizes

SIZES = TrainingSizes(
    num_layers=8, hidden_size=1024, num_attention_heads=8, vocab_size=2000, seq_length=512, zero_stage=1
)
CLUSTER = Cluster(1, 10**11, 32, 100e12, tensor_parallel=1, micro_batch=1, interval=1)
TOKENS = 1e9


def devices_for(days: float, **changes: Any) -> int:
    cluster, plan, late = plan_for_deadline(replace(CLUSTER, **changes), SIZES, Costs(), TOKENS, days)
    assert all(fewer < cluster.devices and least > days for fewer, least in late.items())
    figures = figures_of_run(plan, cluster, SIZES, None, TOKENS, None)
    assert plan.best.fits and figures["days"] * (1 + STEP_TIME_ERROR) <= days
    assert cluster.links.hosts.world_size == figures["devices"] == cluster.devices
    return cluster.devices


def days_of(devices: int) -> float:
    """Return the most days with the shortest step of a number of devices, whatever the choice is."""
    cluster = CLUSTER.resized(devices, CLUSTER.memory_bytes, CLUSTER.flops)
    plan = plan_cluster(cluster, SIZES)
    step_s = min(row.step_s or 0.0 for row in plan.ranked if row.fits)
    return TOKENS / (cluster.batch * SIZES.seq_length) * step_s / 86400 * (1 + STEP_TIME_ERROR)


def test_the_fewest_devices_meet_the_deadline_and_the_next_smaller_number_does_not() -> None:
    days = {devices: days_of(devices) for devices in (1, 2, 4, 8, 16)}
    for fewer, devices in ((1, 2), (2, 4), (4, 8), (8, 16)):
        between = (days[fewer] + days[devices]) / 2
        assert devices_for(between) == devices
    assert devices_for(2 * days[1]) == 1


def test_memory_needs_more_devices_than_the_deadline() -> None:
    states = 16 * SIZES.num_layers * SIZES.layer_parameters
    assert devices_for(1000.0) == 1 and devices_for(1000.0, memory_bytes=int(states / 2)) > 1
    with pytest.raises(ScheduleError, match=r"--memory: .*got 1\.0 MB"):
        devices_for(1000.0, memory_bytes=10**6)


@pytest.mark.parametrize("excess", [0.2, 0.6])
def test_a_deadline_that_no_number_meets_has_the_days_that_are_missing(excess: float) -> None:
    # 4 samples keep 4 devices busy without tensor parallelism; more overlap the weight gradients at most.
    ideal = TOKENS / 512 * SIZES.flops_per_sample / 4 / CLUSTER.flops / 86400
    days = excess * ideal
    with pytest.raises(ScheduleError) as error:
        devices_for(days, batch=4)
    least = re.search(r"--days: must be at least ([\d.e-]+) .*got ", str(error.value))
    assert least is not None and float(least[1]) > days
    assert float(least[1]) >= 0.99 * ideal / 3


def test_refusals_of_all_numbers_are_reported() -> None:
    with pytest.raises(ScheduleError, match="micro-batches of 3 "):
        devices_for(1.0, micro_batch=3)
    with pytest.raises(ScheduleError, match="costs: "):
        plan_for_deadline(CLUSTER, SIZES, Costs(forward=0.0), TOKENS, 1.0)


def test_numbers_of_devices() -> None:
    assert [*_rentable(0.3, 40)] == [1, 2, 4, 8, 16, 24, 32, 40]
    assert [*_rentable(3, 8)] == [4, 8] and [*_rentable(9, 9)] == [16]
    large = [*_rentable(100, 1000)]
    assert large[:4] == [104, 112, 120, 128] and large[-1] >= 1000
    assert all(b % 8 == 0 and b <= 1.125 * a for a, b in pairwise(large))


def test_figures_of_a_run() -> None:
    cluster = CLUSTER.resized(4, CLUSTER.memory_bytes, CLUSTER.flops)
    plan = plan_cluster(cluster, SIZES)
    figures = figures_of_run(plan, cluster, SIZES, 200e12, TOKENS, 2.5)
    step_s = plan.best.step_s or 0.0
    assert figures["tokens_per_s"] == pytest.approx(32 * 512 / step_s)
    # PaLM, appendix B: 6 operations per weight and token, and 12 s h per layer and token for the attention.
    layer = 12 * 1024**2
    operations = 6 * (8 * layer + 2000 * 1024) + 12 * 8 * 512 * 1024
    assert figures["model_flops"] == pytest.approx(figures["tokens_per_s"] * operations / 4)
    assert figures["mfu"] == pytest.approx(figures["model_flops"] / 200e12)
    assert figures["days"] == pytest.approx(TOKENS / figures["tokens_per_s"] / 86400)
    assert figures["gpu_hours"] == pytest.approx(4 * 24 * figures["days"])
    assert figures["cost"] == pytest.approx(2.5 * figures["gpu_hours"])
    missing = figures_of_run(plan, cluster, SIZES, None, None, 2.5)
    assert [missing[key] for key in ("mfu", "days", "gpu_hours", "cost")] == [None] * 4


def test_gpus_are_those_that_fit_published_runs() -> None:
    """docs/clusters.md compares these rates with published step times."""
    a100, h100 = GPUS["a100"].flags, GPUS["h100"].flags
    assert (a100["tflops"], h100["tflops"]) == pytest.approx((218, 692), rel=2e-3)
    assert all(gpu.peak_tflops > 300 for gpu in GPUS.values())
    bandwidths = [parse_bytes(flags["memory_bandwidth"]) for flags in (a100, h100)]
    assert bandwidths == pytest.approx([1.63e12, 2.68e12], rel=5e-3)
    assert (h100["inside"], h100["between"]) == ("450GB,2us", "50GB,10us")
    for gpu in GPUS.values():
        assert gpu.flags["tflops"] == pytest.approx(MATRIX_SHARE * gpu.peak_tflops, abs=0.1)
        expected = BANDWIDTH_SHARE * gpu.bandwidth_tb * 1e12
        assert parse_bytes(gpu.flags["memory_bandwidth"]) == pytest.approx(expected, rel=1e-3)


def test_every_gpu_names_its_document_and_date() -> None:
    source = (Path(__file__).parents[3] / "ds_ext" / "gpus.py").read_text()
    page = (Path(__file__).parents[3] / "docs" / "plans.md").read_text()
    for name, gpu in GPUS.items():
        comment = re.search(rf'((?: {{8}}#.*\n)+) {{8}}"{name}": Gpu', source)
        assert comment is not None and re.search(r"20\d\d", comment[1])
        row = re.search(rf"^\| `{name}` \| (.*) \|$", page, re.MULTILINE)
        assert row is not None
        cells = [cell.replace(",", "") for cell in row[1].split(" | ")]
        figures = (gpu.memory_gb, gpu.peak_tflops, gpu.bandwidth_tb, gpu.inside_gb, gpu.between_gb)
        assert [float(cell.split()[0]) for cell in cells[:5]] == list(figures)


def candidate(schedule: str, time: float, gigabytes: float, stages: int) -> Candidate:
    tight = gigabytes * (1 + ESTIMATE_ERROR) > 72
    need = int(gigabytes * 1e9)
    return Candidate(
        schedule, {}, "none", Costs(), False, time=time, memory_bytes=need, tight=tight, stages=stages
    )


@pytest.mark.parametrize(
    ("roomy_gb", "roomy_time", "choice"),
    [(66.7, 0.997, "roomy"), (66.7, 1.005, "roomy"), (66.7, 1.02, "simple"), (71.0, 0.997, "simple")],
)
def test_the_simplest_keeps_the_headroom(roomy_gb: float, roomy_time: float, choice: str) -> None:
    rows = candidate("simple", 1.0, 72.0, 1), candidate("roomy", roomy_time, roomy_gb, 8)
    ranked = rank_candidates(rows, 72 * 10**9, 0.01, min(1.0, roomy_time))
    assert ranked[0].schedule == choice


def test_the_choice_of_a_cluster_keeps_the_headroom() -> None:
    """Without a pipeline 71.3 of 72 GB would be in use, for a step that takes as long."""
    model = TrainingSizes.of_model(named_model("llama-3-8b"), zero_stage=1)
    cluster = Cluster(64, 72 * 10**9, 512, tensor_parallel=2, slices=(1,))
    plan = plan_cluster(cluster, model)
    best, others = plan.best.candidate, [row.candidate for row in plan.ranked[1:] if row.fits]
    assert best is not None and best.memory_bytes is not None and not best.tight
    assert best.memory_bytes * (1 + ESTIMATE_ERROR) <= 72e9
    shortest = min(row.time or 0.0 for row in (best, *others) if row is not None)
    assert (best.time or 0.0) <= 1.01 * shortest
    simpler = [row for row in plan.ranked if row.fits and row.pipeline < plan.best.pipeline]
    assert simpler and all(row.candidate is not None and row.candidate.tight for row in simpler)


@pytest.mark.parametrize(
    ("devices", "batch", "share", "expected"),
    [(320, 512, 0.862, (280, 560)), (48, 512, 0.92, None), (16, 4, 0.4, (8, 8)), (8, 64, 0.1, None)],
)
def test_fewer_devices_get_a_batch_that_they_divide(
    devices: int, batch: int, share: float, expected: tuple[int, int] | None
) -> None:
    assert fewer_devices(devices, batch, share) == expected
