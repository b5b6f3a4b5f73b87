"""Forward-only timetables for any placement and any number of micro-batches: evaluation and inference."""

from __future__ import annotations

import heapq

from ..errors import ScheduleError
from .ops import FORWARD, Op
from .placement import Placement
from .registry import check_size
from .timetables import Timetable


def forward_timetable(placement: Placement, micro_batches: int, name: str = "inference") -> Timetable:
    """Every device computes what has been ready longest, so messages are taken in the order they are sent in.

    At most D micro-batches are under way in a pipe: enough to keep D devices busy, and a link never has to hold
    more than a few messages however many micro-batches there are. ``micro_batches`` may be any number from 1; no
    pipe gets more than one more than another.

    Raises ScheduleError for less than one micro-batch, and for more than fit a memory.
    """
    if micro_batches < 1:
        raise ScheduleError(f"{name} needs at least 1 micro-batch; got {micro_batches}.")
    check_size(name, placement, micro_batches)
    pipes = placement.pipes_of(micro_batches)
    orders: list[list[Op]] = [[] for _ in range(placement.num_devices)]
    waiting: list[list[int]] = [[] for _ in placement.pipes]
    for m in reversed(range(micro_batches)):
        waiting[pipes[m]].append(m)
    # Per device what is ready: (since when, micro-batch, stage). All forwards take one unit.
    ready: list[list[tuple[int, int, int]]] = [[] for _ in orders]

    def arrive(now: int, m: int, stage: int) -> None:
        heapq.heappush(ready[placement.device(FORWARD, stage, pipes[m])], (now, m, stage))

    def admit(pipe: int, now: int) -> None:
        if waiting[pipe]:
            arrive(now, waiting[pipe].pop(), 0)

    for pipe in range(placement.replicas):
        for _ in range(placement.devices_per_pipe):
            admit(pipe, 0)
    now = 0
    while any(ready):
        turn = [(device, heapq.heappop(queue)) for device, queue in enumerate(ready) if queue]
        now += 1
        for device, (_, m, stage) in turn:
            orders[device].append(Op(FORWARD, m, stage))
            if stage + 1 < placement.stages:
                arrive(now, m, stage + 1)
            else:
                admit(pipes[m], now)
    return Timetable(name, placement, micro_batches, tuple(map(tuple, orders)))
