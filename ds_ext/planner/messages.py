"""Messages of the pipeline groups on several hosts: their times, and the ports that they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

from ..parallel.crossing import messages_between, require_slots
from ..parallel.layout import ParallelLayout
from ..parallel.network import HOST_PORTS, Network
from ..pipe_schedules import Placement
from ..pipe_schedules.costs import Costs
from .candidates import SAME

_LEAST_SHARE = 0.005  # of the ops of a micro-batch on a device; shorter messages do not wait for each other


class PipelineGroup(NamedTuple):
    """Messages of a pipeline group, in the unit of the costs.

    Attributes:
        messages: time on every link.
        shared: long messages between hosts: link -> latency, ports and pipeline groups that use them.
        port_of: port of every device; empty without such links.
    """

    messages: tuple[float, ...]
    shared: tuple[tuple[tuple[int, int], tuple[float, tuple[int, int], int]], ...] = ()
    port_of: tuple[int, ...] = ()


@dataclass(frozen=True)
class Messages:
    """Messages of a step, for any layout with the placement.

    Args:
        costs: times of the ops.
        size: bytes of the hidden states of a micro-batch.
        unit_s: unit of the costs in seconds.
    """

    placement: Placement
    micro_batches: int
    slices: int
    costs: Costs
    network: Network
    size: float
    unit_s: float
    _groups: dict[ParallelLayout, set[PipelineGroup]] = field(default_factory=dict, init=False, compare=False)

    @cached_property
    def _counts(self) -> Counter[tuple[int, int]]:
        return messages_between(self.placement, self.micro_batches)

    @cached_property
    def links(self) -> list[tuple[int, int]]:
        """(Sending device, receiving device) of the messages."""
        return list(self._counts)

    @cached_property
    def most_time(self) -> float:
        """Upper bound on the least time of any layout, in the unit of the costs."""
        network, busy = self.network, Counter[int]()
        for (sender, receiver), count in self._counts.items():
            busy.update({sender: count, ~receiver: count})
        ranks = max(network.hosts.slots) if network.ports == HOST_PORTS else 1
        return ranks * max(busy.values(), default=0) * network.between.time(self.size) / self.unit_s

    def least_time(self, layout: ParallelLayout) -> float:
        """Return a lower bound on the step, in the unit of the costs: the messages of the port with the most."""
        least = max(map(self._busiest_port, self.pipeline_groups(layout)))
        return least * (1 - self.costs.jitter) * (1 - SAME)  # sums of the same times differ by rounding

    def _busiest_port(self, group: PipelineGroup) -> float:
        times, busy = dict(zip(self.links, group.messages, strict=True)), Counter[int]()
        tensors = max(max(row.kind.activations, row.kind.gradients) for row in self.placement.table)
        for link, (latency, ports, users) in group.shared:
            # The turns of the other pipeline groups after the last message may end after the step.
            count = users * self._counts[link] - (users - 1) * tensors
            busy.update(dict.fromkeys(ports, count * (times[link] - latency * self.slices)))
        return max(busy.values(), default=0.0)

    def pipeline_groups(self, layout: ParallelLayout) -> Collection[PipelineGroup]:
        """Return the pipeline groups of a layout that differ.

        The slowest tensor-parallel rank counts. Those of a device send at the same time; the pipeline groups that use a
        port take turns.
        """
        if layout not in self._groups:
            self._groups[layout] = self._pipeline_groups(layout)
        return self._groups[layout]

    def _pipeline_groups(self, layout: ParallelLayout) -> set[PipelineGroup]:
        network, message = self.network, self.size / self.slices
        require_slots(layout, network.hosts)
        tensor, data = layout.tensor_parallel_size, range(layout.data_parallel_size)
        host_of = [*map(network.hosts.host, range(layout.world_size))]
        firsts = [[layout.rank(device, d, 0) for d in data] for device in range(layout.placement.num_devices)]
        hosts = [[tuple(host_of[rank : rank + tensor]) for rank in row] for row in firsts]

        @cache
        def message_time(senders: tuple[int, ...], receivers: tuple[int, ...]) -> tuple[float, Counter[int]]:
            """Return the seconds, and the messages that leave every host, of tensor-parallel ranks on some hosts."""
            pairs = [*zip(senders, receivers, strict=True)]
            sending = Counter(a for a, b in pairs if a != b)
            links = (network.inside if a == b else network.shared(sending[a]).between for a, b in pairs)
            return max(link.time(message) for link in links), sending

        times: list[dict[tuple[int, int], tuple[float, int]]] = [
            {} for _ in data
        ]  # seconds, users of the port
        for a, b in self.links:
            rows = [*map(message_time, hosts[a], hosts[b])]
            users = Counter(chain.from_iterable(sending for _, sending in rows))
            for of_group, (seconds, sending) in zip(times, rows, strict=True):
                shares = network.ports == HOST_PORTS and sending
                of_group[a, b] = seconds, max(map(users.__getitem__, sending)) if shares else 1
        return {self._group(layout, d, of_group) for d, of_group in zip(data, times, strict=True)}

    def _group(
        self, layout: ParallelLayout, data: int, times: Mapping[tuple[int, int], tuple[float, int]]
    ) -> PipelineGroup:
        """Return a pipeline group. A message between hosts is long if other messages may wait for it.

        A port is the number of the first device that has it; it receives as its complement.
        """
        hosts, latency, costs = self.network.hosts, self.network.between.latency, self.costs
        least_s = _LEAST_SHARE * (costs.forward + costs.backward_input + costs.backward_weight) * self.unit_s
        ranks = [layout.rank(device, data, 0) for device in range(layout.placement.num_devices)]
        places = [hosts.host(rank) for rank in ranks] if self.network.ports == HOST_PORTS else ranks
        port_of = tuple(map(places.index, places))
        shared = tuple(
            ((a, b), (latency / self.unit_s, (port_of[a], ~port_of[b]), users))
            for (a, b), (seconds, users) in sorted(times.items())
            if seconds - latency > least_s and hosts.cross((ranks[a], ranks[b]))
        )
        # Of whole micro-batches: a message of a slice takes its share.
        messages = tuple(times[link][0] * self.slices / self.unit_s for link in self.links)
        return PipelineGroup(messages, shared, port_of if shared else ())


messages_of = lru_cache(maxsize=64)(Messages)  # candidates of the planner have many of them in common
