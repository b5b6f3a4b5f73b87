"""``bench engine``: what an engine itself costs, in processor time an instruction, without layers and transport.

What is left of a step's processor time when the layers' own passes and the transport's calls are taken off, the
optimizer's step and the reductions included, over the number of instructions.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from ..comm.transport import TRANSPORTS
from ..errors import ConfigError
from ..pipe_schedules import get_schedule
from ..pipe_schedules.costs import Costs
from .ranks import Job, take_turns
from .report import describe_machine, machine

SUMMARY = "processor time that an engine takes for an instruction, without layers and transport"
RIVAL = "deepspeed_1f1b"
OVER = " over "  # an engine is called "1f1b", or "1f1b over shm"
_DEFAULT = "1f1b,bitpipe,bitpipe_zb"
_LIMIT_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the benchmark."""
    parser.add_argument(
        "--stages", type=int, default=2, metavar="D", help="devices, one rank each (%(default)s)"
    )
    parser.add_argument(
        "--micro-batches", type=int, default=16, metavar="N", help="micro-batches per step (%(default)s)"
    )
    parser.add_argument("--schedules", default=_DEFAULT, metavar="A,B", help="%(default)s")
    parser.add_argument(
        "--transports",
        default="auto",
        metavar="A,B",
        help="over which each schedule is measured (%(default)s)",
    )
    parser.add_argument(
        "--repeats", type=int, default=7, metavar="K", help="measurements after one to warm up (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns 0; raises DsExtError for a wrong request or an engine that fails."""
    if args.stages < 2:
        raise ConfigError(f"--stages must be at least 2, as one stage sends no message; got {args.stages}.")
    if args.repeats < 1:
        raise ConfigError(f"--repeats must be at least 1; got {args.repeats}.")
    ours = [name for name in args.schedules.split(",") if name]
    for name in ours:
        get_schedule(name).timetable(args.stages, args.micro_batches)
    transports = [name for name in args.transports.split(",") if name]
    if not transports or not set(transports) <= set(TRANSPORTS):
        raise ConfigError(f"--transports must be of {', '.join(TRANSPORTS)}; got {args.transports!r}.")
    ours = [name if way == "auto" else name + OVER + way for name in ours for way in transports]
    costs = Costs(0, 0, 0)
    job = Job(args.stages, args.micro_batches, costs, 0.125, _LIMIT_S, "ds_ext.bench.overhead")
    found = _measure([*ours, RIVAL], job, args.repeats)
    if args.json:
        params = {"stages": args.stages, "micro_batches": args.micro_batches, "machine": machine()}
        print(json.dumps([_as_json(name, spent, params) for name, spent in found.items()], indent=1))
    else:
        print(f"{args.stages} ranks, {args.micro_batches} micro-batches\n{describe_machine()}")
        print(_as_table(found))
    return 0


def _measure(names: list[str], job: Job, repeats: int) -> dict[str, list[Any]]:
    """Engine -> what rank 0 spent, for every repeat."""
    found = take_turns(names, job, repeats, 1, _LIMIT_S)
    return {name: [answers[0] for answers in rounds] for name, rounds in found.items()}


def _per_instruction_us(spent: Any) -> float:
    return 1e6 * (spent.whole_s - spent.transport_s - spent.layers_s) / spent.instructions


def _per_message_us(spent: Any) -> float:
    return 1e6 * spent.transport_s / max(spent.messages, 1)


def _as_json(name: str, found: list[Any], params: dict[str, Any]) -> dict[str, Any]:
    times = [_per_instruction_us(spent) for spent in found]
    per_message = statistics.median(map(_per_message_us, found))
    return {
        "name": name,
        "params": {
            **params,
            "instructions": found[0].instructions,
            "messages": found[0].messages,
            "us_per_message": per_message,
        },
        "median": statistics.median(times),
        "best": min(times),
        "unit": "us per instruction",
        "repeats": len(times),
    }


def _as_table(found: dict[str, list[Any]]) -> str:
    rows = [("engine", "us/instruction", "best", "instructions", "us/message in the transport")]
    for name, spent in found.items():
        times = [_per_instruction_us(one) for one in spent]
        message = statistics.median(map(_per_message_us, spent))
        count = f"{spent[0].instructions}"
        rows.append((name, f"{statistics.median(times):.1f}", f"{min(times):.1f}", count, f"{message:.1f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
