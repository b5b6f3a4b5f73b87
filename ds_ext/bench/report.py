"""What a benchmark found, as a table for people and as JSON for programs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..pipe_schedules.simulate import Simulation

_PACKAGES = ("ds_ext", "torch", "deepspeed")
_HEAD = (
    "schedule",
    "best",
    "median",
    "simulated",
    "ideal",
    "best/ideal",
    "simulated/ideal",
    "best/simulated",
)


@dataclass
class Result:
    """One schedule of one engine: milliseconds of every step but the first, its losses, or why it failed.

    ``simulated_ms`` is what each of those steps should have taken; ``simulation`` is that of the last.
    """

    name: str
    simulation: Simulation | None = None
    times_ms: list[float] = field(default_factory=list)
    simulated_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def best(self) -> float | None:
        """The fastest step; None if it failed."""
        return None if self.error or not self.times_ms else min(self.times_ms)

    @property
    def median(self) -> float | None:
        """The median step; None if it failed."""
        return None if self.error or not self.times_ms else statistics.median(self.times_ms)

    @property
    def simulated(self) -> float | None:
        """What the median step should have taken; without steps, what one should take."""
        if self.simulation is None:
            return None
        return statistics.median(self.simulated_ms or [self.simulation.makespan])

    @property
    def over_simulated(self) -> float | None:
        """The least ratio of a step to what it should have taken; None if it failed."""
        if self.error or self.simulation is None or not self.times_ms:
            return None
        should = self.simulated_ms or [self.simulation.makespan] * len(self.times_ms)
        return min(took / simulated for took, simulated in zip(self.times_ms, should, strict=True))


def as_json(results: Sequence[Result], params: dict[str, Any]) -> list[dict[str, Any]]:
    """``[{"name", "params", "median", "best", "unit", "repeats"}, ...]``; the machine is in the first one's params.

    A result that failed has "error" in its params, and null for its times.
    """
    found = []
    for result in results:
        own: dict[str, Any] = dict(params)
        if result.simulation is not None:
            own |= {"simulated": result.simulated, "ideal": result.simulation.ideal}
        own |= {"losses": result.losses} if result.error is None else {"error": result.error}
        if not found:
            own["machine"] = machine()
        found.append(
            {
                "name": result.name,
                "params": own,
                "median": result.median,
                "best": result.best,
                "unit": "ms",
                "repeats": len(result.times_ms),
            }
        )
    return found


def as_table(results: Sequence[Result]) -> str:
    """A line per schedule; under the table what failed and why."""
    rows = [_HEAD, *map(_row, results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    failed = [f"{result.name} failed: {result.error}" for result in results if result.error]
    return "\n".join(line.rstrip() for line in [*lines, *failed])


def _row(result: Result) -> tuple[str, ...]:
    simulation, best, median = result.simulation, result.best, result.median
    measured = ("failed", "") if best is None or median is None else (f"{best:.1f}", f"{median:.1f}")
    if simulation is None:
        return (result.name, *measured, "", "", "", "", "")
    simulated, ideal = result.simulated or 0.0, simulation.ideal
    return (
        result.name,
        *measured,
        f"{simulated:.1f}",
        f"{ideal:.1f}",
        "" if best is None else f"{best / ideal:.3f}",
        f"{simulated / ideal:.3f}",
        "" if result.over_simulated is None else f"{result.over_simulated:.3f}",
    )


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, cores, how busy they are with others, versions."""
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


def describe_machine() -> str:
    """The machine in one line."""
    found = machine()
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"{found['processor']}, {found['cores']} cores, load {found['load_1_minute']:g}; {versions}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
