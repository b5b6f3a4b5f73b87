"""DPP, dynamic pipeline parallel: every device decides at run time what it computes next.

The decision is in :mod:`..dynamic`: a device alternates forwards and backwards, and takes the first by its policy of
those that have arrived and are admitted. This file runs the same policies under given costs, jitter included.
``simulate`` prices the resulting timetable, and the engine takes its links and buffers from it. With free messages it
is as fast as 1F1B and admits micro-batches earlier; late messages delay only the ops that need them::

    rank 0  0 1 2 3 . . . . . . 0'- . 1'- . 2'- . 3'-
    rank 1  . 0 1 2 3 . . . 0'- . 1'- . 2'- . 3'- . .
    rank 2  . . 0 1 2 3 0'- . 1'- . 2'- . 3'- . . . .
    rank 3  . . . 0 0'- 1 1'- 2 2'- 3 3'- . . . . . .

The greedy rule is that of MegatronApp's dynamic scheduler (MegaDPP). Admission, which bounds memory and excludes
deadlocks, is new here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import ScheduleError
from ..costs import Costs
from ..dynamic import POLICIES, Rules
from ..events import NoAdmission, Policy, Work
from ..list_scheduling.dispatch import dispatch
from ..placement import Placement, bidirectional_v, linear, looped, v
from ..registry import DynamicRules, Option, Orders, planned_schedule

_PLACES: Mapping[str, Callable[[int, int], Placement]] = {
    "linear": lambda num_devices, chunks: linear(num_devices),
    "interleaved": looped,
    "v": lambda num_devices, chunks: v(num_devices),
    "bidirectional_v": lambda num_devices, chunks: bidirectional_v(num_devices),
}
_OPTIONS = {
    "placement": Option("linear", None, "where the stages live", tuple(_PLACES)),
    "chunks": Option(2, 1, "stages a device, of the placement interleaved"),
    "policy": Option("group", None, "which of several ready computations is taken", POLICIES),
    "backward": Option("whole", None, "split: weight gradients fill the waits", ("whole", "split")),
    "max_in_flight": Option(0, 0, "micro-batches that are under way at most, all pipes together; 0: 2 D"),
    "max_activations": Option(
        0.0,
        0,
        "most activations a device keeps, in D-ths of the model; 0: those of all micro-batches under way",
    ),
}


def _place(num_devices: int, placement: str, chunks: int) -> Placement:
    if placement == "bidirectional_v" and num_devices % 2:
        ways = " or ".join(str(n) for n in (num_devices - 1, num_devices + 1) if n >= 2)
        raise ScheduleError(
            f"dpp: the placement bidirectional_v needs an even number of stages (pipeline_parallel_size), because "
            f"devices work in mirrored pairs; got {num_devices}. Use {ways}, or another placement."
        )
    return _PLACES[placement](num_devices, chunks)


def make_rules(placed: Placement, micro_batches: int, options: Mapping[str, Any]) -> Rules:
    """Return the rules that all devices of a pipeline group share.

    Args:
        options: of the schedule, complete.

    Raises:
        ScheduleError: an option has no effect, or a limit is too low for one micro-batch of every pipe.
    """
    if options["placement"] != "interleaved" and options["chunks"] != _OPTIONS["chunks"].default:
        raise ScheduleError(
            f"dpp: chunks {options['chunks']} has no effect with the placement {options['placement']}. Leave chunks "
            f"out, or take the placement interleaved."
        )
    in_flight = options["max_in_flight"] or 2 * placed.num_devices
    if in_flight < placed.replicas:
        raise ScheduleError(
            f"dpp: max_in_flight {in_flight} leaves one of the {placed.replicas} pipes no micro-batch. Use at least "
            f"{placed.replicas}."
        )
    share, rest = divmod(in_flight, placed.replicas)
    credits = tuple(share + (pipe < rest) for pipe in range(placed.replicas))
    return Rules(
        placed,
        micro_batches,
        options["backward"] == "split",
        options["policy"],
        credits,
        _rooms(placed, credits, options["max_activations"]),
    )


def _rooms(placed: Placement, credits: tuple[int, ...], most: float) -> tuple[int, ...]:
    """Per device how many stages of micro-batches it may keep. Raises ScheduleError for less than one of each."""
    by_credits = [
        sum(devices.count(d) * n for devices, n in zip(placed.pipes, credits, strict=True))
        for d in range(placed.num_devices)
    ]
    share = placed.stages / placed.num_devices
    limit = math.floor(most * share + 1e-9) if most else max(by_credits)
    least = max(map(len, placed.chunks))
    if limit < least:
        raise ScheduleError(
            f"dpp: max_activations {most:g} has no room for one micro-batch at each of the {least} stages that a "
            f"device holds (of all pipes). Use at least {least / share:g} (D-ths of the model)."
        )
    return tuple(min(limit, n) for n in by_credits)


def run(rules: DynamicRules, costs: Costs) -> Orders:
    """Return the order of every device when computations and messages take the times of ``costs``, with jitter."""
    work = Work(rules.placement, rules.micro_batches, costs, rules.split, jittered=True)
    devices: list[Policy] = [rules.device(device) for device in range(rules.placement.num_devices)]
    done = dispatch(work, devices, NoAdmission(work))
    assert done is not None, "admission of whole micro-batches keeps every device going"
    return done.orders


@planned_schedule(
    "dpp", place=_place, options=_OPTIONS, variants=lambda num_devices, n: [], dynamic=make_rules
)
def dpp(placed: Placement, micro_batches: int, costs: Costs, /, **options: Any) -> Orders:
    """Order decided at run time, by what has arrived; here as it comes out under given costs."""
    return run(make_rules(placed, micro_batches, options), costs)
