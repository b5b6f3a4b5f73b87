"""Timeline of a rank while its engine runs: times of computations, messages, waits and reductions.

Executing an instruction appends a tuple; tuples become text between steps, or once a second. On CUDA the times are
events on the streams, read after the step.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule as ds
from torch import Tensor
from torch.distributed import Work

from ...config.sections import TraceOptions
from ...errors import ConfigError
from ...observe.trace.event import EventText, reduction_lanes
from ...observe.trace.file import TraceFile, write_timetable
from ...parallel.layout import ParallelLayout
from ...pipe_schedules import Instruction, Timetable
from ...pipe_schedules.ops import COMPUTE
from ..busy import BusyClock, Reading
from .clock import Clocks, Times, clock_event

logger = logging.getLogger(__name__)

_FLUSH_S = 1.0  # on CPU: what a killed run loses at most


@dataclass
class _Reduction:
    """Asynchronous reduction; ``end`` is None until it is known."""

    stage: int | None
    size_bytes: int
    begin: Reading
    end: Reading | None = None


class Tracer:
    """Records and writes the timeline of one rank. Files are made at the first step that is traced.

    Args:
        options: settings of traces; they have a folder.
        rank: this global rank.
        layout: of the whole world.
        busy: clock of this rank's computations.
        transport: name of the transport.
        eager: gradients are reduced beside computations.
        timeout_s: longest wait for another rank, in seconds.

    Attributes:
        active: whether the present step is traced.
        times: readings as microseconds; None before the first step that is traced.
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
    ) -> None:
        assert options.dir is not None
        self.folder, self.rank, self.layout, self.busy = Path(options.dir), rank, layout, busy
        self.first, self.last = options.window()
        self.active = False
        self.times: Times | None = None
        self._transport, self._timeout_s = transport, timeout_s
        self._file: TraceFile | None = None
        self._clocks: Clocks | None = None
        self._text = EventText(rank, functools.partial(layout.peers, rank), eager=eager)
        self._executed: list[tuple[Instruction, Reading, Reading, int]] = []
        self._reductions: list[_Reduction] = []
        self._timetable: Timetable | None = None
        self._moved_bytes = 0  # of the last message
        self._step, self._flushed_s, self._ended = 0, 0.0, False

    # --- called by the engine ---

    def now(self) -> Reading:
        """Return a reading of the present."""
        return self.busy.now()

    def start_step(self, step: int, timetable: Timetable) -> None:
        """Start the step numbered ``step``, from 1; every rank calls it in front of every step."""
        self.active = self.first <= step <= self.last and not self._ended
        if not self.active:
            return
        if self.times is None:
            self._open(step, timetable)
        self._step, self._moved_bytes = step, 0  # an evaluation has moved some, too
        try:
            self._write_timetable(timetable)
        except ConfigError as error:  # a full disk must not end a run
            logger.warning("%s", error)

    def count(self, tensors: Sequence[Tensor]) -> None:
        """Count the bytes of a message that the present instruction sends or receives."""
        self._moved_bytes = sum(tensor.nbytes for tensor in tensors)

    def executed(self, instruction: ds.PipeInstruction, begin: Reading) -> None:
        """Record ``instruction``, whose handler began at ``begin`` and has returned."""
        source: Instruction = instruction.source
        # The same readings as in the measured bubble.
        span = self.busy.spans[-1] if source.name in COMPUTE else (begin, self.now())
        self._executed.append((source, *span, self._moved_bytes))
        self._moved_bytes = 0
        if not isinstance(span[1], torch.cuda.Event) and span[1] - self._flushed_s > _FLUSH_S:
            self._flush()

    def reducing(self, stage: int | None, tensor: Tensor, begin: Reading, work: Work) -> None:
        """Record that the reduction of a stage's gradients (None: tied ones) has begun; its end is noted later."""
        if self.active:
            reduction = _Reduction(stage, tensor.nbytes, begin)
            self._reductions.append(reduction)
            # On CUDA the callback runs at once, with a stream that waits for the reduction.
            work.get_future().add_done_callback(lambda _: setattr(reduction, "end", self.now()))

    def end_step(self) -> None:
        """End the step; its loss is known on all ranks."""
        if not self.active:
            return
        assert self.times is not None and self._clocks is not None and self._timetable is not None
        begin, end, self.active = self.busy.started, self.now(), False
        self._flush()
        us = self.times.us
        begin_us, end_us = us(begin), us(end)
        lines = [self._text.step(self._step, begin_us, end_us, self._timetable.micro_batches)]
        reductions = [
            (r.stage, r.size_bytes, us(r.begin), us(end if r.end is None else r.end))
            for r in self._reductions
        ]
        lines += reduction_lanes(self.rank, self._step, reductions)
        self._reductions.clear()
        self._append(lines)
        if self._step == self.last:
            self.finish()
        elif self._clocks.due((end_us - begin_us) / 1e6):
            self._compare()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Record everything inside as one span, between two steps that are traced."""
        begin = self.now()
        yield
        if self.times is not None and not self._ended:
            self.times.settle()
            times = self.times.us(begin), self.times.us(self.now(), settled=False)
            self._append([self._text.evaluation(*times)])

    def failed(self, instruction: ds.PipeInstruction) -> None:
        """Keep what there is of a step that ``instruction`` ends."""
        with contextlib.suppress(Exception):  # the instruction's error is the one to report
            self._flush()
            assert self.times is not None
            at_us = self.times.us(self.now(), settled=False)
            self._append([self._text.failure(str(instruction.source), at_us)])
            self._close()

    def finish(self) -> None:
        """Compare the clocks a last time and close the file; every rank calls it. Nothing is traced afterwards."""
        if self.times is not None and not self._ended:
            self._compare()
        self._close()

    # --- files ---

    def _open(self, step: int, timetable: Timetable) -> None:
        """Make the files, all or none. Raises ConfigError."""
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
        assert isinstance(group, dist.ProcessGroup)
        name = [f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"]
        dist.broadcast_object_list(name, src=0, group=group)
        problems: list[str | None] = [None] * dist.get_world_size()
        problem: str | None = None
        try:
            self._file = TraceFile(self.folder, self.rank, self._describe(name[0], step, timetable))
            self._write_timetable(timetable)
        except ConfigError as error:
            problem = str(error)
        dist.all_gather_object(problems, problem, group=group)
        origin = next((rank for rank, text in enumerate(problems) if text), None)
        if origin is not None:
            self._close()
            error = ConfigError(problems[origin])
            error.reported_by = origin
            raise error
        atexit.register(self._close)
        self.times = Times(self.busy)
        self._flushed_s = self.busy.clock()
        self._clocks = Clocks(group, self.times)
        self._compare()

    def _describe(self, run: str, step: int, timetable: Timetable) -> dict[str, Any]:
        """Return the header of the file: what readers need to know of the run."""
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
        }

    def _write_timetable(self, timetable: Timetable) -> None:
        """Rank 0 writes the timetable, and another one when the number of micro-batches has changed."""
        first, changed = self._timetable is None, timetable is not self._timetable
        self._timetable = timetable
        if changed and self.rank == 0:
            write_timetable(self.folder, timetable, first=first)

    def _compare(self) -> None:
        assert self._clocks is not None
        found = self._clocks.compare()
        if found is not None:
            self._append([clock_event(self.rank, found)])

    def _flush(self) -> None:
        """Write the instructions executed so far."""
        assert self.times is not None
        self.times.settle()
        us = self.times.us
        self._append(
            [
                self._text.instruction(source, us(b), us(e), n, self._step)
                for source, b, e, n in self._executed
            ]
        )
        self._executed.clear()
        self._flushed_s = self.busy.clock()

    def _append(self, lines: Sequence[str]) -> None:
        """Write lines. A full disk does not end a run: the trace of this rank ends there, with a warning."""
        try:
            if self._file is not None:
                self._file.append(lines)
        except OSError as error:
            logger.warning("%s: no more of it is written: %s", self._file and self._file.path, error.strerror)
            self._file = None

    def _close(self) -> None:
        self._ended, self.active = True, False
        atexit.unregister(self._close)
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
