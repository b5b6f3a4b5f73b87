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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE, Op
from ds_ext.pipe_schedules.placement import Placement

WIDTH = 32
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


def make_batches(micro_batches: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Return (inputs, labels) of every micro-batch, the same in every process: (rows, WIDTH), (LOSS_ROWS, WIDTH).

    Labels never have more rows than the inputs.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(number: int) -> Tensor:
        return torch.randn(number, WIDTH, generator=generator)

    return [(draw(rows), draw(min(rows, LOSS_ROWS))) for _ in range(micro_batches)]


class EmulatedDevice:
    """Clock of one rank's passes: waits for them and sums their times.

    It is the ``clock`` of a :class:`ds_ext.PipelineModule`, which sets the micro-batch of each forward. Other engines
    do not, and run the forwards of a stage in the order of the micro-batches.

    Args:
        costs: times in milliseconds, jitter included.
        placement: placement of the stages.

    Attributes:
        split_backwards: (stage, micro-batch) pairs of split backwards, whose halves draw jitter separately.
        repeats: True if forwards repeat those of a forward device (FBD).
        last_end: end of the last pass, by time.perf_counter.
        computed_ms: total time of the passes in this step.
    """

    repeats = False
    split_backwards: frozenset[tuple[int, int]] = frozenset()

    def __init__(self, costs: Costs, placement: Placement) -> None:
        self.costs, self._durations = costs, costs.durations(placement)
        self.last_stage = placement.stages - 1
        self.last_end = self.computed_ms = 0.0
        self._micro_batch: int | None = None
        self._last: Op | None = None
        self._forwards: defaultdict[int, int] = defaultdict(int)
        self._need_weight_gradient: defaultdict[int, deque[int]] = defaultdict(deque)

    def next_seed(self) -> None:
        """Draw the jitter of the following passes from the next seed."""
        self.costs = replace(self.costs, seed=self.costs.seed + 1)

    def start_step(self) -> None:
        """Begin a step: count micro-batches from 0."""
        self.computed_ms = 0.0
        self._forwards.clear()
        self._need_weight_gradient.clear()

    def set(self, step: int, micro_batch: int) -> None:
        """Set the micro-batch of the following forwards."""
        self._micro_batch = micro_batch

    def next_micro_batch(self, stage: int) -> int:
        """Return the micro-batch of the next forward of ``stage``."""
        if self._micro_batch is not None:
            return self._micro_batch
        self._forwards[stage] += 1
        return self._forwards[stage] - 1

    def forward(self, stage: int, micro_batch: int, start: float) -> None:
        """Wait for the end of a forward that began at ``start`` (by time.perf_counter)."""
        kind = RECOMPUTE if self.repeats else FORWARD
        self._wait(Op(kind, micro_batch, stage), start)

    def input_gradient(self, stage: int, micro_batch: int, start: float) -> None:
        """Wait for the end of an input gradient that began at ``start``."""
        self._wait(Op(BACKWARD_INPUT, micro_batch, stage), start)
        self._need_weight_gradient[stage].append(micro_batch)

    def weight_gradient(self, stage: int) -> None:
        """Wait for a weight gradient. Those of a stage come in the order of its input gradients.

        In a whole backward it starts at the end of the input gradient's wait, so the layer's real arithmetic since
        then is part of its time.
        """
        micro_batch = self._need_weight_gradient[stage].popleft()
        op = Op(BACKWARD_WEIGHT, micro_batch, stage)
        follows = self._last == op._replace(kind=BACKWARD_INPUT) and self._in_timetable(op).kind == BACKWARD
        self._wait(op, self.last_end if follows else time.perf_counter())

    def _wait(self, op: Op, start: float) -> None:
        duration_ms = self._durations[op.kind][op.stage] * self.costs.factor(self._in_timetable(op))
        self._occupy(start, duration_ms)
        self.last_end, self._last = time.perf_counter(), op
        self.computed_ms += duration_ms

    def _occupy(self, start: float, duration_ms: float) -> None:
        sleep_until(start + duration_ms / 1000)

    def finish(self) -> None:
        """Wait for the end of the last pass, which a GPU reaches later than the host."""

    def _in_timetable(self, op: Op) -> Op:
        """Return the op of the timetable that a pass belongs to: a whole backward, or the pass itself."""
        whole = op.kind not in (FORWARD, RECOMPUTE) and (op.stage, op.micro_batch) not in self.split_backwards
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
    ) -> None:
        super().__init__(costs, placement)
        self._queue, self._synchronize = queue, synchronize

    def _occupy(self, start: float, duration_ms: float) -> None:
        self._queue(duration_ms)

    def finish(self) -> None:
        """Wait for the end of the last pass."""
        self._synchronize()
        self.last_end = time.perf_counter()


def emulated_device(device: str, costs: Costs, placement: Placement) -> EmulatedDevice:
    """Return the emulated device of this rank, on "cpu" or on the current GPU ("cuda")."""
    if device == "cpu":
        return EmulatedDevice(costs, placement)
    cycles_per_ms = _cycles_per_ms()

    def queue(duration_ms: float) -> None:
        torch.cuda._sleep(round(duration_ms * cycles_per_ms))

    return EmulatedGpu(costs, placement, queue, torch.cuda.synchronize)


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
    """One stage: (rows, WIDTH) to (rows, WIDTH); the last stage returns only the first LOSS_ROWS.

    Only the first LOSS_ROWS rows pass through the linear layer, so a large activation makes messages more expensive,
    but not the arithmetic. A real device would write the other rows without using the host's processor.

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
        micro_batch = self.device.next_micro_batch(self.stage)
        head = self.linear(_Head.apply(x, whole))
        return _Wait.apply(head, whole, self.device, self.stage, micro_batch, start)

    def _weight_gradient(self, grad: Tensor) -> None:
        self.device.weight_gradient(self.stage)

    _weight_gradient.only_observes = True  # pyright: ignore[reportFunctionMemberAccess]; so its gradient is deferred


def _unwritten(like: Tensor, rows: int) -> Tensor:
    """Return a tensor that a device would fill; here the processor only touches every page.

    The ranks share a small number of cores, so writing whole activations would delay the messages of other ranks.
    """
    tensor = like.new_empty(rows, WIDTH)
    tensor[::_PAGE_ROWS] = 0  # untouched pages all map to one page of zeros, which is read from the cache
    return tensor


class _Whole:
    """All rows, which bypass the linear layer: the input in a forward, the gradient in a backward."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


class _Head(torch.autograd.Function):
    """Select the rows for the linear layer. The backward writes their gradient into the gradient of all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: _Whole) -> Tensor:
        ctx.whole = whole
        return x[:LOSS_ROWS].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        tensor = ctx.whole.tensor
        del ctx.whole.tensor  # autograd adopts a gradient without other references, and copies others
        tensor[:LOSS_ROWS] = grads[0]
        return tensor, None


class _Wait(torch.autograd.Function):
    """Waits after the linear layer, so its backward runs first: the input gradient before the weight gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        head: Tensor,
        whole: _Whole,
        device: EmulatedDevice,
        stage: int,
        micro_batch: int,
        start: float,
    ) -> Tensor:
        ctx.whole, ctx.rows = whole, len(whole.tensor)
        ctx.device, ctx.stage, ctx.micro_batch = device, stage, micro_batch
        # Not a view: torch.distributed.pipelining detaches outputs in place.
        y = head.clone() if stage == device.last_stage else _unwritten(whole.tensor, len(whole.tensor))
        y[:LOSS_ROWS] = head
        del whole.tensor  # a layer that computes would not keep it
        device.forward(stage, micro_batch, start)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        start, grad = time.perf_counter(), grads[0]
        ctx.whole.tensor = _unwritten(grad, ctx.rows)
        ctx.device.input_gradient(ctx.stage, ctx.micro_batch, start)
        return grad[:LOSS_ROWS], None, None, None, None, None
