"""Layers that compute by waiting: a device that takes a known time, without the device.

Every pass of a layer takes a given time: forward, input gradient and weight gradient. The processor is free while a
layer waits, so many ranks share few cores and still show the bubble of as many devices. A layer is one small linear
layer: there is a parameter to train, a gradient to reduce and an activation to send.

A layer runs in any engine. Its weight gradient waits in a hook of the weight, which every engine calls when it computes
that gradient: within a whole backward, or later when it splits backwards.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..pipe_schedules.costs import Costs
from ..pipe_schedules.ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE, Op
from ..pipe_schedules.placement import Placement

WIDTH = 32
LOSS_ROWS = 32  # that the last stage gives, so that the loss of large activations takes no time of its own
# A sleep ends 0.03 ms late with exact timers and processors that are awake: the end of a wait is spun.
_SPUN_S = 0.00005
_PAGE_ROWS = 4096 // (4 * WIDTH)
_TIMER_SLACK = Path("/proc/self/timerslack_ns")


def exact_timers() -> None:
    """Have the sleeps of this process's first thread end on time, not up to 0.05 ms later; Linux only."""
    with contextlib.suppress(OSError):
        _TIMER_SLACK.write_text("1")


def rows_of(message_kb: float) -> int:
    """Rows of ``WIDTH`` fp32 numbers in an activation of that many KiB; at least one."""
    return max(1, round(message_kb * 1024 / (4 * WIDTH)))


def make_batches(micro_batches: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    """(inputs, labels) of every micro-batch, the same in every process: (rows, WIDTH) and its first LOSS_ROWS."""
    generator = torch.Generator().manual_seed(0)

    def draw(number: int) -> Tensor:
        return torch.randn(number, WIDTH, generator=generator)

    return [(draw(rows), draw(min(rows, LOSS_ROWS))) for _ in range(micro_batches)]


class EmulatedDevice:
    """How long the passes of this rank take, when the last of them ended, and what all of a step took together.

    It is the clock of a :class:`ds_ext.PipelineModule`, which tells it the micro-batch. Other engines do not, and
    forward the micro-batches of a stage in order.

    Args:
        costs: times in milliseconds, as the simulator takes them, jitter included.
        placement: cuts the model into stages.

    Attributes:
        split_backwards: the (stage, micro-batch) whose halves have a jitter of their own, as in the timetable.
        repeats: whether its forwards are those that another device has computed before (FBD).
    """

    repeats = False

    split_backwards: frozenset[tuple[int, int]] = frozenset()

    def __init__(self, costs: Costs, placement: Placement) -> None:
        self.costs, self._durations = costs, costs.durations(placement)
        self.last_stage = placement.stages - 1
        self.last_end = self.computed_ms = 0.0
        self._told: int | None = None
        self._last: Op | None = None
        self._forwards: defaultdict[int, int] = defaultdict(int)
        self._halved: defaultdict[int, deque[int]] = defaultdict(deque)

    def draw(self) -> None:
        """What follows has the jitter of the next seed."""
        self.costs = replace(self.costs, seed=self.costs.seed + 1)

    def start_step(self) -> None:
        """A step begins: micro-batches count from 0."""
        self.computed_ms = 0.0
        self._forwards.clear()
        self._halved.clear()

    def set(self, step: int, micro_batch: int) -> None:
        """Forwards that follow are of this micro-batch."""
        self._told = micro_batch

    def next_micro_batch(self, stage: int) -> int:
        """The micro-batch that a forward of ``stage`` is about."""
        if self._told is not None:
            return self._told
        self._forwards[stage] += 1
        return self._forwards[stage] - 1

    def forward(self, stage: int, micro_batch: int, start: float) -> None:
        """Wait until a forward that began at ``start`` (of time.perf_counter) has taken its time."""
        self._wait(Op(RECOMPUTE if self.repeats else FORWARD, micro_batch, stage), start)

    def input_gradient(self, stage: int, micro_batch: int, start: float) -> None:
        """Wait until an input gradient that began at ``start`` has taken its time."""
        self._wait(Op(BACKWARD_INPUT, micro_batch, stage), start)
        self._halved[stage].append(micro_batch)

    def weight_gradient(self, stage: int) -> None:
        """Wait as long as the weight gradient takes; those of a stage come in the order of its input gradients.

        In a whole backward it begins where the wait for the input gradient has ended: what the layer has really
        computed since then is part of its time.
        """
        op = Op(BACKWARD_WEIGHT, self._halved[stage].popleft(), stage)
        follows = self._last == op._replace(kind=BACKWARD_INPUT) and self._in_timetable(op).kind == BACKWARD
        self._wait(op, self.last_end if follows else time.perf_counter())

    def _wait(self, op: Op, start: float) -> None:
        takes_ms = self._durations[op.kind][op.stage] * self.costs.factor(self._in_timetable(op))
        end = start + takes_ms / 1000
        left = end - time.perf_counter() - _SPUN_S
        if left > 0:
            time.sleep(left)
        while time.perf_counter() < end:
            pass
        self.last_end, self._last = time.perf_counter(), op
        self.computed_ms += takes_ms

    def _in_timetable(self, op: Op) -> Op:
        """The computation that a pass belongs to: half of a whole backward, or one of its own."""
        whole = op.kind not in (FORWARD, RECOMPUTE) and (op.stage, op.micro_batch) not in self.split_backwards
        return op._replace(kind=BACKWARD) if whole else op


class EmulatedLayer(nn.Module):
    """One stage: (rows, WIDTH) to (rows, WIDTH), of the last one to its first LOSS_ROWS, slowly.

    Only the first LOSS_ROWS rows go through the linear layer, so that a large activation costs what its messages cost:
    the other rows are what a device would write, which takes the processor no time.

    Args:
        stage: of the model; it decides the start weights.
        device: waits.
    """

    def __init__(self, stage: int, device: EmulatedDevice) -> None:
        super().__init__()
        self.stage, self.device = stage, device
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.orthogonal_(self.linear.weight, generator=torch.Generator().manual_seed(stage))
        self.linear.weight.register_hook(self._weight_gradient)

    def forward(self, x: Tensor) -> Tensor:
        start = time.perf_counter()
        rest = _Rest(x)
        micro_batch = self.device.next_micro_batch(self.stage)
        head = self.linear(_Head.apply(x, rest))
        return _Wait.apply(head, rest, self.device, self.stage, micro_batch, start)

    def _weight_gradient(self, grad: Tensor) -> None:
        self.device.weight_gradient(self.stage)


def _made(like: Tensor, rows: int) -> Tensor:
    """A tensor with so many rows of ``like``, for a device to write: the processor only takes hold of every page.

    The ranks share few cores. If each wrote its activations itself, it would keep others from sending theirs.
    """
    made = like.new_empty(rows, WIDTH)
    made[::_PAGE_ROWS] = 0  # a page that was never written to is one that all share, and read from the cache
    return made


class _Rest:
    """What passes by the linear layer: in the forward the input, in the backward the whole gradient."""

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole.detach()


class _Head(torch.autograd.Function):
    """The rows for the linear layer. Its backward puts their gradient into the whole one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rest: _Rest) -> Tensor:
        ctx.rest = rest
        return x[:LOSS_ROWS].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        whole = ctx.rest.whole
        del ctx.rest.whole  # autograd takes a gradient that nobody else has as it is, and copies others
        whole[:LOSS_ROWS] = grads[0]
        return whole, None


class _Wait(torch.autograd.Function):
    """Comes after the linear layer, so that its backward comes first: the input gradient before the weight's."""

    @staticmethod
    def forward(
        ctx: Any,
        head: Tensor,
        rest: _Rest,
        device: EmulatedDevice,
        stage: int,
        micro_batch: int,
        start: float,
    ) -> Tensor:
        ctx.rest, ctx.rows = rest, len(rest.whole)
        ctx.device, ctx.stage, ctx.micro_batch = device, stage, micro_batch
        # No view: torch.distributed.pipelining detaches outputs in place.
        y = head.clone() if stage == device.last_stage else _made(rest.whole, len(rest.whole))
        y[:LOSS_ROWS] = head
        del rest.whole  # a layer that computes would not keep it
        device.forward(stage, micro_batch, start)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        start, grad = time.perf_counter(), grads[0]
        ctx.rest.whole = _made(grad, ctx.rows)
        ctx.device.input_gradient(ctx.stage, ctx.micro_batch, start)
        return grad[:LOSS_ROWS], None, None, None, None, None
