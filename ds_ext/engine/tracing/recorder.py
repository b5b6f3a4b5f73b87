"""The timeline of a rank, as its engine runs: what was computed, sent, waited for and reduced, and when.

Executing an instruction appends a tuple; text is made of them between steps, or once a second. On CUDA the times are
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
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...errors import ConfigError
from ...observe.trace.event import EventText, reduction_lanes
from ...observe.trace.file import TraceFile, write_timetable
from ...pipe_schedules.ops import COMPUTE
from ..messages import Kind, StageMessages
from .clock import Clocks, Times, clock_event

logger = logging.getLogger(__name__)

_FLUSH_S = 1.0  # on CPU: what a killed run loses at most


class Tracer:
    """Records and writes the timeline of one rank.

    Args:
        engine: an initialized :class:`..engine.PipelineEngine`. Files are made at its first step that is traced.

    Attributes:
        active: whether the present step is traced.
        moved: bytes of the last message; :class:`CountingMessages` sets it.
    """

    def __init__(self, engine: Any) -> None:
        options = engine.module.settings.trace
        self.engine, self.folder = engine, Path(options.dir)
        self.first, self.last = options.window()
        self.active, self.moved = False, 0
        self._file: TraceFile | None = None
        self._clocks: Clocks | None = None
        self._times: Times | None = None
        self._text = EventText(
            engine.global_rank,
            functools.partial(engine.layout.peers, engine.global_rank),
            eager=engine._eager is not None,
        )
        self._executed: list[tuple[Any, Any, Any, int]] = []
        self._reductions: list[list[Any]] = []
        self._planned: Any = None
        self._step, self._flushed, self._ended = 0, 0.0, False

    # --- called by the engine ---

    def now(self) -> Any:
        """The present: seconds, on CUDA an event."""
        return self.engine._busy.now()

    def start_step(self, step: int) -> None:
        """The step numbered ``step``, from 1, begins; every rank calls it in front of every step."""
        self.active = self.first <= step <= self.last and not self._ended
        if not self.active:
            return
        if self._times is None:
            self._open(step)
        self._step, self.moved = step, 0  # an evaluation has moved some, too
        try:
            self._keep_plan()
        except ConfigError as error:  # a full disk must not end a run
            logger.warning("%s", error)

    def executed(self, instruction: Any, begin: Any) -> None:
        """``instruction``, which a handler began at ``begin``, is done."""
        source = instruction.source
        # The same readings as the measured bubble is made of.
        span = self.engine._busy.spans[-1] if source.name in COMPUTE else (begin, self.now())
        self._executed.append((source, *span, self.moved))
        self.moved = 0
        if not self._on_cuda and span[1] - self._flushed > _FLUSH_S:
            self._flush()

    def reducing(self, stage: int | None, tensor: Tensor, begin: Any, work: Any) -> None:
        """An asynchronous reduction of a stage's gradients (None: tied ones) has begun; its end is noted later."""
        if self.active:
            entry = [stage, tensor.nbytes, begin, None]
            self._reductions.append(entry)
            # On CUDA the callback runs at once, with a stream that waits for the reduction.
            work.get_future().add_done_callback(lambda _: entry.__setitem__(3, self.now()))

    def end_step(self) -> None:
        """The step is over, its loss known to all."""
        if not self.active:
            return
        assert self._times is not None and self._clocks is not None
        begin, end, self.active = self.engine._busy.started, self.now(), False
        self._flush()
        begin_us, end_us = self._times.us(begin), self._times.us(end)
        lines = [self._text.step(self._step, begin_us, end_us, self.engine._schedule.micro_batches)]
        lines += reduction_lanes(
            self.engine.global_rank,
            self._step,
            [
                (s, n, self._times.us(b), self._times.us(end if e is None else e))
                for s, n, b, e in self._reductions
            ],
        )
        self._reductions.clear()
        self._append(lines)
        if self._step == self.last:
            self.finish()
        elif self._clocks.due((end_us - begin_us) / 1e6):
            self._compare()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Everything inside is an evaluation: one span, between two steps that are traced."""
        begin = self.now()
        yield
        if self._times is not None and not self._ended:
            self._times.settle()
            times = self._times.us(begin), self._times.us(self.now(), settled=False)
            self._append([self._text.evaluation(*times)])

    def failed(self, instruction: Any) -> None:
        """Keep what there is of a step that ``instruction`` ends."""
        with contextlib.suppress(Exception):  # the error that is under way is the one to be told
            self._flush()
            assert self._times is not None
            at_us = self._times.us(self.now(), settled=False)
            self._append([self._text.failure(str(instruction.source), at_us)])
            self._close()

    def finish(self) -> None:
        """Compare the clocks a last time and close the file; every rank calls it. Nothing is traced afterwards."""
        if self._times is not None and not self._ended:
            self._compare()
        self._close()

    # --- files ---

    @property
    def _on_cuda(self) -> bool:
        return self.engine.device.type == "cuda"

    def _open(self, step: int) -> None:
        """Make the files, all or none. Raises ConfigError."""
        engine = self.engine
        timeout_s = engine.module.settings.transport_options.timeout_s
        group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        name = [f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"]
        dist.broadcast_object_list(name, src=0, group=group)
        problems: list[str | None] = [None] * dist.get_world_size()
        mine: str | None = None
        try:
            self._file = TraceFile(self.folder, engine.global_rank, _describe(engine, name[0], step))
            self._keep_plan()
        except ConfigError as error:
            mine = str(error)
        dist.all_gather_object(problems, mine, group=group)
        origin = next((rank for rank, problem in enumerate(problems) if problem), None)
        if origin is not None:
            self._close()
            error = ConfigError(problems[origin])
            error.reported_by = origin
            raise error
        atexit.register(self._close)
        self._times = Times(engine._busy)
        self._flushed = engine._busy.clock()
        self._clocks = Clocks(group, self._times)
        self._compare()

    def _keep_plan(self) -> None:
        """Rank 0 writes the timetable, and another one when the number of micro-batches has changed."""
        timetable = self.engine._schedule.program.timetable
        first, changed = self._planned is None, timetable is not self._planned
        self._planned = timetable
        if changed and self.engine.global_rank == 0:
            write_timetable(self.folder, timetable, first=first)

    def _compare(self) -> None:
        assert self._clocks is not None
        found = self._clocks.compare()
        if found is not None:
            self._append([clock_event(self.engine.global_rank, found)])

    def _flush(self) -> None:
        """Write the instructions executed so far."""
        assert self._times is not None
        self._times.settle()
        us = self._times.us
        self._append(
            [
                self._text.instruction(source, us(b), us(e), n, self._step)
                for source, b, e, n in self._executed
            ]
        )
        self._executed.clear()
        self._flushed = self.engine._busy.clock()

    def _append(self, lines: Sequence[str]) -> None:
        """A full disk must not end a run: from then on there is no trace of this rank, and it says so."""
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


class CountingMessages(StageMessages):
    """The messages of a rank, which tell its tracer their sizes."""

    tracer: Tracer

    def receive(self, kind: Kind, stage: int, micro_batch: int) -> tuple[Tensor, ...]:
        """As the parent's."""
        tensors = super().receive(kind, stage, micro_batch)
        self.tracer.moved = sum(tensor.nbytes for tensor in tensors)
        return tensors

    def send(self, kind: Kind, tensors: Sequence[Tensor], stage: int, micro_batch: int, device: int) -> None:
        """As the parent's."""
        super().send(kind, tensors, stage, micro_batch, device)
        self.tracer.moved = sum(tensor.nbytes for tensor in tensors)


def _describe(engine: Any, run: str, step: int) -> dict[str, Any]:
    """What readers must know of the run."""
    layout, module = engine.layout, engine.module
    _, data, tensor = layout.coordinates(engine.global_rank)
    return {
        "run": run,
        "world_size": layout.world_size,
        "pipeline_parallel_size": layout.placement.ranks,
        "tensor_parallel_size": layout.tensor_parallel_size,
        "data_parallel_size": layout.data_parallel_size,
        "device": module.device_index,
        "data_parallel_rank": data,
        "tensor_parallel_rank": tensor,
        "schedule": engine._schedule.program.timetable.schedule,
        "micro_batches": engine._schedule.micro_batches,
        "transport": engine.transport.name,
        "first_step": step,
        "host": platform.node(),
        "pid": os.getpid(),
    }
