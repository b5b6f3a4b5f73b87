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

from .errors import ScheduleError
from .pipe_schedules import Timetable, get_schedule
from .pipe_schedules.check import check
from .pipe_schedules.costs import Costs, parse_costs
from .pipe_schedules.files import read_timetable
from .pipe_schedules.lower import dump, lower
from .pipe_schedules.render import time_grid
from .pipe_schedules.simulate import Simulation, simulate

EXIT_OK, EXIT_INVALID, EXIT_USAGE, EXIT_PIPE = 0, 1, 2, 141

Verb = Callable[[argparse.Namespace], int]


def run_show(args: argparse.Namespace) -> int:
    """Print the title line and the grid over time, or write the timetable in another format."""
    simulation = _simulation(args)
    return _write(
        args, {".csv": "csv", ".svg": "svg", ".json": "perfetto", ".txt": "timetable"}, [simulation]
    )


def run_compare(args: argparse.Namespace) -> int:
    """Print a line per schedule, or write one page with all timetables on one scale."""
    simulations = [simulate(_timetable(name, args), parse_costs(args.costs)) for name in args.schedules]
    return _write(args, {}, simulations)


def _write(args: argparse.Namespace, endings: dict[str, str], simulations: list[Simulation]) -> int:
    ending = os.path.splitext(args.output)[1] if args.output else ""
    form = args.format or {".html": "html", **endings}.get(ending, "text")
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
        return comparison(simulations)
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


def comparison(simulations: Sequence[Simulation]) -> str:
    """A table: makespan, bubble, peak activations, messages, copies of the weights; times relative to the first."""
    head = ("schedule", "makespan", "vs first", "bubble", "peak act.", "messages", "weights")
    rows = [
        (
            s.timetable.schedule,
            f"{s.makespan:g}",
            f"{s.makespan / simulations[0].makespan:.3f}",
            f"{s.bubble:.1%}",
            f"{max(s.peak_activations):g}",
            f"{s.messages}",
            f"{s.timetable.placement.replicas}x",
        )
        for s in simulations
    ]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def run_check(args: argparse.Namespace) -> int:
    """Print what was proven; a refusal goes to stderr."""
    timetable, _ = _request(args)
    if args.link_slots is not None and args.link_slots < 1:
        raise ScheduleError(f"--link-slots must be at least 1; got {args.link_slots}.")
    try:
        report = check(lower(timetable), link_slots=args.link_slots)
    except ScheduleError as error:
        print(error, file=sys.stderr)
        return EXIT_INVALID
    computations = sum(map(len, timetable.ranks))
    print(f"{_sizes(timetable)}: valid")
    print(
        f"  {computations} computations, each once, on the rank that holds its stage and after what it needs"
    )
    print(f"  {report.messages} messages, each taken by the rank it is sent to, in the order it is sent")
    print(f"  all ranks reach the end, also when a link holds only {report.link_slots} of its messages")
    print(f"  {' '.join(map(str, report.num_slots))} buffers per rank, none used twice at a time")
    print(f"  the loss is on rank {', '.join(map(str, report.loss_ranks))}")
    return EXIT_OK


def run_dump(args: argparse.Namespace) -> int:
    """Print the lowered timetable as JSON."""
    timetable, _ = _request(args)
    print(json.dumps(dump(lower(timetable))))
    return EXIT_OK


def run_simulate(args: argparse.Namespace) -> int:
    """Print the price, as text or JSON."""
    simulation = _simulation(args)
    if args.json:
        print(json.dumps(simulation.as_dict()))
        return EXIT_OK
    timetable = simulation.timetable
    peaks = " ".join(f"{peak:g}" for peak in simulation.peak_activations)
    print(_sizes(timetable))
    print(f"  makespan          {simulation.makespan:g}")
    print(f"  ideal             {simulation.ideal:g}  (computing time of one rank)")
    print(f"  bubble            {simulation.bubble:.1%}")
    print(f"  peak activations  {peaks}  (per rank, in units of 1/{timetable.placement.ranks} of the model)")
    print(f"  messages          {simulation.messages}")
    return EXIT_OK


def run_optimise(args: argparse.Namespace) -> int:
    """Search, print what was found and what is proven, and write it as a timetable file."""
    from .optimise import optimise

    given = _simulation(args)
    room = max(given.peak_activations) if args.max_activations is None else args.max_activations
    if not args.time_limit > 0:
        raise ScheduleError(f"--time-limit must be more than 0 seconds; got {args.time_limit:g}.")
    found = optimise(
        given.timetable, parse_costs(args.costs), max_activations=room, time_limit_s=args.time_limit
    )
    print(f"{_sizes(given.timetable)}, at most {room:g} activations a rank")
    print(f"  its own order   {found.given:g}")
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
        f"{_sizes(simulation.timetable)}: makespan {simulation.makespan:g}, ideal {simulation.ideal:g}, "
        f"bubble {simulation.bubble:.1%}, peak activations {peaks}"
    )


def _sizes(timetable: Timetable) -> str:
    ranks, micro_batches = timetable.placement.ranks, timetable.micro_batches
    return (
        f"{timetable.schedule}, {ranks} stage{'s' if ranks != 1 else ''}, "
        f"{micro_batches} micro-batch{'es' if micro_batches != 1 else ''}"
    )


def _simulation(args: argparse.Namespace) -> Simulation:
    timetable, costs = _request(args)
    return simulate(timetable, costs)


def _request(args: argparse.Namespace) -> tuple[Timetable, Costs]:
    """The timetable and the costs that the shared arguments ask for. Raises ScheduleError."""
    return _timetable(args.schedule, args), parse_costs(args.costs)


def _timetable(name: str, args: argparse.Namespace) -> Timetable:
    """A registered schedule for the given sizes, or a timetable file, which has its own."""
    if os.path.isfile(name):
        return read_timetable(name)
    if args.stages is None or args.micro_batches is None:
        get_schedule(name)
        raise ScheduleError(
            f"{name} needs --stages D and --micro-batches N, for example --stages 4 --micro-batches 8."
        )
    options = dict(_option(text) for text in args.option)
    schedule = get_schedule(name)
    if args.verb == "compare":
        options = {key: value for key, value in options.items() if key in schedule.options}
    return schedule.timetable(args.stages, args.micro_batches, options, parse_costs(args.costs))


def _option(text: str) -> tuple[str, int | float | str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ScheduleError(f"--option {text!r} is not of the form chunks=3.")
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return key, number(value)
    return key, value
