"""Job plan: everything decided from the JSON, the flags and the world size before launch.

:func:`make_job_plan` builds the plan once per process. It is then passed down: the scripts print it, ``PipelineModule``
uses it to split the layers, and the engine runs its program. The layers need only its first part, the
:class:`StagePlan`, which does not depend on the number of micro-batches. A ``PipelineModule`` without a JSON builds
that part, and ``initialize`` completes it. This module imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..config.batch_sizes import BATCH_KEYS, BatchSizes, batch_sizes, nearest_train_sizes
from ..config.deepspeed_json import half_through_zero, zero_stage
from ..config.job import AUTO, UNPOLLED, DsExtConfig, JobConfig, import_own_schedules, named_schedule
from ..errors import ConfigError, ScheduleError
from ..model.config import TransformerConfig
from ..parallel.fbd import make_layout
from ..parallel.layout import ParallelLayout, data_parallel_size
from ..parallel.partition import StageWork
from ..parallel.rank_order import parse_rank_order
from ..pipe_schedules import Placement, Program, Schedule, Timetable
from ..pipe_schedules.checks.collectives import check_gathers, check_reductions
from ..pipe_schedules.checks.program import Report, check
from ..pipe_schedules.costs import Costs, read_costs
from ..pipe_schedules.dynamic import DynamicRules
from ..pipe_schedules.gathers import with_gathers
from ..pipe_schedules.lowering import lower, with_audit
from ..pipe_schedules.methods.fbd import most_ahead
from ..pipe_schedules.reductions import Reductions, eager_reductions, with_reductions
from ..pipe_schedules.simulation import Simulation, simulate
from .auto import best_schedule, choose_for_job
from .candidates import Candidates


@dataclass(frozen=True)
class StagePlan:
    """Part of the job plan that does not depend on the number of micro-batches.

    Attributes:
        options: options of the schedule, from "schedule_options" and "fbd".
        candidates: candidates of the schedule "auto", ranked; None for any other.
        work: work of the stages, if the model is known, as in the scripts.
    """

    job: JobConfig
    schedule: Schedule
    options: Mapping[str, Any]
    layout: ParallelLayout
    candidates: Candidates | None
    work: StageWork | None = field(default=None, kw_only=True)

    @property
    def settings(self) -> DsExtConfig:
        return self.job.ds_ext

    def complete(self, job: JobConfig) -> JobPlan:
        """Return the job plan for the batch sizes of ``job``, with the schedule and parallel sizes of this plan."""
        _require_supported(job.ds_ext, self.schedule, self.layout.placement)
        return _complete_plan(replace(self.stages, job=job), self._sizes(job))

    @property
    def stages(self) -> StagePlan:
        """This part of the plan."""
        return self

    def _sizes(self, job: JobConfig) -> BatchSizes:
        layout = self.layout
        return batch_sizes(
            job.deepspeed,
            layout.placement.replicas,
            layout.data_parallel_size,
            job.flags,
            self._supports,
            one_pipe=layout.world_size
            / (self.settings.pipeline_parallel_size * self.settings.tensor_parallel_size),
        )

    def batch_hint(self) -> str:
        """Return the nearest values of a batch key that the schedule supports; empty without a micro-batch size."""
        train, micro, accumulation = (self.job.deepspeed.get(key) for key in BATCH_KEYS)
        if micro is None:
            return ""
        key, size, unit = BATCH_KEYS[2], accumulation or 1, 1
        if train is not None:
            key, size, unit = BATCH_KEYS[0], train, micro * self.layout.data_parallel_size
        fitting = nearest_train_sizes(size, unit, self._supports)
        return f"With {key}: {' or '.join(map(str, fitting))}." if fitting else ""

    def supports_fewer_devices(self) -> bool:
        """Return whether the schedule has a pipeline of fewer devices, at least 2."""
        for devices in range(2, self.layout.placement.devices_per_pipe):
            with contextlib.suppress(ScheduleError):
                self.schedule.placement(devices, self.options)
                return True
        return False

    def _supports(self, micro_batches: int) -> bool:
        if micro_batches % self.layout.placement.replicas:
            return False
        try:
            self.schedule.timetable(
                self.settings.pipeline_parallel_size,
                micro_batches,
                self.options,
                slices=self.settings.sequence_slices,
            )
        except ScheduleError:
            return False
        return True


@dataclass(frozen=True)
class JobPlan(StagePlan):
    """Everything that follows from the JSON, the flags and the world size.

    Attributes:
        program: the timetable, lowered, with the eager reductions and the waits for gathered weights.
        report: proof that the program runs to completion.
        simulation: simulation with the costs that the schedule was planned or chosen for, by default equal ones of 1/D
            of the model; and with ``work`` if these have no factors of the stages.
        reductions: eager reductions of the program; those that it would have with several replicas.
        rules: runtime scheduling rules; None for a static schedule.
    """

    sizes: BatchSizes
    timetable: Timetable
    program: Program
    report: Report
    simulation: Simulation
    reductions: Reductions
    rules: DynamicRules | None = None

    @property
    def costs(self) -> Costs:
        """Costs that the timetable was planned, chosen and simulated for."""
        return self.simulation.costs

    @property
    def overlaps_steps(self) -> bool:
        """True if weights are gathered beside the next step."""
        is_sharded = bool(zero_stage(half_through_zero(self.job.deepspeed)))
        return self.settings.overlap_across_steps and is_sharded and self.layout.copies > 1

    def timetable_with_parts(self, costs: Costs) -> Timetable:
        """Return the timetable with a part of the head on every device."""
        devices, slices = self.settings.pipeline_parallel_size, self.timetable.slices
        schedule = self.schedule.dividing_head()
        return schedule.timetable(devices, self.sizes.micro_batches, self.options, costs, slices)

    def complete(self, job: JobConfig) -> JobPlan:
        """Return the plan for the batch sizes of ``job``. The timetable is kept if they are those of this plan."""
        if self._sizes(job) != self.sizes:
            return super().complete(job)
        _require_supported(job.ds_ext, self.schedule, self.layout.placement)
        return replace(self, job=job)

    @property
    def stages(self) -> StagePlan:
        return StagePlan(self.job, self.schedule, self.options, self.layout, self.candidates, work=self.work)

    def with_work(self, work: StageWork) -> JobPlan:
        """Return the plan for the work of the stages; a planned order is planned again if that makes it faster."""
        stages = replace(self.stages, work=work)
        simulation = simulate(self.timetable, _costs(stages))
        kept = _with_collectives(replace(self, work=work, simulation=simulation))
        if not self.schedule.planned and not self.settings.vocabulary_parallel_head:
            return kept
        return min(kept, _complete_plan(stages, self.sizes), key=lambda plan: plan.simulation.makespan)

    def with_options(self, options: Mapping[str, Any]) -> JobPlan:
        return _complete_plan(replace(self.stages, options=options), self.sizes)

    def resized(self, gradient_accumulation_steps: int) -> JobPlan:
        sizes = replace(self.sizes, gradient_accumulation_steps=gradient_accumulation_steps)
        return _complete_plan(self.stages, sizes)


def make_job_plan(job: JobConfig, world_size: int | None = None) -> JobPlan:
    """Decide a job. ``world_size`` is the number of processes; None: one pipeline group."""
    return make_stage_plan(job, world_size).complete(job)


def make_stage_plan(
    job: JobConfig,
    world_size: int | None = None,
    layers: int | None = None,
    model: TransformerConfig | None = None,
) -> StagePlan:
    """Decide the part of a job that does not depend on the number of micro-batches.

    Args:
        world_size: number of processes; None: one pipeline group.
        layers: number of the model's pipeline layers, which limits the choice of "auto"; None: unknown.
        model: model that "auto" prices; None: that of "train".
    """
    schedule, candidates = resolve_schedule(job, world_size, layers, model)
    options = options_with_fbd(job.ds_ext, schedule)
    placement = place(job.ds_ext, schedule, options)
    tensor = job.ds_ext.tensor_parallel_size
    data = 1 if world_size is None else data_parallel_size(world_size, placement, tensor)
    layout = make_layout(placement, tensor, data, parse_rank_order(job.ds_ext.rank_order))
    return StagePlan(job, schedule, options, layout, candidates)


def _complete_plan(plan: StagePlan, sizes: BatchSizes) -> JobPlan:
    devices, schedule = plan.settings.pipeline_parallel_size, plan.schedule
    with _as_config_error(plan.batch_hint):
        costs = _costs(plan)
        slices = plan.settings.sequence_slices
        # Without known work, the order is the one that `plan` priced for these options.
        known = None if plan.work is None else costs
        timetable = schedule.timetable(devices, sizes.micro_batches, plan.options, known, slices)
        rules = schedule.make_dynamic_rules(devices, sizes.micro_batches, plan.options)
    program = lower(timetable)
    report = check(program, link_credits=_link_credits(plan.layout.placement))
    simulation = simulate(timetable, costs)
    plan = JobPlan(
        plan.job,
        schedule,
        plan.options,
        plan.layout,
        plan.candidates,
        sizes,
        timetable,
        program,
        report,
        simulation,
        (),
        rules,
        work=plan.work,
    )
    return _with_collectives(plan)


def _with_collectives(plan: JobPlan) -> JobPlan:
    program, reductions = plan.program, eager_reductions(plan.simulation)
    if plan.settings.eager_gradient_sync and plan.layout.copies > 1:
        program = with_reductions(program, reductions)
        check_reductions(program)
    if plan.settings.overlap_across_steps:
        program = with_gathers(program, plan.simulation)
        check_gathers(program)
    if plan.settings.audit_interval:
        program = with_audit(program)
    return replace(plan, program=program, reductions=reductions)


def resolve_schedule(
    job: JobConfig,
    world_size: int | None = None,
    layers: int | None = None,
    model: TransformerConfig | None = None,
) -> tuple[Schedule, Candidates | None]:
    """Return the schedule (named, from a timetable file, or the best of "auto") and the candidates of "auto"."""
    import_own_schedules(job)
    settings = job.ds_ext
    if settings.schedule == AUTO:
        candidates = choose_for_job(job, world_size, layers, model)
        return best_schedule(candidates, settings.vocabulary_parallel_head), candidates
    schedule = named_schedule(settings.schedule).dividing_head(settings.vocabulary_parallel_head)
    if schedule.dynamic is not None and settings.transport in UNPOLLED:
        raise ConfigError(
            f'transport: schedule "{schedule.name}" polls for messages, which this transport does not support '
            f'(got "{settings.transport}"). Use "auto" or "shm", or a static schedule.'
        )
    return schedule, None


def options_with_fbd(settings: DsExtConfig, schedule: Schedule) -> dict[str, Any]:
    options = dict(settings.schedule_options)
    for key, value in settings.fbd.options(settings.tensor_parallel_size).items():
        if key not in schedule.options:
            raise _needs_forward_ranks(f"fbd.{key}", schedule)
        if options.setdefault(key, value) != value:
            raise ConfigError(
                f'schedule_options.{key}: contradicts "fbd", which sets {value} (got {options[key]}). Remove one of '
                f"them."
            )
    settings.fbd.require_something_to_merge(settings.tensor_parallel_size)
    return options


def place(settings: DsExtConfig, schedule: Schedule, options: Mapping[str, Any]) -> Placement:
    with _as_config_error():
        placement = schedule.placement(settings.pipeline_parallel_size, options)
    _require_supported(settings, schedule, placement)
    return placement


def _require_supported(settings: DsExtConfig, schedule: Schedule, placement: Placement) -> None:
    if settings.fbd.forward_hosts is not None and not placement.forward_devices:
        raise _needs_forward_ranks("fbd.forward_hosts", schedule)
    if placement.forward_devices and settings.audit_interval:
        raise ConfigError(
            f"audit_interval: needs ranks that compute both forwards and backwards (got {settings.audit_interval} with "
            f'schedule "{schedule.name}"). Remove it, or use another schedule.'
        )
    if placement.forward_devices and settings.overlap_across_steps:
        raise ConfigError(
            f"overlap_across_steps: needs ranks that compute both forwards and backwards (got true with schedule "
            f'"{schedule.name}"). Remove it, or use another schedule.'
        )
    if placement.merged > 1 and settings.sequence_parallel:
        raise ConfigError(
            "sequence_parallel: cannot be combined with merged forward ranks, which hold all tokens (got true). "
            "Remove it, or fbd.merge_forward_tensor_parallel."
        )


def _needs_forward_ranks(key: str, schedule: Schedule) -> ConfigError:
    return ConfigError(
        f'{key}: needs a schedule with forward ranks (got schedule "{schedule.name}"). Remove it, or use "fbd".'
    )


def _costs(plan: StagePlan) -> Costs:
    """Return the costs that the schedule was chosen or planned for, or the default costs, with the stages' work."""
    if plan.candidates is not None and plan.candidates.best is not None:
        costs = plan.candidates.best.costs
    else:
        text = plan.options.get("costs")
        costs = Costs() if text is None else read_costs(text)
    lengths, slices = plan.settings.slice_lengths, costs.slices
    if slices is None and plan.work is not None:
        slices = plan.work.slices
    elif slices is None and not isinstance(lengths, str):
        slices = tuple(lengths)
    stages = plan.work.stages if costs.stages is None and plan.work is not None else costs.stages
    head = plan.work.head if not costs.head and plan.work is not None else costs.head
    return replace(costs, stages=stages, slices=slices, head=head)


def _link_credits(placement: Placement) -> int | None:
    """Return the limit on messages from a forward to a backward device; None without forward devices."""
    if not placement.forward_devices:
        return None
    stages = range(placement.stages - 1)
    return min((most_ahead(placement.stages, stage) for stage in stages), default=None)


@contextlib.contextmanager
def _as_config_error(hint: Callable[[], str] | None = None) -> Iterator[None]:
    """Raise a ConfigError for a ScheduleError, because sizes come from the JSON; ``hint`` returns a sentence or ""."""
    try:
        yield
    except ScheduleError as error:
        raise ConfigError(f"{error} {hint() if hint else ''}".rstrip()) from None
