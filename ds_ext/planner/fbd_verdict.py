"""Whether devices that only compute forwards pay beside a plan: FBD on all, against what there is without it.

A backward device works f + b + w for a micro-batch, as a device of a plain pipeline does that stores its activations.
So forward devices save no time as such: they pay where the others would have to compute forwards again (4 instead of 3
units), or where nothing else fits, because a backward device keeps one micro-batch however deep the pipeline is.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ScheduleError
from ..pipe_schedules.costs import Costs
from .candidates import format_bytes, parse_bytes
from .fbd import SCHEDULE, ForwardDevices, Priced, best_way
from .memory import ModelSizes
from .parallel_sizes import Cluster, Cut, Cuts, parallel_sizes


@dataclass(frozen=True)
class Verdict:
    """FBD on all devices, beside the best plan for the others alone and for all of them without roles.

    ``best`` is None where nothing fits, ``reason`` says why; ``together`` is as slow as the slower kind and has the
    memory of the smaller one.
    """

    forward: ForwardDevices
    best: Priced | None
    alone: Cut
    together: Cut | None
    devices: int
    reason: str = ""

    @property
    def rivals(self) -> list[Cut]:
        """The plans without roles that fit."""
        return [c for c in (self.alone, self.together) if c is not None and c.fits and c.step_s is not None]

    @property
    def pays(self) -> bool:
        """Whether FBD takes less time than every plan without roles."""
        best = self.best
        return best is not None and all(best.step_s < (cut.step_s or 0.0) for cut in self.rivals)

    def as_dict(self) -> dict[str, Any]:
        """For programs: the two lines, whether it pays, and how to train so."""
        found: dict[str, Any] = {
            "pays": self.pays,
            "reason": "; ".join(line.strip() for line in self.lines()),
        }
        if self.best is not None:
            found |= {
                "step_s": self.best.step_s,
                "memory_bytes": self.best.memory_bytes,
                "forward_memory_bytes": self.best.forward_memory_bytes,
                "micro_batches": self.best.way.micro_batches,
                "ds_ext": self.best.section,
            }
        return found

    def lines(self) -> list[str]:
        """What it is and whether it pays, in two lines; and how to train so if it does."""
        kind = self.forward
        speed = "as fast" if kind.slowdown == 1 else f"{kind.slowdown:g} times the time"
        what = f"with {kind.count} forward devices besides ({speed}, {format_bytes(kind.memory_bytes)})"
        others = " and ".join(
            f"{self._name(cut)} {cut.step_s:.4g} s ({cut.row.label}, recompute {cut.row.recompute})"
            for cut in self.rivals
            if cut.row is not None
        )
        if self.best is None:
            return [f"{what}: {SCHEDULE} is not possible: {self.reason}."]
        first = (
            f"{what}: {SCHEDULE}, {self.best.way}: {self.best.step_s:.4g} s, {format_bytes(self.best.memory_bytes)} a "
            f"backward and {format_bytes(self.best.forward_memory_bytes)} a forward device"
        )
        if not self.rivals:
            return [first, "  it pays: nothing fits without it", *self._way_out()]
        least = min(cut.step_s or 0.0 for cut in self.rivals)
        share = abs(self.best.step_s / least - 1)
        verdict = (
            f"it pays: {share:.1%} less time"
            if self.pays
            else f"it does not pay: it takes {share:.1%} longer"
        )
        than = f"{'the better of ' if len(self.rivals) > 1 else ''}{others}"
        return [first, f"  {verdict} than {than}", *(self._way_out() if self.pays else [])]

    def _way_out(self) -> list[str]:
        assert self.best is not None
        return [f'  to train so: "ds_ext": {json.dumps(self.best.section)}']

    def _name(self, cut: Cut) -> str:
        if cut is self.alone:
            return f"the {self.devices} devices alone,"
        slower = "" if self.forward.slowdown <= 1 else ", as slow as the slowest"
        return f"all {self.devices + self.forward.count} without roles{slower},"


def add_forward_flags(verb: argparse.ArgumentParser) -> None:
    """The flags of ``plan`` for forward devices."""
    verb.add_argument(
        "--forward-devices",
        type=int,
        metavar="F",
        help='devices besides, for forwards only: say whether "fbd" on all pays beside the plan',
    )
    verb.add_argument(
        "--forward-slowdown", type=float, metavar="X", help="time of the same work on one of them (1)"
    )
    verb.add_argument("--forward-memory", metavar="24GB", help="of one of them (as --memory)")


def forward_devices_of(args: argparse.Namespace) -> ForwardDevices | None:
    """What the flags say; None: nothing. Raises ScheduleError for what does not fit."""
    if args.forward_devices is None:
        given = [f for f in ("forward_slowdown", "forward_memory") if getattr(args, f) is not None]
        if given:
            flag = f"--{given[0].replace('_', '-')}"
            raise ScheduleError(f"plan: {flag} is of forward devices: say how many with --forward-devices.")
        return None
    slowdown = 1.0 if args.forward_slowdown is None else args.forward_slowdown
    return ForwardDevices(args.forward_devices, slowdown, parse_bytes(args.forward_memory or args.memory))


def with_forward_devices(
    cluster: Cluster, forward: ForwardDevices, sizes: ModelSizes, ratios: Costs, alone: Cuts
) -> Verdict:
    """Whether to use ``forward`` besides ``cluster``, for which ``alone`` is the plan.

    Args:
        sizes, ratios: as for :func:`.parallel_sizes`.
    """
    slower = replace(
        cluster,
        devices=cluster.devices + forward.count,
        memory_bytes=min(cluster.memory_bytes, forward.memory_bytes),
        flops=cluster.flops / max(forward.slowdown, 1.0),
    )
    try:
        together = parallel_sizes(slower, sizes, ratios).found[0]
    except ScheduleError:
        together = None
    best, reason = best_way(cluster, forward, sizes, ratios)
    return Verdict(forward, best, alone.found[0], together, cluster.devices, reason)
