"""Steps that start before the weights of the last step are gathered train to the same weights, bit for bit.

Their gradients are reduce-scattered: no rank reads the averages of another one's part.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from ds_ext.config.job import load_config
from ds_ext.engine.weights import gathers as weight_gathers
from ds_ext.engine.weights import reduction
from ds_ext.engine.weights.gathers import WeightGathers
from ds_ext.errors import ConfigError
from ds_ext.pipe_schedules import Program, Simulation
from ds_ext.pipe_schedules.gathers import with_gathers
from ds_ext.pipe_schedules.ops import WAIT_STAGE
from ds_ext.planner import job_plan
from ds_ext.planner.job_plan import make_job_plan
from tests.engine_runs import MODEL, Job, StepBatches, batches_of, build, digest, reference, weights
from tests.one_process import assert_as_one_process
from tests.precisions import needs
from tests.ranks import Ranks
from tests.selection import covering, select

GATHER = dist.all_gather_into_tensor
SIZES = {"1f1b": (2, 1, 2), "interleaved": (2, 1, 2), "zb_v": (2, 1, 2), "zb_h1": (1, 2, 2)}
SIZES |= {"dpp": (2, 1, 2), "bitpipe": (4, 1, 1), "bitpipe_zb": (2, 1, 2)}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}
SGD = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}},  # overflows first
    "fp32": {"zero_optimization": {"stage": 1}},
}


class Late:
    """Gather whose result a tensor gets in wait(). Until then, the parts of the other ranks are not numbers."""

    def __init__(self, flat: Tensor, mine: Tensor, group: Any, async_op: bool) -> None:
        assert async_op
        kept, self.flat, self.gathered = mine.clone(), flat, torch.empty_like(flat)
        self.work: Any = GATHER(self.gathered, kept, group=group, async_op=True)
        flat.fill_(math.nan)
        mine.copy_(kept)

    def wait(self) -> None:
        self.work.wait()
        self.flat.copy_(self.gathered)


class Scattered:
    """Reduce-scatter after which the other ranks' parts are not numbers."""

    count = 0

    def __init__(self, mine: Tensor, flat: Tensor, group: Any) -> None:
        Scattered.count += 1
        self.mine, self.flat, self.reduced = mine, flat, torch.empty_like(mine)
        self.work: Any = SCATTER(self.reduced, flat, group=group, async_op=True)

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> None:
        self.work.wait()
        self.flat.fill_(math.nan)
        self.mine.copy_(self.reduced)


def gather_and_wait(self: WeightGathers, *args: Any, **kwargs: Any) -> None:
    START(self, *args, **kwargs)
    self.wait()


START, SCATTER = WeightGathers.start, reduction._SCATTER


def run(rank: int, job: Job, late: bool = True, waits: bool = True, evaluate: bool = False) -> dict[str, Any]:
    """Train without a look at the weights between the steps.

    Args:
        late: weights are numbers only after their wait, and averages of gradients only in the rank's own part; False:
            every gather ends before its step does.
        waits: the program has its waits; False: it lacks those of stage 1, and is not checked.
        evaluate: after every step.
    """
    with ExitStack() as patches:
        if not waits:
            patches.enter_context(mock.patch.object(job_plan, "with_gathers", without_stage_1))
            patches.enter_context(mock.patch.object(job_plan, "check_gathers"))
        engine, tp = build(job)
        if late:
            patches.enter_context(mock.patch.object(weight_gathers.dist, "all_gather_into_tensor", Late))
            patches.enter_context(mock.patch.object(reduction, "_reduce_scatter", Scattered))
        else:
            patches.enter_context(mock.patch.object(WeightGathers, "start", gather_and_wait))
        gathers = engine.update.gathers
        assert gathers is not None
        batches, losses, evaluated, pending, norms = StepBatches(batches_of(job)), [], [], [], []
        Scattered.count = 0
        for _ in range(job.steps):
            losses.append(float(engine.train_batch(batches)))
            pending.append(len(gathers._pending))
            norms.append(float(engine.get_global_grad_norm() or 0.0))
            if evaluate:
                evaluated.append(float(engine.eval_batch(StepBatches(batches_of(job)))))
        engine.wait_for_weights()
    result = {
        "losses": losses,
        "evaluated": evaluated,
        "weights": weights(engine, tp),
        "digest": digest(engine),
        "pending": pending,
        "norms": norms,
        "scattered": Scattered.count,
        "skipped": engine.skipped_steps,
    }
    engine.transport.close()
    return result


def without_stage_1(program: Program, simulation: Simulation) -> Program:
    instructions = [
        tuple(i for i in of_device if i.name != WAIT_STAGE or i.stage != 1)
        for of_device in with_gathers(program, simulation).instructions
    ]
    return replace(program, instructions=tuple(instructions))


def make_job(schedule: str, precision: str = "bf16", **options: Any) -> Job:
    deepspeed = ADAM | PRECISIONS[precision]
    return Job(schedule, *SIZES[schedule], 4, MODEL, 4, deepspeed=deepspeed, overlap=True, **options)


@pytest.mark.parametrize(
    ("schedule", "precision"),
    [
        pytest.param(schedule, precision, marks=needs(precision))
        for schedule, precision in covering(product(SIZES, PRECISIONS), 1)
    ],
)
def test_weights_are_those_of_gathers_within_the_step(ranks: Ranks, schedule: str, precision: str) -> None:
    job = make_job(schedule, precision, decay_groups=precision != "fp32")
    late = ranks(job.world_size).run(run, job, timeout_s=120)
    early = ranks(job.world_size).run(run, job, False, timeout_s=120)
    for one, other in zip(late, early, strict=True):
        assert (one["losses"], one["norms"]) == (other["losses"], other["norms"])
        assert one["scattered"] and not other["scattered"]
        assert one["digest"] == other["digest"]
        assert one["skipped"] == other["skipped"] and bool(one["skipped"]) == (precision == "fp16")
        assert any(one["pending"]) and not any(other["pending"])


@pytest.mark.parametrize("schedule", select([*SIZES], ["zb_h1", "bitpipe_zb"]))
def test_weights_are_those_of_one_process(ranks: Ranks, schedule: str) -> None:
    """The model of the tests ties its embedding to the head."""
    job = replace(make_job(schedule, "fp32"), deepspeed=SGD)
    assert_as_one_process(ranks(job.world_size).run(run, job, timeout_s=120), reference(job))


def first_norm(rank: int, job: Job) -> float:
    engine, _ = build(job)
    engine.train_batch(StepBatches(batches_of(job)))
    engine.transport.close()
    norm = engine.get_global_grad_norm()
    assert norm is not None
    return float(norm)


# Sizes that leave padding in the parts of the ranks.
ODD = replace(MODEL, hidden_size=9, num_attention_heads=3, ffn_hidden_size=7, vocab_size=11)


@pytest.mark.parametrize(
    ("schedule", "precision"),
    [
        pytest.param(schedule, precision, marks=needs(precision))
        for schedule, precision in covering(
            product(["1f1b", "zb_v", "bitpipe_zb", "interleaved"], ["fp32", "bf16"]), 1
        )
    ],
)
def test_the_norm_of_partitions_is_that_of_gradients(ranks: Ranks, schedule: str, precision: str) -> None:
    job = replace(make_job(schedule, precision, decay_groups=True), model=ODD)
    # Without ZeRO, or the bf16 optimizer's norm of whole gradients.
    plain = {"zero_optimization": {"stage": 0}} if precision == "fp32" else {}
    whole = replace(job, overlap=False, deepspeed=job.deepspeed | plain)
    expected = ranks(job.world_size).run(first_norm, whole, timeout_s=120)
    for one in (job, replace(job, overlap=False)):
        norms = ranks(job.world_size).run(first_norm, one, timeout_s=120)
        assert norms == pytest.approx(expected, rel=1e-6)


def test_the_norm_counts_shards_once(ranks: Ranks) -> None:
    job = make_job("zb_h1", decay_groups=True)
    assert job.tp == 2
    parts, whole = (ranks(4).run(first_norm, replace(job, overlap=o), timeout_s=120) for o in (True, False))
    assert parts == pytest.approx(whole, rel=1e-6)


def test_evaluations_wait_for_all_weights(ranks: Ranks) -> None:
    job = make_job("interleaved")
    late, early = (ranks(4).run(run, job, late, True, True, timeout_s=120) for late in (True, False))
    assert [one["evaluated"] for one in late] == [one["evaluated"] for one in early]
    assert all(not math.isnan(loss) for loss in late[0]["evaluated"])


def test_a_missing_wait_gives_other_losses(ranks: Ranks) -> None:
    results = ranks(4).run(run, make_job("interleaved", "fp32"), True, False, timeout_s=120)
    assert math.isfinite(results[0]["losses"][0]) and math.isnan(results[0]["losses"][1])


def saved(rank: int, job: Job, folder: str) -> list[str]:
    """Save after every step, train on, load each, and return digests of both."""
    engine, _ = build(job)
    batches, digests = StepBatches(batches_of(job)), []
    with mock.patch.object(weight_gathers.dist, "all_gather_into_tensor", Late):
        for step in range(job.steps - 1):
            engine.train_batch(batches)
            engine.save_checkpoint(folder, f"step{step}")
            digests.append(digest(engine))
            engine.train_batch(batches)
            engine.load_checkpoint(folder, f"step{step}")
            digests.append(digest(engine))
            batches.step -= 1
    engine.transport.close()
    return digests


def test_checkpoints_have_the_weights_of_their_step(ranks: Ranks, tmp_path: Path) -> None:
    for digests in ranks(4).run(saved, make_job("1f1b"), str(tmp_path), timeout_s=180):
        assert digests[::2] == digests[1::2]
        assert len(set(digests)) == len(digests) // 2


def lists_of_rates(rank: int) -> list[float]:
    """Train with a list of a learning rate per parameter group, and return those of the split groups."""
    job = make_job("interleaved", decay_groups=True)
    scheduler = {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": [0.0, 0.0], "warmup_max_lr": [0.1, 0.2], "warmup_num_steps": 2},
    }
    engine, _ = build(replace(job, deepspeed=job.deepspeed | {"scheduler": scheduler}))
    batches = StepBatches(batches_of(job))
    for _ in range(job.steps):
        engine.train_batch(batches)
    engine.wait_for_weights()
    engine.transport.close()
    return engine.get_lr()


def test_lists_of_a_scheduler_are_expanded(ranks: Ranks) -> None:
    # Two stages per device. The embedding, which is tied to the head, has its own group.
    for rates in ranks(4).run(lists_of_rates, timeout_s=120):
        assert rates == pytest.approx([0.1, 0.1, 0.1, 0.2, 0.2])


def rates_of_parts(rank: int, parts: slice | int | None) -> float | str:
    """Halve the rate of some parts of the first group, or pass a function per group; return the rate or error."""
    job = make_job("interleaved", decay_groups=True)
    options: dict[str, Any] = {}
    if parts is None:
        options["lr_scheduler"] = lambda optimizer: LambdaLR(optimizer, [lambda _: 1.0, lambda _: 0.5])
    try:
        engine, _ = build(job, **options)
        groups = engine.optimizer.param_groups[parts]
        for group in groups if isinstance(groups, list) else [groups]:
            group["lr"] /= 2
        engine.train_batch(StepBatches(batches_of(job)))
        engine.wait_for_weights()
        return engine.optimizer.param_groups[0]["lr"]
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    ("parts", "key"), [(1, "param_groups[1]['lr']"), (slice(3), None), (None, "lr_scheduler")]
)
def test_parts_of_a_group_have_equal_values(ranks: Ranks, parts: slice | int | None, key: str | None) -> None:
    results = ranks(4).run(rates_of_parts, parts, timeout_s=120)
    if key is None:
        assert all(isinstance(rate, float) for rate in results)
    else:
        assert {str(text).partition(":")[0] for text in results} == {key}


def test_forward_ranks_are_refused() -> None:
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "ds_ext": {"schedule": "fbd", "pipeline_parallel_size": 2, "overlap_across_steps": True},
    }
    with pytest.raises(ConfigError, match=r"overlap_across_steps: .*fbd"):
        make_job_plan(load_config(config))
