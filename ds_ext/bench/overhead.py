"""A rank of ``bench engine``: real engines with layers that take next to no time, and what the processor did meanwhile.

Times are those of the processor in this thread, so that waiting for another rank or for a core does not count.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from deepspeed.pipe import PipelineModule as DeepSpeedPipelineModule
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.schedule import TrainSchedule
from torch import Tensor, nn

from ..comm.transport import Ticket
from ..engine import PipelineModule, initialize
from ..pipe_schedules import Timetable, get_schedule
from ..pipe_schedules.lower import lower
from ..pipe_schedules.ops import FORWARD
from .emulated import WIDTH, make_batches, rows_of
from .engine import OVER, RIVAL
from .ranks import Job
from .rivals import SameBatches, config_of

STEPS = 5  # that one measurement sums over


@dataclass(frozen=True)
class Spent:
    """Processor seconds of one step of one rank, and what it was spent on."""

    whole_s: float
    transport_s: float
    layers_s: float
    instructions: int
    messages: int


class Stopwatch:
    """Sums the processor time of calls."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, with its time counted."""

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - start
                self.calls += 1

        return call


class TimedTransport:
    """A transport whose calls are counted as its own."""

    def __init__(self, transport: Any, watch: Stopwatch) -> None:
        self.name, self._watch = transport.name, watch
        self.send, self.close = watch.timed(transport.send), transport.close
        self.abort = transport.abort
        self.ready, self._recv = transport.ready, watch.timed(transport.recv)
        if hasattr(transport, "wait_any"):  # which a dynamic order needs, and not every transport has
            self.wait_any = watch.timed(transport.wait_any)

    def recv(self, peer: int, tag: int) -> Ticket:
        """As the transport's; what waits for the ticket is counted too."""
        return _TimedTicket(self._recv(peer, tag), self._watch)


class _TimedTicket:
    def __init__(self, ticket: Ticket, watch: Stopwatch) -> None:
        self.done, self.wait = ticket.done, watch.timed(ticket.wait)


@dataclass
class Measured:
    """An engine of this rank and how to measure it.

    Args:
        step: trains one step.
        timetable: what it runs; only rank 0's is read.
        passes: (layer, whether it ends in the loss) of every forward of this rank.
        instructions, messages: of one step of this rank.
        watch: sums what its transport takes.
    """

    step: Callable[[], Any]
    timetable: Timetable
    passes: Sequence[tuple[nn.Module, bool]]
    instructions: int
    messages: int
    watch: Stopwatch

    def run(self) -> Spent:
        """Some steps, and then their layers alone."""
        self.watch.seconds = 0.0
        start = time.thread_time()
        for _ in range(STEPS):
            self.step()
        whole_s = time.thread_time() - start
        return Spent(
            whole_s / STEPS, self.watch.seconds / STEPS, self._bare(), self.instructions, self.messages
        )

    def _bare(self) -> float:
        """The forwards and backwards of a step without an engine."""
        x, gradient = torch.randn(1, WIDTH, requires_grad=True), torch.randn(1, WIDTH)
        start = time.thread_time()
        for layer, is_last in self.passes:
            y = layer(x)
            y, with_respect_to = (F.mse_loss(y, gradient), None) if is_last else (y, gradient)
            torch.autograd.backward([y], [with_respect_to])
        spent = time.thread_time() - start
        for layer, _ in self.passes:
            layer.zero_grad()
        return spent


def build(name: str, job: Job) -> Measured:
    """The engine called ``name`` on this rank: DeepSpeed's, or ours with a schedule over a transport."""
    schedule, _, transport = name.partition(OVER)
    return _deepspeed_1f1b(job) if name == RIVAL else _ours(schedule, transport or "auto", job)


def _layers(stages: int) -> list[LayerSpec]:
    return [LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(stages)]


def _batches(job: Job) -> list[tuple[Tensor, Tensor]]:
    return make_batches(job.micro_batches, rows_of(job.message_kb))


def _ours(name: str, transport: str, job: Job) -> Measured:
    timetable = get_schedule(name).timetable(job.devices, job.micro_batches)
    section = {
        "schedule": name,
        "pipeline_parallel_size": job.devices,
        "transport": transport,
        "transport_options": {"timeout_s": job.timeout_s},
    }
    config = {**config_of(job, timetable.placement.replicas), "ds_ext": section}
    model = PipelineModule(
        _layers(timetable.placement.stages), config, loss_fn=F.mse_loss, partition_method="uniform"
    )
    engine, *_ = initialize(model=model, config=config)
    watch, batches = Stopwatch(), SameBatches(_batches(job))
    engine.use_transport(TimedTransport(engine.transport, watch))
    mine = lower(timetable).instructions[model.device_index]
    last = timetable.placement.stages - 1
    layers: dict[int, Any] = {stage: model.stage_funcs[stage][0] for stage in model.stages}
    passes = [
        (layers[op.stage], op.stage == last)
        for op in timetable.orders[model.device_index]
        if op.kind == FORWARD
    ]
    messages = sum(instruction.peer is not None for instruction in mine)
    return Measured(lambda: engine.train_batch(batches), timetable, passes, len(mine), messages, watch)


def _deepspeed_1f1b(job: Job) -> Measured:
    timetable = get_schedule("1f1b").timetable(job.devices, job.micro_batches)
    model = DeepSpeedPipelineModule(
        _layers(job.devices), num_stages=job.devices, loss_fn=F.mse_loss, partition_method="uniform"
    )
    engine, *_ = deepspeed.initialize(model=model, config=config_of(job, 1))
    batches, watch = itertools.cycle(_batches(job)), Stopwatch()
    p2p.send, p2p.recv = watch.timed(p2p.send), watch.timed(p2p.recv)
    steps = TrainSchedule(job.micro_batches, job.devices, engine.stage_id).steps()
    mine = [instruction for step in steps for instruction in step]
    messages = sum(type(instruction).__name__.startswith(("Send", "Recv")) for instruction in mine)
    passes = [(model.forward_funcs[0], engine.is_last_stage())] * job.micro_batches
    return Measured(
        lambda: engine.train_batch(data_iter=batches), timetable, passes, len(mine), messages, watch
    )
