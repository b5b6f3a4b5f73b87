"""Ranks that share GPU 0, in a gloo world, because nccl refuses two ranks on one GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.engine_runs import Job, StepBatches, batches_of, build, weights
from tests.ranks import RankPool

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@contextmanager
def gpu_ranks(count: int) -> Iterator[RankPool]:
    """Context of a pool whose ranks use CUDA from the first call on. No other test may use the pool."""
    pool = RankPool(count)
    try:
        yield pool
    finally:
        pool.close()


def use_gpu() -> None:
    """Select GPU 0 in this rank, also for DeepSpeed."""
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
    from deepspeed.accelerator.real_accelerator import set_accelerator

    os.environ["LOCAL_RANK"] = "0"
    set_accelerator(CUDA_Accelerator())
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True, warn_only=True)


def train_on_gpu(rank: int, job: Job, device: str = "cuda") -> dict[str, Any]:
    """Train a job on this rank; losses, norms, weights on the CPU, and messages by route."""
    if device == "cuda":
        use_gpu()
    engine, tp = build(job)
    assert engine.device.type == device and all(p.device.type == device for p in engine.module.parameters())
    batches, losses, norms = StepBatches(batches_of(job)), [], []
    for _ in range(job.steps):
        losses.append(float(engine.train_batch(batches)))
        norms.append(float(engine.get_global_grad_norm()))
    result = {
        "losses": losses,
        "norms": norms,
        "weights": {name: value.float().cpu() for name, value in weights(engine, tp).items()},
        "counts": dict(getattr(engine.transport, "counts", {})),
        "evaluated": float(engine.eval_batch(StepBatches(batches_of(job)))),
    }
    engine.transport.close()
    return result
