"""Benchmarks: ``python -m ds_ext bench NAME``.

A benchmark is one module: its flags, its command, and the part that its ranks run. Importing it imports neither torch
nor DeepSpeed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys

from . import engine, fbd, recovery, schedules, training, transport
from .command import describe, machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks and the flags of each."""
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="NAME", required=True, title="benchmarks")
    for module in (engine, fbd, recovery, schedules, training, transport):
        name = module.__name__.rpartition(".")[2]
        added = benchmarks.add_parser(name, help=module.SUMMARY, description=f"Measure {module.SUMMARY}.")
        module.add_arguments(added)
        added.add_argument("--json", action="store_true", help="print JSON")
        added.set_defaults(measure=module.measure)


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark and print its report. Returns 0, or 1 if one of our schedules failed.

    Raises:
        DsExtError: the request cannot be run, or an engine failed.
    """
    host = machine()  # before the measurement, so that the reported load comes from other processes
    # SIGTERM runs the clean-up, as Ctrl-C does.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        report = args.measure(args)
    finally:
        signal.signal(signal.SIGTERM, before)
    if args.json:
        for item in report.items:
            item["params"]["machine"] = host
        print(json.dumps(report.items, indent=1))
    else:
        print(report.title, describe(host), report.text, sep="\n")
    return int(report.failed)
