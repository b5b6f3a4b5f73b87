"""Every schedule with four ranks on one GPU trains to the losses and weights of one process, over both routes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ds_ext.comm.cuda.header import Route
from tests.engine_runs import MODEL, SCHEDULES, Job, reference
from tests.gpu.ranks import gpu_ranks, needs_gpu, train_on_gpu
from tests.ranks import RankPool
from tests.reference import ReferenceRun

pytestmark = needs_gpu

ROUTES = {"shm": Route.DIRECT, "tcp": Route.STAGED}
JOBS = {name: Job(name, 4, 1, 1, 8, MODEL, steps=5) for name in [*SCHEDULES, "dualpipev", "dpp"]}
JOBS["fbd"] = Job("fbd", 2, 1, 1, 4, MODEL, steps=5)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with gpu_ranks(4) as pool:
        yield pool


def assert_as_one_process(results: list[dict[str, Any]], expected: ReferenceRun) -> None:
    """Compare losses, norms and weights within the rounding of a GPU."""
    for result in results:
        assert result["losses"] == pytest.approx(expected.losses, rel=1e-4)
        assert result["norms"] == pytest.approx(expected.grad_norms, rel=1e-3)
        for name, value in result["weights"].items():
            torch.testing.assert_close(value, expected.parameters[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("schedule", JOBS)
def test_trains_as_one_process(ranks: RankPool, schedule: str) -> None:
    runs = {}
    for kind, route in ROUTES.items():
        job = dataclasses.replace(JOBS[schedule], transport=kind)
        runs[kind] = ranks.run(train_on_gpu, job, timeout_s=180)
        assert_as_one_process(runs[kind], reference(job))
        senders = [result["counts"] for result in runs[kind] if sum(result["counts"].values()) > job.steps]
        assert len(senders) > 1 and all(counts[route] >= job.steps for counts in senders)
    assert [result["losses"] for result in runs["shm"]] == [result["losses"] for result in runs["tcp"]]


@pytest.mark.parametrize("sizes", [(2, 1, 2), (2, 2, 1)], ids=["data", "tensor"])
def test_gradients_and_shards_are_reduced_over_gloo(ranks: RankPool, sizes: tuple[int, int, int]) -> None:
    job = Job("1f1b", *sizes, 4, dataclasses.replace(MODEL, sequence_parallel=sizes[1] > 1), steps=5)
    assert_as_one_process(ranks.run(train_on_gpu, job, timeout_s=180), reference(job))
