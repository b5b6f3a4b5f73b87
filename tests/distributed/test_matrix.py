"""Every schedule, precision, ZeRO stage, tensor and sequence parallelism and recomputation, and all pairs of them.

Here runs a selection in which every two values of two factors meet; ``make test-all`` runs the whole product.

fp32 is compared with one plain process, to 1e-5. In half precision the yardstick is this engine on one rank, without a
pipeline: bf16 keeps 8 bits, so that a sum in another order (micro-batches of two replicas, shards of a layer) differs
by up to 2^-9 of its largest term. The loss, a mean over 128 tokens of numbers that differ so, differs less; 2e-3 is
allowed. What training changes in the loss within these steps is ten times as much, which is tested too, so that wrong
gradients, loss scales or samples would show.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest

from ds_ext.pipe_schedules import SCHEDULES
from tests import engine_runs
from tests.engine_runs import Job, batches_of, train
from tests.precisions import needs
from tests.ranks import Ranks
from tests.reference import ReferenceRun, train_reference
from tests.selection import covering

MODEL = dataclasses.replace(engine_runs.MODEL, num_layers=4)
STEPS, LR = 4, 1.0
HALF = 2e-3


class Case(NamedTuple):
    """One cell of the matrix; ``split`` is how a layer is split: not, by tensor, by tensor and sequence."""

    schedule: str
    precision: str
    zero: int
    split: str
    recompute: str


FACTORS = (
    sorted(SCHEDULES),
    ["fp32", "bf16", "fp16"],
    [0, 1],
    ["tp1", "tp2", "tp2-sequence"],
    ["none", "selective", "full"],
)


MATRIX = [Case(*values) for values in product(*FACTORS)]
CASES = covering(MATRIX, 2)


def job_of(case: Case) -> Job:
    tp = 1 if case.split == "tp1" else 2
    model = dataclasses.replace(
        MODEL, recompute=case.recompute, sequence_parallel=case.split == "tp2-sequence"
    )
    return Job(case.schedule, 2, tp, 1, 4, model, steps=STEPS, deepspeed=deepspeed(case.precision, case.zero))


def deepspeed(precision: str, zero: int) -> dict[str, Any]:
    scale = {"initial_scale_power": 8} if precision == "fp16" else {}
    half = {} if precision == "fp32" else {precision: {"enabled": True, **scale}}
    sgd = {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}}
    zero_json = {"zero_optimization": {"stage": zero}, "zero_allow_untested_optimizer": True}
    return {"optimizer": sgd, **zero_json, **half}


@cache
def in_fp32(lr: float = LR) -> ReferenceRun:
    return train_reference(MODEL, batches_of(job_of(MATRIX[0])), STEPS, lr=lr, momentum=0.9, clip=1.0)


@cache
def without_a_pipeline(ranks: Ranks, precision: str, zero: int) -> dict[str, Any]:
    job = Job("1f1b", 1, 1, 1, 4, MODEL, steps=STEPS, deepspeed=deepspeed(precision, zero))
    return ranks(1).run(train, job, timeout_s=120)[0]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=needs(case.precision)) for case in CASES],
    ids=lambda case: "-".join(map(str, case)),
)
def test_trains_alike(ranks: Ranks, case: Case) -> None:
    job = job_of(case)
    results = ranks(job.world_size).run(train, job, timeout_s=120)
    fp32 = in_fp32()
    if case.precision == "fp32":
        losses, norms, tolerance = fp32.losses, fp32.grad_norms, 1e-5
    else:
        expected = without_a_pipeline(ranks, case.precision, case.zero)
        losses, norms, tolerance = expected["losses"], expected["norms"], HALF
        # And the yardstick itself measures the same thing as fp32.
        assert losses == pytest.approx(fp32.losses, rel=10 * HALF)
        assert norms == pytest.approx(fp32.grad_norms, rel=0.1)
    for result in results:
        assert result["losses"] == pytest.approx(losses, rel=tolerance)
        assert result["norms"] == pytest.approx(norms, rel=tolerance if tolerance < HALF else 10 * HALF)


def test_what_the_steps_change_is_more_than_what_is_allowed() -> None:
    untrained, trained = in_fp32(lr=0.0).losses, in_fp32().losses
    assert abs(untrained[-1] - trained[-1]) > 10 * HALF * trained[-1]
