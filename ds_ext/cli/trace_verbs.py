"""Subcommand ``trace`` of ``python -m ds_ext``: merge, summarize, price and draw traces. Does not import torch."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import ConfigError
from ..observe.trace.costs import BETWEEN, INSIDE, OVERHEAD, measure_costs
from ..observe.trace.merge import clocks, merge
from ..observe.trace.read import read_traces
from ..observe.trace.summary import Summary, summarize, summary_table
from ..pipe_schedules.costs import Costs, dump_costs
from ..pipe_schedules.ops import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from ..planner.text import aligned

_EARLY_US = 100.0  # tolerated clock error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="trace_verb", metavar="VERB", required=True, title="verbs")
    folder = {"metavar": "DIR", "type": Path, "help": 'folder in "ds_ext": {"trace": {"dir": DIR}}'}

    join = verbs.add_parser("merge", help="one file for ui.perfetto.dev, with an arrow for every message")
    join.add_argument("folder", **folder)
    join.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help="JSON file to write")
    join.set_defaults(trace_run=run_merge)

    total = verbs.add_parser("summary", help="busy, bubble and waiting times; slowest stage and link")
    total.add_argument("folder", **folder)
    total.add_argument("--json", action="store_true", help="print JSON")
    total.set_defaults(trace_run=run_summary)

    costs = verbs.add_parser(
        "costs", help="times of stages and messages as a file for --costs of other verbs"
    )
    costs.add_argument("folder", **folder)
    costs.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help="costs.json to write")
    costs.set_defaults(trace_run=run_costs)

    page = verbs.add_parser(
        "view", help="page with the planned timetable above the measured one, or a picture"
    )
    page.add_argument("folder", **{**folder, "nargs": "+"})
    output = "file to write: an .html page of one run, or an .svg picture of one or several runs"
    page.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help=output)
    page.add_argument("--step", type=int, metavar="K", help="step to draw (the one with the median time)")
    page.set_defaults(trace_run=run_view)


def run(args: argparse.Namespace) -> int:
    return args.trace_run(args)


def run_merge(args: argparse.Namespace) -> int:
    traces = read_traces(args.folder)
    if args.output.resolve() in {trace.path.resolve() for trace in traces.ranks.values()}:
        raise ConfigError(f"-o: overwrites a trace (got {args.output}). Use another file.")
    with writing(args.output):
        result = merge(traces, args.output)
    _print_notes(traces.notes)
    worst, world = max(clock["error_us"] for clock in clocks(traces)), traces.run["world_size"]
    print(
        f"wrote {args.output}: {len(traces.ranks)} of {world} rank{'s' * (world != 1)}, {result.events} events, "
        f"{result.messages} messages, {os.path.getsize(args.output):,} bytes; clock error {worst:.0f} us"
    )
    if result.early_us > max(worst, _EARLY_US):
        _print_notes([f"clocks: a message arrives {result.early_us:.0f} us before it is sent"])
    return 0


def run_summary(args: argparse.Namespace) -> int:
    summary = summarize(read_traces(args.folder))
    if args.json:
        print(json.dumps(summary.as_dict()))
    else:
        _print_notes(summary.notes)
        print("\n".join(summary_lines(summary)))
    return 0


def run_costs(args: argparse.Namespace) -> int:
    traces = read_traces(args.folder)
    costs = measure_costs(traces)
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in dump_costs(costs).items()]
    with writing(args.output):
        args.output.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    _print_notes(traces.notes)
    if costs.measured["whole_backwards"]:
        _print_notes(
            ["backwards: not split, so each half has half of the time. Trace zb_v or zb_h1 to measure both"]
        )
    print("\n".join(aligned(costs_table(costs), left=(0,))))
    print(f"wrote {args.output}: milliseconds, medians over {costs.measured['steps']} steps")
    return 0


def costs_table(costs: Costs) -> list[tuple[str, ...]]:
    factors, spread = costs.stage_factors or (), costs.measured["spread"]
    share = costs.measured["devices"] / len(factors)
    rows: list[tuple[str, ...]] = [("", "forward", "backward_input", "backward_weight")]
    kinds = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    for stage, (own, spreads) in enumerate(zip(factors, spread["stages"], strict=True)):
        times = [share * costs.time(kind, own) for kind in kinds]
        rows.append((f"stage {stage}", *map(_time_text, times, spreads)))
    if isinstance(costs.head, tuple):
        forward, gradient, weight = (costs.time(k, costs.head) / costs.measured["devices"] for k in kinds)
        first, last = map(_time_text, (forward + gradient, weight), spread["head_part"])
        rows.append(("head part", first, "in forward", last))
    between = max(costs.links.values(), default=costs.comm)
    for (kind, _), ms in ((OVERHEAD, costs.overhead), (INSIDE, costs.comm), (BETWEEN, between)):
        if kind in spread:
            rows.append((kind, _time_text(ms, spread[kind]), "", ""))
    return rows


def _time_text(ms: float, spread: float) -> str:
    return f"{ms:.2f} +- {spread:.2f}"


def run_view(args: argparse.Namespace) -> int:
    from ..observe.trace.view import page, picture

    runs = [read_traces(folder) for folder in args.folder]
    if args.output.suffix == ".svg":
        text = picture(runs, args.step)
    elif len(runs) == 1:
        text = page(runs[0], args.step)
    else:
        raise ConfigError(
            f"-o: a page shows one run (got {len(runs)} folders). Use one folder, or an .svg file."
        )
    with writing(args.output):
        args.output.write_text(text, "utf-8")
    _print_notes([note for traces in runs for note in traces.notes])
    print(f"wrote {args.output} ({os.path.getsize(args.output):,} bytes)")
    return 0


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context in which an OSError becomes a ConfigError about ``-o``."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"-o: cannot write (got {path}, {error.strerror}). Use another path.") from None


def summary_lines(summary: Summary) -> list[str]:
    ranks = ""
    if len(summary.ranks) < summary.world_size:
        ranks = f" ({len(summary.ranks)} of {summary.world_size} ranks)"
    steps = f"{summary.steps} step{'s' * (summary.steps != 1)}"
    rest = ", ".join(f"{name} {s:.3f} s" for name, s in summary.rest_s.items())
    lines = [
        f"{summary.schedule}, {steps} of {summary.step_s:.3f} s{ranks}: bubble {summary.bubble:.1%} of the makespan, "
        f"{summary.makespan_s:.3f} s; then {rest} (means)",
        "",
        *aligned(summary_table(summary), left=(0, 8)),
        "",
    ]
    stage, link = summary.slowest_stage, summary.slowest_link
    if stage is not None:
        others = "" if stage.others_ms is None else f"; other stages {stage.others_ms:.2f} ms"
        lines.append(
            f"slowest stage  {stage.name} on rank {stage.rank}: {stage.ms:.2f} ms per micro-batch (medians{others})"
        )
    if link is not None:
        lines.append(
            f"slowest link   rank {link.sender} to {link.receiver}: {link.ms:.3f} ms for {link.bytes:,} bytes "
            f"(median of {link.messages} awaited messages)"
        )
    if summary.causes is not None:
        lines += ["", *summary.causes.lines()]
    return lines


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
