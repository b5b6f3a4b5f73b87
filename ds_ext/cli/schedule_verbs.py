"""What the verbs of ``python -m ds_ext`` about schedules do; the command line itself is in ``__main__``.

They are pure and answer at once: none imports torch or deepspeed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..errors import ScheduleError
from ..pipe_schedules import Timetable
from ..pipe_schedules.check.program import Report, check
from ..pipe_schedules.draw.grid import time_grid
from ..pipe_schedules.lower import dump, lower
from ..pipe_schedules.simulate import Simulation
from ..planner.candidates import aligned, format_bytes
from ..planner.fbd import comparison_note
from ..planner.memory import ModelSizes, memory
from ..planner.stage_costs import cut
from .model_flags import model_of
from .schedule_flags import comparison_of, naming, simulation_of, timetable_of

EXIT_OK, EXIT_INVALID, EXIT_USAGE, EXIT_PIPE = 0, 1, 2, 141

Verb = Callable[[argparse.Namespace], int]


def run_show(args: argparse.Namespace) -> int:
    """Print the title line and the grid over time, or write the timetable in another format."""
    simulation = simulation_of(args)
    form = _form(args, {".csv": "csv", ".svg": "svg", ".json": "perfetto", ".txt": "timetable"})
    return _write(args, form, _drawn(args, simulation) if form == "text" else _render(form, simulation))


def run_compare(args: argparse.Namespace) -> int:
    """Print a line per schedule, or write one page with that table and all timetables on one scale.

    A schedule that is not possible has its reason in its line, and the exit status is 1.
    """
    form, model = _form(args, {}), model_of(args)
    compared = comparison_of(args)
    table = comparison(compared.simulations, model, compared.refused)
    notes = [*compared.notes, *filter(None, map(comparison_note, compared.simulations))]
    status = EXIT_INVALID if compared.refused else EXIT_OK
    if form == "text":
        _write(args, form, "\n".join([*aligned(table, left=(0, len(table[0]) - 1)), *notes]))
        return status
    from ..pipe_schedules.draw.page import html

    _write(args, form, html(compared.simulations, table, notes))
    return status


def _form(args: argparse.Namespace, endings: dict[str, str]) -> str:
    """The format that the flags ask for; ``endings`` are those of -o beside none and .html."""
    ending = os.path.splitext(args.output)[1] if args.output else ""
    forms = {"": "text", ".html": "html", **endings}
    if args.format is None and ending not in forms:
        known = ", ".join(filter(None, forms))
        raise ScheduleError(
            f"-o {args.output}: {ending} is no ending that says a format; use {known}, or --format."
        )
    return args.format or forms[ending]


def _write(args: argparse.Namespace, form: str, text: str) -> int:
    if args.output is None:
        print(text)
        return EXIT_OK
    _write_file(args.output, text + "\n")
    print(f"wrote {args.output} ({form}, {os.path.getsize(args.output):,} bytes)")
    return EXIT_OK


def _write_file(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ScheduleError(f"-o {path}: {error.strerror}.") from None


def _drawn(args: argparse.Namespace, simulation: Simulation) -> str:
    color = args.color == "always" or (
        args.color == "auto" and args.output is None and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    )
    return f"{title(simulation)}\n{time_grid(simulation, labels=args.labels, color=color)}"


def _render(form: str, simulation: Simulation) -> str:
    """The formats beside plain text; what they need is imported only here."""
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


def comparison(
    simulations: Sequence[Simulation],
    model: ModelSizes | None = None,
    refused: Mapping[int, tuple[str, str]] | None = None,
) -> list[tuple[str, ...]]:
    """A table: makespan, bubble, peak activations, messages, copies of the weights; times relative to the first.

    Its first row is the head. With ``model`` also the bytes of the worst rank. Times of other numbers of micro-batches
    than the first's are not compared. Raises ScheduleError when the model's layers do not fit the stages.

    Args:
        refused: place in the table -> name and reason of a schedule that is not possible.
    """
    first = simulations[0]
    head = ("schedule", "makespan", "vs first", "bubble", "peak act.", "messages", "weights", "memory", "")
    rows = [
        (
            s.timetable.schedule,
            f"{s.makespan:g}",
            f"{s.makespan / first.makespan:.3f}" if first.makespan and _alike(s, first) else "",
            f"{s.bubble:.1%}",
            f"{max(s.peak_activations):g}",
            f"{s.messages}",
            f"{_weights(s)}x",
            "" if model is None else format_bytes(_worst(s, model)),
            "",
        )
        for s in simulations
    ]
    for place, (name, reason) in sorted((refused or {}).items()):
        size = "" if model is None else "-"
        rows.insert(place, (name, "-", "-", "-", "-", "-", "-", size, reason))
    columns = [i for i, word in enumerate(head) if word or refused]
    columns = [i for i in columns if head[i] != "memory" or model is not None]
    return [tuple(row[i] for i in columns) for row in (head, *rows)]


def _weights(simulation: Simulation) -> int:
    """Return the number of copies of the weights: of every pipe, and of forward devices."""
    return simulation.timetable.placement.copies


def _alike(one: Simulation, other: Simulation) -> bool:
    return one.timetable.micro_batches == other.timetable.micro_batches


def _worst(simulation: Simulation, model: ModelSizes) -> int:
    """Bytes of the rank that needs most."""
    made = simulation.timetable
    return max(rank.total for rank in memory(made, cut(model, made.placement, made.schedule)))


def run_check(args: argparse.Namespace) -> int:
    """Print what was proven; a refusal goes to stderr."""
    timetable = timetable_of(args)
    if args.link_slots is not None and args.link_slots < 1:
        raise ScheduleError(f"--link-slots must be at least 1; got {args.link_slots}.")
    try:
        with naming(args.schedule):
            report = check(lower(timetable), link_slots=args.link_slots)
    except ScheduleError as error:
        print(error, file=sys.stderr)
        return EXIT_INVALID
    print(f"{describe_sizes(timetable)}: valid")
    print("\n".join(f"  {sentence}" for sentence in _proven(timetable, report)))
    return EXIT_OK


def _proven(timetable: Timetable, report: Report) -> Iterator[str]:
    """A sentence a line."""
    computations = sum(map(len, timetable.orders))
    yield f"{computations} computations, each once, on the rank that holds its stage and after what it needs"
    if report.messages:
        yield f"{report.messages} messages, each taken by the rank it is sent to, in the order it is sent"
        yield f"all ranks reach the end, also when a link holds only {report.link_slots} of its messages"
    else:
        yield "no messages, so every rank reaches its end by itself, however much a link holds"
    yield f"{' '.join(map(str, report.num_buffers))} buffers per rank, none used twice at a time"
    yield f"the loss is on rank {', '.join(map(str, report.loss_ranks))}"
    if not timetable.trains:
        yield "there are no backwards: an evaluation"


def run_dump(args: argparse.Namespace) -> int:
    """Print the lowered timetable as JSON."""
    print(json.dumps(dump(lower(timetable_of(args)))))
    return EXIT_OK


def run_optimise(args: argparse.Namespace) -> int:
    """Search, print what was found and what is proven, and write it as a timetable file."""
    from ..planner.solver import optimise

    given = simulation_of(args)
    room = max(given.peak_activations) if args.max_activations is None else args.max_activations
    if not args.time_limit > 0:
        raise ScheduleError(f"--time-limit must be more than 0 seconds; got {args.time_limit:g}.")
    found = optimise(given.timetable, given.costs, max_activations=room, time_limit_s=args.time_limit)
    print(f"{describe_sizes(given.timetable)}, at most {room:g} activations a rank")
    kept = max(given.peak_activations)
    more = f"  (keeps {kept:g} activations, more than the limit)" if kept > room + 1e-9 else ""
    print(f"  its own order   {found.given:g}{more}")
    if given.costs.jitter:
        print("  (without the jitter of the costs)")
    print(f"  the best found  {found.makespan:g}")
    print(f"  proven bound    {found.bound:g}{'  (optimal)' if found.proven else ''}")
    if args.output is not None:
        from ..pipe_schedules.text import dumps

        _write_file(args.output, dumps(found.timetable))
        print(f"wrote {args.output}")
    return EXIT_OK


def title(simulation: Simulation) -> str:
    """The schedule, its sizes and its price in one line."""
    peaks = " ".join(f"{peak:g}" for peak in simulation.peak_activations)
    return (
        f"{describe_sizes(simulation.timetable)}: makespan {simulation.makespan:g}, ideal {simulation.ideal:g}, "
        f"bubble {simulation.bubble:.1%}, peak activations {peaks}"
    )


def describe_sizes(timetable: Timetable) -> str:
    """``bitpipe, 4 stages, 8 micro-batches``, and of an evaluation that it is one."""
    ranks, micro_batches = timetable.placement.devices_per_pipe, timetable.micro_batches
    devices = f" on {timetable.placement.num_devices} devices" if timetable.placement.forward_devices else ""
    return (
        f"{timetable.schedule}, {ranks} stage{'s' if ranks != 1 else ''}{devices}, "
        f"{micro_batches} micro-batch{'es' if micro_batches != 1 else ''}{'' if timetable.trains else ', forward only'}"
    )
