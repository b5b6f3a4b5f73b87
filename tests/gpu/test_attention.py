"""Attention in fp32 over 2,048 tokens gives the same bits on each run and over each transport."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from tests.engine_runs import MODEL, Job, train
from tests.gpu.ranks import gpu_ranks, needs_gpu, use_gpu

pytestmark = needs_gpu


def train_deterministically(rank: int, job: Job) -> dict[str, Any]:
    """Train a job with deterministic algorithms; memory-efficient attention ignores ``warn_only=True``."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    use_gpu()
    torch.use_deterministic_algorithms(True)
    return train(rank, job)


def test_long_samples_train_alike_over_shm_and_tcp() -> None:
    job = Job("1f1b", 2, 1, 1, 4, replace(MODEL, seq_length=2048), steps=3)
    found = []
    with gpu_ranks(2) as ranks:
        for transport in ("shm", "shm", "tcp"):
            found.append(ranks.run(train_deterministically, replace(job, transport=transport), timeout_s=180))
    for results in found[1:]:
        for result, expected in zip(results, found[0], strict=True):
            assert result["losses"] == expected["losses"] and result["norms"] == expected["norms"]
            for name, weight in result["weights"].items():
                assert torch.equal(weight, expected["weights"][name]), name
