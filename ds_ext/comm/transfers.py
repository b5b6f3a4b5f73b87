"""Contents of messages between GPUs in flight: start, wait, time limits.

On CUDA the host waits for a transfer only in await_all(), by polling. gloo, which takes NCCL's place in tests, reports
a transfer only to a rank that waits for it, once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import TransportError
from .cuda.device import Device
from .failure_state import FailureState
from .groups import explain
from .receive_stream import HostReceives, Receives, StreamReceives
from .transport import describe_tag

_SEND, _RECV = "send to", "recv from"
_POLL_S = 0.001
_ROUNDING_S = 0.01  # gloo's limits are whole milliseconds


@dataclass(eq=False)
class Transfer:
    """Contents in flight since ``start`` (``time.monotonic()``). ``body`` is kept until the transfer is complete."""

    work: dist.Work
    body: Tensor
    op: str
    peer: int
    tag: int
    start: float
    waited: bool = False


class Transfers:
    """Transfers of one rank, oldest first."""

    def __init__(self, state: FailureState, device: torch.device, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._state, self._on_cuda = state, device.type == "cuda"
        self._receives: Receives = StreamReceives(Device(device)) if self._on_cuda else HostReceives()
        self._unfinished: deque[Transfer] = deque()
        self._num_removed = 0  # complete transfers removed from _unfinished

    def send(self, body: Tensor, peer: int, tag: int, group: dist.ProcessGroup) -> Transfer:
        """Start to send a body, after the work queued on the current stream."""
        return self._start(_SEND, peer, tag, lambda: (body, _work(dist.isend(body, peer, group=group))))

    def recv(self, num_bytes: int, peer: int, tag: int, group: dist.ProcessGroup) -> Transfer:
        """Start to receive a body, without waiting for queued work."""

        def receive_into(body: Tensor) -> dist.Work:
            return _work(dist.irecv(body, peer, group=group))

        return self._start(_RECV, peer, tag, lambda: self._receives.post(num_bytes, receive_into))

    def finish(self, transfer: Transfer, timeout_s: float | None = None) -> None:
        """Wait for a transfer, or on CUDA make the current stream wait for it."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        start = time.monotonic()
        if transfer.waited:
            return
        try:
            if transfer.op == _RECV:
                self._receives.hand_over(transfer.body, transfer.work, limit_s)
            elif self._on_cuda:
                transfer.work.wait()
            else:
                transfer.work.wait(timedelta(seconds=max(0.001, limit_s)))
        except RuntimeError as error:
            if time.monotonic() - start < limit_s - _ROUNDING_S:
                raise self._failure(transfer.op, transfer.peer, transfer.tag, start, error) from error
            raise self._state.timeout(transfer.op, transfer.peer, transfer.tag, limit_s) from error
        transfer.waited = True

    def await_receives(self) -> None:
        self._await(lambda: [transfer for transfer in self._unfinished if transfer.op == _RECV])

    def await_all(self, progress: Callable[[], None] = lambda: None) -> None:
        """Wait until all transfers are complete, and call ``progress`` meanwhile."""

        def unfinished() -> Sequence[Transfer]:
            progress()
            return self._unfinished

        self._await(unfinished)

    def _await(self, unfinished: Callable[[], Sequence[Transfer]]) -> None:
        """Wait until ``unfinished()``, some of the transfers, is empty. It may start transfers.

        Raises TransportTimeout if no transfer completes within the time limit.
        """
        start, num_removed = time.monotonic(), self._num_removed
        while transfers := unfinished():
            if not self._on_cuda:
                self.finish(transfers[0])
            num_transfers = len(self._unfinished)
            self._unfinished = deque(each for each in self._unfinished if not self._is_complete(each))
            self._num_removed += num_transfers - len(self._unfinished)
            if self._num_removed > num_removed:
                start, num_removed = time.monotonic(), self._num_removed
            elif time.monotonic() - start > self.timeout_s:
                first = transfers[0]
                raise self._state.timeout(first.op, first.peer, first.tag, self.timeout_s)
            else:
                time.sleep(_POLL_S)

    def _start(self, op: str, peer: int, tag: int, begin: Callable[[], tuple[Tensor, dist.Work]]) -> Transfer:
        start = time.monotonic()
        try:
            body, work = begin()
        except RuntimeError as error:
            raise self._failure(op, peer, tag, start, error) from error
        while self._unfinished and self._is_complete(self._unfinished[0]):
            self._unfinished.popleft()
            self._num_removed += 1
        transfer = Transfer(work, body, op, peer, tag, start)
        self._unfinished.append(transfer)
        return transfer

    def _is_complete(self, transfer: Transfer) -> bool:
        """Return whether a transfer is complete. Raises TransportError if NCCL reports its failure."""
        if not self._on_cuda:
            return transfer.waited  # finish() has waited for it
        if not transfer.work.is_completed():
            return False
        error = _error(transfer.work)  # NCCL counts a failed transfer as complete, and wait() does not raise
        if error is not None:
            raise self._failure(transfer.op, transfer.peer, transfer.tag, transfer.start, error)
        return True

    def _failure(self, op: str, peer: int, tag: int, start: float, error: BaseException) -> TransportError:
        """Return the error for a failure after waiting since ``start``."""
        why = explain(error, peer, time.monotonic() - start, self.timeout_s)
        failure = self._state.failure(f"{op} rank {peer} of {describe_tag(tag)}: {why}")
        failure.peer, failure.op, failure.tag = peer, op, tag
        return failure


def _error(work: dist.Work) -> BaseException | None:
    """Return the failure of a complete operation; None if it succeeded."""
    try:
        return work.exception()
    except TypeError:  # torch 2.9 and 2.10 cannot convert any result
        return None if work.is_success() else RuntimeError("the transfer failed")


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work
