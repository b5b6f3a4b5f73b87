"""``bench transport``: what a message between two ranks of this host takes, beside gloo and a plain copy in memory."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..pipe_schedules.costs import Costs
from .awake import busy_processes
from .ranks import Job, RankGroup, prepare_host
from .report import describe_machine, machine

SUMMARY = "what a message between two ranks of this host takes, by every transport, gloo alone and memcpy"
SIZES = (4, 1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
PEERS = 8  # of the rank that asks ready()
WAYS = {
    "shm": "send and receive through shared memory: one copy, used where it arrives",
    "tcp": "send and receive through a connection of this host with itself",
    "torch": "the transport over torch.distributed",
    "gloo": "torch.distributed's send and recv alone",
    "memcpy": "a copy of one core in its own memory",
    "ready": f"asking {PEERS} peers what has arrived, when nothing has",
}
IDLE = {"idle_shm": "shm", "idle_tcp": "tcp"}
_LIMIT_S = 120.0

Times = dict[tuple[str, int], list[float]]  # (way, bytes) -> seconds one way


@dataclass(frozen=True)
class ExchangeJob(Job):
    """Two ranks of :mod:`.exchange`, and the bytes of the messages that they send each other."""

    sizes: tuple[int, ...] = SIZES
    idle_s: float = 0.0  # how long to wait for a message that does not come; 0: not at all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the benchmark."""
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="K", help="measurements after one to warm up (%(default)s)"
    )
    parser.add_argument(
        "--sizes",
        default=",".join(map(str, SIZES)),
        metavar="A,B",
        help="bytes of the messages (%(default)s)",
    )
    parser.add_argument(
        "--idle",
        type=float,
        default=0.0,
        metavar="S",
        help="also wait for so long, and say what share of a core the busiest thread takes meanwhile",
    )
    parser.add_argument(
        "--busy", type=int, default=0, metavar="K", help="processes that compute beside it (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns 0; raises DsExtError for a wrong request or ranks that fail."""
    if args.repeats < 1:
        raise ConfigError(f"--repeats must be at least 1; got {args.repeats}.")
    if not 0 <= args.idle < _LIMIT_S / 4:
        raise ConfigError(f"--idle must be 0 to {_LIMIT_S / 4:g} seconds; got {args.idle:g}.")
    if not 0 <= args.busy <= 1024:
        raise ConfigError(f"--busy must be 0 to 1024 processes; got {args.busy}.")
    sizes = _sizes(args.sizes)
    with busy_processes(args.busy):
        found = _measure(args.repeats, sizes, args.idle)
    if args.json:
        print(json.dumps(_as_json(found, args.busy), indent=1))
    else:
        beside = f", {args.busy} busy processes beside them" if args.busy else ""
        print(f"2 ranks{beside}; microseconds one way, median (best)")
        print(f"{describe_machine()}\n{_as_table(found, sizes)}")
        print("\n".join(f"{name:<13}  {text}" for name, text in WAYS.items()))
    return 0


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(word) for word in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"--sizes must be numbers of bytes such as 4,65536; got {text!r}.")
    return sizes


def _measure(repeats: int, sizes: tuple[int, ...], idle_s: float) -> Times:
    prepare_host()
    job = ExchangeJob(2, 1, Costs(0, 0, 0), 0, _LIMIT_S, "ds_ext.bench.exchange", sizes=sizes, idle_s=idle_s)
    found: Times = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="ds_ext_bench_") as folder:
        group = RankGroup("transport", job, Path(folder))
        try:
            group.start()
            for repeat in range(1 + repeats):
                measured = group.ask(_LIMIT_S)[0]
                for key, seconds in measured.items() if repeat else ():
                    found[key] += seconds
        finally:
            group.close()
    return found


def _as_json(found: Times, busy: int) -> list[dict[str, Any]]:
    items = []
    for (name, size), seconds in found.items():
        median, best = statistics.median(seconds), min(seconds)
        params: dict[str, Any] = {"peers": size} if name == "ready" else {"bytes": size} if size else {}
        if name in WAYS and name != "ready":
            params["gb_per_s"] = size / median / 1e9
        unit, scale = ("% of a core", 100) if name in IDLE else ("us", 1e6)
        if not items:
            params |= {"machine": machine(), "busy": busy}
        items.append(
            {
                "name": name,
                "params": params,
                "median": scale * median,
                "best": scale * best,
                "unit": unit,
                "repeats": len(seconds),
            }
        )
    return items


def _as_table(found: Times, sizes: tuple[int, ...]) -> str:
    rows = [("", *map(_size, sizes))]
    for name in WAYS:
        times = [found[name, size] for size in sizes if (name, size) in found]
        if times:
            rows.append((name, *(f"{1e6 * statistics.median(t):.1f} ({1e6 * min(t):.1f})" for t in times)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    ready = found["ready", PEERS]
    lines.append(f"ready          {1e6 * statistics.median(ready):.1f} ({1e6 * min(ready):.1f})")
    for name, kind in IDLE.items():
        if shares := found.get((name, 0)):
            lines.append(f"idle           {100 * max(shares):.2f} % of a core at most, waiting over {kind}")
    return "\n".join(lines)


def _size(num_bytes: int) -> str:
    return (
        f"{num_bytes >> 20} MiB"
        if num_bytes >> 20
        else f"{num_bytes >> 10} KiB"
        if num_bytes >> 10
        else f"{num_bytes} B"
    )
