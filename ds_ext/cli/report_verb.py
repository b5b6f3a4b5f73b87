"""Subcommand ``report`` of ``python -m ds_ext``: one page of a run. Does not import torch."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ..errors import ConfigError
from ..observe.report.folder import read_run
from ..observe.report.page import report
from .trace_verbs import writing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "folder of a run with its metrics file, or the metrics file; the run record and the traces are found there"
    parser.add_argument("folder", metavar="FOLDER", type=Path, help=what)
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, required=True, help="page to write, such as report.html"
    )


def run(args: argparse.Namespace) -> int:
    run_of_folder = read_run(args.folder)
    if args.output.suffix != ".html":
        raise ConfigError(f"-o: must end in .html (got {args.output}).")
    text = report(run_of_folder)
    with writing(args.output):
        args.output.write_text(text, "utf-8")
    for note in run_of_folder.notes:
        print(f"note: {note}")
    print(f"wrote {args.output} ({os.path.getsize(args.output):,} bytes)")
    return 0
