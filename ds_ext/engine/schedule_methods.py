"""Which timetables an engine runs, and what goes with them: their links, and how gradients are reduced."""

from __future__ import annotations

import functools
import logging
import operator
from typing import Any

import torch.distributed as dist

from ..parallel.layout import ParallelLayout
from ..pipe_schedules.bridge import TimetableSchedule
from ..pipe_schedules.check.program import check
from ..pipe_schedules.inference import forward_timetable
from ..pipe_schedules.lower import lower
from ..planner.job_plan import JobPlan
from ..tensor_parallel import DeferralWatch
from .dynamic.order import DynamicSchedule
from .grad_sync import DynamicReduction, EagerReduction, why_not_eager
from .link_slots import link_slots
from .module import PipelineModule

logger = logging.getLogger(__name__)

_WORTH_SPLITTING = 0.5  # share of the deferred elements
_NAMED = 4  # parameters in a message


class ScheduleMethods:
    """Methods of :class:`.engine.PipelineEngine` that make its schedules from the module's settings."""

    module: PipelineModule
    layout: ParallelLayout
    global_rank: int
    plan: JobPlan
    bubble_simulated: float
    _schedule: TimetableSchedule
    _inference_schedules: dict[int, TimetableSchedule]
    _deferral: DeferralWatch | None
    deferred_share: float | None = None

    def _links(self) -> dict[tuple[int, int], int]:
        """(sender, receiver) -> how many messages the receiver holds at a time, of all schedules that will run."""
        known = link_slots(self.layout, [self._schedule.program, self._inference_schedule(1).program])
        for link, held in self._schedule.links(self.layout).items():
            known[link] = max(held, known.get(link, 0))
        return known

    def _use(self, plan: JobPlan) -> None:
        """Run the timetable of ``plan`` from the next step on."""
        device = self.module.device_index
        self.plan, self.bubble_simulated = plan, plan.simulation.bubble
        if plan.rules is None:
            self._schedule = TimetableSchedule(plan.program, device)
        else:
            self._schedule = DynamicSchedule(plan.program, device, plan.rules)

    def _make_eager(self) -> EagerReduction | None:
        """Eager gradient synchronization, if the JSON asks for it and it can be done."""
        if not self.module.settings.eager_gradient_sync:
            return None
        reason = why_not_eager(self)
        if reason is not None:
            logger.debug("gradients are reduced after the last backward: %s", reason)
            return None
        made = DynamicReduction if self._schedule.dynamic else EagerReduction
        return made(self)

    def _report_deferral(self) -> None:
        """Log once which weight gradients the first step deferred; a collective call of all ranks.

        A schedule that splits backwards gains by them alone; other gradients are computed with the input gradient.
        """
        watch, self._deferral = self._deferral, None
        assert watch is not None
        watch.close()
        named = (
            (f"{name} of layer {index} ({type(layer).__name__})", parameter)
            for stage in self.module.stages
            for index, layer in self.module.stage_modules(stage).items()
            for name, parameter in layer.named_parameters()
        )
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, watch.deferral(named))
        total = functools.reduce(operator.add, found)
        self.deferred_share = total.share
        if self.global_rank != 0:
            return
        at_once = ", ".join(total.largest_at_once[:_NAMED]) or "none"
        name = self._schedule.program.timetable.schedule
        if total.share >= _WORTH_SPLITTING:
            logger.info(
                "%s: deferred weight gradients: %.1f%%, at once: %s", name, 100 * total.share, at_once
            )
        else:
            logger.warning(
                "%s: deferred weight gradients: %.1f%% of the elements, so splitting backwards gains little. Computed "
                "with the input gradient: %s. In these layers use nn.Linear, nn.Embedding or "
                "ds_ext.tensor_parallel.linear (docs/schedules.md).",
                name,
                100 * total.share,
                at_once,
            )

    def _train_schedule(self) -> TimetableSchedule:
        return self._schedule

    def _inference_schedule(self, micro_batches: int) -> TimetableSchedule:
        if micro_batches not in self._inference_schedules:
            placement = self.layout.placement
            timetable = forward_timetable(placement, micro_batches * placement.replicas)
            program = lower(timetable)
            check(program)
            self._inference_schedules[micro_batches] = TimetableSchedule(program, self.module.device_index)
        return self._inference_schedules[micro_batches]
