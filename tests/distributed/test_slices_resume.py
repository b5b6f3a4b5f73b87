"""Checkpoints, snapshots and evaluations of jobs with sequence slices."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ext.engine.rank_state import RankState
from ds_ext.engine.recovery import slots
from tests.engine_runs import LLAMA, UNEQUAL, Job, StepBatches, batches_of, build, digest, sliced, weights
from tests.ranks import Ranks
from tests.selection import select

STEPS, AT = 3, 1
EXACT = 1e-6  # sums in another order

Slices = int | tuple[int, ...]
Run = tuple[list[float], str, dict[str, Tensor]]  # losses, hash of the weights, and whole weights


def job(schedule: str, slices: Slices, sizes: tuple[int, int, int] = (4, 1, 1), **fields: Any) -> Job:
    return sliced(schedule, slices, sizes, hidden_dropout=0.1, steps=STEPS, **fields)


ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
JOBS: dict[str, tuple[Job, Slices]] = {  # and the slices of a run that continues it
    "1f1b": (job("1f1b", 4), 1),
    "unsliced": (job("zb_v", 1), UNEQUAL),
    "unequal": (job("zb_v", UNEQUAL, model=dataclasses.replace(LLAMA, recompute="full")), 2),
    "tensor": (job("zb_h1", 2, (2, 2, 1), model=LLAMA), 4),
    "two ranks": (
        job("bitpipe_zb", UNEQUAL, (2, 1, 1), model=dataclasses.replace(LLAMA, recompute="full")),
        2,
    ),
    "data": (job("bitpipe_zb", 4, (2, 1, 2), deepspeed={"zero_optimization": {"stage": 1}, **ADAM}), UNEQUAL),
}


def go_on(engine: Any, tp: Any, one: Job, first: int, last: int = STEPS) -> Run:
    """Train the steps from ``first`` on and close the engine."""
    batches = StepBatches(batches_of(one))
    batches.step = first
    losses = [float(engine.train_batch(batches)) for _ in range(first, last)]
    found = losses, digest(engine), weights(engine, tp)
    engine.transport.close()
    return found


def runs(rank: int, one: Job, other: Job, folder: str) -> list[Run]:
    """Runs from step AT on: undisturbed, recovered from a snapshot, resumed, and resumed with other slices."""
    engine, tp = build(one)
    batches = StepBatches(batches_of(one))
    for _ in range(AT):
        engine.train_batch(batches)
    engine.save_checkpoint(folder)
    tensors = {name: tensor.clone() for name, tensor in RankState(engine).tensors().items()}
    values = slots.unpack_state(slots.pack_state(RankState(engine).values()))
    found = [go_on(engine, tp, one, AT)]
    engine, tp = build(one)
    RankState(engine).load(tensors, values)
    found.append(go_on(engine, tp, one, AT))
    for run in (one, other):
        engine, tp = build(run)
        engine.load_checkpoint(folder)
        found.append(go_on(engine, tp, run, AT))
    return found


@pytest.mark.parametrize("name", select([*JOBS], ["two ranks"]))
def test_a_run_continues_bitwise_with_equal_slices_and_closely_with_others(
    ranks: Ranks, tmp_path: Path, name: str
) -> None:
    one, slices = JOBS[name]
    other = dataclasses.replace(one, slices=slices)
    for whole, recovered, resumed, changed in ranks(one.world_size).run(
        runs, one, other, str(tmp_path), timeout_s=180
    ):
        assert recovered[:2] == resumed[:2] == whole[:2]
        assert changed[0] == pytest.approx(whole[0], rel=EXACT)
        for key, value in whole[2].items():
            assert (changed[2][key] - value).abs().max() <= EXACT * value.abs().max().clamp(min=1), key


Evaluations = tuple[float, dict[int, Tensor], Any, Any]


def evaluate(rank: int, one: Job) -> Evaluations:
    """(mean loss, outputs by micro-batch, losses, and outputs without a loss) of evaluations between two steps."""
    engine, _ = build(one)
    batches = batches_of(one)
    train = StepBatches(batches)
    engine.train_batch(train)
    loss, outputs = engine.eval_batch(StepBatches(batches), return_logits=True)
    losses = engine.eval_batch(StepBatches(batches), reduce_output=None, bcast_loss=False)
    bare = engine.eval_batch(StepBatches(batches), compute_loss=False, reduce_output=None)
    engine.train_batch(train)
    engine.transport.close()
    return float(loss), outputs, losses, bare


def assert_close(found: Any, expected: Any) -> None:
    """Compare numbers, tensors and collections of them."""
    if expected is None:
        assert found is None
    elif isinstance(expected, dict | list):
        assert len(found) == len(expected)
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            assert_close(found[key], expected[key])
    else:
        tensors = torch.as_tensor(found), torch.as_tensor(expected)
        torch.testing.assert_close(
            *tensors, rtol=EXACT, atol=5 * EXACT
        )  # logits of the size of 1, after a step


@pytest.mark.parametrize("name", select([*JOBS], ["two ranks"]))
def test_evaluations_are_those_of_whole_sequences(ranks: Ranks, name: str) -> None:
    one, slices = JOBS[name]
    pool = ranks(one.world_size)
    results = [
        pool.run(evaluate, dataclasses.replace(one, slices=k), timeout_s=180) for k in (1, slices, one.slices)
    ]
    for whole, *others in zip(*results, strict=True):
        for other in others:
            for found, expected in zip(other, whole, strict=True):
                assert_close(found, expected)
    assert sum(whole[2] is not None for whole in results[0]) >= 1
