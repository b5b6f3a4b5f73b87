"""Forwards on ranks of their own: losses, norms and weights of one plain process, on every rank."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_ext.parallel.fbd import DisaggregatedLayout
from ds_ext.pipe_schedules.methods.fbd import most_ahead
from tests.engine_runs import (
    MODEL,
    STEPS,
    WITH_DROPOUT,
    Job,
    StepBatches,
    batches_of,
    build,
    reference,
    train,
    zero_keys,
)
from tests.fbd_watch import Seen, watch
from tests.one_process import assert_as_one_process, expected_of
from tests.precisions import needs
from tests.ranks import Ranks
from tests.selection import select


def watched(rank: int, job: Job) -> dict[str, Any]:
    """Train ``job`` on this rank and look on; an evaluation in the middle must change nothing."""
    return train(rank, job, evaluate=True, watch=watch)


PLAIN = Job("fbd", 2, 1, 1, 4, MODEL)
DROPOUT = dataclasses.replace(PLAIN, model=WITH_DROPOUT)
MERGED = dataclasses.replace(DROPOUT, tp=2, fbd={"merge_forward_tensor_parallel": True})
TWO = dataclasses.replace(DROPOUT, fbd={"backward_per_forward": 2}, deepspeed=zero_keys(1))
THREE = dataclasses.replace(DROPOUT, fbd={"backward_per_forward": 3}, micro_batches=6)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(DROPOUT, id="plain", marks=pytest.mark.quick),
        pytest.param(TWO, id="two backward pipelines, ZeRO-1"),
        *select(
            [
                pytest.param(PLAIN, id="without dropout"),
                pytest.param(dataclasses.replace(DROPOUT, options={"backward": "split"}), id="split"),
                pytest.param(dataclasses.replace(DROPOUT, transport="torch"), id="torch"),
                pytest.param(THREE, id="three backward pipelines"),
                pytest.param(dataclasses.replace(DROPOUT, pp=4, micro_batches=8), id="four stages"),
                pytest.param(
                    dataclasses.replace(DROPOUT, dp=2, deepspeed=zero_keys(1)), id="two groups, ZeRO-1"
                ),
            ],
            [],
        ),
    ],
)
def test_trains_as_one_process(ranks: Ranks, job: Job) -> None:
    """An evaluation in between included."""
    results = ranks(job.world_size).run(watched, job, timeout_s=120)
    assert_as_one_process(results, reference(job))
    assert_roles(job, results)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(MERGED, id="merged"),
        *select([pytest.param(dataclasses.replace(MERGED, fbd={}), id="not merged")], []),
    ],
)
def test_tensor_parallel_masks_are_those_of_the_shards(ranks: Ranks, job: Job) -> None:
    results = ranks(job.world_size).run(watched, job, timeout_s=120)
    assert_as_one_process(results, expected_of(ranks, job))
    assert_roles(job, results)


def train_on_named_hosts(rank: int, job: Job, hosts: list[str]) -> dict[str, Any]:
    socket.gethostname = lambda: hosts[rank]
    return watched(rank, job)


def test_forward_ranks_sit_where_the_json_says(ranks: Ranks) -> None:
    """Ranks 2 and 3 are on the host that is named."""
    job = dataclasses.replace(DROPOUT, fbd={"forward_hosts": ["small"]})
    results = ranks(4).run(train_on_named_hosts, job, ["big", "big", "small", "small"], timeout_s=120)
    assert [result["watched"].optimizer for result in results] == [True, True, False, False]
    assert_as_one_process(results, reference(job))


def assert_roles(job: Job, results: list[dict[str, Any]]) -> None:
    """What each role has in memory, and that forwards and repeated forwards have the same weights, bit by bit."""
    layout, stages = job.layout, job.layout.placement.stages
    assert isinstance(layout, DisaggregatedLayout)
    weights: dict[tuple[int, int, bool], set[str]] = {}
    roles: dict[tuple[int, int, bool], set[str]] = {}
    for rank, result in enumerate(results):
        seen: Seen = result["watched"]
        stage, _ = layout.stage_and_pipe(layout.coordinates(rank)[0])
        if layout.role(rank) == "forward":
            assert (seen.graphs, seen.gradients, seen.optimizer) == (0, 0, False)
        else:
            assert (seen.graphs, seen.buffers) == (1, 1) and seen.optimizer
            assert seen.handed_over <= (most_ahead(stages, stage - 1) if stage else 0)
        for key, hashes in seen.weights.items():
            weights.setdefault(key, set()).update(hashes)
            roles.setdefault(key, set()).add(layout.role(rank))
    assert {len(hashes) for hashes in weights.values()} == {1}
    steps = [(step, stage, False) for step in range(job.steps) for stage in range(stages)]
    assert [key for key in steps if len(roles[key]) == 2] == [k for k in steps if k[1] < stages - 1]
    assert {key for key in weights if key[2]} == {(job.steps // 2, stage, True) for stage in range(stages)}
    assert len({result["evaluated"] for result in results}) == 1
    assert {result["lr"] for result in results} == {results[0]["lr"]}


HALF: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    # Overflows at first: steps are skipped, and no weights are sent.
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 32, "loss_scale_window": 100, "hysteresis": 1}},
}


@pytest.mark.parametrize("precision", [pytest.param(name, marks=needs(name)) for name in HALF])
def test_half_precision_with_zero_1_is_that_of_1f1b(ranks: Ranks, precision: str) -> None:
    """The same numbers as a plain pipeline in that precision, whose backward ranks compute the same.

    That keeps as many micro-batches as it is deep, which shows that they would be seen.
    """
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    steps = 20 if precision == "fp16" else STEPS  # the first steps in fp16 are skipped
    job = dataclasses.replace(DROPOUT, steps=steps, deepspeed={**HALF[precision], **zero_keys(1), **adam})
    results = ranks(4).run(watched, job, timeout_s=120)
    expected = ranks(2).run(watched, dataclasses.replace(job, schedule="1f1b"), timeout_s=120)
    assert_roles(job, results)
    assert [result["watched"].graphs for result in expected] == [2, 1]
    assert {result["skipped"] for result in results} == {expected[0]["skipped"]}
    assert (expected[0]["skipped"] > 0) == (precision == "fp16")
    for result in results:
        assert result["losses"] == pytest.approx(expected[0]["losses"], rel=1e-5)
    for forward, backward in job.layout.groups()["weights"]:
        plain = expected[backward // 2]["weights"]
        for name, value in plain.items():
            assert torch.equal(results[forward]["weights"][name], results[backward]["weights"][name])
            torch.testing.assert_close(results[backward]["weights"][name], value, rtol=1e-5, atol=1e-5)


def train_with_a_checkpoint(rank: int, job: Job, folder: str, at: int, load: bool) -> list[float]:
    """The losses of ``job``: all with a checkpoint on the way, or those after it."""
    engine, _ = build(job)
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
        dataclasses.replace(DROPOUT, steps=8, deepspeed=zero_keys(1)),
        Job("1f1b", 2, 1, 1, 4, job.model, steps=8, deepspeed=zero_keys(1)),
    ):
        went_on = ranks(other.world_size).run(train_with_a_checkpoint, other, str(tmp_path), 4, True)
        for mine in went_on:
            assert mine == pytest.approx(losses[4:], rel=1e-5)
    assert not list((tmp_path / "saved").glob("optimizer_rank_00*")), "rank 0 computes forwards"


def train_with_wrapped_handlers(rank: int) -> tuple[list[float], list[str]]:
    """Losses with every handler wrapped as a script does it, and the names of the handlers called."""
    called: list[str] = []

    def wrapped(handler: Any, name: str) -> Any:
        def call(engine: Any, *arguments: Any, **named: Any) -> None:
            called.append(name)
            handler(engine, *arguments, **named)

        return call

    engine, _ = build(PLAIN)
    handlers = type(engine)._INSTRUCTION_MAP
    before = dict(handlers)
    try:
        for kind, handler in before.items():
            handlers[kind] = wrapped(handler, kind.__name__)
        batches = StepBatches(batches_of(PLAIN))
        losses = [float(engine.train_batch(batches)) for _ in range(PLAIN.steps)]
    finally:
        handlers.update(before)
        engine.transport.close()
    return losses, sorted(set(called))


def test_a_wrapped_handler_keeps_that_of_the_role(ranks: Ranks) -> None:
    expected = ranks(4).run(train, PLAIN)[0]["losses"]
    results = ranks(4).run(train_with_wrapped_handlers)
    for losses, called in results:
        assert losses == pytest.approx(expected, rel=1e-6) and "SyncWeights" in called
    assert {name for _, called in results for name in called} >= {"RecvActivation", "SendActivation"}
