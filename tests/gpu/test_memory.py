"""Peak of the memory that torch allocates for ranks on one GPU against ``memory`` for the same job."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.distributed.test_memory import FOREACH, FUSED, MODEL, Case, assert_close, estimates
from tests.engine_runs import Job, StepBatches, batches_of, build
from tests.gpu.ranks import gpu_ranks, needs_gpu, use_gpu
from tests.ranks import RankPool

pytestmark = needs_gpu

# 200 million parameters: workspaces of kernels, 32 MiB, are small beside them.
LARGE = replace(MODEL, num_layers=16, hidden_size=1024, num_attention_heads=16, seq_length=64)
CASES = [
    Case("1f1b", adam=FOREACH, model=LARGE),
    Case("1f1b", zero=1, adam=FOREACH, model=LARGE),
    Case("1f1b", "bf16", adam=FOREACH, model=LARGE),
    Case("1f1b", "fp16", adam=FOREACH, model=LARGE),
    Case("bitpipe", "bf16", adam=FUSED, model=LARGE),
    Case("bitpipe_zb", "fp16", adam=FUSED, model=LARGE),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with gpu_ranks(2) as pool:
        yield pool


def peak_on_gpu(rank: int, job: Job) -> int:
    """Return the least peak of a step of this rank, in bytes, without what gloo allocates.

    Its gather of the bf16 weights after the optimizer's step allocates a copy of them. Temporary tensors of a foreach
    optimizer take more, earlier.
    """
    use_gpu()
    gc.collect()
    before, peaks = torch.cuda.memory_allocated(), []
    engine, _ = build(job)
    batches = StepBatches(batches_of(job))
    for _ in range(job.steps):
        torch.cuda.reset_peak_memory_stats()
        engine.train_batch(batches)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    gathered = [p.nbytes for p in engine.module.parameters() if p.dtype == torch.bfloat16]
    in_gloo = sum(gathered) if job.deepspeed["optimizer"]["params"].get("fused") else 0
    engine.transport.close()
    return min(peaks[1:]) - in_gloo  # the first step allocates optimizer states


@pytest.mark.parametrize("case", CASES, ids=str)
def test_peaks(ranks: RankPool, case: Case) -> None:
    assert_close(ranks.run(peak_on_gpu, case.job, timeout_s=120), estimates(case.job), 0.1)
