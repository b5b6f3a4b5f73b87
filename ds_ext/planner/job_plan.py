"""Plan of a job: everything decided from the JSON, the flags and the world size before launch.

Built once per process by :func:`make_job_plan` and passed down: the scripts print it, ``PipelineModule`` cuts layers by
it, the engine runs its program. Imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..config.batch_sizes import BatchSizes, batch_sizes
from ..config.job import AUTO, DsExtConfig, JobConfig, import_own_schedules, named_schedule
from ..errors import ConfigError, ScheduleError
from ..parallel.fbd import make_layout
from ..parallel.layout import ParallelLayout, data_parallel_size
from ..pipe_schedules import Placement, Program, Schedule, Timetable
from ..pipe_schedules.check.program import Report, check
from ..pipe_schedules.costs import Costs, read_costs
from ..pipe_schedules.lower import lower
from ..pipe_schedules.methods.fbd import most_ahead
from ..pipe_schedules.ops import Op
from ..pipe_schedules.reductions import eager_reductions
from ..pipe_schedules.registry import DynamicRules
from ..pipe_schedules.simulate import Simulation, simulate
from .auto import choose_for_job, chosen_schedule
from .candidates import Choice


@dataclass(frozen=True)
class JobPlan:
    """Everything that follows from the JSON, the flags and the world size.

    Attributes:
        schedule, options: the schedule that runs, and its options from "schedule_options" and "fbd".
        layout: global ranks of every device, pipeline group and tensor-parallel rank.
        program: the timetable, lowered.
        report: proof that the program ends.
        simulation: the timetable priced with the costs that it was planned or chosen for; equal costs by default.
        reductions: per device: computation -> the stages whose gradients are reduced from then on.
        rules: runtime scheduling rules; None for a static schedule.
        choice: candidates of the schedule "auto", ranked; None for any other.
    """

    job: JobConfig
    schedule: Schedule
    options: Mapping[str, Any]
    layout: ParallelLayout
    sizes: BatchSizes
    timetable: Timetable
    program: Program
    report: Report
    simulation: Simulation
    reductions: tuple[Mapping[Op, tuple[int, ...]], ...]
    rules: DynamicRules | None = None
    choice: Choice | None = None

    @property
    def settings(self) -> DsExtConfig:
        """The validated "ds_ext" section."""
        return self.job.ds_ext

    @property
    def costs(self) -> Costs:
        """The costs that the timetable was planned, chosen and priced for."""
        return self.simulation.costs

    def resized(self, gradient_accumulation_steps: int) -> JobPlan:
        """Return the plan for another number of micro-batches. Raises ConfigError when the schedule refuses it."""
        sizes = replace(self.sizes, gradient_accumulation_steps=gradient_accumulation_steps)
        return _plan(self.job, self.schedule, self.options, self.layout, sizes, self.choice)


def make_job_plan(job: JobConfig, world_size: int | None = None) -> JobPlan:
    """Decide a job.

    Args:
        world_size: number of processes; None means one pipeline group.

    Raises:
        ConfigError: a size, an option or the batch does not fit the schedule or the world.
        ScheduleError: the schedule's own timetable is not sound.
    """
    schedule, choice = resolve_schedule(job, world_size)
    options = schedule_options(job.ds_ext, schedule)
    placement = place(job.ds_ext, schedule, options)
    tensor = job.ds_ext.tensor_parallel_size
    data = 1 if world_size is None else data_parallel_size(world_size, placement, tensor)
    sizes = batch_sizes(job.deepspeed, placement.replicas, data, job.flags)
    return _plan(job, schedule, options, make_layout(placement, tensor, data), sizes, choice)


def _plan(
    job: JobConfig,
    schedule: Schedule,
    options: Mapping[str, Any],
    layout: ParallelLayout,
    sizes: BatchSizes,
    choice: Choice | None,
) -> JobPlan:
    devices = job.ds_ext.pipeline_parallel_size
    with _as_config_error():
        timetable = schedule.timetable(devices, sizes.micro_batches, options)
        rules = schedule.rules(devices, sizes.micro_batches, options)
    program = lower(timetable)
    report = check(program, link_slots=_link_credits(layout.placement))
    simulation = simulate(timetable, _costs(options, choice))
    reductions = eager_reductions(simulation)
    return JobPlan(
        job,
        schedule,
        options,
        layout,
        sizes,
        timetable,
        program,
        report,
        simulation,
        reductions,
        rules,
        choice,
    )


def resolve_schedule(job: JobConfig, world_size: int | None = None) -> tuple[Schedule, Choice | None]:
    """Return the schedule by name, from a timetable file, or the best candidate of "auto", with all candidates.

    Raises:
        ConfigError: it is unknown, a module of the key "import" fails, nothing fits the job, or the transport cannot
            run it.
    """
    import_own_schedules(job)
    settings = job.ds_ext
    if settings.schedule == AUTO:
        choice = choose_for_job(
            job.deepspeed,
            devices=settings.pipeline_parallel_size,
            tensor_parallel=settings.tensor_parallel_size,
            options=settings.schedule_options,
            train=settings.train,
            world_size=world_size,
        )
        return chosen_schedule(choice), choice
    schedule = named_schedule(settings.schedule)
    if schedule.dynamic is not None and settings.transport == "torch":
        raise ConfigError(
            f'"ds_ext": schedule "{schedule.name}" decides its order by the messages that have arrived, and transport '
            f'"torch" cannot poll for them. Use "transport": "auto" or "shm", or a static schedule.'
        )
    return schedule, None


def schedule_options(settings: DsExtConfig, schedule: Schedule) -> dict[str, Any]:
    """Return the schedule's options: "schedule_options" and those of "fbd". Raises ConfigError."""
    options = dict(settings.schedule_options)
    for key, value in settings.fbd.options(settings.tensor_parallel_size).items():
        if key not in schedule.options:
            raise ConfigError(
                f'"ds_ext": fbd.{key} is for a schedule with forward ranks, such as "fbd"; the schedule is '
                f'"{schedule.name}". Leave it out, or set "schedule": "fbd".'
            )
        if options.setdefault(key, value) != value:
            raise ConfigError(
                f'"ds_ext": schedule_options.{key} {options[key]} contradicts "fbd", which makes it {value}. '
                f"Give one of them."
            )
    settings.fbd.require_something_to_merge(settings.tensor_parallel_size)
    return options


def place(settings: DsExtConfig, schedule: Schedule, options: Mapping[str, Any]) -> Placement:
    """Return the stages of every device. Raises ConfigError when the schedule cannot use these sizes."""
    with _as_config_error():
        placement = schedule.placement(settings.pipeline_parallel_size, options)
    if settings.fbd.forward_hosts is not None and not placement.forward_devices:
        raise ConfigError(
            f'"ds_ext": fbd.forward_hosts is for a schedule with forward ranks, such as "fbd"; the schedule is '
            f'"{schedule.name}". Leave it out, or set "schedule": "fbd".'
        )
    if placement.merged > 1 and settings.sequence_parallel:
        raise ConfigError(
            '"sequence_parallel": true and merged forward ranks exclude each other: the ranks of a tensor-parallel '
            "group take slices of the tokens, and a merged rank has all of them. Leave one of the two out."
        )
    return placement


def _costs(options: Mapping[str, Any], choice: Choice | None) -> Costs:
    """Return the costs that the schedule was chosen or planned for; forward = input = weight gradient by default."""
    if choice is not None and choice.best is not None:
        return choice.best.costs
    given = options.get("costs")
    return Costs() if given is None else read_costs(given)


def _link_credits(placement: Placement) -> int | None:
    """Return how many messages a forward rank may be ahead of a backward rank; None where nothing limits it."""
    if not placement.forward_devices:
        return None
    stages = range(placement.stages - 1)
    return min((most_ahead(placement.stages, stage) for stage in stages), default=None)


@contextlib.contextmanager
def _as_config_error() -> Iterator[None]:
    """Turn a schedule's refusal of sizes into a ConfigError: here they come from the JSON."""
    try:
        yield
    except ScheduleError as error:
        raise ConfigError(str(error)) from None
