"""``bench training``: tokens a second of a small GPT with real arithmetic, beside DeepSpeed's own pipeline engine.

The engines take turns step by step, so that what disturbs the machine disturbs them alike; what counts is the ratio of
the medians. With more ranks than cores the figure says little: ranks then compute one after the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from ..comm.spin import usable_cores
from ..errors import ConfigError
from ..pipe_schedules import get_schedule
from ..pipe_schedules.costs import Costs
from .ranks import Job, take_turns
from .report import describe_machine, machine

SUMMARY = "tokens a second of a small GPT, ours beside DeepSpeed's engine"
RIVAL = "deepspeed_1f1b"
_LIMIT_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the benchmark."""
    parser.add_argument("--stages", type=int, default=2, metavar="D", help="ranks (%(default)s)")
    parser.add_argument(
        "--micro-batches", type=int, default=8, metavar="N", help="micro-batches per step (%(default)s)"
    )
    parser.add_argument("--schedules", default="1f1b", metavar="A,B", help="%(default)s")
    parser.add_argument(
        "--steps",
        type=int,
        default=10,
        metavar="K",
        help="of each engine, after two to warm up (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns 0; raises DsExtError for a wrong request or an engine that fails."""
    if args.steps < 1:
        raise ConfigError(f"--steps must be at least 1; got {args.steps}.")
    ours = [name for name in args.schedules.split(",") if name]
    for name in ours:
        get_schedule(name).timetable(args.stages, args.micro_batches)
    job = Job(args.stages, args.micro_batches, Costs(), 0.0, _LIMIT_S, "ds_ext.bench.gpt")
    found = _measure([*ours, RIVAL], job, args.steps)
    if args.json:
        params = {"stages": args.stages, "micro_batches": args.micro_batches, "machine": machine()}
        print(json.dumps([_as_json(name, found, params) for name in found], indent=1))
        return 0
    print(f"{args.stages} ranks, {args.micro_batches} micro-batches\n{describe_machine()}")
    for name, speeds in found.items():
        median, best = statistics.median(speeds), max(speeds)
        print(f"{name:<16} {median:8.0f} tokens/s, best {best:8.0f}, {_ratio(name, found):.3f} x {RIVAL}")
    if args.stages > usable_cores():
        print(
            f"{args.stages} ranks share {usable_cores():g} cores: the figures say little about the engines."
        )
    return 0


def _measure(names: list[str], job: Job, steps: int) -> dict[str, list[float]]:
    """Engine -> tokens a second of every step."""

    def speed(answers: list[Any]) -> float:
        starts, ends, tokens, _ = zip(*answers, strict=True)
        return tokens[0] / (max(ends) - min(starts))

    found = take_turns(names, job, steps, 2, _LIMIT_S)
    return {name: [*map(speed, rounds)] for name, rounds in found.items()}


def _ratio(name: str, found: dict[str, list[float]]) -> float:
    return statistics.median(found[name]) / statistics.median(found[RIVAL])


def _as_json(name: str, found: dict[str, list[float]], params: dict[str, Any]) -> dict[str, Any]:
    speeds = found[name]
    return {
        "name": name,
        "params": {**params, "ratio": _ratio(name, found)},
        "median": statistics.median(speeds),
        "best": max(speeds),
        "unit": "tokens/s",
        "repeats": len(speeds),
    }
