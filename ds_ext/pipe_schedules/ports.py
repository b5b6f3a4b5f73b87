"""Network ports that messages and collectives share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Ports:
    """Network ports of the devices. A message waits for earlier ones, and shares the rate equally with a collective.

    Args:
        links: (sender, receiver) -> latency, the ports that the message uses until then, and the number of pipelines
            that use these ports alike, one after the other; without links that share no port.
        collectives: port -> (start, end) of its collectives.
    """

    links: Mapping[tuple[int, int], tuple[float, tuple[int, ...], int]]
    collectives: Mapping[int, Sequence[tuple[float, float]]]

    def arrival(self, now: float, link: tuple[int, int], delay: float, free: dict[int, float]) -> float:
        """Return the time at which a message arrives that would take ``delay`` alone.

        ``free`` has the end of the last message of every port, and is updated.
        """
        if link not in self.links:
            return now + delay
        latency, ports, users = self.links[link]
        end = max(now, *(free.get(port, 0.0) for port in ports))
        left = transfer = max(0.0, delay - latency)
        for start, stop in sorted(span for port in ports for span in self.collectives.get(port, ())):
            if start >= end + left:
                break
            if stop > end:
                alone = max(0.0, start - end)
                beside = min(stop - max(start, end), 2 * (left - alone))
                end, left = end + alone + beside, left - alone - beside / 2
        end += left
        for port in ports:
            free[port] = end + (users - 1) * transfer
        return end + latency


class Collective(NamedTuple):
    """Op that several devices compute together, beside their other ops: a transfer, then a latency.

    Attributes:
        name: ``reduce@3`` for the gradients of stage 3, ``gather@3`` for its weights; ``tie`` for the sum of the
            gradients of tied weights over devices, ``reduce`` for their reduction after it, and ``gather`` for all
            stages of the device. In a measured step the name in the trace.
        stage: None for tied weights, or all stages.
        devices: participants of each pipeline group.
        latency: time after the transfer.
        transfer: time that the transfer takes alone.
        ports: ports of the transfer, which collectives share equally.
    """

    name: str
    stage: int | None = None
    devices: tuple[int, ...] = ()
    latency: float = 0.0
    transfer: float = 0.0
    ports: frozenset[int] = frozenset()


class Transfers(Generic[T]):
    """Transfers in progress, which share the rate of their ports equally, as fluids.

    ``uses`` has the time alone and the ports of each op with a transfer.
    """

    def __init__(self, uses: Mapping[T, tuple[float, Collection[int]]]) -> None:
        self.now = 0.0
        self._uses = uses
        self._remaining: dict[tuple[int, T, float], float] = {}  # device, op, start of the op -> time alone
        self._users = Counter[int]()

    def __bool__(self) -> bool:
        return bool(self._remaining)

    def begin(self, now: float, device: int, op: T) -> bool:
        """Begin the transfer of an op, and return whether it has one."""
        if op not in self._uses:
            return False
        self.now = now
        self._remaining[device, op, now], ports = self._uses[op]
        self._users.update(ports)
        return True

    def advance(self, until: float) -> list[tuple[int, T, float]]:
        """Advance to the next end of a transfer, at most to ``until``. Return (device, op, start of the op) of each."""
        slowdowns = {key: max(self._users[port] for port in self._uses[key[1]][1]) for key in self._remaining}
        times = {key: time * slowdowns[key] for key, time in self._remaining.items()}
        passed = min(until - self.now, *times.values())
        self.now += passed
        ends = [key for key, time in times.items() if time <= passed]
        for _, op, _ in ends:
            self._users.subtract(self._uses[op][1])
        self._remaining = {
            key: time - passed / slowdowns[key]
            for key, time in self._remaining.items()
            if times[key] > passed
        }
        return ends
