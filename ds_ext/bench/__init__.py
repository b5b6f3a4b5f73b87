"""Benchmarks: ``python -m ds_ext bench NAME``, so far ``schedules``."""

from __future__ import annotations

import argparse

from . import schedules


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmarks and the options of each."""
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="NAME", required=True, title="benchmarks")
    known = benchmarks.add_parser(
        "schedules", help=schedules.SUMMARY, description=f"Measure {schedules.SUMMARY}."
    )
    schedules.add_arguments(known)
    known.set_defaults(benchmark_run=schedules.run)


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark. Returns 0, or 1 if something of ours failed; raises DsExtError for a wrong request."""
    return args.benchmark_run(args)
