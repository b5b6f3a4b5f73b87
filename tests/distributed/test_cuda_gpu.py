"""The transport and the engine on a real GPU, which all ranks share; skipped where torch sees none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ext.comm.cuda import trial as cuda_trial
from ds_ext.comm.cuda.device import Device
from ds_ext.comm.cuda.header import Route
from tests.distributed.test_cuda import traffic
from tests.engine_runs import MODEL, SCHEDULES, Job, StepBatches, batches_of, build, reference, weights
from tests.ranks import RankPool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

LATE_CYCLES = 2_000_000  # about a millisecond


class LateCuda(Device):
    """The GPU, with work that is late; what tests need beside it as in tests/late_device.py."""

    def tensor(self, contents: Tensor) -> Tensor:
        torch.cuda._sleep(LATE_CYCLES)
        return contents.to(self.device, non_blocking=True)

    def fill(self, tensor: Tensor, value: int) -> None:
        tensor.view(-1).view(torch.uint8).fill_(value)

    def read(self, tensor: Tensor) -> Callable[[], bytes]:
        torch.cuda._sleep(LATE_CYCLES // 2)
        on_host, over = torch.empty_like(tensor, device="cpu", pin_memory=True), torch.cuda.Event()
        on_host.copy_(tensor, non_blocking=True)
        over.record()

        def result() -> bytes:
            over.synchronize()
            return on_host.contiguous().view(-1).view(torch.uint8).numpy().tobytes()

        return result


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[Callable[[int], RankPool]]:
    """Pools of their own: their ranks use CUDA from the first call on."""
    pools: dict[int, RankPool] = {}
    yield lambda count: pools.setdefault(count, RankPool(count))
    for pool in pools.values():
        pool.close()


def late_traffic(rank: int, messages: int, direct: bool) -> tuple[int, dict[Route, int]]:
    torch.cuda.set_device(0)
    return traffic(rank, LateCuda(torch.device("cuda", 0)), messages, direct)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "staged"])
def test_every_byte_on_the_gpu(gpu_ranks: Callable[[int], RankPool], direct: bool) -> None:
    for wrong, counts in gpu_ranks(2).run(late_traffic, 200, direct, timeout_s=120):
        assert wrong == 0
        assert counts[Route.DIRECT] > 100 if direct else counts[Route.STAGED] == 200


def train_on_gpu(rank: int, job: Job) -> dict[str, Any]:
    """Train with all ranks on GPU 0; the process group stays gloo, because nccl refuses that."""
    import os

    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
    from deepspeed.accelerator.real_accelerator import set_accelerator

    os.environ["LOCAL_RANK"] = "0"
    set_accelerator(CUDA_Accelerator())
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    engine, tp = build(job)
    batches = StepBatches(batches_of(job))
    losses, norms = [], []
    for _ in range(job.steps):
        losses.append(float(engine.train_batch(batches)))
        norms.append(float(engine.get_global_grad_norm()))
    counts = dict(getattr(engine.transport, "counts", {}))
    found = {name: value.cpu() for name, value in weights(engine, tp).items()}
    engine.transport.close()
    return {"losses": losses, "norms": norms, "weights": found, "counts": counts}


@pytest.mark.parametrize("schedule", [*SCHEDULES, "dpp"])
def test_trains_on_one_gpu(gpu_ranks: Callable[[int], RankPool], schedule: str) -> None:
    """As one process on the CPU within rounding, and bitwise the same over every transport."""
    job = Job(schedule, 4, 1, 1, micro_batches=8, model=MODEL, steps=5)
    expected = reference(job)
    runs = {}
    for kind in ("shm", "tcp"):
        runs[kind] = gpu_ranks(4).run(train_on_gpu, dataclasses.replace(job, transport=kind), timeout_s=180)
        for result in runs[kind]:
            assert result["losses"] == pytest.approx(expected.losses, rel=1e-4)
            assert result["norms"] == pytest.approx(expected.grad_norms, rel=1e-3)
            assert result["counts"][Route.DIRECT if kind == "shm" else Route.STAGED] > 10
    assert [one["losses"] for one in runs["shm"]] == [one["losses"] for one in runs["tcp"]]


def test_auto_takes_ours_for_ranks_of_one_gpu(gpu_ranks: Callable[[int], RankPool]) -> None:
    job = Job("1f1b", 4, 1, 1, micro_batches=8, model=MODEL, steps=1)
    assert all(one["counts"][Route.DIRECT] > 0 for one in gpu_ranks(4).run(train_on_gpu, job, timeout_s=180))


def test_another_process_sends_to_this_one(tmp_path: Path) -> None:
    assert cuda_trial.try_direct("ds_ext.comm.cuda.trial:torch_cuda", "0") == cuda_trial.TRIAL_BYTES
