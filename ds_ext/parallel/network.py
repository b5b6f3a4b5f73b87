"""Times of messages and collectives on links inside hosts and between hosts. Pure arithmetic.

A message of b bytes takes latency + b / bandwidth (Hockney, "The communication challenge for MPP", 1994).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..errors import ConfigError
from .hosts import Hosts

NCCL, GLOO = "nccl", "gloo"
RANK_PORTS, HOST_PORTS = "rank", "host"
_GLOO_SEGMENT = 1 << 20  # bytes
_GLOO_IN_FLIGHT = 2


@dataclass(frozen=True)
class Link:
    """Directed connection between two ranks.

    Args:
        bandwidth: bytes per second.
        latency: seconds from the start of a send to the arrival of the first byte.
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ConfigError(f"link: bandwidth must be greater than 0 (got {self.bandwidth:g}).")
        if not 0 <= self.latency < math.inf:
            raise ConfigError(f"link: latency must be at least 0 seconds (got {self.latency:g}).")

    def time(self, size: float) -> float:
        """Return the seconds of a message of ``size`` bytes."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Network:
    """Hosts and the links between their ranks.

    Args:
        inside: link between two ranks on one host.
        between: link between two ranks on different hosts; its bandwidth is that of a network port.
        ports: ``"rank"`` if every rank has its own port, as on DGX and HGX machines with one network card per GPU;
            ``"host"`` if the ranks of a host share one.
        backend: ``"nccl"`` or ``"gloo"``; determines the algorithms of collectives.
        memory_bandwidth: bytes per second of a device's memory, for element-wise ops; None: their time is a part of the
            devices' rate.
    """

    hosts: Hosts
    inside: Link
    between: Link
    ports: str = RANK_PORTS
    backend: str = NCCL
    memory_bandwidth: float | None = None

    @property
    def lanes(self) -> int:
        """Collectives of one process group that run at the same time: torch gives gloo two threads."""
        return 2 if self.backend == GLOO else 1

    @property
    def scatters(self) -> bool:
        """True if a reduce-scatter is faster than an all-reduce. In torch, gloo's is one."""
        return self.backend != GLOO

    def needs_processors(self, ranks: Sequence[int]) -> bool:
        """Return whether processors transfer and sum the data of a collective, as those of a host in gloo."""
        return self.backend == GLOO and not self.hosts.cross(ranks)

    def link(self, a: int, b: int) -> Link:
        return self.between if self.hosts.cross((a, b)) else self.inside

    def shared(self, users: int) -> Network:
        """Return the network with the share of a host's port that each of ``users`` ranks gets."""
        if self.ports == RANK_PORTS or users <= 1:
            return self
        return replace(self, between=Link(self.between.bandwidth / users, self.between.latency))

    def port_time(self, size: float, ranks: Sequence[int]) -> float:
        """Return the seconds for which a pass of ``size`` bytes through a ring occupies the busiest host's port."""
        hosts = [self.hosts.host(rank) for rank in sorted(ranks)]
        leaving = Counter(a for a, b in pairwise([*hosts, hosts[0]]) if a != b)
        block = size * (len(hosts) - 1) / len(hosts)
        return block * max(leaving.values(), default=0) / self.between.bandwidth

    def all_reduce_time(self, size: float, ranks: Sequence[int]) -> float:
        """Return the seconds of an all-reduce of ``size`` bytes.

        NCCL's tuner chooses the faster of a ring and a double binary tree. gloo has its own ring.
        """
        if len(ranks) < 2:
            return 0.0
        if self.backend == GLOO:
            return self._gloo_all_reduce(size, sorted(ranks))
        return min(2 * self._ring_pass(size, ranks), self._tree_all_reduce(size, ranks))

    def all_gather_time(self, size: float, ranks: Sequence[int]) -> float:
        """Return the seconds of an all-gather that gives every rank ``size`` bytes; a reduce-scatter takes as long."""
        return self._ring_pass(size, ranks)

    def _ring_pass(self, size: float, ranks: Sequence[int]) -> float:
        """Return the seconds of n - 1 steps of a ring in rank order, which crosses each host's port once.

        Each step sends size / n bytes over every connection (Patarasuk and Yuan, "Bandwidth optimal all-reduce
        algorithms for clusters of workstations", 2009). Steps proceed without a barrier. Therefore a block takes the
        latencies of the connections that it passes, and the slowest connection limits the rate.
        """
        ring = sorted(ranks)
        steps = len(ring) - 1
        if not steps:
            return 0.0
        block = size / len(ring)
        hosts = [self.hosts.host(rank) for rank in ring]
        port_rate = self.between.bandwidth * self._rings(hosts)
        latencies, slowest_s = [], 0.0
        for a, b in pairwise([*hosts, hosts[0]]):
            latencies.append(self.inside.latency if a == b else self.between.latency)
            rate = self.inside.bandwidth if a == b else port_rate
            slowest_s = max(slowest_s, block / rate)
        # The worst block skips the connection with the lowest latency.
        return sum(sorted(latencies)[1:]) + steps * slowest_s

    def _tree_all_reduce(self, size: float, ranks: Sequence[int]) -> float:
        """Return the seconds of an all-reduce over a double binary tree of hosts, with a chain inside each host.

        The trees reduce and broadcast half of the data each. Every port receives 2 x size bytes in all, and data
        passes each level twice (Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast,
        reduction and scan", 2009; used by NCCL 2.4).
        """
        hosts = [self.hosts.host(rank) for rank in ranks]
        ranks_per_host = Counter(hosts)
        levels, chain = math.ceil(math.log2(len(ranks_per_host))), max(ranks_per_host.values()) - 1
        latencies_s = 2 * (levels * self.between.latency + chain * self.inside.latency)
        inside_s = 2 * size / self.inside.bandwidth if chain else 0.0
        between_s = 2 * size / (self.between.bandwidth * self._rings(hosts)) if levels else 0.0
        return latencies_s + max(inside_s, between_s)

    def _rings(self, hosts: Sequence[int]) -> int:
        """Return the number of rings or trees that NCCL builds: one for each port of the ranks on a host."""
        return 1 if self.ports == HOST_PORTS else min(Counter(hosts).values())

    def _gloo_all_reduce(self, size: float, ring: Sequence[int]) -> float:
        """Return the seconds of gloo's ring (gloo/allreduce.cc), segment by segment.

        gloo cuts the data into at least two segments per rank, of at most 1 MiB each. A rank keeps two segments in
        flight. A segment is sent only after the receiver has reported that it is ready, so every two segments take a
        round trip. The ring passes the data twice, first to reduce and then to gather.
        """
        n = len(ring)
        segments = -(-max(2 * n, math.ceil(size / _GLOO_SEGMENT)) // n) * n
        segment = size / segments
        links = [self.link(ring[rank - 1], ring[rank]) for rank in range(n)]  # from the previous rank
        now = [0.0] * n
        free_at = [0.0] * n
        for _ in range(2):
            received: list[list[float]] = []
            sent: list[list[float]] = []
            for step in range(segments - _GLOO_IN_FLIGHT):
                if step >= _GLOO_IN_FLIGHT:
                    earlier = step - _GLOO_IN_FLIGHT
                    now = [max(now[r], received[earlier][r], sent[earlier][r]) for r in range(n)]
                ready = [max(now[r - 1], now[r] + links[r].latency) for r in range(n)]
                starts = [max(ready[r], free_at[r]) for r in range(n)]
                free_at = [starts[r] + segment / links[r].bandwidth for r in range(n)]
                received.append([free_at[r] + links[r].latency for r in range(n)])
                sent.append([starts[(r + 1) % n] for r in range(n)])
            last = [*received[-_GLOO_IN_FLIGHT:], *sent[-_GLOO_IN_FLIGHT:]]
            now = [max(times[r] for times in (now, *last)) for r in range(n)]
        return max(now)
