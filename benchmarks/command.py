"""Parts that the benchmarks' commands share: flags, requested schedules, tables, JSON items and the machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_ext.cli.schedule_flags import split_request
from ds_ext.errors import ConfigError
from ds_ext.pipe_schedules import Schedule, Timetable, get_schedule
from ds_ext.pipe_schedules.costs import Costs, factors_text
from ds_ext.pipe_schedules.placement import Placement

_IN_SLICES = re.compile(r"(.*) in (\d+) slices")  # "zb_v:max_activations=3 in 4 slices"
_PACKAGES = ("ds_ext", "torch", "deepspeed")


@dataclass(frozen=True)
class Report:
    """Result of a benchmark: items of ``--json``, or a title and a text.

    Args:
        failed: True if one of our schedules failed.
    """

    items: list[dict[str, Any]]
    title: str
    text: str
    failed: bool = False


def add_number(
    parser: argparse.ArgumentParser, flag: str, default: float, metavar: str, text: str, *aliases: str
) -> None:
    """Add a flag for a number of the default's type."""
    help = f"{text} (%(default)s)"
    parser.add_argument(flag, *aliases, type=type(default), default=default, metavar=metavar, help=help)


def add_size_flags(parser: argparse.ArgumentParser, num_devices: int, micro_batches: int) -> None:
    """Add the flags for D and N with these defaults."""
    devices = "devices of the pipeline, one rank each"
    add_number(parser, "--num-devices", num_devices, "D", devices, "--stages")
    add_number(parser, "--micro-batches", micro_batches, "N", "micro-batches per step")


def add_device_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the device of the ranks."""
    help = "device of the ranks, which share a GPU if they outnumber the GPUs (%(default)s)"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=help)


def count_gpus(device: str) -> int:
    """Return the number of GPUs for ``--device``: 0 for cpu. Raises ConfigError for cuda without a GPU."""
    if device == "cpu":
        return 0
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("--device: cuda needs a GPU (torch sees none). Use cpu.")
    return torch.cuda.device_count()


def names_in(text: str) -> list[str]:
    """Return the names in a comma-separated list, each once; ``none`` is the empty list."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    return [] if names == ["none"] else names


def in_slices(text: str, slices: int) -> str:
    """Return a request for a schedule with slices of sequences."""
    return text if slices == 1 else f"{text} in {slices} slices"


def slices_of(text: str) -> int:
    """Return the slices of a request of :func:`in_slices`."""
    match = _IN_SLICES.fullmatch(text)
    return int(match[2]) if match else 1


def read_request(text: str) -> tuple[Schedule, dict[str, Any]]:
    """Return the schedule and options of ``NAME[:KEY=VALUE...]``, in slices or not. Raises ScheduleError."""
    match = _IN_SLICES.fullmatch(text)
    name, options = split_request(match[1] if match else text)
    return get_schedule(name), options


def options_for(text: str, costs: Costs) -> dict[str, Any]:
    """Return a request's options; a planned schedule also gets the costs, without jitter and link delays."""
    schedule, options = read_request(text)
    if schedule.planned:
        options["costs"] = f"f={costs.forward!r},b={costs.backward_input!r},w={costs.backward_weight!r}"
        if costs.stages is not None:
            options["costs"] += f",stages={factors_text(costs.stages)}"
        if costs.head:
            options["costs"] += f",head={costs.head!r}"
    return options


def costs_on(placement: Placement, costs: Costs) -> Costs:
    """Return the costs with the head on the last stage, unless the placement has parts of it."""
    if not costs.head or placement.head_parts:
        return costs
    assert not isinstance(costs.head, tuple)
    last = 1 + costs.head * placement.stages / placement.devices_per_pipe
    return replace(costs, head=0.0, stages=(*(1.0,) * (placement.stages - 1), last))


def timetable_for(
    text: str, devices: int, micro_batches: int, costs: Costs, divides_head: bool = False
) -> Timetable:
    """Return a request's timetable; for a dynamic schedule the simulated one. Raises ScheduleError."""
    schedule, options = read_request(text)
    schedule = schedule.dividing_head(divides_head)
    costs = costs_on(schedule.placement(devices, options), costs)
    simulated = None if schedule.dynamic is None else costs
    options = options_for(text, costs)
    return schedule.timetable(devices, micro_batches, options, simulated, slices_of(text))


def check_at_least(flag: str, value: float, least: float) -> None:
    """Raise ConfigError for a value below ``least``."""
    if not value >= least:
        raise ConfigError(f"{flag}: must be at least {least:g} (got {value:g}).")


def json_item(
    name: str,
    params: dict[str, Any],
    values: Sequence[float],
    unit: str,
    best: Callable[[Sequence[float]], float] = min,
) -> dict[str, Any]:
    """Return one result as ``--json`` prints it; without values, the figures are null."""
    return {
        "name": name,
        "params": params,
        "median": statistics.median(values) if values else None,
        "best": best(values) if values else None,
        "unit": unit,
        "repeats": len(values),
    }


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns: the first left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Return the properties that the figures depend on: processor, cores, load, system and versions."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_1_minute": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions,
    }


def describe(host: dict[str, Any]) -> str:
    """Describe a machine in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in host["versions"].items())
    return f"{host['processor']}, {host['cores']} cores, load {host['load_1_minute']:g}; {versions}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
