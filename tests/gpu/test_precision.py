"""bf16 and ZeRO-1 with four ranks on one GPU: losses as in fp32, and as without ZeRO."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.engine_runs import MODEL, Job
from tests.gpu.ranks import gpu_ranks, needs_gpu, train_on_gpu

pytestmark = needs_gpu

ZERO: dict[str, Any] = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(("schedule", "sizes"), [("1f1b", (2, 1, 2)), ("bitpipe", (4, 1, 1))])
def test_bf16_and_zero_train_alike(schedule: str, sizes: tuple[int, int, int]) -> None:
    job, losses = Job(schedule, *sizes, 8, MODEL, steps=5), {}
    with gpu_ranks(4) as ranks:
        for name, section in (("fp32", {}), ("zero", ZERO), ("bf16", BF16), ("bf16 zero", {**BF16, **ZERO})):
            of_section = dataclasses.replace(job, deepspeed=section)
            results = ranks.run(train_on_gpu, of_section, timeout_s=180)
            assert all(result["losses"] == results[0]["losses"] for result in results)
            losses[name] = results[0]["losses"]
    assert losses["zero"] == pytest.approx(losses["fp32"], rel=1e-5)
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=2e-2) and losses["bf16"] != losses["fp32"]
    assert losses["bf16 zero"] == pytest.approx(losses["bf16"], rel=1e-2)
