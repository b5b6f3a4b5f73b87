"""Forward-only timetables for evaluation and inference, for any placement and number of micro-batches."""

from __future__ import annotations

import heapq
from collections import Counter

from .definition import check_size
from .ops import FORWARD, Op
from .placement import Placement
from .timetables import Timetable


def forward_timetable(
    placement: Placement, micro_batches: int, name: str = "inference", slices: int = 1
) -> Timetable:
    """Return a timetable in which every device computes the op that has been ready longest.

    Messages are therefore received in the order of the sends. At most D slices are in a pipe at a time, which keeps D
    devices busy and bounds the messages on a link. They enter in order, so every stage computes the slices of a
    micro-batch in order too. The pipes share the micro-batches evenly.
    """
    check_size(name, placement, micro_batches, slices)
    pipes = placement.pipes_of(micro_batches)
    entries = [stage for stage, row in enumerate(placement.table) if not row.sources]
    arrived: Counter[tuple[int, int, int]] = Counter()  # inputs, by micro-batch, slice and stage
    orders: list[list[Op]] = [[] for _ in range(placement.num_devices)]
    waiting: list[list[tuple[int, int]]] = [[] for _ in placement.pipes]
    for m in reversed(range(micro_batches)):
        waiting[pipes[m]] += ((m, j) for j in reversed(range(slices)))
    # Ready ops of every device: (ready since, micro-batch, slice, stage). All forwards take one unit of time.
    ready: list[list[tuple[int, int, int, int]]] = [[] for _ in orders]

    def add_ready(now: int, m: int, j: int, stage: int) -> None:
        heapq.heappush(ready[placement.device(FORWARD, stage, pipes[m])], (now, m, j, stage))

    def admit(pipe: int, now: int) -> None:
        if waiting[pipe]:
            m, j = waiting[pipe].pop()
            for stage in entries:
                add_ready(now, m, j, stage)

    for pipe in range(placement.replicas):
        for _ in range(placement.devices_per_pipe):
            admit(pipe, 0)
    now = 0
    while any(ready):
        step = [(device, heapq.heappop(queue)) for device, queue in enumerate(ready) if queue]
        now += 1
        for device, (_, m, j, stage) in step:
            orders[device].append(Op(FORWARD, m, stage, j))
            if stage == placement.loss_stage:
                admit(pipes[m], now)
            for reader in placement.readers[stage]:
                sources = placement.table[reader].sources
                if stage in sources:
                    arrived[m, j, reader] += 1
                    if arrived[m, j, reader] == len(sources):
                        add_ready(now, m, j, reader)
    return Timetable(name, placement, micro_batches, tuple(map(tuple, orders)), slices)
