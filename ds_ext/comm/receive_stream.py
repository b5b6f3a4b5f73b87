"""Receives of torch.distributed that do not wait for queued computations.

torch starts a transfer of NCCL after the work that is queued on the current stream. On the stream of the computations,
a receive would start after computations that do not depend on it. Receives are therefore posted on a separate stream.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .cuda.device import Device

Post = Callable[[Tensor], dist.Work]  # starts a receive into memory


class Receives(Protocol):
    """Memory of received messages, and its order with other work."""

    def post(self, num_bytes: int, post: Post) -> tuple[Tensor, dist.Work]:
        """Return new memory, uint8 [num_bytes], and the receive into it that ``post`` starts."""
        ...

    def hand_over(self, body: Tensor, work: dist.Work, limit_s: float) -> None:
        """Order the receive before work that the caller queues from now on. Raises RuntimeError after ``limit_s``."""
        ...


class HostReceives:
    def post(self, num_bytes: int, post: Post) -> tuple[Tensor, dist.Work]:
        body = torch.empty(num_bytes, dtype=torch.uint8)
        return body, post(body)

    def hand_over(self, body: Tensor, work: dist.Work, limit_s: float) -> None:
        work.wait(timedelta(seconds=max(0.001, limit_s)))  # for gloo, zero means no limit


class StreamReceives:
    """Receives into GPU memory, on a separate stream, which owns the memory. The host waits for nothing."""

    def __init__(self, device: Device) -> None:
        self._device, self._stream = device, device.inward

    def post(self, num_bytes: int, post: Post) -> tuple[Tensor, dist.Work]:
        with self._device.on(self._stream):
            body = self._device.empty(num_bytes, self._stream)
            return body, post(body)

    def hand_over(self, body: Tensor, work: dist.Work, limit_s: float) -> None:
        """Make the current stream wait for the receive. The memory is kept until that stream has used it."""
        work.wait()
        self._device.keep(body, self._device.current())
