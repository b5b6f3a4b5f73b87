"""Command line ``python -m ds_ext``. The subcommands for schedules import neither torch nor DeepSpeed."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .cli.model_flags import add_model_flags
from .cli.network_flags import add_network_flags
from .cli.plan_verb import add_plan_flags, run_plan
from .cli.schedule_flags import add_schedule_flags, list_schedules, name_flags
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
    run_simulate,
)
from .errors import ConfigError, DsExtError
from .pipe_schedules.draw.grid import (
    COLLECTIVE_LEGEND,
    HEAD_LEGEND,
    LEGEND,
    REPEATED_LEGEND,
    SLICE_LEGEND,
    SPLIT_LEGEND,
)
from .pipe_schedules.registry import get_schedule, import_modules

Verbs = argparse._SubParsersAction  # pyright: ignore[reportPrivateUsage]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns the exit status: 0, 1 for a refused timetable, 2 for an error in the flags."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = argparse.Namespace()
    try:
        if argv[:1] == ["auto"]:
            get_schedule(argv[0])  # which is possible in a JSON only
        parser, verbs = build_parser(argv[0] if argv else "")
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            verbs.get(args.verb, parser).error(f"unrecognized arguments: {' '.join(unknown)}")
        if args.verb is None:
            parser.print_help()
            return EXIT_OK
        import_modules(getattr(args, "modules", ()), "--import")
        status = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader (`| head`) has closed the pipe. Redirect stdout so that the flush at exit does not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except DsExtError as error:
        print(f"error: {name_flags(str(error), args)}", file=sys.stderr)
        return EXIT_USAGE


def build_parser(verb: str) -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser of all subcommands, and that of each. Flags that need imports are added only for ``verb``."""
    parser = argparse.ArgumentParser(prog="python -m ds_ext", description="Pipeline schedules for DeepSpeed.")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")

    legend = (
        f"grid: {LEGEND}; split backward: {SPLIT_LEGEND}; {REPEATED_LEGEND}; {SLICE_LEGEND}; {HEAD_LEGEND}; with "
        f"--hosts: {COLLECTIVE_LEGEND}"
    )
    show = _schedule_verb(verbs, "show", run_show, "draw a timetable", legend)
    labels = "op: F3@1"
    show.add_argument("--labels", choices=["micro-batch", "op"], default="micro-batch", help=labels)
    colors = "one color per pipe"
    show.add_argument("--color", choices=["auto", "always", "never"], default="auto", help=colors)
    _add_output(show, ["text", "svg", "html", "perfetto", "csv", "timetable"])
    add_model_flags(show)
    add_network_flags(show)

    proof = _schedule_verb(
        verbs, "check", run_check, "prove that a timetable runs to completion; exit status 1 if it does not"
    )
    credits = "maximum number of messages on a link between two devices (unlimited)"
    proof.add_argument("--link-credits", "--link-slots", type=int, metavar="K", help=credits)

    _schedule_verb(verbs, "dump", run_dump, "print the program of every device as JSON")
    cost = _schedule_verb(
        verbs, "simulate", run_simulate, "simulate a step: makespan, bubble, memory, messages"
    )
    cost.add_argument("--json", action="store_true", help="print JSON")
    add_model_flags(cost)
    add_network_flags(cost)

    compare = _schedule_verb(verbs, "compare", run_compare, "simulate several schedules", several=True)
    _add_output(compare, ["text", "html"])
    measured = (
        "also these runs, with measured times: a trace folder, or a folder of runs; needs --costs of a trace"
    )
    compare.add_argument("--measured", metavar="DIR", type=Path, help=measured)
    add_model_flags(compare)

    plan = _add_verb(verbs, "plan", "choose parallel sizes and a schedule for a cluster")
    add_plan_flags(plan)
    plan.set_defaults(run=run_plan)

    best = _schedule_verb(
        verbs,
        "optimise",
        run_optimise,
        "search for the best order of a timetable's ops (needs ds_ext[solve])",
        forward_only=False,
    )
    limit = "maximum live activations per device, in units of 1/D of the model (those of the schedule)"
    best.add_argument("--max-activations", type=float, metavar="A", help=limit)
    best.add_argument("--time-limit", type=float, default=60.0, metavar="S", help="seconds (%(default)s)")
    best.add_argument("-o", "--output", metavar="FILE", help="timetable file to write")

    for name, text, module in (
        ("prepare", "turn text into training data", "recipes.data.prepare"),
        ("convert", "convert checkpoints to and from Hugging Face (needs ds_ext[hf])", "recipes.convert"),
        ("export", "write the weights of a checkpoint as safetensors", "recipes.convert.export"),
        ("report", "make a page of a run: curves, memory, waits, timetables", "cli.report_verb"),
        (
            "trace",
            "merge, summarize or draw the traces of a run, or measure costs in them",
            "cli.trace_verbs",
        ),
        ("doctor", "check the transports on this host, or the hosts of a job", "cli.doctor_verb"),
        ("bench", "run benchmarks on this host, from a checkout of the sources", ""),
    ):
        other = _add_verb(verbs, name, text)
        if name == verb:
            loaded = importlib.import_module(f"{__package__}.{module}") if module else _benchmarks()
            loaded.add_arguments(other)
            other.set_defaults(run=loaded.run)
    return parser, verbs.choices


def _benchmarks() -> ModuleType:
    """Return the benchmarks, which a checkout has beside this package."""
    checkout = Path(__file__).parents[1]
    if not (checkout / "benchmarks" / "rank_server.py").is_file():
        raise ConfigError(
            f"bench: needs the folder benchmarks of a checkout of ds_ext (got the installed package in {checkout}). "
            f"Clone the repository and run the command there."
        )
    sys.path.insert(0, str(checkout))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")]))
    return importlib.import_module("benchmarks")


def _add_verb(verbs: Verbs, name: str, text: str, **more: Any) -> argparse.ArgumentParser:
    return verbs.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", **more)


def _schedule_verb(
    verbs: Verbs,
    name: str,
    run: Verb,
    text: str,
    note: str = "",
    *,
    several: bool = False,
    forward_only: bool = True,
) -> argparse.ArgumentParser:
    epilog = f"schedules:\n{list_schedules()}\n\n{note}".rstrip()
    form = argparse.RawDescriptionHelpFormatter
    verb = _add_verb(verbs, name, text, epilog=epilog, formatter_class=form)
    add_schedule_flags(verb, several=several, forward_only=forward_only)
    verb.set_defaults(run=run)
    return verb


def _add_output(verb: argparse.ArgumentParser, formats: list[str]) -> None:
    verb.add_argument(
        "--format", choices=formats, default=None, help="default: text, or set by the extension of -o"
    )
    verb.add_argument("-o", "--output", metavar="FILE", help="file to write instead of standard output")


if __name__ == "__main__":
    sys.exit(main())
