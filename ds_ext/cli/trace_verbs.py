"""``python -m ds_ext trace``: join, sum up and draw the traces of a run. Imports neither torch nor deepspeed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError
from ..observe.trace.merge import clocks, merge
from ..observe.trace.read import read_traces
from ..observe.trace.summary import Summary, summarize
from ..planner.candidates import aligned

_EARLY_US = 100.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the three verbs."""
    verbs = parser.add_subparsers(dest="trace_verb", metavar="VERB", required=True, title="verbs")
    folder = {"metavar": "DIR", "type": Path, "help": 'the folder of "ds_ext": {"trace": {"dir": DIR}}'}

    join = verbs.add_parser("merge", help="one file for ui.perfetto.dev, with an arrow for every message")
    join.add_argument("folder", **folder)
    join.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help="a .json")
    join.set_defaults(trace_run=run_merge)

    total = verbs.add_parser(
        "summary", help="where the time went: busy, bubble, waits; slowest stage and link"
    )
    total.add_argument("folder", **folder)
    total.add_argument("--json", action="store_true", help="for programs")
    total.set_defaults(trace_run=run_summary)

    page = verbs.add_parser("view", help="one HTML page: the planned timetable above the measured one")
    page.add_argument("folder", **folder)
    page.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help="an .html")
    page.add_argument("--step", type=int, metavar="K", help="the step to draw (the one of median length)")
    page.set_defaults(trace_run=run_view)


def run(args: argparse.Namespace) -> int:
    """Run the chosen verb. Returns 0; raises DsExtError."""
    return args.trace_run(args)


def run_merge(args: argparse.Namespace) -> int:
    """Join the ranks' traces into one file and say what was found."""
    traces = read_traces(args.folder)
    if args.output.resolve() in {trace.path.resolve() for trace in traces.ranks.values()}:
        raise ConfigError(f"-o {args.output} is one of the traces that are joined. Give another file.")
    try:
        merged = merge(traces, args.output)
    except OSError as error:
        raise ConfigError(f"-o {args.output}: {error.strerror}.") from None
    _tell(traces.notes)
    worst = max(clock["error_us"] for clock in clocks(traces))
    print(
        f"wrote {args.output}: {len(traces.ranks)} of {traces.run['world_size']} ranks, {merged.events} events, "
        f"{merged.messages} messages, {os.path.getsize(args.output):,} bytes; clocks within {worst:.0f} us"
    )
    if merged.early_us > max(worst, _EARLY_US):
        _tell(
            [
                f"a message seems to arrive {merged.early_us:.0f} us before it is sent: the clocks are that wrong."
            ]
        )
    return 0


def run_summary(args: argparse.Namespace) -> int:
    """Print the summary, for people or for programs."""
    found = summarize(read_traces(args.folder))
    if args.json:
        print(json.dumps(found.as_dict()))
        return 0
    _tell(found.notes)
    print("\n".join(summary_lines(found)))
    return 0


def run_view(args: argparse.Namespace) -> int:
    """Write the page."""
    from ..observe.trace.view import page

    traces = read_traces(args.folder)
    text = page(traces, args.step)
    try:
        args.output.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"-o {args.output}: {error.strerror}.") from None
    _tell(traces.notes)
    print(f"wrote {args.output} ({os.path.getsize(args.output):,} bytes)")
    return 0


def summary_lines(found: Summary) -> list[str]:
    """The summary as text."""
    some = len(found.ranks) < found.world_size
    of = f" ({len(found.ranks)} of {found.world_size} ranks)" if some else ""
    steps = f"{found.steps} step{'s' * (found.steps != 1)}"
    lines = [
        f"{found.schedule}, {steps} of {found.step_s:.3f} s{of}: bubble {found.bubble:.1%}",
        "",
        *aligned(summary_table(found), left=(0, 7)),
        "",
    ]
    stage, link = found.slowest_stage, found.slowest_link
    if stage is not None:
        others = "" if stage.others_ms is None else f" (the others {stage.others_ms:.2f} ms)"
        lines.append(
            f"slowest stage  {stage.stage} on rank {stage.rank}: {stage.ms:.2f} ms a micro-batch{others}"
        )
    if link is not None:
        lines.append(
            f"slowest link   rank {link.sender} to {link.receiver}: {link.ms:.3f} ms for {link.bytes:,} bytes "
            f"(median of {link.messages} messages that were waited for)"
        )
    return lines


def summary_table(found: Summary) -> list[tuple[str, ...]]:
    """A head, then a row a rank."""
    head = ("rank", "busy", "bubble", "p2p", "reduction", "hidden", "optimizer", "waits for")
    rows = [
        (
            str(rank.rank),
            *(
                f"{share:.1%}"
                for share in (
                    rank.busy,
                    rank.bubble,
                    rank.p2p,
                    rank.reduction,
                    rank.reduction_hidden,
                    rank.optimizer,
                )
            ),
            _waits(rank.waits),
        )
        for rank in found.ranks
    ]
    return [head, *rows]


def _waits(waits: dict[int, float]) -> str:
    """``rank 1 12.3%, rank 3 0.5%``: the longest first."""
    return ", ".join(
        f"rank {peer} {share:.1%}"
        for peer, share in sorted(waits.items(), key=lambda item: -item[1])
        if share >= 5e-4
    )


def _tell(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
