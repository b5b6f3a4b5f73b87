"""Recorder of a rank's timeline: computations, messages, waits and reductions.

The executor calls :meth:`Tracer.after`, which appends a tuple per instruction. Tuples are converted to text between
steps, or once a second. On CUDA, the times are events on the streams, which are read after the step.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import platform
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule as ds
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from ...comm.spin import usable_cores
from ...config.sections import TraceOptions
from ...errors import ConfigError
from ...observe.trace.event import EventText, collective_lanes
from ...observe.trace.file import TraceFile, write_timetable
from ...parallel.layout import ParallelLayout
from ...pipe_schedules import Instruction, Timetable
from ...pipe_schedules.ops import COMPUTE, GATHER_STAGE, REDUCE_STAGE
from ..contracts import AdaptedLayer
from ..executor import Observer
from ..module import PipelineModule
from ..types import Json, Record
from .clock import BusyClock, Clocks, Reading, Times, clock_event

logger = logging.getLogger(__name__)

_FLUSH_S = 1.0  # on CPU; a killed run loses at most this much


@dataclass
class _Collective:
    """Asynchronous reduction or gather. ``end`` is None until it ends."""

    step: int
    stage: int | None
    size_bytes: int
    begin: Reading
    end: Reading | None = None


class Tracer(Observer):
    """Recorder of the timeline of one rank. The first traced step creates the files.

    Args:
        eager: reductions overlap with computation.
        facts: further values of the description of the run, such as those of MEASURED_SIZES.

    Attributes:
        first, last: numbers of the first and last traced step, from 1.
        active: whether the current step is traced.
        times: conversion of readings to microseconds; None before the first traced step.
    """

    def __init__(
        self,
        options: TraceOptions,
        rank: int,
        layout: ParallelLayout,
        busy: BusyClock,
        *,
        transport: str,
        eager: bool,
        timeout_s: float,
        facts: Json = MappingProxyType({}),
    ) -> None:
        assert options.dir is not None
        self.folder = Path(options.dir)
        self.rank, self.layout, self.busy = rank, layout, busy
        self.first, self.last = options.window()
        self.active = False
        self.times: Times | None = None
        self._transport, self._timeout_s = transport, timeout_s
        self._facts = facts
        self._text = EventText(rank, functools.partial(layout.peers, rank), eager=eager)
        self._file: TraceFile | None = None  # opened by the first traced step, and closed after the last one
        self._clocks: Clocks | None = None
        self._flushed_s = 0.0  # reading of the clock at the last flush
        self._has_ended = False
        # Of the current step.
        self._step = 0
        self._timetable: Timetable | None = None
        # Instruction, begin, end and bytes of the message.
        self._executed: list[tuple[Instruction, Reading, Reading, int]] = []
        self._reductions: list[_Collective] = []
        self._gathers: list[_Collective] = []
        # Of the current instruction.
        self._begin: Reading = 0.0
        self._moved_bytes = 0

    @classmethod
    def from_module(cls, module: PipelineModule, busy: BusyClock, transport: str, eager: bool) -> Tracer:
        plan, settings = module.plan, module.plan.settings
        facts = {
            "stage_parameters": {stage: _parameters(module, stage) for stage in module.stages},
            "stage_layers": [stop - start for start, stop in pairwise(module.parts[: module.num_stages + 1])],
            "balanced": plan.work is not None and plan.work.is_balanced,
            "micro_batch_size": plan.sizes.micro_batch_size,
            "recomputes": module.activation_checkpoint_interval > 0
            or any(AdaptedLayer(layer).recompute for layer in module.modules()),
        }
        return cls(
            settings.trace,
            module.global_rank,
            module.layout,
            busy,
            transport=transport,
            eager=eager,
            timeout_s=settings.transport_options.timeout_s,
            facts=facts,
        )

    # --- called by the engine ---

    def now(self) -> Reading:
        return self.busy.now()

    def start_step(self, step: int, timetable: Timetable) -> None:
        """Start step number ``step``, counted from 1. All ranks must call this before every step."""
        self.active = self.first <= step <= self.last and not self._has_ended
        if not self.active:
            return
        self._step, self._moved_bytes = step, 0  # discard the bytes of an evaluation
        if self.times is None:
            self._open(step, timetable)
            return
        try:
            self._write_timetable(timetable)
        except ConfigError as error:  # a full disk must not stop the run
            logger.warning("%s", error)

    def count(self, tensors: Sequence[Tensor]) -> None:
        """Count the bytes of a message that the current instruction sends or receives."""
        self._moved_bytes = sum(tensor.nbytes for tensor in tensors)

    def before(self, instruction: ds.PipeInstruction) -> None:
        self._begin = self.now()

    def after(self, instruction: ds.PipeInstruction) -> None:
        source: Instruction = instruction.lowered
        if source.name in (REDUCE_STAGE, GATHER_STAGE):
            return  # recorded from its start to its end
        # Computations use the readings from which the bubble is measured.
        span = self.busy.spans[-1] if source.name in COMPUTE else (self._begin, self.now())
        self._executed.append((source, *span, self._moved_bytes))
        self._moved_bytes = 0
        if not isinstance(span[1], torch.cuda.Event) and span[1] - self._flushed_s > _FLUSH_S:
            self._flush()

    def reducing(self, stage: int | None, tensor: Tensor, begin: Reading, work: Work) -> None:
        """Record the start of a reduction of a stage's gradients (None: tied ones), and later its end."""
        self._start(self._reductions, stage, tensor, begin, work)

    def gathering(self, stage: int, tensor: Tensor, begin: Reading, work: Work) -> None:
        """Record the start of a gather of a stage's weights, and later its end, maybe in the next step."""
        self._start(self._gathers, stage, tensor, begin, work)

    def _start(
        self, started: list[_Collective], stage: int | None, tensor: Tensor, begin: Reading, work: Work
    ) -> None:
        if self.active:
            collective = _Collective(self._step, stage, tensor.nbytes, begin)
            started.append(collective)
            # On CUDA the callback runs immediately, on a stream that waits for the collective.
            work.get_future().add_done_callback(lambda _: setattr(collective, "end", self.now()))

    def end_step(self) -> None:
        """End the step, after all ranks have its loss."""
        if not self.active:
            return
        assert self.times is not None and self._clocks is not None and self._timetable is not None
        end = self.now()
        self.active = False
        self._flush()
        us = self.times.us
        begin_us, end_us = us(self.busy.started), us(end)
        ended = [gather for gather in self._gathers if gather.end is not None]
        self._gathers = [gather for gather in self._gathers if gather.end is None]
        self._append([self._text.step(self._step, begin_us, end_us, self._timetable.micro_batches)])
        self._append(self._lanes("reduce", self._reductions, end))
        self._append(self._lanes("gather", ended, end))
        self._reductions.clear()
        if self._step == self.last:
            self.finish()
        elif self._clocks.is_due((end_us - begin_us) / 1e6):
            self._compare()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Context that records an evaluation between two traced steps as one span."""
        begin = self.now()
        yield
        if self.times is not None and not self._has_ended:
            self.times.settle()
            times = self.times.us(begin), self.times.us(self.now(), settled=False)
            self._append([self._text.evaluation(*times)])

    def failed(self, instruction: ds.PipeInstruction) -> None:
        """Write the incomplete step after ``instruction`` has failed, and close the file."""
        with contextlib.suppress(Exception):  # report only the instruction's error
            self._flush()
            assert self.times is not None
            at_us = self.times.us(self.now(), settled=False)
            self._append([self._text.failure(str(instruction.lowered), at_us)])
            self._close()

    def finish(self) -> None:
        """Compare the clocks one last time and close the file. All ranks must call this together."""
        if self.times is not None and not self._has_ended:
            self._compare()
            self._append(self._lanes("gather", self._gathers, self.now()))
            self._gathers.clear()
        self._close()

    def _lanes(self, thread: str, collectives: Sequence[_Collective], end: Reading) -> list[str]:
        """Return the events of collectives; ``end`` is that of running ones."""
        assert self.times is not None
        us = self.times.us
        spans = [
            (c.step, c.stage, c.size_bytes, us(c.begin), us(end if c.end is None else c.end))
            for c in collectives
        ]
        return collective_lanes(self.rank, thread, spans)

    # --- files ---

    def _open(self, step: int, timetable: Timetable) -> None:
        """Create the files of all ranks and compare their clocks. Raises ConfigError on all ranks if a file fails."""
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
        assert isinstance(group, dist.ProcessGroup)
        try:
            self._create_files(group, step, timetable)
        except ConfigError:
            self._close()
            dist.destroy_process_group(group)
            raise
        atexit.register(self._close)
        self.times = Times(self.busy)
        self._flushed_s = self.busy.clock()
        self._clocks = Clocks(group, self.times)
        self._compare()

    def _create_files(self, group: ProcessGroup, step: int, timetable: Timetable) -> None:
        """Create this rank's file, and the timetable on rank 0. Raises ConfigError on all ranks if one fails."""
        run = [f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"]
        dist.broadcast_object_list(run, src=0, group=group)
        problem: str | None = None
        try:
            self._file = TraceFile(self.folder, self.rank, self._describe(run[0], step, timetable))
            self._write_timetable(timetable)
        except ConfigError as error:
            problem = str(error)
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem, group=group)
        for rank, text in enumerate(problems):
            if text:
                error = ConfigError(text)
                error.reported_by = rank
                raise error

    def _describe(self, run: str, step: int, timetable: Timetable) -> Record:
        device, data, tensor = self.layout.coordinates(self.rank)
        return {
            "run": run,
            "world_size": self.layout.world_size,
            "pipeline_parallel_size": self.layout.placement.num_devices,
            "tensor_parallel_size": self.layout.tensor_parallel_size,
            "data_parallel_size": self.layout.data_parallel_size,
            "device": device,
            "data_parallel_rank": data,
            "tensor_parallel_rank": tensor,
            "schedule": timetable.schedule,
            "micro_batches": timetable.micro_batches,
            "transport": self._transport,
            "first_step": step,
            "host": platform.node(),
            "pid": os.getpid(),
            "cores": None if self.busy.on_cuda else usable_cores(),
            **self._facts,
        }

    def _write_timetable(self, timetable: Timetable) -> None:
        """Write the timetable on rank 0, and again if the number of micro-batches has changed."""
        first, changed = self._timetable is None, timetable is not self._timetable
        self._timetable = timetable
        if changed and self.rank == 0:
            write_timetable(self.folder, timetable, first=first)

    def _compare(self) -> None:
        assert self._clocks is not None
        comparison = self._clocks.compare()
        if comparison is not None:
            self._append([clock_event(self.rank, comparison)])

    def _flush(self) -> None:
        assert self.times is not None
        self.times.settle()
        us = self.times.us
        self._append(
            [
                self._text.instruction(source, us(begin), us(end), moved_bytes, self._step)
                for source, begin, end, moved_bytes in self._executed
            ]
        )
        self._executed.clear()
        self._flushed_s = self.busy.clock()

    def _append(self, lines: Sequence[str]) -> None:
        """Write lines. A full disk ends the trace of this rank with a warning, and the run continues."""
        try:
            if self._file is not None:
                self._file.append(lines)
        except OSError as error:
            logger.warning("%s: trace ends here: %s", self._file and self._file.path, error.strerror)
            self._file = None

    def _close(self) -> None:
        self._has_ended = True
        self.active = False
        atexit.unregister(self._close)
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def _parameters(module: PipelineModule, stage: int) -> int:
    layers = module.stage_modules(stage).values()
    return sum(parameter.numel() for layer in layers for parameter in layer.parameters())
