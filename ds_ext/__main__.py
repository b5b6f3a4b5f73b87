"""``python -m ds_ext``: look at schedules before anything is launched, prepare data, measure.

The verbs about schedules are pure and answer at once: they import neither torch nor deepspeed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .cli.model_flags import add_model_flags
from .cli.plan_verbs import add_plan_flags, run_plan, run_simulate
from .cli.schedule_flags import add_schedule_flags, list_schedules
from .cli.schedule_verbs import (
    EXIT_OK,
    EXIT_PIPE,
    EXIT_USAGE,
    Verb,
    run_check,
    run_compare,
    run_dump,
    run_optimise,
    run_show,
)
from .errors import DsExtError
from .pipe_schedules.draw.grid import LEGEND, REPEATED_LEGEND, SPLIT_LEGEND
from .pipe_schedules.registry import import_modules


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Returns the exit status: 0, 1 for a timetable that is refused, 2 for a wrong request."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser(argv[0] if argv else "")
    args = parser.parse_args(argv)
    if args.verb is None:
        parser.print_help()
        return EXIT_OK
    try:
        import_modules(getattr(args, "modules", ()), "--import")
        status = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader (`| head`) has left; point stdout elsewhere so that the flush at exit does not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except DsExtError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE


def build_parser(verb: str) -> argparse.ArgumentParser:
    """The parser of all verbs; the flags of ``verb`` itself may need an import that the others are spared."""
    parser = argparse.ArgumentParser(prog="python -m ds_ext", description="Pipeline schedules for DeepSpeed.")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")

    picture = f"The picture: {LEGEND}; of a split backward {SPLIT_LEGEND}; {REPEATED_LEGEND}."
    show = _schedule_verb(verbs, "show", run_show, "draw the timetable", picture)
    show.add_argument(
        "--labels", choices=["micro-batch", "op"], default="micro-batch", help="op: F3@1 in full"
    )
    show.add_argument(
        "--color", choices=["auto", "always", "never"], default="auto", help="one colour a pipe"
    )

    _add_output(show, ["text", "svg", "html", "perfetto", "csv", "timetable"])

    proof = _schedule_verb(verbs, "check", run_check, "prove that it runs to its end; exit status 1 if not")
    proof.add_argument(
        "--link-slots",
        type=int,
        metavar="K",
        help="messages that a link between two ranks holds (any number)",
    )

    _schedule_verb(verbs, "dump", run_dump, "print what every rank executes, as JSON")
    cost = _schedule_verb(verbs, "simulate", run_simulate, "price it: makespan, bubble, memory, messages")
    cost.add_argument("--json", action="store_true", help="for programs")
    add_model_flags(cost)

    compare = _schedule_verb(
        verbs, "compare", run_compare, "price several schedules side by side", several=True
    )
    _add_output(compare, ["text", "html"])
    add_model_flags(compare)

    whole = verbs.add_parser(
        "plan",
        help="choose sizes and a schedule for devices that are not there yet",
        description="Choose the sizes of tensor, pipeline and data parallelism, and a schedule.",
    )
    add_plan_flags(whole)
    whole.set_defaults(run=run_plan)

    best = _schedule_verb(
        verbs,
        "optimise",
        run_optimise,
        "search for the best order of its computations (needs ds_ext[solve])",
        forward_only=False,
    )
    best.add_argument(
        "--max-activations",
        type=float,
        metavar="A",
        help="most that a device keeps, in D-ths of the model (as many as the schedule itself)",
    )
    best.add_argument("--time-limit", type=float, default=60.0, metavar="S", help="seconds (%(default)s)")
    best.add_argument("-o", "--output", metavar="FILE", help="write the order as a timetable file")

    prepare = verbs.add_parser(
        "prepare", help="turn text into training data", description="Text to training data."
    )
    if verb == "prepare":
        from .data import prepare as data

        data.add_arguments(prepare)
        prepare.set_defaults(run=data.run)
    convert = verbs.add_parser(
        "convert",
        help="checkpoints to and from Hugging Face's transformers",
        description="Checkpoints to and from Hugging Face's transformers (GPT-2 and BERT; needs ds_ext[hf]).",
    )
    if verb == "convert":
        from . import convert as conversion

        conversion.add_arguments(convert)
        convert.set_defaults(run=conversion.run)
    timeline = verbs.add_parser(
        "trace",
        help="join, sum up and draw the traces of a run",
        description="The traces that ranks write when the JSON says where (docs/traces.md).",
    )
    if verb == "trace":
        from .cli import trace_verbs

        trace_verbs.add_arguments(timeline)
        timeline.set_defaults(run=trace_verbs.run)
    host = verbs.add_parser(
        "doctor",
        help="what this host offers to the transports",
        description="What this host offers to the transports, and what to do where it is too little.",
    )
    if verb == "doctor":
        from .cli import doctor

        doctor.add_arguments(host)
        host.set_defaults(run=doctor.run)
    measure = verbs.add_parser("bench", help="measure on this host", description="Benchmarks.")
    if verb == "bench":
        from . import bench

        bench.add_arguments(measure)
        measure.set_defaults(run=bench.run)
    return parser


def _schedule_verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Verb,
    text: str,
    note: str = "",
    *,
    several: bool = False,
    forward_only: bool = True,
) -> argparse.ArgumentParser:
    """A verb with the arguments that all verbs about a schedule share."""
    verb = verbs.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=f"schedules:\n{list_schedules()}\n\n{note}".rstrip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_schedule_flags(verb, several=several, forward_only=forward_only)
    verb.set_defaults(run=run)
    return verb


def _add_output(verb: argparse.ArgumentParser, formats: list[str]) -> None:
    verb.add_argument("--format", choices=formats, default=None, help="text, or what the ending of -o says")
    verb.add_argument("-o", "--output", metavar="FILE", help="write there instead of to standard output")


if __name__ == "__main__":
    sys.exit(main())
