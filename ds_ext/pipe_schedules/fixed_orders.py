"""Event loop of fixed orders: that of :mod:`.events` for devices that choose nothing, on numbers instead of ops.

A timetable is numbered once, and then simulated with many costs. The only events are the ends of ops: when the last
input of an op is sent, its start is known. The result is that of :func:`.events.run`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from .dependencies import Dependencies
from .events import Run, Workload
from .ops import Op
from .ports import Ports


class FixedOrders:
    """Numbered ops of all devices, one device after the other, and the messages between them."""

    def __init__(self, dependencies: Dependencies, orders: Sequence[Sequence[Op]]) -> None:
        self._orders = tuple(map(tuple, orders))
        self._ops = [op for order in orders for op in order]
        self._devices = [device for device, order in enumerate(orders) for _ in order]
        self._counts = [*map(dependencies.count, self._ops)]
        numbers = {op: number for number, op in enumerate(self._ops)}
        # Sender, receiver and number of tensors of a message -> number of these links.
        links: dict[tuple[int, int, int], int] = {}
        self._consumers: list[list[tuple[int, int]]] = []  # number of the consumer, and of the link to it
        for op, device in zip(self._ops, self._devices, strict=True):
            row = [
                (numbers[consumer], (device, receiver, dependencies.tensors(consumer)))
                for consumer, receiver in dependencies.consumers(op)
                if consumer in numbers
            ]
            self._consumers.append([(number, links.setdefault(link, len(links))) for number, link in row])
        self._links = [*links]
        self._sent = sum(
            self._links[link][0] != self._links[link][1] for row in self._consumers for _, link in row
        )

    def run(self, workload: Workload, releases: Mapping[Op, float], ports: Ports | None) -> Run[Op] | None:
        """Return the run with the times of a workload; None for a deadlock.

        Args:
            releases: op -> time of a further input, such as gathered weights.
            ports: None: messages do not wait for each other.
        """
        devices, all_consumers = self._devices, self._consumers
        times, missing = workload.times_of(self._ops), [*self._counts]
        delays = [self._delay(workload, *link) for link in self._links]
        starts, ends = [0.0] * len(times), [0.0] * len(times)
        ready = [releases.get(op, 0.0) for op in self._ops] if releases else [0.0] * len(times)
        following, stop = list[int](), 0  # next op of each device; the first one of the next device
        is_busy, stops = [False] * len(self._orders), list[int]()
        for order in self._orders:
            following.append(stop)
            stops.append(stop := stop + len(order))
        free = [0.0] * len(self._orders)
        of_ports: dict[int, float] = {}
        # With events, an op that takes no time ends after all ops that end when it starts: in the next round.
        events: list[tuple[float, int, int, int]] = []  # end, round, device, op
        now, round_, ended = 0.0, 0, 0

        def start(device: int, number: int) -> None:
            is_busy[device] = True
            begin = max(ready[number], free[device])
            starts[number], end, after = begin, begin + times[number], 0
            if end == begin:
                after = round_ + 1 if begin == now else 1
            heappush(events, (end, after, device, number))

        for device, number in enumerate(following):
            if number < stops[device] and not missing[number]:
                start(device, number)
        while events:
            end, round_, device, number = heappop(events)
            now = end
            ends[number], free[device], is_busy[device] = end, end, False
            ended += 1
            following[device] = after = number + 1
            for consumer, link in all_consumers[number]:
                arrival = end
                if delay := delays[link]:
                    sender, receiver, _ = self._links[link]
                    arrival += delay
                    if ports is not None:
                        arrival = ports.arrival(end, (sender, receiver), delay, of_ports)
                if arrival > ready[consumer]:
                    ready[consumer] = arrival
                missing[consumer] -= 1
                target = devices[consumer]
                if (
                    not missing[consumer]
                    and following[target] == consumer
                    and not is_busy[target]
                    and target != device
                ):
                    start(target, consumer)
            if after < stops[device] and not missing[after]:
                start(device, after)
        if ended < len(times):
            return None
        return Run(self._orders, self._rows(starts), self._rows(ends), max(ends, default=0.0), self._sent)

    @staticmethod
    def _delay(workload: Workload, sender: int, receiver: int, tensors: int) -> float:
        delay = workload.costs.delay(sender, receiver) / workload.slices
        return delay * tensors if delay and workload.placement.rows else delay

    def _rows(self, values: list[float]) -> tuple[tuple[float, ...], ...]:
        rows, start = list[tuple[float, ...]](), 0
        for order in self._orders:
            rows.append(tuple(values[start : start + len(order)]))
            start += len(order)
        return tuple(rows)
