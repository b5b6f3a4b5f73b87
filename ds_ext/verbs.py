"""What the verbs of ``python -m ds_ext`` about schedules do; the command line itself is in ``__main__``.

They are pure and answer at once: none imports torch or deepspeed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence

from .choice import aligned, format_bytes
from .errors import ScheduleError
from .model_flags import model_of
from .pipe_schedules import Timetable, get_schedule
from .pipe_schedules.check import check, check_timetable
from .pipe_schedules.costs import Costs, load_costs, parse_costs
from .pipe_schedules.files import is_timetable_file, read_timetable
from .pipe_schedules.lower import dump, lower
from .pipe_schedules.memory import ModelSizes, memory
from .pipe_schedules.render import time_grid
from .pipe_schedules.simulate import Simulation, simulate

EXIT_OK, EXIT_INVALID, EXIT_USAGE, EXIT_PIPE = 0, 1, 2, 141

Verb = Callable[[argparse.Namespace], int]


def run_show(args: argparse.Namespace) -> int:
    """Print the title line and the grid over time, or write the timetable in another format."""
    simulation = simulation_of(args)
    return _write(
        args, {".csv": "csv", ".svg": "svg", ".json": "perfetto", ".txt": "timetable"}, [simulation]
    )


def run_compare(args: argparse.Namespace) -> int:
    """Print a line per schedule, or write one page with all timetables on one scale."""
    simulations = [_priced(name, args) for name in args.schedules]
    return _write(args, {}, simulations)


def _write(args: argparse.Namespace, endings: dict[str, str], simulations: list[Simulation]) -> int:
    ending = os.path.splitext(args.output)[1] if args.output else ""
    forms = {"": "text", ".html": "html", **endings}
    if args.format is None and ending not in forms:
        known = ", ".join(filter(None, forms))
        raise ScheduleError(
            f"-o {args.output}: {ending} is no ending that says a format; use {known}, or --format."
        )
    form = args.format or forms[ending]
    text = _as_text(args, simulations) if form == "text" else _render(form, simulations)
    if args.output is None:
        print(text)
        return EXIT_OK
    _write_file(args.output, text + "\n")
    print(f"wrote {args.output} ({form}, {os.path.getsize(args.output):,} bytes)")
    return EXIT_OK


def _write_file(path: str, text: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError as error:
        raise ScheduleError(f"-o {path}: {error.strerror}.") from None


def _as_text(args: argparse.Namespace, simulations: list[Simulation]) -> str:
    if args.verb == "compare":
        return comparison(simulations, model_of(args))
    color = args.color == "always" or (
        args.color == "auto" and args.output is None and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    )
    return f"{title(simulations[0])}\n{time_grid(simulations[0], labels=args.labels, color=color)}"


def _render(form: str, simulations: list[Simulation]) -> str:
    """The formats beside plain text; what they need is imported only here."""
    simulation = simulations[0]
    if form == "html":
        from .pipe_schedules.page import html

        return html(simulations)
    if form == "svg":
        from .pipe_schedules.drawing import svg

        return svg(simulation)
    if form == "perfetto":
        from .pipe_schedules.perfetto import chrome_trace

        return json.dumps(chrome_trace(simulation))
    from .pipe_schedules.text import dumps, torch_csv

    return (torch_csv if form == "csv" else dumps)(simulation.timetable).rstrip("\n")


def comparison(simulations: Sequence[Simulation], model: ModelSizes | None = None) -> str:
    """A table: makespan, bubble, peak activations, messages, copies of the weights; times relative to the first.

    With ``model`` also the bytes of the worst rank. Raises ScheduleError when its layers do not fit the stages.
    """
    head = ("schedule", "makespan", "vs first", "bubble", "peak act.", "messages", "weights", "memory")
    rows = [
        (
            s.timetable.schedule,
            f"{s.makespan:g}",
            f"{s.makespan / simulations[0].makespan:.3f}" if simulations[0].makespan else "",
            f"{s.bubble:.1%}",
            f"{max(s.peak_activations):g}",
            f"{s.messages}",
            f"{s.timetable.placement.replicas}x",
            "" if model is None else format_bytes(max(rank.total for rank in memory(s, model))),
        )
        for s in simulations
    ]
    columns = len(head) - (model is None)
    return "\n".join(aligned([row[:columns] for row in (head, *rows)], left=(0,)))


def run_check(args: argparse.Namespace) -> int:
    """Print what was proven; a refusal goes to stderr."""
    timetable = _timetable(args.schedule, args)
    if args.link_slots is not None and args.link_slots < 1:
        raise ScheduleError(f"--link-slots must be at least 1; got {args.link_slots}.")
    try:
        report = check(lower(timetable), link_slots=args.link_slots)
    except ScheduleError as error:
        print(error, file=sys.stderr)
        return EXIT_INVALID
    computations = sum(map(len, timetable.ranks))
    print(f"{describe_sizes(timetable)}: valid")
    print(
        f"  {computations} computations, each once, on the rank that holds its stage and after what it needs"
    )
    print(f"  {report.messages} messages, each taken by the rank it is sent to, in the order it is sent")
    print(f"  all ranks reach the end, also when a link holds only {report.link_slots} of its messages")
    print(f"  {' '.join(map(str, report.num_slots))} buffers per rank, none used twice at a time")
    print(f"  the loss is on rank {', '.join(map(str, report.loss_ranks))}")
    if not timetable.trains:
        print("  there are no backwards: an evaluation")
    return EXIT_OK


def run_dump(args: argparse.Namespace) -> int:
    """Print the lowered timetable as JSON."""
    timetable = _timetable(args.schedule, args)
    print(json.dumps(dump(lower(timetable))))
    return EXIT_OK


def run_optimise(args: argparse.Namespace) -> int:
    """Search, print what was found and what is proven, and write it as a timetable file."""
    from .optimise import optimise

    given = simulation_of(args)
    room = max(given.peak_activations) if args.max_activations is None else args.max_activations
    if not args.time_limit > 0:
        raise ScheduleError(f"--time-limit must be more than 0 seconds; got {args.time_limit:g}.")
    found = optimise(given.timetable, given.costs, max_activations=room, time_limit_s=args.time_limit)
    print(f"{describe_sizes(given.timetable)}, at most {room:g} activations a rank")
    print(f"  its own order   {found.given:g}")
    if given.costs.jitter:
        print("  (without the jitter of the costs)")
    print(f"  the best found  {found.makespan:g}")
    bound = "the same: there is no better order" if found.proven else f"{found.bound:g}"
    print(f"  proven bound    {bound}")
    if args.output is not None:
        from .pipe_schedules.text import dumps

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
    """``bitpipe, 4 stages, 8 micro-batches``."""
    ranks, micro_batches = timetable.placement.ranks, timetable.micro_batches
    return (
        f"{timetable.schedule}, {ranks} stage{'s' if ranks != 1 else ''}, "
        f"{micro_batches} micro-batch{'es' if micro_batches != 1 else ''}"
    )


def simulation_of(args: argparse.Namespace) -> Simulation:
    """The priced timetable that the shared arguments ask for. Raises ScheduleError."""
    return _priced(args.schedule, args)


def _priced(name: str, args: argparse.Namespace) -> Simulation:
    """A file may hold anything: its computations are looked at before they are priced."""
    made = _timetable(name, args)
    check_timetable(made)
    return simulate(made, read_costs(args.costs))


def read_costs(given: str) -> Costs:
    """``f=1,b=1,w=1,comm=0``, or a JSON file that says more. Raises ScheduleError."""
    if os.path.isfile(given) or given.endswith(".json"):
        return load_costs(given)
    return parse_costs(given)


def _of_these_sizes(made: Timetable, args: argparse.Namespace) -> Timetable:
    """A timetable from a file, which other sizes cannot be asked of."""
    asked = (args.stages, args.micro_batches)
    has = (made.placement.ranks, made.micro_batches)
    if any(a not in (None, h) for a, h in zip(asked, has, strict=True)):
        raise ScheduleError(
            f"the timetable file is for --stages {has[0]} --micro-batches {has[1]}; leave both out, or give a schedule."
        )
    return made


def _timetable(name: str, args: argparse.Namespace) -> Timetable:
    """A registered schedule for the given sizes, or a timetable file, which has its own."""
    costs = read_costs(args.costs)
    if os.path.isfile(name) or is_timetable_file(name):
        return _of_these_sizes(read_timetable(name), args)
    if args.stages is None or args.micro_batches is None:
        get_schedule(name)
        raise ScheduleError(
            f"{name} needs --stages D and --micro-batches N, for example --stages 4 --micro-batches 8."
        )
    options = dict(_option(text) for text in args.option)
    schedule = get_schedule(name)
    if args.verb == "compare":
        options = {key: value for key, value in options.items() if key in schedule.options}
    return schedule.timetable(args.stages, args.micro_batches, options, costs)


def _option(text: str) -> tuple[str, int | float | str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ScheduleError(f"--option {text!r} is not of the form chunks=3.")
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return key, number(value)
    return key, value
