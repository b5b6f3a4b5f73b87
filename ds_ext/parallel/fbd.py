"""How a world is cut when forwards have ranks of their own: roles, groups and hand-over pairs. Pure arithmetic.

A pipeline group is one forward pipeline and the k backward pipelines that it serves. Rank order is the host's, tensor
fastest, then pipelines (of every group the forward one first), then stages; so a stage of a group has TP_f + k x TP
neighbouring ranks, TP_f being 1 where one forward rank does the work of TP ("merged"), else TP::

    rank = t + offset of the pipeline + (TP_f + k TP) * (group + groups * stage)
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ..errors import ConfigError
from ..pipe_schedules import Placement
from .layout import ParallelLayout

FORWARD_ROLE, BACKWARD_ROLE = "forward", "backward"


@dataclass(frozen=True)
class DisaggregatedLayout(ParallelLayout):
    """A world with forward and backward ranks; the placement has forward devices.

    ``data_parallel_size`` counts pipeline groups; to the optimizer there are k times as many data-parallel ranks.
    ``order[i]`` is the global rank at the i-th place; None: places are ranks.
    """

    order: tuple[int, ...] | None = None

    @property
    def forward_tensor_parallel_size(self) -> int:
        """TP_f, the ranks of a forward device."""
        return self.tensor_parallel_size // self.placement.merged

    @property
    def block(self) -> int:
        """Ranks of one stage of one pipeline group."""
        return self.forward_tensor_parallel_size + self.placement.replicas * self.tensor_parallel_size

    @property
    def world_size(self) -> int:
        """Number of processes: PP x DP' x (TP_f / k + TP), DP' being the backward pipelines."""
        return self.placement.stages * self.data_parallel_size * self.block

    def rank(self, device: int, data: int, tensor: int) -> int:
        """Global rank of a device of group ``data``; of a merged forward device it is one for every ``tensor``."""
        stage, pipe = self.stage_and_pipe(device)
        size = self.forward_tensor_parallel_size
        offset = min(tensor, size - 1) if pipe is None else size + pipe * self.tensor_parallel_size + tensor
        place = offset + self.block * (data + self.data_parallel_size * stage)
        return place if self.order is None else self.order[place]

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(device, data, tensor) of a global rank."""
        place = rank if self.order is None else self.order.index(rank)
        rest, offset = divmod(place, self.block)
        stage, data = divmod(rest, self.data_parallel_size)
        size = self.forward_tensor_parallel_size
        if offset < size:
            return self.placement.forward_devices[stage], data, offset
        pipe, tensor = divmod(offset - size, self.tensor_parallel_size)
        return self.placement.pipes[pipe][stage], data, tensor

    def stage_and_pipe(self, device: int) -> tuple[int, int | None]:
        """The stage of a device, and its pipe if it goes backward."""
        forwards = self.placement.forward_devices
        if device in forwards:
            return forwards.index(device), None
        pipe = next(p for p, devices in enumerate(self.placement.pipes) if device in devices)
        return self.placement.pipes[pipe].index(device), pipe

    def role(self, rank: int) -> str:
        """``"forward"`` or ``"backward"``."""
        stage_and_pipe = self.stage_and_pipe(self.coordinates(rank)[0])
        return FORWARD_ROLE if stage_and_pipe[1] is None else BACKWARD_ROLE

    def tensor_ranks(self, device: int) -> int:
        """How many ranks a device has."""
        merges = device in self.placement.forward_devices
        return self.forward_tensor_parallel_size if merges else self.tensor_parallel_size

    def peers(self, rank: int, device: int) -> tuple[int, ...]:
        """The ranks of ``device``, in the same group, with which ``rank`` exchanges: one, or of a merged rank all."""
        mine, data, tensor = self.coordinates(rank)
        if self.tensor_ranks(device) > self.tensor_ranks(mine):
            return tuple(self.rank(device, data, t) for t in range(self.tensor_parallel_size))
        return (self.rank(device, data, tensor),)

    def ranks_of(self, device: int, data: int) -> list[int]:
        """All ranks of a device of a group."""
        return [self.rank(device, data, t) for t in range(self.tensor_ranks(device))]

    def groups(self) -> dict[str, list[list[int]]]:
        """Rank lists of every kind of group, and of the pairs between the roles.

        "hand-over" pairs a forward rank with the backward ranks that repeat the next stage, "weights" with those from
        which it gets its weights.
        """
        placement, groups = self.placement, range(self.data_parallel_size)
        forwards = placement.forward_devices
        every = [(device, g) for device in range(placement.ranks) for g in groups]
        pipelines = [(devices, g) for g in groups for devices in (forwards, *placement.pipes)]
        feeds = [
            (devices[0], devices[1], g)
            for g in groups
            for pipe in placement.pipes
            for devices in zip(forwards, pipe[1:], strict=False)
        ]
        table = {
            "tensor": [self.ranks_of(device, g) for device, g in every],
            "pipeline": [
                [self.rank(device, g, t) for device in devices]
                for devices, g in pipelines
                for t in range(self.tensor_ranks(devices[0]))
            ],
            "data": [
                [self.rank(device, g, t) for g in groups]
                for device in range(placement.ranks)
                for t in range(self.tensor_ranks(device))
            ],
            "mirror": [
                [self.rank(device, g, t) for device in devices]
                for devices in placement.replica_groups
                for g in groups
                for t in range(self.tensor_parallel_size)
            ],
            "forward": [[r for d in forwards for g in groups for r in self.ranks_of(d, g)]],
            "backward": [
                [r for pipe in placement.pipes for d in pipe for g in groups for r in self.ranks_of(d, g)]
            ],
            "hand-over": self._pairs(feeds),
            "weights": self._pairs(
                [(d, placement.pipes[0][s], g) for s, d in enumerate(forwards) for g in groups]
            ),
        }
        if placement.replicas == 1:
            del table["mirror"]
        return {
            name: sorted(found) if name in ("tensor", "hand-over", "weights") else found
            for name, found in table.items()
        }

    def _pairs(self, devices: list[tuple[int, int, int]]) -> list[list[int]]:
        """[forward rank, backward rank] for every pair of devices and tensor-parallel rank."""
        return [
            [self.rank(forward, g, t), self.rank(backward, g, t)]
            for forward, backward, g in devices
            for t in range(self.tensor_parallel_size)
        ]


def make_layout(placement: Placement, tensor_parallel_size: int, data_parallel_size: int) -> ParallelLayout:
    """The layout that fits the placement.

    Raises:
        ConfigError: forward ranks are merged, but not as many as there are.
    """
    if not placement.forward_devices:
        return ParallelLayout(placement, tensor_parallel_size, data_parallel_size)
    merged = placement.merged
    if merged not in (1, tensor_parallel_size):
        raise ConfigError(
            f"a merged forward rank does the work of all tensor-parallel ranks: merge_forward_tensor_parallel {merged} "
            f"must be 1 or tensor_parallel_size {tensor_parallel_size}. Use "
            f'"fbd": {{"merge_forward_tensor_parallel": true}}, which takes that size.'
        )
    return DisaggregatedLayout(placement, tensor_parallel_size, data_parallel_size)


def is_address(name: str) -> bool:
    """Return whether the name of a host is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def host_key(name: str) -> str:
    """Return what identifies a host among others: its name without domain, or its address in the usual notation."""
    return str(ipaddress.ip_address(name)) if is_address(name) else name.partition(".")[0]


def place_by_hosts(
    layout: DisaggregatedLayout,
    hosts: Sequence[str],
    forward_hosts: Sequence[str],
    addresses: Sequence[Collection[str]] | None = None,
) -> DisaggregatedLayout:
    """The layout with its forward ranks on given hosts.

    Args:
        layout: in the order of ranks.
        hosts: of every rank, as its own system calls it.
        forward_hosts: those of the forward ranks: names, with or without domain, or IP addresses.
        addresses: of every rank's host; None: not known.

    Raises:
        ConfigError: there is no such host, or they do not have as many ranks as there are forward ranks.
    """
    asked = {host_key(name) for name in forward_hosts}
    short = [host_key(name) for name in hosts]
    keys = [
        {name, *map(host_key, own)} for name, own in zip(short, addresses or [()] * len(short), strict=True)
    ]
    unknown = sorted(asked.difference(*keys))
    if unknown:
        raise ConfigError(
            f"fbd.forward_hosts names {unknown[0]!r}, on which there is no rank; the hosts of the job "
            f"are {', '.join(sorted(set(short)))}."
        )
    theirs = [rank for rank, own in enumerate(keys) if own & asked]
    others = [rank for rank, own in enumerate(keys) if not own & asked]
    places = range(layout.world_size)
    forward = [place for place in places if replace(layout, order=None).role(place) == FORWARD_ROLE]
    if len(forward) != len(theirs):
        raise ConfigError(
            f"fbd.forward_hosts {', '.join(sorted(asked))} have {len(theirs)} ranks, and the job has {len(forward)} "
            f"forward and {len(places) - len(forward)} backward ranks. Start {len(forward)} ranks there (slots in the "
            f"hostfile), and the others elsewhere."
        )
    order = dict(zip(forward, theirs, strict=True))
    backward = [place for place in places if place not in order]
    order |= dict(zip(backward, others, strict=True))
    return replace(layout, order=tuple(order[place] for place in places))
