"""Schedules of a rank for training steps and evaluations, their messages, and the limits of the links."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import Tensor

from ..comm.transport import Transport
from ..errors import ConfigError
from ..parallel.layout import ParallelLayout
from ..pipe_schedules.bridge import TimetableSchedule
from ..pipe_schedules.checks.program import check
from ..pipe_schedules.dynamic import DynamicRules
from ..pipe_schedules.inference import forward_timetable
from ..pipe_schedules.lowering import lower
from ..planner.job_plan import JobPlan
from .dynamic import messages as dynamic
from .dynamic.order import DynamicSchedule
from .messages import StageMessages, max_held

Count = Callable[[Sequence[Tensor]], None]
_MAX_SIZES = 16  # evaluation schedules kept, by number of micro-batches


class Schedules:
    """Schedules of this rank. ``slices`` is the number of slices of every sequence."""

    def __init__(self, layout: ParallelLayout, device: int, slices: int = 1) -> None:
        self._layout, self._device, self._slices = layout, device, slices
        self.inference = functools.lru_cache(_MAX_SIZES)(self._inference)

    def connect(
        self, transport: Transport, rules: DynamicRules | None, rank: int, count: Count | None = None
    ) -> None:
        """Use a transport from the next step on. ``count`` is called with the tensors of every message.

        Raises ConfigError if ``rules`` decide the order at run time and the transport cannot report arrivals.
        """
        self._messages = StageMessages(transport, self._layout, rank, count)
        if rules is not None:
            senders = dynamic.senders(rules, self._device)
            self._dynamic = dynamic.DynamicMessages(transport, self._layout, rank, senders, count)

    def messages(self, schedule: TimetableSchedule) -> StageMessages:
        return self._dynamic if isinstance(schedule, DynamicSchedule) else self._messages

    def training(self, plan: JobPlan) -> TimetableSchedule:
        if plan.rules is None:
            return TimetableSchedule(plan.program, self._device)
        return DynamicSchedule(plan.program, self._device, plan.rules)

    def _inference(self, micro_batches: int) -> TimetableSchedule:
        """Return the schedule of an evaluation, by micro-batches per data-parallel rank."""
        if micro_batches < 1:
            raise ConfigError(f"num_micro_batches: must be at least 1 (got {micro_batches}).")
        placement = self._layout.placement
        count = micro_batches * placement.replicas
        program = lower(forward_timetable(placement, count, slices=self._slices))
        check(program)
        return TimetableSchedule(program, self._device)

    def max_held(self, plan: JobPlan) -> dict[tuple[int, int], int]:
        """Return how many messages a receiver may hold in training and evaluation, by (sender, receiver) ranks."""
        held = max_held(self._layout, [plan.program, self.inference(1).program])
        if plan.rules is not None:
            for link, messages in dynamic.max_held(self._layout, plan.rules).items():
                held[link] = max(messages, held.get(link, 0))
        return held
