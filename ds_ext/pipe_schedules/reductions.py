"""When the gradients of a stage can be reduced: right after its last backward, while other stages still compute.

A reduction is a collective over the devices that hold the same stages, which finish them in different orders. All of
them must start their reductions in one order: by the time at which the last of them has finished a stage.
"""

from __future__ import annotations

from .ops import BACKWARD, BACKWARD_WEIGHT, Op
from .simulate import Simulation


def eager_reductions(simulation: Simulation) -> tuple[dict[Op, tuple[int, ...]], ...]:
    """Return per device: computation -> the stages whose gradients it reduces from then on, in this order.

    A device starts a stage's reduction when it has finished that stage and all before it in the common order, so
    every stage of a device is there once. (BitPipe's "eager gradient synchronization", arXiv 2410.19367, section
    3.3, with an order that all ranks of a collective agree on.)
    """
    finished = [
        {op.stage: (end, op) for op, _, end in spans if op.kind in (BACKWARD, BACKWARD_WEIGHT)}
        for spans in simulation.spans
    ]
    timetable = simulation.timetable
    found: list[dict[Op, tuple[int, ...]]] = [{} for _ in timetable.orders]
    for group in timetable.placement.replica_groups:
        stages = set().union(*(finished[device] for device in group))
        latest = {
            stage: max(finished[device][stage][0] for device in group if stage in finished[device])
            for stage in stages
        }
        order = sorted(stages, key=lambda stage: (latest[stage], stage))
        for device in group:
            found[device] = _starts(timetable.orders[device], finished[device], order)
    return tuple(found)


def _starts(
    ops: tuple[Op, ...], finished: dict[int, tuple[float, Op]], order: list[int]
) -> dict[Op, tuple[int, ...]]:
    """Where a device starts the reductions, which it does in ``order``."""
    place = {op: i for i, op in enumerate(ops)}
    starts: dict[Op, tuple[int, ...]] = {}
    now = -1
    for stage in order:
        # A stage that this device has computed nothing of waits for nothing.
        now = max(now, place[finished[stage][1]] if stage in finished else now, 0)
        starts[ops[now]] = (*starts.get(ops[now], ()), stage)
    return starts
