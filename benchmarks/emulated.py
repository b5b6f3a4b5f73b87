"""Emulated layers: each pass waits for a given time instead of computing.

The processor is free while a layer waits, so a few cores show the bubble of many devices. A layer holds one small
linear layer: a parameter to train, a gradient to reduce and an activation to send.

Layers run in any engine. A hook on the weight waits for the weight gradient's time. Every engine triggers it when it
computes that gradient: within a whole backward, or later when backwards are split.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE, Op
from ds_ext.pipe_schedules.placement import Placement
from ds_ext.tensor_parallel import HeadPart, LogitGradients, PartialLoss, TensorParallel, current_slice

WIDTH = 32
HEAD_ROWS = 8  # rows of a part of the head; few, so that their arithmetic takes no time
LOSS_ROWS = 32  # rows of the last stage's output; few, so that the loss takes no time
# With exact timers and awake processors a sleep ends 0.03 ms late, so the end of a wait spins.
_SPIN_S = 0.00005
_PAGE_ROWS = 4096 // (4 * WIDTH)
_TIMER_SLACK = Path("/proc/self/timerslack_ns")


def set_exact_timers() -> None:
    """Let sleeps of this process's first thread end on time instead of up to 0.05 ms late; Linux only."""
    with contextlib.suppress(OSError):
        _TIMER_SLACK.write_text("1")


def sleep_until(moment: float) -> None:
    """Wait until ``moment`` by time.perf_counter, which all processes on a host share."""
    sleep_s = moment - time.perf_counter() - _SPIN_S
    if sleep_s > 0:
        time.sleep(sleep_s)
    while time.perf_counter() < moment:
        pass


def rows_of(message_kb: float) -> int:
    """Return the number of rows of ``WIDTH`` fp32 values in an activation of ``message_kb`` KiB, at least one."""
    return max(1, round(message_kb * 1024 / (4 * WIDTH)))


def make_batches(micro_batches: int, rows: int, slices: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Return (inputs, labels) of every micro-batch, the same in every process: (1, rows, WIDTH), (1, LOSS_ROWS, WIDTH).

    A micro-batch is one sample, whose rows are its tokens. Both numbers of rows are rounded up to a multiple of
    ``slices``. Labels never have more rows than the inputs.
    """
    generator = torch.Generator().manual_seed(0)
    inputs, labels = (-(-number // slices) * slices for number in (rows, min(rows, LOSS_ROWS)))

    def draw(number: int) -> Tensor:
        return torch.randn(1, number, WIDTH, generator=generator)

    return [(draw(inputs), draw(labels)) for _ in range(micro_batches)]


class EmulatedDevice:
    """Clock of one rank's passes: waits for them and sums their times.

    It is the ``clock`` of a :class:`ds_ext.PipelineModule`, which sets the micro-batch of each forward. Other engines
    do not, and run the forwards of a stage in the order of the micro-batches.

    Args:
        costs: times in milliseconds, jitter included.
        placement: placement of the stages.
        slices: equal slices of the sequence of every micro-batch; a pass computes one.

    Attributes:
        loss_rows: rows of the last stage's output for a slice.
        split_backwards: (stage, micro-batch) pairs of split backwards, whose halves draw jitter separately.
        head_ops: ops of this rank's parts of the head, in the order of the timetable.
        repeats: True if forwards repeat those of a forward device (FBD).
        last_end: end of the last pass, by time.perf_counter.
        computed_ms: total time of the passes in this step.
    """

    repeats = False
    split_backwards: frozenset[tuple[int, int]] = frozenset()
    head_ops: Sequence[Op] = ()

    def __init__(self, costs: Costs, placement: Placement, slices: int = 1) -> None:
        self.costs, self._durations = costs, costs.durations(placement, slices)
        self.slices, self.loss_rows = slices, -(-LOSS_ROWS // slices)
        self.placement = placement
        self.last_end = self.computed_ms = 0.0
        self._micro_batch: int | None = None
        self._last: Op | None = None
        self._forwards: defaultdict[int, int] = defaultdict(int)
        self._need_weight_gradient: defaultdict[int, deque[Op]] = defaultdict(deque)
        self._head_ops: Iterator[Op] = iter(())

    def next_seed(self) -> None:
        """Draw the jitter of the following passes from the next seed."""
        self.costs = replace(self.costs, seed=self.costs.seed + 1)

    def start_step(self) -> None:
        """Begin a step: count micro-batches from 0."""
        self.computed_ms = 0.0
        self._forwards.clear()
        self._need_weight_gradient.clear()
        self._head_ops = iter(self.head_ops)

    def set(self, step: int, micro_batch: int) -> None:
        """Set the micro-batch of the following forwards."""
        self._micro_batch = micro_batch

    def next_forward(self, stage: int) -> Op:
        """Return the next forward of ``stage``."""
        kind, part = RECOMPUTE if self.repeats else FORWARD, current_slice()
        if self._micro_batch is not None:
            return Op(kind, self._micro_batch, stage, part.index if part else 0)
        self._forwards[stage] += 1
        return Op(kind, self._forwards[stage] - 1, stage)

    def forward(self, op: Op, start: float) -> None:
        """Wait for the end of a forward that began at ``start`` (by time.perf_counter)."""
        self._wait(op, start)

    def input_gradient(self, forward: Op, start: float) -> None:
        """Wait for the end of the input gradient of a forward. It began at ``start``."""
        op = forward._replace(kind=BACKWARD_INPUT)
        self._wait(op, start)
        self._need_weight_gradient[op.stage].append(op)

    def weight_gradient(self, stage: int) -> None:
        """Wait for a weight gradient. Those of a stage come in the order of its input gradients.

        In a whole backward it starts at the end of the input gradient's wait, so the layer's real arithmetic since
        then is part of its time.
        """
        of_input = self._need_weight_gradient[stage].popleft()
        op = of_input._replace(kind=BACKWARD_WEIGHT)
        follows = self._last == of_input and self._in_timetable(op).kind == BACKWARD
        self._wait(op, self.last_end if follows else time.perf_counter())

    def head_part(self, start: float) -> None:
        """Wait for the end of the next op of this rank's parts of the head. It began at ``start``."""
        self._wait(next(self._head_ops), start)

    def _wait(self, op: Op, start: float) -> None:
        duration_ms = self._durations[op.kind][op.stage] * self.costs.jitter_factor(self._in_timetable(op))
        self._occupy(start, duration_ms)
        self.last_end, self._last = time.perf_counter(), op
        self.computed_ms += duration_ms

    def _occupy(self, start: float, duration_ms: float) -> None:
        sleep_until(start + duration_ms / 1000)

    def finish(self) -> None:
        """Wait for the end of the last pass, which a GPU reaches later than the host."""

    def _in_timetable(self, op: Op) -> Op:
        """Return the op of the timetable that a pass belongs to: a whole backward, or the pass itself."""
        if op.kind in (FORWARD, RECOMPUTE) or op.stage >= self.placement.stages:
            return op
        whole = (op.stage, op.micro_batch) not in self.split_backwards
        return op._replace(kind=BACKWARD) if whole else op


class EmulatedGpu(EmulatedDevice):
    """Device whose passes occupy the current stream of a GPU. The host continues immediately.

    Args:
        queue: called with the milliseconds of a pass; queues a kernel of this duration.
        synchronize: waits until all queued kernels have finished.
    """

    def __init__(
        self,
        costs: Costs,
        placement: Placement,
        queue: Callable[[float], None],
        synchronize: Callable[[], None],
        slices: int = 1,
    ) -> None:
        super().__init__(costs, placement, slices)
        self._queue, self._synchronize = queue, synchronize

    def _occupy(self, start: float, duration_ms: float) -> None:
        self._queue(duration_ms)

    def finish(self) -> None:
        """Wait for the end of the last pass."""
        self._synchronize()
        self.last_end = time.perf_counter()


def emulated_device(device: str, costs: Costs, placement: Placement, slices: int = 1) -> EmulatedDevice:
    """Return the emulated device of this rank, on "cpu" or on the current GPU ("cuda")."""
    if device == "cpu":
        return EmulatedDevice(costs, placement, slices)
    cycles_per_ms = _cycles_per_ms()

    def queue(duration_ms: float) -> None:
        torch.cuda._sleep(round(duration_ms * cycles_per_ms))

    return EmulatedGpu(costs, placement, queue, torch.cuda.synchronize, slices)


def _cycles_per_ms(cycles: int = 2_000_000, repeats: int = 10) -> float:
    """Return the clock rate of the GPU, from its fastest wait. Other ranks may use the same GPU meanwhile."""
    times_ms = []
    for _ in range(1 + repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        times_ms.append(start.elapsed_time(end))
    return cycles / min(times_ms[1:])


class EmulatedLayer(nn.Module):
    """One stage: (1, rows, WIDTH) to (1, rows, WIDTH); the last stage returns only the first LOSS_ROWS.

    Only the first LOSS_ROWS rows (1/k of them in each of k slices) pass through the linear layer, so a large activation
    makes messages more expensive, but not the arithmetic. A real device would write the other rows without using the
    host's processor.

    Args:
        stage: stage of the model; determines the initial weights.
        device: waits for the passes.
    """

    def __init__(self, stage: int, device: EmulatedDevice) -> None:
        super().__init__()
        self.stage, self.device = stage, device
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.orthogonal_(self.linear.weight, generator=torch.Generator().manual_seed(stage))
        self.linear.weight.register_hook(self._weight_gradient)

    def forward(self, x: Tensor) -> Tensor:
        """Wait for the time of a forward, then return the output."""
        start = time.perf_counter()
        whole = _Whole(x)
        op = self.device.next_forward(self.stage)
        head = self.linear(_Head.apply(x, whole, self.device.loss_rows))
        return _Wait.apply(head, whole, self.device, op, start)

    def _weight_gradient(self, grad: Tensor) -> None:
        self.device.weight_gradient(self.stage)

    _weight_gradient.only_observes = True  # pyright: ignore[reportFunctionMemberAccess]; so its gradient is deferred


class EmulatedHeadPart(HeadPart):
    """Part of a head with HEAD_ROWS rows: a partial loss and a weight gradient wait for the time of their op.

    Args:
        part: number of the part.
        parts: number of parts.
        device: waits for the ops.
    """

    def __init__(self, part: int, parts: int, device: EmulatedDevice) -> None:
        weight = nn.Parameter(torch.randn(HEAD_ROWS, WIDTH, generator=torch.Generator().manual_seed(part)))
        super().__init__(weight, part, TensorParallel(), parts * HEAD_ROWS)
        self.device = device
        weight.register_hook(self._weight_gradient)

    def partial_loss(
        self, hidden_BSD: Tensor, labels_BS: Tensor, with_gradient: bool
    ) -> tuple[PartialLoss, LogitGradients | None]:
        """Wait for the time of a forward, then return what a part does."""
        start = time.perf_counter()
        partial_loss = super().partial_loss(hidden_BSD, labels_BS, with_gradient)
        self.device.head_part(start)
        return partial_loss

    def _weight_gradient(self, grad: Tensor) -> None:
        self.device.head_part(time.perf_counter())


def _unwritten(like: Tensor, rows: int) -> Tensor:
    """Return a tensor that a device would fill; here the processor only touches every page.

    The ranks share a small number of cores, so writing whole activations would delay the messages of other ranks.
    """
    tensor = like.new_empty(*like.shape[:-2], rows, WIDTH)
    # Untouched pages all map to one page of zeros, which is read from the cache.
    tensor[..., ::_PAGE_ROWS, :] = 0
    return tensor


class _Whole:
    """All rows, which bypass the linear layer: the input in a forward, the gradient in a backward."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


class _Head(torch.autograd.Function):
    """Select the rows for the linear layer. The backward writes their gradient into the gradient of all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: _Whole, rows: int) -> Tensor:
        ctx.whole, ctx.rows = whole, rows
        return x[..., :rows, :].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        tensor = ctx.whole.tensor
        del ctx.whole.tensor  # autograd adopts a gradient without other references, and copies others
        tensor[..., : ctx.rows, :] = grads[0]
        return tensor, None, None


class _Wait(torch.autograd.Function):
    """Waits after the linear layer, so its backward runs first: the input gradient before the weight gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        head: Tensor,
        whole: _Whole,
        device: EmulatedDevice,
        op: Op,
        start: float,
    ) -> Tensor:
        ctx.whole, ctx.rows = whole, whole.tensor.size(-2)
        ctx.device, ctx.op = device, op
        # Not a view: torch.distributed.pipelining detaches outputs in place.
        y = head.clone() if op.stage == device.placement.loss_stage else _unwritten(whole.tensor, ctx.rows)
        y[..., : device.loss_rows, :] = head
        del whole.tensor  # a layer that computes would not keep it
        device.forward(op, start)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        start, grad = time.perf_counter(), grads[0]
        ctx.whole.tensor = _unwritten(grad, ctx.rows)
        ctx.device.input_gradient(ctx.op, start)
        return grad[..., : ctx.device.loss_rows, :], None, None, None, None
