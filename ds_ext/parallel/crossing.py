"""Traffic between hosts: which process groups cross hosts, and how many bytes a step sends from host to host.

A collective over n ranks on h > 1 hosts counts as a ring in rank order, which passes from one host to the next h times.
An all-reduce of V bytes sends 2 V (n - 1) / n over every connection of the ring, an all-gather or a reduce-scatter half
of that (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import permutations

from ..errors import ConfigError
from ..pipe_schedules import Placement
from ..pipe_schedules.dependencies import Dependencies
from ..pipe_schedules.ops import BACKWARD, Op
from .hosts import Hosts
from .layout import ParallelLayout
from .rank_order import DATA, DEEPSPEED_ORDER, MIRROR, PIPELINE, TENSOR, RankOrder

MIRRORS, DATA_RANKS = "mirror", "data"  # names of groups, as in ParallelLayout.groups


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank communicates in a step, before they are divided between connections.

    Args:
        message: activation or gradient of one micro-batch, from one rank to one rank of another device.
        gradients: for each device, the gradients of one rank that its replicas and data-parallel ranks average.
        weights: for each device, the weights of one rank that change in a step.
        tensor: for each device, the tensors that one rank all-reduces over its tensor-parallel group; empty: 0.
        tied: gradient of a weight that two devices share: that of the first and the last stage, or rows of it that a
            part of the head has.
        zero_stage: 1 if the ranks that average gradients also gather the weights after the step.
        overlaps: with ZeRO, gradients are reduce-scattered, and the weights gathered beside the next step.
        stages: for each stage, the gradients of one rank, without weights tied to other devices; empty: unknown.
    """

    message: float
    gradients: tuple[float, ...]
    weights: tuple[float, ...]
    tensor: tuple[float, ...] = ()
    tied: float = 0.0
    zero_stage: int = 0
    overlaps: bool = False
    stages: tuple[float, ...] = ()


@dataclass(frozen=True)
class GroupTraffic:
    """Groups of one kind.

    Attributes:
        name: "tensor", "neighbors" (links between devices), "tied" (first and last stage, if they share a weight),
            "mirror", "data", "gradients" (the groups that average gradients, if a device has both replicas and
            data-parallel ranks) or "weights" (``fbd``).
        size: number of ranks in a group; 2 for links.
        groups: number of groups, or of directed links.
        crossing: number of groups with ranks on several hosts.
        bytes: bytes from host to host in a step.
    """

    name: str
    size: int
    groups: int
    crossing: int
    bytes: float


@dataclass(frozen=True)
class Crossing:
    """Traffic between hosts under one rank order; ``kinds`` has no groups of one rank."""

    rank_order: RankOrder
    kinds: tuple[GroupTraffic, ...]

    @property
    def bytes(self) -> float:
        return sum(kind.bytes for kind in self.kinds)

    def kind(self, name: str) -> GroupTraffic | None:
        """Return the groups of a kind; None if they have one rank each."""
        return next((kind for kind in self.kinds if kind.name == name), None)


def traffic_between_hosts(
    layout: ParallelLayout, hosts: Hosts, traffic: Traffic, micro_batches: int
) -> Crossing:
    """Return the traffic between hosts for the layout's rank order. ``micro_batches`` is N per pipeline group."""
    require_slots(layout, hosts)
    table = layout.groups()

    def device(rank: int) -> int:
        return layout.coordinates(rank)[0]

    tensor = traffic.tensor or (0.0,) * layout.placement.num_devices
    rings = [(group, _all_reduce(len(group), tensor[device(group[0])])) for group in table["tensor"]]
    kinds = [
        _rings("tensor", rings, hosts),
        _links("neighbors", _messages(layout, traffic, micro_batches), hosts),
        _rings("tied", _ties(layout, traffic), hosts),
    ]
    reductions = list(_reductions(layout, traffic))
    if layout.placement.replicas > 1 and layout.data_parallel_size > 1:
        # Gradients are averaged over mirrors and data-parallel ranks together; both only show their own crossings.
        kinds += [
            _rings(name, [(group, 0.0) for group in table[name]], hosts) for name in (MIRRORS, DATA_RANKS)
        ]
        kinds.append(_rings("gradients", reductions, hosts))
    else:
        kinds.append(_rings(MIRRORS if layout.placement.replicas > 1 else DATA_RANKS, reductions, hosts))
    # A pair is (forward rank, backward rank); weights go from the backward to the forward rank.
    links = [(backward, forward) for forward, backward in table.get("weights", ())]
    copies = {link: traffic.weights[device(link[0])] for link in links}
    kinds.append(_links("weights", copies, hosts))
    return Crossing(layout.rank_order, tuple(kind for kind in kinds if kind.size > 1 and kind.groups))


def rank_orders(layout: ParallelLayout) -> list[RankOrder]:
    """Return the rank orders that number the layout's ranks differently, the default order first.

    Forward/backward disaggregation has one order.
    """
    if layout.placement.forward_devices:
        return [layout.rank_order]
    axes = [(DATA, PIPELINE)]
    axes += [(MIRROR, DATA, PIPELINE)] if layout.placement.replicas > 1 else []
    orders = [RankOrder((TENSOR, *order)) for words in axes for order in permutations(words)]
    orders_by_ranks: dict[tuple[int, ...], RankOrder] = {}
    for order in (DEEPSPEED_ORDER, *orders):
        ordered = replace(layout, rank_order=order)
        devices, groups = range(layout.placement.num_devices), range(layout.data_parallel_size)
        orders_by_ranks.setdefault(tuple(ordered.rank(d, g, 0) for d in devices for g in groups), order)
    return list(orders_by_ranks.values())


def ranked_orders(
    layout: ParallelLayout, hosts: Hosts, traffic: Traffic, micro_batches: int
) -> list[Crossing]:
    """Return the traffic between hosts for every rank order, fewest bytes first; ties: the default, then no mirror.

    Tensor-parallel groups have consecutive ranks in every order. They cross hosts only if the tensor-parallel size
    does not divide the slots of every host.
    """
    crossings = [
        traffic_between_hosts(replace(layout, rank_order=order), hosts, traffic, micro_batches)
        for order in rank_orders(layout)
    ]
    return sorted(crossings, key=lambda entry: entry.bytes)


def require_slots(layout: ParallelLayout, hosts: Hosts) -> None:
    if hosts.world_size != layout.world_size:
        raise ConfigError(
            f"hosts: {hosts} has {hosts.world_size} slots, and the job {layout.world_size} ranks. Use hosts with "
            f"{layout.world_size} slots in all."
        )


def messages_between(placement: Placement, micro_batches: int) -> Counter[tuple[int, int]]:
    """Return the hidden states that are sent in a training step, by (sending device, receiving device).

    The unit is an activation or gradient of one micro-batch. Every message is one, except those of head parts.
    """
    pipes = Counter(placement.pipes_of(micro_batches))
    dependencies = Dependencies(placement, placement.replicas)  # one micro-batch per pipe
    counts: Counter[tuple[int, int]] = Counter()
    for pipe in range(placement.replicas):
        for stage in range(placement.op_stages):
            passes_back = placement.table[stage].kind.gradient_kind == BACKWARD
            gradients = (dependencies.gradient_kind(stage, pipe),) if passes_back else ()
            for kind in (*dependencies.forward_kinds(stage), *gradients):
                op = Op(kind, pipe, stage)
                sender = dependencies.device(op)
                for consumer, receiver in dependencies.consumers(op):
                    if receiver != sender:
                        counts[sender, receiver] += pipes[pipe] * dependencies.tensors(consumer)
    return counts


def _messages(layout: ParallelLayout, traffic: Traffic, micro_batches: int) -> dict[tuple[int, int], float]:
    """Return the bytes of the messages between stages in a step, by (sending rank, receiving rank)."""
    return {
        (layout.rank(sender, data, tensor), layout.rank(receiver, data, tensor)): count * traffic.message
        for (sender, receiver), count in messages_between(layout.placement, micro_batches).items()
        for data in range(layout.data_parallel_size)
        for tensor in range(layout.tensor_parallel_size)
    }


def _ties(layout: ParallelLayout, traffic: Traffic) -> Iterable[tuple[list[int], float]]:
    """Yield the ranks that sum the gradient of a tied weight, and the bytes per connection."""
    if not traffic.tied:
        return
    for devices in sorted({tuple(sorted(pair)) for pair in layout.placement.tied_pairs}):
        for data in range(layout.data_parallel_size):
            for tensor in range(layout.tensor_parallel_size):
                yield [layout.rank(device, data, tensor) for device in devices], _all_reduce(2, traffic.tied)


def _reductions(layout: ParallelLayout, traffic: Traffic) -> Iterable[tuple[list[int], float]]:
    """Yield the ranks that average gradients, and the bytes per connection of their ring."""
    groups = range(layout.data_parallel_size)
    for devices in layout.placement.replica_groups:
        for tensor in range(layout.tensor_parallel_size):
            ranks = [layout.rank(device, group, tensor) for group in groups for device in devices]
            size = _all_reduce(len(ranks), traffic.gradients[devices[0]]) / (2 if traffic.overlaps else 1)
            if traffic.zero_stage:
                # The all-gather of the weights.
                size += _all_reduce(len(ranks), traffic.weights[devices[0]]) / 2
            yield ranks, size


def _all_reduce(ranks: int, size: float) -> float:
    return 2 * size * (ranks - 1) / ranks


def _rings(name: str, rings: Iterable[tuple[list[int], float]], hosts: Hosts) -> GroupTraffic:
    """Return the traffic of collectives, given as (ranks, bytes per connection of the ring)."""
    rings = list(rings)
    spans = [len({hosts.host(rank) for rank in ranks}) for ranks, _ in rings]
    total = sum(span * size for span, (_, size) in zip(spans, rings, strict=True) if span > 1)
    return GroupTraffic(
        name, max((len(r) for r, _ in rings), default=0), len(rings), sum(s > 1 for s in spans), total
    )


def _links(name: str, links: dict[tuple[int, int], float], hosts: Hosts) -> GroupTraffic:
    """Return the traffic of links, given as (sender, receiver) -> bytes."""
    between = [size for link, size in links.items() if hosts.cross(link)]
    return GroupTraffic(name, 2, len(links), len(between), sum(between))
