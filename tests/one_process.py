"""Comparison of a job's ranks with one plain process that trains the same model on the same batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ext.tensor_parallel import create_tensor_parallel
from tests.engine_runs import Job, reference, train
from tests.ranks import Ranks
from tests.reference import ReferenceRun

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}
LOSS = 1e-7  # relative rounding of losses, which are fp32


def assert_trains_as_one_process(ranks: Ranks, job: Job, evaluate: bool = False) -> list[dict[str, Any]]:
    """Train a job, compare it, and return its results by rank.

    Args:
        evaluate: the first batches too, after half of the steps, which must change nothing.
    """
    results = ranks(job.world_size).run(train, job, evaluate, timeout_s=180)
    assert_as_one_process(results, expected_of(ranks, job), TOLERANCES[job.dtype], job)
    return results


def assert_as_one_process(
    results: Sequence[Mapping[str, Any]],
    expected: ReferenceRun,
    tolerance: float = 1e-5,
    job: Job | None = None,
) -> None:
    """Compare losses, norms and weights of all ranks, and that no weight is missing.

    Args:
        tolerance: relative to a loss or norm, and to the largest element of a weight.
        job: joins the weights of its head in parts.
    """
    for rank, result in enumerate(results):
        assert result["losses"] == pytest.approx(expected.losses, rel=max(tolerance, LOSS)), f"rank {rank}"
        assert result["norms"] == pytest.approx(expected.grad_norms, rel=tolerance), f"norms on rank {rank}"
    weights = [result["weights"] for result in results]
    if job is not None and job.head_parts:
        weights = [joined_head(weights, job)]
    for rank, of_rank in enumerate(weights):
        for name, weight in of_rank.items():
            full = expected.parameters[name]
            # The others are padding; of a head in parts, the rows of one process may be more.
            rows = len(full) if job is None or not job.head_parts else min(len(weight), len(full))
            assert weight.dtype == full.dtype, name
            worst = (weight[:rows] - full[:rows]).abs().max() / full.abs().max().clamp(min=1e-3)
            assert worst < tolerance, f"{name} on rank {rank}: {worst}"
    assert set().union(*weights) == set(expected.parameters)


def joined_head(weights: Sequence[Mapping[str, Tensor]], job: Job) -> dict[str, Tensor]:
    """Return all weights of a run by name; the parts of the head are one weight without padding."""
    found: dict[str, Tensor] = {}
    for of_rank in weights:
        for name, weight in of_rank.items():
            assert torch.equal(found.setdefault(name, weight), weight), name
    head = job.model.num_layers + 3  # index of the head's layer
    whole, names = f"{head}.weight", [f"{head + part}.weight" for part in range(job.pp)]
    if not job.model.untie_embeddings_and_output_weights:
        copies = [found.pop(name, None) for name in names]
        whole = "0.word_embeddings.weight"
        names = [f"{whole}.{part}" for part in range(job.pp)]
        for name, copy in zip(names, copies, strict=True):
            assert copy is None or torch.equal(copy, found[name])  # None: on the embedding's device
    parts = [found.pop(name) for name in names]
    assert len({len(part) for part in parts}) == 1
    return {**found, whole: torch.cat(parts)[: job.model.vocab_size]}


def expected_of(ranks: Ranks, job: Job) -> ReferenceRun:
    """Return the run of one process, or of one tensor-parallel group, whose attention masks are drawn per shard."""
    if job.tp > 1 and job.model.attention_dropout:
        return ranks(job.tp).run(tensor_parallel_reference, job, timeout_s=120)[0]
    return reference(job)


def tensor_parallel_reference(rank: int, job: Job) -> ReferenceRun:
    return reference(job, create_tensor_parallel([list(range(job.tp))]))
