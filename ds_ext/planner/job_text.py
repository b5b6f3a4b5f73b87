"""Text of a job plan: sizes, groups, stages, costs and the timetable. Imports neither torch nor DeepSpeed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise

from ..comm.rounds import divide_into_rounds, links_per_rank
from ..config.batch_sizes import counted
from ..config.deepspeed_json import precision, reduce_bucket_size, zero_stage
from ..errors import ScheduleError
from ..parallel.hosts import copy_hosts, fatal_pairs
from ..parallel.layout import ParallelLayout, links_of
from ..parallel.partition import StageWork
from ..pipe_schedules.costs import TYPICAL_HEAD, Costs
from ..pipe_schedules.draw.grid import HEAD_LEGEND, LEGEND, REPEATED_LEGEND, SPLIT_LEGEND, time_grid
from ..pipe_schedules.simulation import Simulation, simulate
from ..pipe_schedules.stage_kinds import HEAD_PART
from .auto import vocabulary
from .job_plan import JobPlan
from .memory import DeviceMemory
from .parameter_bytes import parameter_bytes
from .text import aligned, describe_costs, format_bytes

_OVERLAP = "overlap   weights gathered beside the next step (overlap_across_steps)"
_CANDIDATES_SHOWN = 5
_DEVICES_SHOWN = 16
_PAIRS_SHOWN = 8
_CHECKPOINT = "the last checkpoint on disk"
_SLOW_STAGE = 1.5  # times the mean of the others
_LEAST_GAIN = 0.01  # bubble
_GRID_MICRO_BATCHES = 32  # most micro-batches of a timetable that fits the screen
_MORE = (
    'more      --verbose or "print_plan": "all" prints groups, stages, messages, devices and the timetable'
)


def describe(
    plan: JobPlan,
    *,
    boundaries: list[int],
    layer_names: list[str],
    message_bytes: int | None = None,
    model: str = "",
    parameters: Sequence[int] = (),
    empty_stages: Sequence[int] = (),
    memory: Sequence[DeviceMemory] = (),
    defers: bool = True,
    hosts: Sequence[int] | None = None,
    settings: Sequence[str] = (),
    verbose: bool = True,
    gpus: bool = True,
) -> str:
    """Return the plan as text: about ten lines, or all with ``verbose``.

    Args:
        boundaries: stage s holds layers ``boundaries[s]`` to ``boundaries[s + 1]``.
        layer_names: one name per layer; consecutive numbers ("layer 3") are merged into ranges.
        message_bytes: largest size of an activation or gradient between stages; None: unknown.
        model: text on the parameters of the whole model; empty: unknown.
        parameters: parameters on each rank of every device; empty: unknown.
        empty_stages: stages without parameters.
        memory: memory of every device; empty: unknown.
        defers: False if the layers compute all weight gradients with the input gradients.
        hosts: number of every rank's host; None: unknown.
        settings: further lines, on the settings of the script.
        gpus: True if the job runs on GPUs, or might.
    """
    sizes = plan.sizes
    simulation = plan.simulation
    slices = f" in {plan.timetable.slices} slices" if plan.timetable.slices > 1 else ""
    lengths = plan.job.ds_ext.slice_lengths
    slices += "" if isinstance(lengths, str) else f" ({', '.join(map(str, lengths))} tokens)"
    groups, rows = _describe_groups(plan.layout, plan.job.ds_ext.fbd.forward_hosts)
    auto, candidates = _describe_candidates(plan)
    recovery, failures = _describe_recovery(plan, memory, hosts)
    lines = [
        *(f"note: {note}" for note in plan.job.notes),
        f"schedule  {plan.timetable.schedule}, {counted(sizes.micro_batches, 'micro-batch')} of "
        f"{sizes.micro_batch_size}{slices} per pipeline group, {counted(sizes.train_batch_size, 'sample')} per step",
        *settings,
        groups,
        *(rows if verbose else []),
        _describe_partition(plan, boundaries, empty_stages),
        *(_describe_stages(plan, boundaries, layer_names) if verbose else []),
        *([f"model     {model}"] if model else []),
        *([_OVERLAP] if plan.overlaps_steps else []),
        *_describe_bubble(plan, boundaries),
        *_describe_slowest_stage(plan),
        *(_describe_costs(plan, simulation, message_bytes) if verbose else []),
        *_describe_memory(plan, memory),
        *(_describe_devices(parameters, memory) if verbose else []),
        *recovery,
        *(failures if verbose else []),
        *([] if defers else _describe_whole_backwards(plan, simulation.costs)),
        *(_describe_communicators(plan) if verbose and gpus else []),
        *auto,
        *(candidates if verbose else [_MORE]),
    ]
    if verbose and sizes.micro_batches <= _GRID_MICRO_BATCHES:
        lines += ["", time_grid(simulation), f"        {_legend(plan)}"]
    return "\n".join(lines)


def _describe_groups(layout: ParallelLayout, forward_hosts: Sequence[str] | None) -> tuple[str, list[str]]:
    placement, tensor = layout.placement, layout.tensor_parallel_size
    sizes = f"{placement.num_devices} pipeline x {tensor} tensor"
    if placement.forward_devices:
        forward = tensor // placement.merged
        sizes = (
            f"{placement.stages} pipeline x ({forward} forward + {placement.replicas} x {tensor} backward)"
        )
    rows = [
        f"  {name:<9} {' '.join(str(group).replace(' ', '') for group in groups)}"
        for name, groups in layout.groups().items()
    ]
    if forward_hosts and getattr(layout, "order", None) is None:
        rows.append(
            f"  forward ranks are those of {', '.join(forward_hosts)}; the numbers count each role in rank order"
        )
    return f"world {layout.world_size} = {sizes} x {layout.data_parallel_size} data", rows


def _describe_partition(plan: JobPlan, boundaries: list[int], empty_stages: Sequence[int]) -> str:
    layers = [stop - start for start, stop in pairwise(boundaries)]
    low, high = min(layers), max(layers)
    span = f"{low}" if low == high else f"{low} to {high}"
    text = f"stages    {plan.layout.placement.stages}, {span} pipeline layer{'s' * (high > 1)} each"
    if parts := plan.layout.placement.stages_of_kind(HEAD_PART):
        text += f"; head in {counted(len(parts), 'part')}, one per device and pipe"
    if not empty_stages:
        return text
    names = f"stage{'s' * (len(empty_stages) > 1)} {_ranges([f' {stage}' for stage in empty_stages])}"
    return f"{text}; without parameters: {names}"


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


def _describe_bubble(plan: JobPlan, boundaries: Sequence[int]) -> list[str]:
    """Return a line with the simulated bubble; none if stages with different layers take unknown times."""
    layers = {stop - start for start, stop in pairwise(boundaries)}
    if len(layers) > 1 and plan.work is None and plan.costs.stages is None:
        return []
    work = plan.work or StageWork(None, None)
    stages, slices = work.stages, work.slices
    priced = "equal stages" if stages is None and not work.head else "layers and head"
    priced += f", head {TYPICAL_HEAD:g}" if plan.schedule.divides_head and not work.head else ""
    priced += "" if slices is None else ", causal slices"
    costs = f"{priced}, forward : backward = 1 : 2, free messages"
    if plan.costs != Costs(stages=stages, slices=slices, head=work.head):
        costs = describe_costs(plan.costs)
    return [f"bubble    {plan.simulation.bubble:.1%} (simulated: {costs})"]


def _describe_slowest_stage(plan: JobPlan) -> list[str]:
    """Return a line with any remedies if a stage is much slower than the others."""
    work = plan.work or StageWork(None, None)
    stage, ratio = _slowest_stage(work.stages)
    if ratio < _SLOW_STAGE or plan.costs.stages != work.stages:
        return []
    balanced = plan.with_work(replace(work, stages=work.balanced))
    simulations = {"--stage-layers balanced": balanced.simulation}
    if work.parts is not None:
        costs = replace(plan.costs, stages=work.parts.stages, head=work.parts.head)
        with contextlib.suppress(ScheduleError):
            simulations["--vocabulary-parallel-head"] = simulate(plan.timetable_with_parts(costs), costs)
    remedies = [
        f"{flag} gives a bubble of {other.bubble:.1%}{_more_activations(plan.simulation, other)}"
        for flag, other in sorted(simulations.items(), key=lambda item: item[1].bubble)
        if other.bubble < plan.simulation.bubble - _LEAST_GAIN
    ]
    if _slowest_stage(work.balanced)[1] >= _SLOW_STAGE and plan.supports_fewer_devices():
        remedies.append("use fewer stages")
    advice = f"; {'; or '.join(remedies)}" if remedies else ""
    return [f"note: stage {stage} takes {ratio:.2g} times as long as the others{advice}"]


def _more_activations(simulation: Simulation, other: Simulation) -> str:
    before, after = (max(each.peak_activations) for each in (simulation, other))
    return f" and keeps {after:.3g} activations instead of {before:.3g}" if after > before else ""


def _slowest_stage(weights: tuple[float, ...] | None) -> tuple[int, float]:
    """Return the stage with the most work, and its work relative to the mean of the others."""
    if weights is None or len(weights) < 2:
        return 0, 1.0
    slowest = max(range(len(weights)), key=weights.__getitem__)
    others = (sum(weights) - weights[slowest]) / (len(weights) - 1)
    return slowest, weights[slowest] / others if others else 1.0


def _describe_costs(plan: JobPlan, simulation: Simulation, message_bytes: int | None) -> list[str]:
    placement, report = plan.layout.placement, plan.report
    peaks = ", ".join(f"{peak:g}" for peak in simulation.peak_activations)
    copies = "1 copy" if placement.copies == 1 else f"{placement.copies} copies"
    credits = counted(report.link_credits, "message")
    losses = ", ".join(map(str, report.loss_devices))
    up_to = "" if isinstance(plan.settings.slice_lengths, str) else "up to "
    size = "" if message_bytes is None else f", {up_to}{message_bytes:,} bytes each"
    if message_bytes is not None and plan.schedule.divides_head:
        size = f", {plan.timetable.sent_tensors * message_bytes:,} bytes in all"
    return [
        f"peak      {peaks} live activations per device, in units of 1/{placement.devices_per_pipe} of the model for "
        f"one micro-batch",
        f"messages  {simulation.messages} per step and pipeline group{size}",
        f"weights   {copies} of the model per pipeline group",
        f"checked   no deadlock with room for {credits} per link",
        f"loss      device {losses}",
    ]


def _describe_memory(plan: JobPlan, memory: Sequence[DeviceMemory]) -> list[str]:
    """Describe the device that needs the most memory, with the key of ZeRO's buckets if they are most of it."""
    if not memory:
        return []
    largest = max(memory, key=lambda device: device.total)
    sizes = asdict(largest)
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size)
    config = plan.job.deepspeed
    bytes_of = parameter_bytes(precision(config), min(zero_stage(config), 1), "fused")
    if bytes_of.bucketed and max(sizes, key=sizes.__getitem__) == "buffers":
        parts += f": two buckets of zero_optimization.reduce_bucket_size {reduce_bucket_size(config):,}"
    size = format_bytes(largest.total)
    return [f"memory    {size} of tensors on device {memory.index(largest)} (estimated: {parts})"]


def _describe_devices(parameters: Sequence[int], memory: Sequence[DeviceMemory]) -> list[str]:
    if not parameters:
        return []
    sizes = [format_bytes(device.total) for device in memory] or [""] * len(parameters)
    devices_by_row: dict[tuple[str, str], list[int]] = {}
    for device, row in enumerate(zip([f"{count:,}" for count in parameters], sizes, strict=True)):
        devices_by_row.setdefault(row, []).append(device)
    cells = [("device", "parameters", "memory" if memory else "")]
    for row, devices in [*devices_by_row.items()][:_DEVICES_SHOWN]:
        cells.append((_ranges([f" {device}" for device in devices]), *row))
    lines = ["each rank", *(f"  {line}" for line in aligned(cells, left=(0,)))]
    if len(devices_by_row) > _DEVICES_SHOWN:
        lines.append(f"  and {len(devices_by_row) - _DEVICES_SHOWN} more")
    return lines


def _describe_recovery(
    plan: JobPlan, memory: Sequence[DeviceMemory], hosts: Sequence[int] | None
) -> tuple[list[str], list[str]]:
    """Return a line with the memory of the snapshots, and which failures they survive; both empty without recovery."""
    options = plan.job.ds_ext.recovery
    if options is None:
        return [], []
    interval = "step" if options.every == 1 else f"{options.every} steps"
    has_copies = options.second_copy == "mirror"
    copies = copy_hosts(plan.layout, hosts) if hosts is not None and has_copies else None
    size = ""
    if memory:
        # Without ZeRO, fp32 weights are their own master weights.
        is_master = precision(plan.job.deepspeed) == "fp32" and zero_stage(plan.job.deepspeed) == 0
        largest = max(device.optimizer + (device.weights if is_master else 0) for device in memory)
        size = f", {'4' if copies else '2'} x {format_bytes(largest)} per rank at most"
    results = {"a rank is killed": "continues from the snapshots (torchrun --max-restarts)"}
    if copies and hosts is not None:
        results["a host is lost"] = "continues from the copies on other hosts, with a new host in its place"
        results["two hosts are lost"] = _describe_pairs(hosts, copies)
    else:
        on_several = "; in a job on several hosts, from the copies" if has_copies and hosts is None else ""
        results["a host is lost"] = f"continues from {_CHECKPOINT}{on_several}"
    return (
        [f"recovery  a snapshot every {interval} in host memory{size}"],
        [f"          {failure}: {result}" for failure, result in results.items()],
    )


def _describe_pairs(hosts: Sequence[int], copies: Sequence[int]) -> str:
    """Return how a job continues after the loss of two hosts; the arguments are those of :func:`.fatal_pairs`."""
    fatal, count = fatal_pairs(hosts, copies), len(set(hosts))
    if len(fatal) == count * (count - 1) // 2:  # every pair
        return f"continues from {_CHECKPOINT}"
    pairs = " ".join(f"{first}+{second}" for first, second in fatal[:_PAIRS_SHOWN])
    more = f" and {len(fatal) - _PAIRS_SHOWN} more" if len(fatal) > _PAIRS_SHOWN else ""
    return f"continues from the copies; hosts {pairs}{more}: {_CHECKPOINT}"


def _describe_whole_backwards(plan: JobPlan, costs: Costs) -> list[str]:
    """Return the bubble of split backwards whose first half computes the weight gradients too."""
    if not plan.timetable.split_backwards:
        return []
    backward = costs.backward_input + costs.backward_weight
    bubble = simulate(plan.timetable, replace(costs, backward_input=backward, backward_weight=0.0)).bubble
    return [f"te        bubble {bubble:.1%}: its layers compute weight gradients in I, and none in W"]


def _describe_communicators(plan: JobPlan) -> list[str]:
    """Describe the NCCL communicators of the messages between stages, for the case of GPUs."""
    settings = plan.job.ds_ext
    links = links_of(plan.layout, [plan.program])
    if plan.rules is not None or settings.transport not in ("auto", "torch") or not links:
        return []
    most, assumed = links_per_rank(links), settings.transport_options.communicator_mib
    return [
        f"nccl      on GPUs: {counted(most, 'communicator')} per rank at most for messages, "
        f"{format_bytes(most * assumed << 20)} (assumed: {assumed} MiB each); {len(links)} in all, made in "
        f"{counted(len(divide_into_rounds(links)), 'round')}; collectives have their own"
    ]


def _describe_candidates(plan: JobPlan) -> tuple[list[str], list[str]]:
    if plan.candidates is None or plan.candidates.best is None:
        return [], []
    cells = [("schedule", "recompute", "time", "bubble", "memory")]
    for candidate in plan.candidates.usable[:_CANDIDATES_SHOWN]:
        assert candidate.time is not None and candidate.bubble is not None, "usable candidates are simulated"
        size = "-" if candidate.memory_bytes is None else format_bytes(candidate.memory_bytes)
        times = f"{candidate.time:.4g}", f"{candidate.bubble:.1%}"
        cells.append((candidate.label, candidate.recompute, *times, size))
    lines = [f"  {line}" for line in aligned(cells, left=(0, 1))]
    if (sizes := plan.candidates.best.sizes) is not None:
        settings = plan.job.ds_ext
        entries, source = vocabulary(settings.schedule_options.get("vocab_size", 0), settings.train)
        source = source if entries == sizes.vocab_size else "the model"
        lines.append(f"  vocabulary {sizes.vocab_size:,} ({source})")
    return [f"auto      {plan.candidates.reason()}"], lines


def _legend(plan: JobPlan) -> str:
    legend = f"{LEGEND}; {REPEATED_LEGEND}" if plan.layout.placement.forward_devices else LEGEND
    legend = f"{legend}; {HEAD_LEGEND}" if plan.schedule.divides_head else legend
    return f"{legend}; {SPLIT_LEGEND}" if plan.timetable.split_backwards else legend


def _ranges(names: list[str]) -> str:
    """Return ``"layer 3-4, head"`` for ``["layer 3", "layer 4", "head"]``. The word may be empty."""
    parts: list[
        tuple[str, int, int] | str
    ] = []  # (word, first number, last number), or a name without a number
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
        p if isinstance(p, str) else f"{p[0]} {p[1]}".strip() + (f"-{p[2]}" if p[2] > p[1] else "")
        for p in parts
    )
