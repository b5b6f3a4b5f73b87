"""bf16 and fp16: every schedule gives the losses of 1F1B within rounding, and an overflow skips a step everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from ds_ext.engine import PipelineModule, initialize
from tests.engine_runs import MODEL, Job, build, train
from tests.losses import learned
from tests.precisions import needs
from tests.ranks import RankPool, Ranks
from tests.reference import random_batches

ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
# Losses of about 4.6 after a few steps: bf16 has 8 bits, and gradients of micro-batches are summed in other orders.
TOLERANCE = 1e-3


def json(precision: str, zero: int, **section: Any) -> dict[str, Any]:
    return {
        precision: {"enabled": True, **section},
        "zero_optimization": {"stage": zero, "reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6},
        **ADAM,
    }


@pytest.mark.parametrize(
    ("precision", "zero"),
    [pytest.param(name, zero, marks=needs(name)) for name in ("bf16", "fp16") for zero in (0, 1)],
)
def test_schedules_agree_in_half_precision(ranks: Ranks, precision: str, zero: int) -> None:
    scale = {"initial_scale_power": 8} if precision == "fp16" else {}
    results = [
        ranks(2).run(
            train, Job(schedule, 2, 1, 1, 4, MODEL, steps=6, deepspeed=json(precision, zero, **scale))
        )[0]
        for schedule in ("1f1b", "bitpipe", "bitpipe_zb")
    ]
    for result in results[1:]:
        assert result["losses"] == pytest.approx(results[0]["losses"], rel=TOLERANCE)
        assert result["norms"] == pytest.approx(results[0]["norms"], rel=10 * TOLERANCE)
    # The loss scale, whatever it is, leaves the gradient as it is without one.
    whole = ranks(2).run(train, Job("1f1b", 2, 1, 1, 4, MODEL, steps=6, deepspeed=ADAM))[0]
    learned(whole["losses"])
    assert results[0]["norms"] == pytest.approx(whole["norms"], rel=0.05)
    # Halves of a backward are the whole, whatever the precision.
    assert results[1]["losses"] == pytest.approx(results[2]["losses"], rel=1e-5)


def train_with_overflow(rank: int, job: Job) -> tuple[list[int], list[float]]:
    """(Skipped steps, loss scale) after each step."""
    engine, _ = build(job)
    data = random_batches(job.model, 1, job.micro_batches)[0]
    skipped, scales = [], []
    for _ in range(job.steps):
        engine.train_batch(iter(data))
        skipped.append(engine.skipped_steps)
        scales.append(float(engine.optimizer.loss_scale))
    engine.transport.close()
    return skipped, scales


@needs("fp16")
@pytest.mark.parametrize("schedule", ["1f1b", "bitpipe_zb"])
def test_an_overflow_anywhere_skips_the_step_everywhere(ranks2: RankPool, schedule: str) -> None:
    """A loss scale of 2^40 overflows at first; every rank skips the same steps, and then all train."""
    config = json("fp16", 1, initial_scale_power=40, hysteresis=1)
    results = ranks2.run(train_with_overflow, Job(schedule, 2, 1, 1, 4, MODEL, steps=30, deepspeed=config))
    assert results[0] == results[1]
    skipped, scales = results[0]
    assert 1 <= skipped[-1] < 30 and skipped[-1] == skipped[-2]
    assert scales[-1] == 2.0 ** (40 - skipped[-1])


class Branch(nn.Module):
    """Layer that uses a weight only for positive samples."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.always(x) + self.sometimes(x) if x.sum() > 0 else self.always(x)


def step_with_a_branch(rank: int) -> tuple[list[list[float]], float]:
    """Return the weights and the norm of a step in which only rank 0 uses one of the weights."""
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "bf16": {"enabled": True},
    }
    model = PipelineModule([LayerSpec(Branch)], config, num_stages=1, loss_fn=nn.functional.mse_loss)
    engine, *_ = initialize(model=model, config=config, model_parameters=model.parameters())
    assert engine.update.reduction is not None
    sign = 1 - 2 * engine.mpu.get_data_parallel_rank()
    sample = torch.full((1, 2), float(sign), dtype=torch.bfloat16)
    engine.train_batch(iter([(sample, -sample)] * 2))
    norm = engine.get_global_grad_norm()
    assert norm is not None
    return [parameter.flatten().tolist() for parameter in model.parameters()], float(norm)


@needs("bf16")
def test_a_weight_that_one_replica_uses_counts_on_both(ranks2: RankPool) -> None:
    first, second = ranks2.run(step_with_a_branch)
    assert first == second
