"""DPP, dynamic pipeline parallel: every device decides at run time what it computes next.

The decision is in :mod:`..dpp.policy`: of what has arrived and is admitted, by the policy's order, forwards and
backwards in turn. The timetable of this file is the run of those same policies under given costs, jitter included: what
``simulate`` prices and what the engine takes its links and buffers from. With free messages it takes as long as 1F1B,
but admits micro-batches earlier; when messages are slow or late, the order goes round them::

    rank 0  0 1 2 3 . . . . . . 0'- . 1'- . 2'- . 3'-
    rank 1  . 0 1 2 3 . . . 0'- . 1'- . 2'- . 3'- . .
    rank 2  . . 0 1 2 3 0'- . 1'- . 2'- . 3'- . . . .
    rank 3  . . . 0 0'- 1 1'- 2 2'- 3 3'- . . . . . .

The greedy rule is that of MegatronApp's dynamic scheduler (MegaDPP); admission, which keeps it from running into memory
or a deadlock, is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ...errors import ScheduleError
from ..costs import Costs, parse_costs
from ..dpp.follow import FollowRules
from ..dpp.policy import POLICIES, Rules, in_micro_batch_order, join_ends
from ..files import is_timetable_file, schedule_of_file
from ..list_scheduling.dispatch import AllAtOnce, Policy, Work, dispatch
from ..ops import Timetable
from ..placement import Placement, bidirectional_v, linear, looped, v
from ..registry import DynamicRules, Option, Orders, Schedule, get_schedule, planned_schedule

_PLACES: Mapping[str, Callable[[int, int], Placement]] = {
    "linear": lambda ranks, chunks: linear(ranks),
    "interleaved": looped,
    "v": lambda ranks, chunks: v(ranks),
    "bidirectional_v": lambda ranks, chunks: bidirectional_v(ranks),
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
    "max_bytes": Option(0, 0, "most bytes of activations a device keeps, by stage_bytes; 0: no such limit"),
    "stage_bytes": Option("", None, "bytes of a micro-batch's activations at every stage: 4e6x7/6e6"),
    "follow": Option(False, None, "keep to a plan, and go round what is late"),
    "plan": Option(
        "", None, "the plan: a static schedule or a timetable file; else this schedule's own order"
    ),
    "window": Option(4, 1, "planned computations that a device that follows may look ahead"),
    "report": Option(0, 0, "steps between two reports of who was slow and what it cost; 0: none"),
    "record": Option("", None, "file for the order of the last step, as a timetable (.json or .txt)"),
    "deterministic": Option(False, None, "gradients of a stage are added in the order of micro-batches"),
}
# What there is no choice about where a plan is followed.
_OF_THE_ORDER = (
    *("placement", "chunks", "policy", "backward"),
    *("max_in_flight", "max_activations", "max_bytes", "stage_bytes"),
)


def _place(ranks: int, placement: str, chunks: int, plan: str) -> Placement:
    if plan:
        return schedule_to_follow(plan).placement(ranks)
    if placement == "bidirectional_v" and ranks % 2:
        ways = " or ".join(str(n) for n in (ranks - 1, ranks + 1) if n >= 2)
        raise ScheduleError(
            f"dpp: the placement bidirectional_v needs an even number of stages (pipeline_parallel_size), because "
            f"devices work in mirrored pairs; got {ranks}. Use {ways}, or another placement."
        )
    return _PLACES[placement](ranks, chunks)


def make_rules(
    placed: Placement, micro_batches: int, costs: Costs, options: Mapping[str, Any]
) -> DynamicRules:
    """What all devices agree on before a step. Raises ScheduleError for a limit that leaves a pipe no micro-batch.

    Args:
        costs: by which orders are planned that must be known in advance; their jitter does not count.
        options: of the schedule, complete.
    """
    _refuse_unused(options)
    plan, known = options["plan"], replace(costs, jitter=0.0)
    if plan:
        made = schedule_to_follow(plan).timetable(placed.ranks, micro_batches, {}, known)
        return FollowRules(made, options["window"], options["deterministic"])
    rules = _greedy_rules(placed, micro_batches, costs, options)
    if options["follow"]:
        made = Timetable("dpp", placed, micro_batches, run(rules, known))
        return FollowRules(made, options["window"], options["deterministic"])
    return rules


def _refuse_unused(options: Mapping[str, Any]) -> None:
    """Raise ScheduleError for an option that another one makes void: who gives it expects it to count."""
    void: dict[str, tuple[str, str]] = {}  # option -> why, and what else to do
    if not options["follow"]:
        void = dict.fromkeys(("plan", "window"), ("without follow", "set follow"))
    elif options["plan"]:
        why = f"with the plan {options['plan']!r}, which says it all"
        void = dict.fromkeys(_OF_THE_ORDER, (why, "leave the plan out"))
    if options["placement"] != "interleaved":
        void.setdefault(
            "chunks", (f"with the placement {options['placement']}", "take the placement interleaved")
        )
    if not options["max_bytes"]:
        void.setdefault("stage_bytes", ("without max_bytes", "set max_bytes"))
    for name, (why, way) in void.items():
        if options[name] != _OPTIONS[name].default:
            raise ScheduleError(
                f"dpp: {name} {options[name]!r} has no effect {why}. Leave {name} out, or {way}."
            )


def schedule_to_follow(plan: str) -> Schedule:
    """The schedule by name or file. Raises ScheduleError for one that has no order of its own."""
    found = schedule_of_file(plan) if is_timetable_file(plan) else get_schedule(plan)
    if found.dynamic is not None:
        raise ScheduleError(
            f"dpp: plan {plan!r} has no fixed order to follow; leave it out, or name 1 static schedule."
        )
    return found


def _greedy_rules(placed: Placement, micro_batches: int, costs: Costs, options: Mapping[str, Any]) -> Rules:
    in_flight = options["max_in_flight"] or 2 * placed.ranks
    if in_flight < placed.replicas:
        raise ScheduleError(
            f"dpp: max_in_flight {in_flight} leaves one of the {placed.replicas} pipes no micro-batch. Use at least "
            f"{placed.replicas}."
        )
    share, rest = divmod(in_flight, placed.replicas)
    credits = tuple(share + (pipe < rest) for pipe in range(placed.replicas))
    rules = Rules(
        placed,
        micro_batches,
        options["backward"] == "split",
        options["policy"],
        credits,
        _rooms(placed, credits, options["max_activations"], options["deterministic"]),
        *_bytes(placed, options),
    )
    return _in_order(rules, replace(costs, jitter=0.0)) if options["deterministic"] else rules


def _rooms(placed: Placement, credits: tuple[int, ...], most: float, ordered: bool) -> tuple[int, ...]:
    """Per device how many stages of micro-batches it may keep. Raises ScheduleError for less than one of each."""
    by_credits = [
        sum(devices.count(d) * n for devices, n in zip(placed.pipes, credits, strict=True))
        for d in range(placed.ranks)
    ]
    share = placed.stages / placed.ranks
    if most and ordered:
        raise ScheduleError(
            f"dpp: deterministic with max_activations {most:g} could make devices wait for each other: a micro-batch "
            f"that came first may hold the room of one that is to be added before it. Lower max_in_flight (now "
            f"{sum(credits)}) instead; a device keeps that many activations at most."
        )
    limit = math.floor(most * share + 1e-9) if most else max(by_credits)
    least = max(map(len, placed.chunks))
    if limit < least:
        raise ScheduleError(
            f"dpp: max_activations {most:g} has no room for one micro-batch at each of the {least} stages that a "
            f"device holds (of all pipes). Use at least {least / share:g} (D-ths of the model)."
        )
    return tuple(min(limit, n) for n in by_credits)


def _bytes(placed: Placement, options: Mapping[str, Any]) -> tuple[tuple[float, ...], int]:
    """Bytes of every stage's activations, and how many a device may keep. Raises ScheduleError."""
    most, text = options["max_bytes"], options["stage_bytes"]
    if not most:
        return (0.0,) * placed.stages, 0
    if options["deterministic"]:
        raise ScheduleError(
            f"dpp: deterministic with max_bytes {most:,} could make devices wait for each other, as with "
            f"max_activations. Lower max_in_flight instead."
        )
    sizes = parse_costs(f"stages={text}").stages if text else None
    if sizes is None or len(sizes) != placed.stages:
        raise ScheduleError(
            f"dpp: max_bytes {most:,} needs stage_bytes, the bytes of a micro-batch's activations at each of the "
            f"{placed.stages} stages; got {len(sizes or ())} numbers. Give them as 4e6x{placed.stages}. For a model "
            f'`python -m ds_ext simulate` with --model or its sizes prints them ("stage bytes"); docs/dpp.md has the '
            f'formula ("Bytes of a stage").'
        )
    least = max(sum(sizes[chunk.stage] for chunk in chunks) for chunks in placed.chunks)
    if most < least:
        raise ScheduleError(
            f"dpp: max_bytes {most:,} has no room for one micro-batch at each of the stages that a device holds (of "
            f"all pipes). Use at least {math.ceil(least):,}."
        )
    return sizes, most


def _in_order(rules: Rules, costs: Costs) -> Rules:
    """The same with gradients in the order of micro-batches; where that leaves it open, as these rules plan it."""
    placed, devices = rules.placement, range(rules.placement.ranks)
    lists = [in_micro_batch_order(placed, rules.pipes, device) for device in devices]
    by_stage = replace(rules, sequences=tuple(tuple(map(tuple, mine)) for mine in lists))
    if all(pipe[0] != pipe[-1] or placed.stages == 1 for pipe in placed.pipes):
        return by_stage
    orders = run(by_stage, costs)
    joined = (join_ends(placed, order, mine) for order, mine in zip(orders, lists, strict=True))
    return replace(rules, sequences=tuple(joined))


def run(rules: DynamicRules, costs: Costs) -> Orders:
    """The order of every device when computations and messages take what ``costs`` say, jitter included."""
    work = Work(rules.placement, rules.micro_batches, costs, rules.split, jittered=True)
    devices: list[Policy] = [rules.device(device) for device in range(rules.placement.ranks)]
    done = dispatch(work, devices, AllAtOnce(rules.micro_batches))
    assert done is not None, "admission of whole micro-batches keeps every device going"
    return done.orders


@planned_schedule("dpp", place=_place, options=_OPTIONS, variants=lambda ranks, n: [], dynamic=make_rules)
def dpp(placed: Placement, micro_batches: int, costs: Costs, /, **options: Any) -> Orders:
    """Order decided at run time, by what has arrived; here as it comes out under given costs."""
    return run(make_rules(placed, micro_batches, costs, options), costs)
