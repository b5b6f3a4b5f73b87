"""``bench engine``: CPU time that an engine takes per instruction.

The result is the CPU time of a step, minus the layers' passes and the transport's calls, divided by the number of
instructions. It includes the optimizer's step and the reductions. Times are those of the rank's thread, so waiting for
another rank or for a core does not count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ds_ext.comm.transport import TRANSPORTS
from ds_ext.errors import ConfigError
from ds_ext.pipe_schedules import Timetable, get_schedule
from ds_ext.pipe_schedules.lowering import lower
from ds_ext.pipe_schedules.ops import FORWARD

from .command import Report, add_number, add_size_flags, check_at_least, json_item, names_in, table
from .ranks import Job, take_turns

SUMMARY = "CPU time that an engine takes per instruction, without layers and transport"
RIVAL = "deepspeed_1f1b"
STEPS = 5  # summed in one measurement
_OVER = " over "  # an engine is called "1f1b", or "1f1b over shm"
_LIMIT_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the benchmark."""
    add_size_flags(parser, num_devices=2, micro_batches=16)
    parser.add_argument("--schedules", default="1f1b,bitpipe,bitpipe_zb", metavar="A,B", help="%(default)s")
    parser.add_argument("--transports", default="auto", metavar="A,B", help="for each schedule (%(default)s)")
    add_number(parser, "--repeats", 7, "K", "measurements, after one warm-up")


def measure(args: argparse.Namespace) -> Report:
    """Measure every schedule over every transport, and DeepSpeed's engine.

    Raises:
        ConfigError: a flag is wrong.
        RankFailure: an engine failed.
    """
    check_at_least("--num-devices", args.num_devices, 2)  # one device sends no message
    check_at_least("--repeats", args.repeats, 1)
    schedules, transports = names_in(args.schedules), names_in(args.transports)
    for name in schedules:
        get_schedule(name).timetable(args.num_devices, args.micro_batches)
    if not transports or not set(transports) <= set(TRANSPORTS):
        raise ConfigError(
            f"--transports: unknown name (got {args.transports!r}). Use any of {', '.join(TRANSPORTS)}."
        )
    ours = [
        name if transport == "auto" else name + _OVER + transport
        for name in schedules
        for transport in transports
    ]
    job = Job(build, args.num_devices, _LIMIT_S, args.micro_batches)
    items: list[dict[str, Any]] = []
    rows: list[tuple[str, ...]] = [("engine", "us/instruction", "best", "instructions", "us/message")]
    for name, run in take_turns([*ours, RIVAL], job, 1 + args.repeats).items():
        costs: list[EngineCost] = [answers[0] for answers in run.rounds[1:]]
        times = [cost.us_per_instruction for cost in costs]
        params = {
            "stages": args.num_devices,
            "micro_batches": args.micro_batches,
            "instructions": costs[0].instructions,
            "messages": costs[0].messages,
            "us_per_message": statistics.median(cost.us_per_message for cost in costs),
        }
        items.append(json_item(name, params, times, "us per instruction"))
        figures = (f"{value:.1f}" for value in (statistics.median(times), min(times)))
        rows.append((name, *figures, str(costs[0].instructions), f"{params['us_per_message']:.1f}"))
    return Report(items, f"{args.num_devices} devices, {args.micro_batches} micro-batches", table(rows))


# --- on a rank ---


class EngineCost(NamedTuple):
    """Microseconds of CPU time on one rank, and numbers of its instructions and messages per step."""

    us_per_instruction: float
    us_per_message: float
    instructions: int
    messages: int


class Stopwatch:
    """Total CPU time of calls. Calls inside counted calls are not counted again."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._running = False

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with its time counted."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._running:
                return function(*args, **kwargs)
            self._running = True
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - start
                self._running = False

        return call

    def count(self, transport: Any) -> None:
        """Count the calls of a transport and of its receive tickets."""
        recv, wait_any = self.counted(transport.recv), getattr(transport, "wait_any", None)
        transport.send = self.counted(transport.send)
        transport.recv = lambda peer, tag: _CountedTicket(recv(peer, tag), self)
        if wait_any is not None:
            transport.wait_any = self.counted(
                lambda tickets, timeout_s=None: wait_any([ticket.inner for ticket in tickets], timeout_s)
            )


class _CountedTicket:
    def __init__(self, inner: Any, watch: Stopwatch) -> None:
        self.inner, self.done, self.wait = inner, inner.done, watch.counted(inner.wait)


@dataclass(frozen=True)
class MeasuredEngine:
    """Engine of this rank.

    Args:
        step: trains one step.
        passes: (layer, True if it ends in the loss) of every forward of this rank.
        instructions: number of instructions of this rank per step.
        messages: number of messages that this rank sends or receives per step.
        watch: counts the transport's calls.
    """

    step: Callable[[], Any]
    timetable: Timetable
    passes: Sequence[tuple[Any, bool]]
    instructions: int
    messages: int
    watch: Stopwatch

    def run(self) -> EngineCost:
        """Run some steps, then the same layers without the engine."""
        self.watch.seconds = 0.0
        start = time.thread_time()
        for _ in range(STEPS):
            self.step()
        whole_s, transport_s = time.thread_time() - start, self.watch.seconds
        engine_us = 1e6 * ((whole_s - transport_s) / STEPS - self._layers_s())
        message_us = 1e6 * transport_s / STEPS / max(self.messages, 1)
        return EngineCost(engine_us / self.instructions, message_us, self.instructions, self.messages)

    def _layers_s(self) -> float:
        """Run the forwards and backwards of a step without an engine. Returns their time in seconds."""
        import torch
        import torch.nn.functional as F

        from .emulated import WIDTH

        x, gradient = torch.randn(1, WIDTH, requires_grad=True), torch.randn(1, WIDTH)
        start = time.thread_time()
        for layer, is_last in self.passes:
            y = layer(x)
            y, of_output = (F.mse_loss(y, gradient), None) if is_last else (y, gradient)
            torch.autograd.backward([y], [of_output])
        seconds = time.thread_time() - start
        for layer, _ in self.passes:
            layer.zero_grad()
        return seconds


def build(name: str, job: Job) -> MeasuredEngine:
    """Build the engine called ``name``: DeepSpeed's, or ours with a schedule over a transport."""
    if name == RIVAL:
        return _deepspeed_1f1b(job)
    schedule, _, transport = name.partition(_OVER)
    return _ours(schedule, transport or "auto", job)


def _workload(stages: int, micro_batches: int) -> Any:
    from deepspeed.pipe import LayerSpec
    from torch import nn

    from .emulated import WIDTH, make_batches
    from .rivals import Workload

    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(stages)]
    return Workload(layers, make_batches(micro_batches, rows=1))


def _ours(name: str, transport: str, job: Job) -> MeasuredEngine:
    timetable = get_schedule(name).timetable(job.num_ranks, job.micro_batches)
    workload = _workload(timetable.placement.stages, job.micro_batches)
    engine, step = workload.in_ours(job, timetable, transport=transport)
    watch, module = Stopwatch(), engine.module
    watch.count(engine.transport)
    program = lower(timetable).instructions[module.device_index]
    last = timetable.placement.stages - 1
    layers: dict[int, Any] = {stage: module.stage_funcs[stage][0] for stage in module.stages}
    order = timetable.orders[module.device_index]
    passes = [(layers[op.stage], op.stage == last) for op in order if op.kind == FORWARD]
    messages = sum(instruction.peer is not None for instruction in program)
    return MeasuredEngine(step, timetable, passes, len(program), messages, watch)


def _deepspeed_1f1b(job: Job) -> MeasuredEngine:
    from deepspeed.runtime.pipe import p2p
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    timetable = get_schedule("1f1b").timetable(job.num_ranks, job.micro_batches)
    engine, step = _workload(job.num_ranks, job.micro_batches).in_deepspeeds(job.num_ranks)
    watch = Stopwatch()
    p2p.send, p2p.recv = watch.counted(p2p.send), watch.counted(p2p.recv)
    steps = TrainSchedule(job.micro_batches, job.num_ranks, engine.stage_id).steps()
    program = [instruction for step in steps for instruction in step]
    messages = sum(type(instruction).__name__.startswith(("Send", "Recv")) for instruction in program)
    passes = [(engine.module.forward_funcs[0], engine.is_last_stage())] * job.micro_batches
    return MeasuredEngine(step, timetable, passes, len(program), messages, watch)
