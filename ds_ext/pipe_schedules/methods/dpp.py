"""DPP, dynamic pipeline parallelism: each device chooses its next op at run time.

The policy is in :mod:`..dynamic`: a device alternates between forwards and backwards, and computes the ready op with
the highest priority. This file runs the policies under given costs and jitter. ``simulate`` evaluates the resulting
timetable; the engine uses its links and buffers. With free messages DPP takes as long as 1F1B and admits micro-batches
earlier. A late message delays only the ops that need it::

    device 0  0 1 2 3 . . . . . . 0'- . 1'- . 2'- . 3'-
    device 1  . 0 1 2 3 . . . 0'- . 1'- . 2'- . 3'- . .
    device 2  . . 0 1 2 3 0'- . 1'- . 2'- . 3'- . . . .
    device 3  . . . 0 0'- 1 1'- 2 2'- 3 3'- . . . . . .

The greedy choice follows MegatronApp's dynamic scheduler (MegaDPP). The admission rule, which bounds memory and
prevents deadlocks, is our addition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import ScheduleError
from ..costs import Costs
from ..definition import Option, Orders, needs_even_devices
from ..dynamic import POLICIES, DynamicRules
from ..events import Policy, Workload
from ..list_scheduling.dispatch import dispatch
from ..placement import Placement, bidirectional_v, linear, looped, v
from ..registry import planned_schedule

_PLACES: Mapping[str, Callable[[int, int], Placement]] = {
    "linear": lambda num_devices, chunks: linear(num_devices),
    "interleaved": looped,
    "v": lambda num_devices, chunks: v(num_devices),
    "bidirectional_v": lambda num_devices, chunks: bidirectional_v(num_devices),
}
_OPTIONS = {
    "placement": Option("linear", None, "placement of the stages", tuple(_PLACES)),
    "chunks": Option(2, 1, "stages per device, for placement interleaved"),
    "policy": Option("group", None, "choice among ready ops", POLICIES),
    "backward": Option("whole", None, "split: weight gradients fill idle time", ("whole", "split")),
    "max_in_flight": Option(0, 0, "maximum number of micro-batches in flight, over all pipes; 0: 2 D"),
    "max_activations": Option(
        0.0,
        0,
        "maximum live activations per device, in units of 1/D of the model; 0: no limit beyond max_in_flight",
    ),
}


def _place(num_devices: int, placement: str, chunks: int) -> Placement:
    if placement == "bidirectional_v" and num_devices % 2:
        raise ScheduleError(needs_even_devices("dpp with placement bidirectional_v", num_devices))
    return _PLACES[placement](num_devices, chunks)


def make_rules(placed: Placement, micro_batches: int, options: Mapping[str, Any]) -> DynamicRules:
    """Return the rules of a step; ``options`` contains all options of the schedule."""
    if options["placement"] != "interleaved" and options["chunks"] != _OPTIONS["chunks"].default:
        raise ScheduleError(
            f"dpp: chunks needs placement interleaved (got {options['chunks']} with placement "
            f"{options['placement']}). Remove chunks, or change the placement."
        )
    max_in_flight = options["max_in_flight"] or 2 * placed.num_devices
    if max_in_flight < placed.replicas:
        raise ScheduleError(
            f"dpp: max_in_flight must be at least the number of pipes, {placed.replicas} (got {max_in_flight})."
        )
    share, remainder = divmod(max_in_flight, placed.replicas)
    in_flight = tuple(share + (pipe < remainder) for pipe in range(placed.replicas))
    return DynamicRules(
        placed,
        micro_batches,
        options["backward"] == "split",
        options["policy"],
        in_flight,
        _max_live(placed, in_flight, options["max_activations"] or None),
    )


def _max_live(
    placed: Placement, in_flight: tuple[int, ...], max_activations: float | None
) -> tuple[int, ...]:
    """Return the maximum of (stage, micro-batch) pairs per device.

    Args:
        in_flight: maximum number of micro-batches in flight, per pipe.
        max_activations: limit in units of 1/D of the model; None: no limit beyond ``in_flight``.
    """
    max_pairs = tuple(
        sum(devices.count(d) * n for devices, n in zip(placed.pipes, in_flight, strict=True))
        for d in range(placed.num_devices)
    )
    if max_activations is None:
        return max_pairs
    stages_per_unit = placed.stages / placed.num_devices
    limit = math.floor(max_activations * stages_per_unit + 1e-9)
    chunks = max(map(len, placed.chunks))
    if limit < chunks:
        raise ScheduleError(
            f"dpp: max_activations is too low for one micro-batch at each of the {chunks} stages of a device "
            f"(got {max_activations:g}). Use at least {chunks / stages_per_unit:g} (units of 1/D of the model)."
        )
    return tuple(min(limit, n) for n in max_pairs)


def run(rules: DynamicRules, costs: Costs) -> Orders:
    """Return the order of every device under ``costs``, with jitter."""
    workload = Workload(rules.placement, rules.micro_batches, costs, rules.split, jittered=True)
    devices: list[Policy] = [rules.device(device) for device in range(rules.placement.num_devices)]
    result = dispatch(workload, devices)
    assert result is not None, "the rules prevent deadlocks"
    return result.orders


@planned_schedule(
    "dpp", place=_place, options=_OPTIONS, variants=lambda num_devices, n: [], dynamic=make_rules
)
def dpp(placed: Placement, micro_batches: int, costs: Costs, /, **options: Any) -> Orders:
    """Each device chooses its next op at run time; the timetable is one run under given costs."""
    return run(make_rules(placed, micro_batches, options), costs)
