"""Text of a job's plan: sizes, groups, stages, costs and the timetable. Imports neither torch nor DeepSpeed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..config.batch_sizes import counted
from ..parallel.layout import ParallelLayout
from ..pipe_schedules.costs import Costs
from ..pipe_schedules.draw.grid import LEGEND, REPEATED_LEGEND, SPLIT_LEGEND, time_grid
from ..pipe_schedules.simulate import Simulation, simulate
from ..planner.auto import vocabulary
from ..planner.candidates import describe_costs, describe_rows
from ..planner.job_plan import JobPlan

_CHOICES_SHOWN = 5


def describe_groups(layout: ParallelLayout, hosts: Sequence[str] | None = None) -> str:
    """The table of process groups; ``hosts`` are those of forward ranks, if the JSON names them."""
    placement, tensor = layout.placement, layout.tensor_parallel_size
    sizes = f"{placement.num_devices} pipeline x {tensor} tensor"
    if placement.forward_devices:
        forward = tensor // placement.merged
        sizes = (
            f"{placement.stages} pipeline x ({forward} forward + {placement.replicas} x {tensor} backward)"
        )
    sizes = f"world {layout.world_size} = {sizes} x {layout.data_parallel_size} data"
    rows = [
        f"  {name:<9} {' '.join(str(group).replace(' ', '') for group in groups)}"
        for name, groups in layout.groups().items()
    ]
    if hosts:
        rows.append(
            f"  these are places: forward ranks are those of {', '.join(hosts)}, and so on in both roles"
        )
    return "\n".join([sizes, *rows])


def _legend(plan: JobPlan) -> str:
    legend = f"{LEGEND}; {REPEATED_LEGEND}" if plan.layout.placement.forward_devices else LEGEND
    return f"{legend}; {SPLIT_LEGEND}" if plan.timetable.split_backwards else legend


def describe(
    plan: JobPlan,
    *,
    boundaries: list[int],
    layer_names: list[str],
    message_bytes: int,
    weights: tuple[float, ...] | None = None,
    with_head: bool = False,
    grid: bool = True,
) -> str:
    """The plan as text: groups, stages and their layers, cost, and the timetable.

    Args:
        boundaries: stage s holds the layers ``boundaries[s]`` to ``boundaries[s + 1]``.
        layer_names: one a layer; numbered ones ("layer 3") are joined to ranges.
        message_bytes: size of one activation or gradient between stages.
        weights: of the stages, as factors, where they differ; from :func:`ds_ext.parallel.partition.stage_weights`.
        with_head: the head's work is among ``weights``.
        grid: draw the timetable too.
    """
    sizes = plan.sizes
    simulation = plan.simulation
    if weights is not None and plan.costs.stages is None:
        simulation = simulate(plan.timetable, replace(plan.costs, stages=weights))
    lines = [
        *(f"note: {note}" for note in plan.job.notes),
        f"schedule  {plan.timetable.schedule}, {counted(sizes.micro_batches, 'micro-batch')} of "
        f"{sizes.micro_batch_size} per pipeline group, {counted(sizes.train_batch_size, 'sample')} a step",
        describe_groups(plan.layout, plan.job.ds_ext.fbd.forward_hosts),
        "stages",
        *_describe_stages(plan, boundaries, layer_names),
        *_describe_costs(plan, simulation, message_bytes, with_head),
        *_describe_choice(plan),
    ]
    if grid:
        lines += ["", time_grid(simulation), f"        {_legend(plan)}"]
    return "\n".join(lines)


def _describe_stages(plan: JobPlan, boundaries: list[int], layer_names: list[str]) -> list[str]:
    placement = plan.layout.placement
    lines = []
    for stage in range(placement.stages):
        names = layer_names[boundaries[stage] : boundaries[stage + 1]]
        devices = ", ".join(str(pipe[stage]) for pipe in placement.pipes)
        if placement.forward_devices:
            devices = f"{placement.forward_devices[stage]} > {devices}"
        lines.append(f"  stage {stage:<3} device {devices:<7} {_ranges(names)}")
    return lines


def _describe_costs(plan: JobPlan, simulation: Simulation, message_bytes: int, with_head: bool) -> list[str]:
    placement, report = plan.layout.placement, plan.report
    peaks = ", ".join(f"{peak:g}" for peak in simulation.peak_activations)
    activations = "activation" if peaks == "1" else "activations"
    copies = "1 copy" if placement.copies == 1 else f"{placement.copies} copies"
    slots = counted(report.link_slots, "message")
    losses = ", ".join(map(str, report.loss_ranks))
    head = "with the head's work" if with_head else "of the layers alone"
    how = f"simulated {head}, forward : backward = 1 : 2, free messages"
    if plan.costs != Costs():
        how = f"simulated with {describe_costs(simulation.costs)}"
    return [
        f"bubble    {simulation.bubble:.1%} ({how})",
        f"peak      {peaks} live {activations} per device, in units of 1/{placement.devices_per_pipe} of the model and "
        f"a micro-batch",
        f"messages  {simulation.messages} a step and pipeline group, {message_bytes:,} bytes each",
        f"weights   {copies} of the model per pipeline group",
        f"checked   every message has its receive, also with room for {slots} on a link; the loss is on device "
        f"{losses}",
    ]


def _describe_choice(plan: JobPlan) -> list[str]:
    """Why "auto" chose, the best of what it chose from, and for which vocabulary."""
    choice = plan.choice
    if choice is None or choice.best is None:
        return []
    rows = describe_rows(choice.fitting[:_CHOICES_SHOWN])
    lines = [f"auto      {choice.reason()}", *(f"  {row}" for row in rows)]
    if choice.best.memory_bytes is not None:
        settings = plan.job.ds_ext
        entries, source = vocabulary(settings.schedule_options.get("vocab_size", 0), settings.train)
        lines.append(f"  chosen for a vocabulary of {entries:,} ({source})")
    return lines


def _ranges(names: list[str]) -> str:
    """``["layer 3", "layer 4", "head"]`` -> ``"layer 3-4, head"``."""
    parts: list[tuple[str, int, int] | str] = []
    for name in names:
        word, _, number = name.rpartition(" ")
        previous = parts[-1] if parts else None
        if not number.isdigit():
            parts.append(name)
        elif isinstance(previous, tuple) and previous[0] == word and previous[2] + 1 == int(number):
            parts[-1] = (word, previous[1], int(number))
        else:
            parts.append((word, int(number), int(number)))
    return ", ".join(
        p if isinstance(p, str) else f"{p[0]} {p[1]}" + (f"-{p[2]}" if p[2] > p[1] else "") for p in parts
    )
