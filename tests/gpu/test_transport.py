"""Every byte of messages between two ranks on one GPU, over CUDA IPC and staged in host memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ds_ext.comm.cuda.device import Device
from ds_ext.comm.cuda.header import Route
from tests.distributed.test_cuda import traffic
from tests.gpu.ranks import gpu_ranks, needs_gpu, use_gpu

pytestmark = needs_gpu

LATE_CYCLES = 2_000_000  # about a millisecond
MESSAGES = 200


class LateCuda(Device):
    """GPU with work that is late, and the additional methods of tests/late_device.py."""

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


def late_traffic(rank: int, direct: bool) -> tuple[int, dict[Route, int]]:
    use_gpu()
    return traffic(rank, LateCuda(torch.device("cuda", 0)), MESSAGES, direct)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "staged"])
def test_every_byte(direct: bool) -> None:
    with gpu_ranks(2) as ranks:
        for wrong, counts in ranks.run(late_traffic, direct, timeout_s=180):
            assert wrong == 0
            assert counts[Route.DIRECT] > MESSAGES // 2 if direct else counts[Route.STAGED] == MESSAGES
