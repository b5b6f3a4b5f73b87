"""Benchmarks: ``python -m ds_ext bench NAME``."""

from __future__ import annotations

import argparse

from . import engine, fbd, schedules, training, transport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmarks and the options of each."""
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="NAME", required=True, title="benchmarks")
    for module in (engine, fbd, schedules, training, transport):
        name = module.__name__.rpartition(".")[2]
        known = benchmarks.add_parser(name, help=module.SUMMARY, description=f"Measure {module.SUMMARY}.")
        module.add_arguments(known)
        known.set_defaults(benchmark_run=module.run)


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark. Returns 0, or 1 if something of ours failed; raises DsExtError for a wrong request."""
    return args.benchmark_run(args)
