"""Checkpoints and deferred gradients of models of the Llama family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests import engine_runs
from tests.distributed.test_checkpoint import AT, Sizes, go_on, same_contents, settings, train_and_save
from tests.engine_runs import Job, StepBatches, batches_of, build
from tests.ranks import Ranks
from tests.selection import select

LLAMA, QWEN3 = (replace(model, num_layers=4) for model in (engine_runs.LLAMA, engine_runs.QWEN3))
MODELS = {"llama": LLAMA, "qwen3": QWEN3}


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        # Four ranks hold the keys and values of both groups, two ranks those of one.
        ("llama", ("1f1b", 1, 4, 1, 4), ("zb_h1", 1, 2, 1, 4)),
        ("qwen3", ("zb_v", 2, 1, 1, 4), ("1f1b", 2, 2, 1, 4)),
        *select([("llama", ("1f1b", 2, 2, 1, 4), ("1f1b", 1, 4, 1, 4))], []),
    ],
)
def test_a_checkpoint_goes_on_under_other_sizes(
    ranks: Ranks, tmp_path: Path, model: str, before: Sizes, after: Sizes
) -> None:
    adam = settings("fp32", 1)
    first, second = (Job(*sizes, MODELS[model], deepspeed=adam) for sizes in (before, after))
    straight = ranks(first.world_size).run(train_and_save, first, str(tmp_path), timeout_s=120)[0]
    for losses, _ in ranks(second.world_size).run(go_on, second, str(tmp_path), None, "again", timeout_s=120):
        assert losses == pytest.approx(straight[AT:], rel=1e-5)
    same_contents(tmp_path / "saved", tmp_path / "again")


def deferred_share(rank: int, job: Job) -> tuple[float, float]:
    """The engine's share of deferred elements, and that of matrices in this rank's parameters."""
    engine, _ = build(job)
    engine.train_batch(StepBatches(batches_of(job)))
    sizes = [(parameter.dim() == 2, parameter.numel()) for parameter in engine.module.parameters()]
    engine.transport.close()
    assert engine.deferred_share is not None
    return engine.deferred_share, sum(n for matrix, n in sizes if matrix) / sum(n for _, n in sizes)


def test_all_matrices_are_deferred(ranks: Ranks) -> None:
    """Replicated keys and values included."""
    for found, matrices in ranks(2).run(deferred_share, Job("zb_h1", 1, 2, 1, 4, QWEN3, steps=1)):
        assert found == matrices < 1
