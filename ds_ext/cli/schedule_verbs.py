"""Subcommands of ``python -m ds_ext`` for schedules: show, check, dump, simulate, compare, optimise.

None of them imports torch or DeepSpeed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import ScheduleError
from ..pipe_schedules import SCHEDULES, Placement, Timetable
from ..pipe_schedules.checks.program import Report, check
from ..pipe_schedules.costs import MEASURED_SIZES, Costs, factors_text, read_costs
from ..pipe_schedules.draw.grid import time_grid
from ..pipe_schedules.draw.svg import heading
from ..pipe_schedules.files import dump
from ..pipe_schedules.lowering import lower
from ..pipe_schedules.simulation import Simulation
from ..pipe_schedules.stage_kinds import HEAD_PART
from ..planner.activations import stage_activations
from ..planner.fbd import comparison_note
from ..planner.memory import memory
from ..planner.stage_costs import message_bytes, split_layers
from ..planner.text import aligned, format_bytes
from ..planner.training_sizes import TrainingSizes
from .host_step import HostStep, step_on_hosts
from .model_flags import model_of
from .schedule_flags import comparison_of, head_notes, naming_file, simulation_of, timetable_of

_COLUMNS = ("vs first", "bubble", "peak act.", "messages", "weights", "memory", "")  # of a comparison
_SAME = 5e-4  # relative difference that is not shown
EXIT_OK, EXIT_INVALID, EXIT_USAGE, EXIT_PIPE = 0, 1, 2, 141

if TYPE_CHECKING:
    from ..observe.trace.summary import Summary

Verb = Callable[[argparse.Namespace], int]


# --- show ------------------------------------------------------------------------------------------------------------


def run_show(args: argparse.Namespace) -> int:
    """Print a title and the grid over time, or write the timetable in another format; with hosts also collectives."""
    simulation = simulation_of(args)
    for note in head_notes([simulation]):
        print(note, file=sys.stderr)
    on_hosts = step_on_hosts(args, simulation, model_of(args))
    if on_hosts is not None:
        simulation = on_hosts.step.drawn
    form = _format(args, {".csv": "csv", ".svg": "svg", ".json": "perfetto", ".txt": "timetable"})
    if form != "text":
        return _write(args, form, _render(form, simulation))
    lines = [] if on_hosts is None else on_hosts.lines()
    return _write(args, form, "\n".join([_grid(args, simulation), *lines]))


def _format(args: argparse.Namespace, endings: dict[str, str]) -> str:
    """Return the format set by ``--format`` or by the file's extension.

    ``endings`` maps an extension to its format, in addition to no extension and .html.
    """
    ending = os.path.splitext(args.output)[1] if args.output else ""
    formats = {"": "text", ".html": "html", **endings}
    if args.format is None and ending not in formats:
        known = ", ".join(filter(None, formats))
        raise ScheduleError(f"-o: unknown extension (got {args.output}). Use {known}, or --format.")
    return args.format or formats[ending]


def _write(args: argparse.Namespace, form: str, text: str) -> int:
    if args.output is None:
        print(text)
        return EXIT_OK
    write_file(args.output, text + "\n")
    print(f"wrote {args.output} ({form}, {os.path.getsize(args.output):,} bytes)")
    return EXIT_OK


def write_file(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ScheduleError(f"-o: cannot write (got {path}, {error.strerror}). Use another path.") from None


def _grid(args: argparse.Namespace, simulation: Simulation) -> str:
    color = args.color == "always" or (
        args.color == "auto" and args.output is None and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    )
    return f"{title(simulation)}\n{time_grid(simulation, labels=args.labels, color=color)}"


def _render(form: str, simulation: Simulation) -> str:
    """Return the timetable in a format other than text. Each format imports its module only here."""
    if form == "html":
        from ..pipe_schedules.draw.page import html

        return html([simulation])
    if form == "svg":
        from ..pipe_schedules.draw.svg import svg

        return svg(simulation)
    if form == "perfetto":
        from ..pipe_schedules.draw.perfetto import chrome_trace

        return json.dumps(chrome_trace(simulation))
    from ..pipe_schedules.text import dumps, torch_csv

    return (torch_csv if form == "csv" else dumps)(simulation.timetable).rstrip("\n")


# --- compare ---------------------------------------------------------------------------------------------------------


def run_compare(args: argparse.Namespace) -> int:
    """Print one row per schedule, or write a page with this table and all timetables on one scale.

    A refused schedule has its reason in its row, and the exit status is 1. Without names and runs, the rows are all
    schedules that support the sizes, and a note has the others.
    """
    form = _format(args, {})
    model = model_of(args)
    runs = measured_runs(args)
    is_survey = not args.schedules and not runs
    if is_survey and None in (args.num_devices, args.micro_batches):
        raise ScheduleError(
            "NAME: missing (got no schedule). Name schedules, or add --measured DIR, or --num-devices D and "
            "--micro-batches N for all schedules."
        )
    args.schedules += sorted(SCHEDULES) if is_survey else runs
    result = comparison_of(args, {path: run.sizes for path, run in runs.items()})
    refused = {} if is_survey else result.refused
    table = comparison(result.simulations, model, refused, runs)
    notes = [*result.notes, *filter(None, map(comparison_note, result.simulations))]
    notes += head_notes(result.simulations)
    if is_survey and result.refused:
        names_by_reason: dict[str, list[str]] = {}
        for name, reason in result.refused.values():
            names_by_reason.setdefault(reason.rstrip("."), []).append(name)
        reasons = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in names_by_reason.items())
        notes.append(f"refused: {reasons}.")
    if runs:
        most = max(
            min(rank.reduction + rank.optimizer for rank in run.summary.ranks)
            for run in runs.values()
            if run.summary.ranks
        )
        notes.append(
            "makespan, measured: milliseconds from the start of a step to its last op. Not included: exposed "
            f"reductions and the optimizer step (up to {most:.1%} of the makespan), loss and norm."
        )
    if form == "text":
        _write(args, form, "\n".join([*aligned(table, left=(0, len(table[0]) - 1)), *notes]))
    else:
        from ..pipe_schedules.draw.page import html

        _write(args, form, html(result.simulations, table, notes))
    return EXIT_INVALID if refused else EXIT_OK


@dataclass(frozen=True)
class MeasuredRun:
    """Traced run: its name in the table, the summary of its traces, and its MEASURED_SIZES."""

    name: str
    summary: Summary
    sizes: Mapping[str, Any]


def measured_runs(args: argparse.Namespace) -> dict[str, MeasuredRun]:
    """Return timetable file -> run, for every run in the folder of ``--measured``.

    Traces of a run are in the folder, in one of its subfolders, or in a subfolder of that.
    """
    if args.measured is None:
        return {}
    if args.costs is None or not read_costs(args.costs).measured:
        raise ScheduleError(
            f"--measured: needs costs from a trace (got --costs {args.costs}). Add --costs FILE of `trace costs`."
        )
    from ..observe.trace.file import TIMETABLE
    from ..observe.trace.read import read_traces, trace_folders
    from ..observe.trace.summary import summarize

    folders: dict[Path, str] = {}  # with their names
    for path in filter(Path.is_dir, (args.measured, *sorted(args.measured.glob("*")))):
        inside = trace_folders(path)
        if path in inside:
            inside = [path]
        elif path == args.measured:
            inside = []  # its subfolders follow
        folders |= {
            folder: path.name if len(inside) == 1 else f"{path.name}/{folder.name}" for folder in inside
        }
    runs: dict[str, MeasuredRun] = {}
    for folder, name in folders.items():
        if (folder / TIMETABLE).exists():
            traces = read_traces(folder)
            sizes = {key: traces.run[key] for key in MEASURED_SIZES if key in traces.run}
            runs[str(folder / TIMETABLE)] = MeasuredRun(name, summarize(traces), sizes)
    if not any(run.summary.makespan_by_step for run in runs.values()):
        raise ScheduleError(
            f"--measured: no run with a complete step (got {args.measured}). Use a trace folder."
        )
    return runs


def comparison(
    simulations: Sequence[Simulation],
    model: TrainingSizes | None = None,
    refused: Mapping[int, tuple[str, str]] | None = None,
    runs: Mapping[str, MeasuredRun] = MappingProxyType({}),
) -> list[tuple[str, ...]]:
    """Return a table with its header: makespan, bubble, peak activations, messages, copies of the weights.

    With ``model`` it includes the memory of the device that needs the most. Makespans are relative to the first row for
    the same number of micro-batches.

    Args:
        refused: index of a row -> name and reason of a refused schedule.
        runs: path of a simulated timetable file -> its run.
    """
    first = simulations[0]
    header = ("schedule", "makespan", "measured", "error", *_COLUMNS)

    def relative(simulation: Simulation) -> str:
        if not first.makespan or simulation.timetable.micro_batches != first.timetable.micro_batches:
            return ""
        return f"{simulation.makespan / first.makespan:.3f}"

    def times(simulation: Simulation) -> tuple[str, ...]:
        name, run = simulation.timetable.schedule, runs.get(simulation.timetable.schedule)
        if run is None or not run.summary.makespan_by_step:
            return name, f"{simulation.makespan:g}", "", ""
        measured_ms = statistics.median(run.summary.makespan_by_step.values()) / 1e3
        error = simulation.makespan / measured_ms - 1
        return run.name, f"{simulation.makespan:g}", f"{measured_ms:g}", f"{error:+.1%}"

    rows: list[tuple[str, ...]] = [
        (
            *times(s),
            relative(s),
            f"{s.bubble:.1%}",
            f"{max(s.peak_activations):g}",
            f"{s.messages}",
            f"{s.timetable.placement.copies}x",
            "" if model is None else format_bytes(_worst(s.timetable, model)),
            "",
        )
        for s in simulations
    ]
    is_shown = [any(column) for column in zip(*rows, strict=True)]
    for index, (name, reason) in sorted((refused or {}).items()):
        name = runs[name].name if name in runs else name
        rows.insert(index, (name, *["-"] * (len(header) - 2), reason))
        is_shown[-1] = True
    columns = [i for i, shown in enumerate(is_shown) if shown]
    return [tuple(row[i] for i in columns) for row in (header, *rows)]


def _worst(timetable: Timetable, model: TrainingSizes) -> int:
    sizes = split_layers(model, timetable.placement, timetable.schedule)
    return max(device.total for device in memory(timetable, sizes))


# --- check and dump --------------------------------------------------------------------------------------------------


def run_check(args: argparse.Namespace) -> int:
    """Print the proven properties of a timetable. Errors of the timetable go to stderr."""
    timetable = timetable_of(args)
    if args.link_credits is not None and args.link_credits < 1:
        raise ScheduleError(f"--link-credits: must be at least 1 (got {args.link_credits}).")
    try:
        with naming_file(args.schedule):
            report = check(lower(timetable), link_credits=args.link_credits)
    except ScheduleError as error:
        print(error, file=sys.stderr)
        return EXIT_INVALID
    print(f"{describe_sizes(timetable)}: valid")
    print("\n".join(f"  {line}" for line in _proven(timetable, report)))
    return EXIT_OK


def _proven(timetable: Timetable, report: Report) -> Iterator[str]:
    yield f"ops       {sum(map(len, timetable.orders))}, each once, on the device of its stage, after its dependencies"
    yield f"messages  {report.messages}{', received in the order of each link' if report.messages else ''}"
    if report.messages:
        room = report.link_credits
        yield f"links     no deadlock with room for {room} message{'s' * (room != 1)} per link"
    unit = "micro-batch" if timetable.slices == 1 else "slice of a micro-batch"
    yield f"buffers   {' '.join(map(str, report.num_buffers))}  (per device), one {unit} at a time in each"
    yield f"loss      device {', '.join(map(str, report.loss_devices))}"
    if not timetable.trains:
        yield "backward  none: an evaluation"


def run_dump(args: argparse.Namespace) -> int:
    print(json.dumps(dump(lower(timetable_of(args)))))
    return EXIT_OK


# --- simulate and optimise -------------------------------------------------------------------------------------------


def run_simulate(args: argparse.Namespace) -> int:
    """Print the simulation as text or JSON; with a model also its memory and messages, with hosts the step time."""
    simulation = simulation_of(args)
    timetable = simulation.timetable
    model = model_of(args)
    on_hosts = step_on_hosts(args, simulation, model)
    if model is not None:
        model = split_layers(model, timetable.placement, timetable.schedule)
        if on_hosts is not None:
            model = replace(model, data_parallel=on_hosts.layout.data_parallel_size)
    if args.json:
        values = simulation.as_dict() | {"busy": list(simulation.busy)}
        if model is not None:
            values |= {
                "memory": _device_memory(timetable, model),
                "message_bytes": message_bytes(model) // timetable.slices,
                "layers": model.stage_layers,
                "stage_bytes": _stage_bytes(model, timetable.placement),
            }
        if on_hosts is not None:
            values |= on_hosts.as_dict()
        print(json.dumps(values))
        return EXIT_OK
    print("\n".join(_simulation_lines(simulation, model)))
    if model is not None:
        print("\n".join(_stage_lines(model, simulation.costs)))
        print("\n".join(_memory_lines(_device_memory(timetable, model))))
    if on_hosts is not None:
        print("\n".join(on_hosts.lines()))
    for note in _last_stage_notes(args, simulation, on_hosts):
        print(note)
    return EXIT_OK


def _last_stage_notes(
    args: argparse.Namespace, simulation: Simulation, on_hosts: HostStep | None
) -> Iterator[str]:
    """Yield a note if the step of a model with a head in parts is shorter with the head on the last stage."""
    model = model_of(args)
    if model is None or not args.vocabulary_parallel_head:
        return
    plain = argparse.Namespace(**{**vars(args), "vocabulary_parallel_head": False})
    with contextlib.suppress(ScheduleError):  # a file has its parts, and costs may have a factor of the head
        other = simulation_of(plain)
        times, unit = (other.makespan, simulation.makespan), ""
        if on_hosts is not None:
            step = step_on_hosts(plain, other, model)
            assert step is not None, "there are hosts"
            times, unit = (step.step.step_s, on_hosts.step.step_s), " s"
        if times[0] < (1 - _SAME) * times[1]:
            last, parts = (f"{time:.4g}{unit}" for time in times)
            yield f"  last stage        {last} with the head on the last stage, {parts} with parts"


def _simulation_lines(simulation: Simulation, model: TrainingSizes | None) -> Iterator[str]:
    peaks = " ".join(f"{peak:g}" for peak in simulation.peak_activations)
    share = f"1/{simulation.timetable.placement.num_devices} of the model"
    size = "" if model is None else f", {_message_size_text(simulation.timetable, model)}"
    yield describe_sizes(simulation.timetable)
    yield f"  makespan          {simulation.makespan:g}"
    yield f"  ideal             {simulation.ideal:g}  (computing time per device)"
    yield f"  bubble            {simulation.bubble:.1%}"
    yield f"  busy              {' '.join(f'{busy:.1%}' for busy in simulation.busy)}  (per device)"
    yield f"  peak activations  {peaks}  (per device, in units of {share})"
    yield f"  messages          {simulation.messages}{size}"
    if simulation.costs.head:
        yield f"  head              {factors_text([simulation.costs.head], '.3g')}  (factor, divided over the devices)"


def _message_size_text(timetable: Timetable, model: TrainingSizes) -> str:
    """Return text with the size of one message; with head parts, whose messages differ, with the sum of all."""
    size = message_bytes(model) // timetable.slices
    if HEAD_PART in timetable.placement.stage_kinds:
        return f"{format_bytes(timetable.sent_tensors * size)} in all"
    return f"{format_bytes(size)} each"


def _device_memory(timetable: Timetable, model: TrainingSizes) -> list[dict[str, int]]:
    return [{**asdict(device), "total": device.total} for device in memory(timetable, model)]


def _stage_bytes(model: TrainingSizes, placement: Placement) -> list[int]:
    """Return the bytes of a micro-batch's activations at every stage, parts of the head included."""
    return [math.ceil(stage.kept) for stage in stage_activations(model, placement)]


def _stage_lines(model: TrainingSizes, costs: Costs) -> Iterator[str]:
    assert model.stage_layers is not None, "split_layers() comes first"
    yield f"  layers            {' '.join(map(str, model.stage_layers))}  (per stage)"
    if costs.stages is not None:
        factors = " ".join(factors_text([stage], ".3g") for stage in costs.stages)
        yield f"  costs             {factors}  (factor per stage{'' if costs.head else ', including the head'})"
    if model.repeated_share:
        yield f"  recompute         {model.repeated_share:.0%} of a layer's forward  ({model.recompute})"


def _memory_lines(devices: Sequence[dict[str, int]]) -> list[str]:
    rows = [[str(device), *map(format_bytes, parts.values())] for device, parts in enumerate(devices)]
    return [f"  {line}" for line in aligned([["device", *devices[0]], *rows], left=())]


def run_optimise(args: argparse.Namespace) -> int:
    from ..planner.solver import optimise

    original = simulation_of(args)
    if original.timetable.slices > 1:
        raise ScheduleError(
            f"optimise: sequence_slices must be 1 (got {original.timetable.slices}). The search has no slices."
        )
    if parts := original.timetable.placement.stages_of_kind(HEAD_PART):
        raise ScheduleError(
            f"optimise: vocabulary_parallel_head is not searched (got {len(parts)} parts). Remove it."
        )
    original_peak = max(original.peak_activations)
    limit = original_peak if args.max_activations is None else args.max_activations
    if not args.time_limit > 0:
        raise ScheduleError(f"--time-limit: must be greater than 0 seconds (got {args.time_limit:g}).")
    optimum = optimise(
        original.timetable, original.costs, max_activations=limit, time_limit_s=args.time_limit
    )
    excess = f"  ({original_peak:g} activations, above the limit)" if original_peak > limit + 1e-9 else ""
    print(f"{describe_sizes(original.timetable)}, at most {limit:g} activations per device")
    print(f"  original order  {optimum.given:g}{excess}")
    print(f"  best order      {optimum.makespan:g}")
    print(f"  proven bound    {optimum.bound:g}{'  (optimal)' if optimum.proven else ''}")
    if original.costs.jitter:
        print("  jitter          ignored")
    if args.output is not None:
        from ..pipe_schedules.text import dumps

        write_file(args.output, dumps(optimum.timetable))
        print(f"wrote {args.output}")
    return EXIT_OK


# --- text ------------------------------------------------------------------------------------------------------------


def title(simulation: Simulation) -> str:
    peaks = " ".join(f"{peak:g}" for peak in simulation.peak_activations)
    return (
        f"{describe_sizes(simulation.timetable)}: makespan {simulation.makespan:g}, ideal {simulation.ideal:g}, "
        f"bubble {simulation.bubble:.1%}, peak activations {peaks}"
    )


def describe_sizes(timetable: Timetable) -> str:
    """Return ``bitpipe, 4 devices, 8 micro-batches``, with ``forward only`` for an evaluation."""
    return f"{timetable.schedule}, {heading(timetable)}{'' if timetable.trains else ', forward only'}"
