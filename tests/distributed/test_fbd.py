"""Forwards on ranks of their own: losses, norms and weights of one plain process, on every rank."""

from __future__ import annotations

import dataclasses
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ds_ext.config import load_config
from ds_ext.engine import PipelineEngine, PipelineModule, initialize
from ds_ext.fbd_layout import DisaggregatedLayout, make_layout
from ds_ext.models.gpt import gpt_layer_specs, gpt_loss
from ds_ext.tensor_parallel import DropoutClock, TensorParallel, create_tensor_parallel
from tests.distributed.test_parity import WITH_DROPOUT, assert_equal, reference, tensor_parallel_reference
from tests.engine_runs import MODEL, Job, StepBatches, batches_of, digest, weights
from tests.engine_runs import build as build_plainly
from tests.ranks import Ranks
from tests.selection import select


@dataclass(frozen=True)
class FbdJob(Job):
    """``dp`` counts pipeline groups, ``micro_batches`` those of a group."""

    fbd: dict[str, Any] = field(default_factory=dict)
    transport: str = "auto"

    def config(self, replicas: int) -> dict[str, Any]:
        made = super().config(replicas)
        section = {**made["ds_ext"], "fbd": self.fbd, "transport": self.transport}
        return made | {"ds_ext": section}

    @property
    def layout(self) -> DisaggregatedLayout:
        layout = make_layout(load_config(self.config(1)).ds_ext.placement(), self.tp, self.dp)
        assert isinstance(layout, DisaggregatedLayout)
        return layout

    @property
    def world_size(self) -> int:
        return self.layout.world_size


def build(job: FbdJob) -> tuple[PipelineEngine, TensorParallel]:
    """The engine of this rank."""
    config = job.config(job.layout.placement.replicas)
    tp, clock = create_tensor_parallel(job.layout.groups()["tensor"]), DropoutClock()
    model = PipelineModule(
        gpt_layer_specs(job.model, tp, clock),
        config,
        loss_fn=gpt_loss(job.model, tp),
        clock=clock,
        partition_method=job.partition_method,
    )
    engine, *_ = initialize(model=model, config=config)
    return engine, tp


def train(rank: int, job: FbdJob) -> dict[str, Any]:
    """Train ``job`` on this rank; an evaluation in the middle must change nothing."""
    engine, tp = build(job)
    batches = StepBatches(batches_of(job))
    losses, norms, digests, evaluated = [], [], [], 0.0
    for step in range(job.steps):
        if step == job.steps // 2:
            evaluated = float(engine.eval_batch(StepBatches(batches_of(job))))
        losses.append(float(engine.train_batch(batches)))
        norms.append(float(engine.get_global_grad_norm()))
        digests.append(digest(engine))
    result = {
        "losses": losses,
        "norms": norms,
        "weights": weights(engine, tp),
        "digests": digests,
        "evaluated": evaluated,
        "lr": engine.get_lr()[0],
        "gradients": sum(p.grad is not None for p in engine.module.parameters()),
        "optimizer": engine.optimizer is not None,
        "skipped": engine.skipped_steps,
    }
    engine.transport.close()
    return result


ZERO = {
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6},
    "zero_allow_untested_optimizer": True,
}
PLAIN = FbdJob("fbd", 2, 1, 1, 4, MODEL)
DROPOUT = dataclasses.replace(PLAIN, model=WITH_DROPOUT)
MERGED = dataclasses.replace(DROPOUT, tp=2, fbd={"merge_forward_tensor_parallel": True})
TWO = dataclasses.replace(DROPOUT, fbd={"backward_per_forward": 2}, deepspeed=ZERO)
THREE = dataclasses.replace(DROPOUT, fbd={"backward_per_forward": 3}, micro_batches=6)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(DROPOUT, id="plain"),
        pytest.param(TWO, id="two backward pipelines, ZeRO-1"),
        *select(
            [
                pytest.param(PLAIN, id="without dropout"),
                pytest.param(dataclasses.replace(DROPOUT, options={"backward": "split"}), id="split"),
                pytest.param(dataclasses.replace(DROPOUT, transport="torch"), id="torch"),
                pytest.param(THREE, id="three backward pipelines"),
                pytest.param(dataclasses.replace(DROPOUT, pp=4, micro_batches=8), id="four stages"),
                pytest.param(dataclasses.replace(DROPOUT, dp=2, deepspeed=ZERO), id="two groups, ZeRO-1"),
            ],
            [],
        ),
    ],
)
def test_trains_as_one_process(ranks: Ranks, job: FbdJob) -> None:
    """An evaluation in between included; forward ranks have the weights of their backward ranks after every step."""
    results = ranks(job.world_size).run(train, job, timeout_s=120)
    assert_equal(results, reference(job))
    assert_roles(job, results)
    for forward, backward in job.layout.groups()["weights"]:
        assert results[forward]["digests"] == results[backward]["digests"]


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(MERGED, id="merged"),
        *select([pytest.param(dataclasses.replace(MERGED, fbd={}), id="not merged")], []),
    ],
)
def test_tensor_parallel_masks_are_those_of_the_shards(ranks: Ranks, job: FbdJob) -> None:
    results = ranks(job.world_size).run(train, job, timeout_s=120)
    assert_equal(results, ranks(2).run(tensor_parallel_reference, job, timeout_s=120)[0])
    assert_roles(job, results)


def train_on_named_hosts(rank: int, job: FbdJob, hosts: list[str]) -> dict[str, Any]:
    socket.gethostname = lambda: hosts[rank]
    return train(rank, job)


def test_forward_ranks_sit_where_the_json_says(ranks: Ranks) -> None:
    """Ranks 2 and 3 are on the host that is named."""
    job = dataclasses.replace(DROPOUT, fbd={"forward_hosts": ["small"]}, steps=6)
    results = ranks(4).run(train_on_named_hosts, job, ["big", "big", "small", "small"], timeout_s=120)
    assert [result["optimizer"] for result in results] == [True, True, False, False]
    assert_equal(results, reference(job))


def assert_roles(job: FbdJob, results: list[dict[str, Any]]) -> None:
    groups = job.layout.groups()
    for role, trains in (("forward", False), ("backward", True)):
        for rank in groups[role][0]:
            assert results[rank]["optimizer"] == trains
            assert trains or not results[rank]["gradients"]
    assert len({result["evaluated"] for result in results}) == 1
    assert {result["lr"] for result in results} == {0.1}


HALF: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    # Overflows at first: steps are skipped, and no weights are sent.
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 32, "loss_scale_window": 100, "hysteresis": 1}},
}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_with_zero_1_is_that_of_1f1b(ranks: Ranks, precision: str) -> None:
    """The same numbers as a plain pipeline in that precision, whose backward ranks compute the same."""
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    job = dataclasses.replace(DROPOUT, deepspeed={**HALF[precision], **ZERO, **adam}, steps=12)
    results = ranks(4).run(train, job, timeout_s=120)
    plain = Job("1f1b", 2, 1, 1, 4, job.model, steps=12, deepspeed=job.deepspeed)
    expected = ranks(2).run(train_plainly, plain, timeout_s=120)[0]
    assert results[0]["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert {result["skipped"] for result in results} == {expected["skipped"]}
    assert (expected["skipped"] > 0) == (precision == "fp16")
    for forward, backward in job.layout.groups()["weights"]:
        assert results[forward]["digests"] == results[backward]["digests"]


def train_plainly(rank: int, job: Job) -> dict[str, Any]:
    """The losses of ``job`` and the steps that overflowed."""
    engine, _ = build_plainly(job)
    batches = StepBatches(batches_of(job))
    losses = [float(engine.train_batch(batches)) for _ in range(job.steps)]
    engine.transport.close()
    return {"losses": losses, "skipped": engine.skipped_steps}


def train_with_a_checkpoint(rank: int, job: FbdJob, folder: str, at: int, load: bool) -> list[float]:
    """The losses of ``job``: all with a checkpoint on the way, or those after it."""
    engine, _ = build(job) if isinstance(job, FbdJob) else build_plainly(job)
    batches = StepBatches(batches_of(job))
    if load:
        path, state = engine.load_checkpoint(folder)
        assert path is not None and state == {"note": at} and engine.global_steps == at
        batches.step = at
    losses = []
    for step in range(batches.step, job.steps):
        if step == at and not load:
            engine.save_checkpoint(folder, tag="saved", client_state={"note": at})
        losses.append(float(engine.train_batch(batches)))
    engine.transport.close()
    return losses


def test_checkpoints_go_on_as_fbd_and_as_1f1b_on_half_the_ranks(ranks: Ranks, tmp_path: Path) -> None:
    job = dataclasses.replace(TWO, steps=8)
    losses = ranks(job.world_size).run(train_with_a_checkpoint, job, str(tmp_path), 4, False)[0]
    for other in (
        dataclasses.replace(DROPOUT, steps=8, deepspeed=ZERO),
        Job("1f1b", 2, 1, 1, 4, job.model, steps=8, deepspeed=ZERO),
    ):
        went_on = ranks(other.world_size).run(train_with_a_checkpoint, other, str(tmp_path), 4, True)
        for mine in went_on:
            assert mine == pytest.approx(losses[4:], rel=1e-5)
    assert not list((tmp_path / "saved").glob("optimizer_rank_00*")), "rank 0 computes forwards"
