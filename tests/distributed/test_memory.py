"""Peak of the live storages of ranks against ``memory`` for the same job."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from ds_ext.pipe_schedules import timetable
from ds_ext.planner.auto import training_sizes
from ds_ext.planner.memory import memory
from ds_ext.recipes.models.gpt import GPTConfig
from tests.allocations import AllocatedBytes
from tests.engine_runs import Job, StepBatches, batches_of, build
from tests.precisions import needs
from tests.ranks import Ranks
from tests.selection import select

# Weights dominate: 6 million parameters, and micro-batches of 32 tokens.
MODEL = GPTConfig(
    num_layers=8,
    hidden_size=256,
    num_attention_heads=4,
    seq_length=16,
    vocab_size=512,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
LONG_SAMPLES = replace(
    MODEL, seq_length=128
)  # activations as large as the temporary tensors of the optimizer
BUCKET = 10**6
LOOP, FOREACH, FUSED = (
    {"foreach": False},
    {"foreach": True},
    {"fused": True},
)  # torch's default on CPUs comes first


@dataclass(frozen=True)
class Case:
    """Job of two devices."""

    schedule: str
    precision: str = "fp32"
    zero: int = 0
    adam: Any = None
    data: int = 1
    bucket: int = BUCKET
    model: GPTConfig = MODEL

    def __str__(self) -> str:
        tokens = self.model.seq_length
        adam = "".join(f"-{key}" for key, value in (self.adam or {}).items() if value) or "-loop"
        return (
            f"{self.schedule}-{self.precision}-zero{self.zero}{adam}-dp{self.data}-{self.bucket:g}-{tokens}"
        )

    @property
    def job(self) -> Job:
        """Job of four steps."""
        adam = {"lr": 1e-3, "torch_adam": True, **(self.adam or {})}
        deepspeed: dict[str, Any] = {
            "zero_optimization": {"stage": self.zero, "reduce_bucket_size": self.bucket},
            "optimizer": {"type": "AdamW", "params": adam},
        }
        if self.precision != "fp32":
            # A fixed loss scale skips no steps.
            scale = {"loss_scale": 128} if self.precision == "fp16" else {}
            deepspeed[self.precision] = {"enabled": True, **scale}
        # Two parameter groups, as in the training scripts.
        return Job(self.schedule, 2, 1, self.data, 4, self.model, 4, deepspeed=deepspeed, decay_groups=True)


def peak_bytes(rank: int, job: Job) -> int:
    """Return the least peak of a step of this rank. On a busy host, more copies of gradients wait in some steps."""
    peaks = []
    with AllocatedBytes() as allocated:
        engine, _ = build(job)
        batches = StepBatches(batches_of(job))
        for _ in range(job.steps):
            allocated.peak = allocated.live
            engine.train_batch(batches)
            peaks.append(allocated.peak)
    engine.transport.close()
    return min(peaks[1:])  # the first step allocates optimizer states


def estimates(job: Job) -> list[int]:
    """Return the bytes that the planner estimates for every rank."""
    sizes = training_sizes(job.config(1), job.model, 2, job.tp, job.dp)
    devices = memory(timetable(job.schedule, job.pp, job.micro_batches), sizes)
    return [devices[job.layout.coordinates(rank)[0]].total for rank in range(job.world_size)]


SCHEDULES, TWO_COPIES = ("1f1b", "bitpipe", "bitpipe_zb"), ("bitpipe", "bitpipe_zb")
CASES = [
    Case("1f1b"),
    Case("1f1b", zero=1, bucket=10**7),
    Case("1f1b", "bf16", adam=FUSED),
    Case("bitpipe"),
    Case("bitpipe_zb", zero=1, adam=FUSED),
    Case("bitpipe_zb", "bf16", adam=FUSED),
]
MORE = [
    *(
        Case(schedule, precision, zero, adam)
        for schedule in SCHEDULES
        for precision in ("fp32", "bf16")
        for zero in (0, 1)
        for adam in (None, LOOP, FOREACH, FUSED)
    ),
    *(Case("1f1b", precision, zero, data=2) for precision in ("fp32", "bf16") for zero in (0, 1)),
    Case("1f1b", "bf16", adam=LOOP, model=LONG_SAMPLES),
    *(Case(schedule, p, 1, model=LONG_SAMPLES) for schedule in TWO_COPIES for p in ("fp32", "bf16")),
]
HALF = [Case(schedule, "fp16", adam=adam) for schedule in SCHEDULES for adam in (LOOP, FUSED)]


def assert_close(peaks: list[int], estimated: list[int]) -> None:
    """The estimate may be 10% too high, and 5% too low."""
    for peak, estimate in zip(peaks, estimated, strict=True):
        assert 0.95 * peak <= estimate <= 1.1 * peak


@pytest.mark.parametrize(
    "case",
    [*select([*CASES, *MORE], CASES), *(pytest.param(case, marks=needs("fp16")) for case in HALF)],
    ids=str,
)
def test_peaks(ranks: Ranks, case: Case) -> None:
    assert_close(ranks(case.job.world_size).run(peak_bytes, case.job, timeout_s=120), estimates(case.job))
