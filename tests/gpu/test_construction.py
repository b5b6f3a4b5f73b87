"""Two ranks on one GPU build an engine and train a step. Everything else on one GPU needs this."""

from __future__ import annotations

import math

from ds_ext.comm.cuda.header import Route
from tests.engine_runs import MODEL, Job
from tests.gpu.ranks import gpu_ranks, needs_gpu, train_on_gpu

pytestmark = needs_gpu


def test_two_ranks_on_one_gpu_train_a_step() -> None:
    """gloo cannot send GPU tensors, and "auto" may not choose nccl."""
    with gpu_ranks(2) as ranks:
        results = ranks.run(train_on_gpu, Job("1f1b", 2, 1, 1, 4, MODEL, steps=1), timeout_s=180)
    for result in results:
        assert result["losses"] == results[0]["losses"] and math.isfinite(result["losses"][0])
        assert result["counts"][Route.DIRECT] + result["counts"][Route.STAGED] > 0
