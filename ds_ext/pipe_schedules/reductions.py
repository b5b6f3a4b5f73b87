"""Eager gradient reduction: right after the last backward of a stage, while other stages still compute.

A reduction is a collective over the replicas of a device. The replicas finish their stages in different orders, but
must start the reductions in a common order: by the time at which the last replica finishes a stage.
"""

from __future__ import annotations

from .ops import BACKWARD, BACKWARD_WEIGHT, Op
from .simulation import Simulation


def eager_reductions(simulation: Simulation) -> tuple[dict[Op, tuple[int, ...]], ...]:
    """Return, for every device, op -> stages whose reductions start after that op, in order.

    A device starts the reduction of a stage when it has finished that stage and all earlier ones in the common order.
    Each stage of a device occurs once. (BitPipe, arXiv 2410.19367, section 3.3; the common order is our addition.)
    """
    last_backwards = [
        {op.stage: (end, op) for op, _, end in spans if op.kind in (BACKWARD, BACKWARD_WEIGHT)}
        for spans in simulation.spans
    ]
    timetable = simulation.timetable
    reductions: list[dict[Op, tuple[int, ...]]] = [{} for _ in timetable.orders]
    for group in timetable.placement.replica_groups:
        stages = set().union(*(last_backwards[device] for device in group))
        latest = {
            stage: max(
                last_backwards[device][stage][0] for device in group if stage in last_backwards[device]
            )
            for stage in stages
        }
        order = sorted(stages, key=lambda stage: (latest[stage], stage))
        for device in group:
            reductions[device] = _starts(timetable.orders[device], last_backwards[device], order)
    return tuple(reductions)


def _starts(
    ops: tuple[Op, ...], last_backwards: dict[int, tuple[float, Op]], order: list[int]
) -> dict[Op, tuple[int, ...]]:
    """Return the ops after which a device starts the reductions of the stages in ``order``.

    ``last_backwards`` maps the stages of the device to (end, op) of their last backward.
    """
    position = {op: i for i, op in enumerate(ops)}
    starts: dict[Op, tuple[int, ...]] = {}
    latest = 0
    for stage in order:
        # With few micro-batches, a device may compute no op of a stage; it then need not wait for that stage.
        if stage in last_backwards:
            latest = max(latest, position[last_backwards[stage][1]])
        starts[ops[latest]] = (*starts.get(ops[latest], ()), stage)
    return starts
