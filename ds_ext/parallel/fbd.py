"""Layout of the world under forward/backward disaggregation: roles, groups and hand-over pairs. Pure arithmetic.

A pipeline group is one forward pipeline and the k backward pipelines that it serves. In the rank numbering, the
tensor-parallel index varies fastest, then the pipeline (the forward pipeline of a group comes first), then the group,
then the stage. A stage of a group therefore has TP_f + k x TP consecutive ranks. TP_f is 1 if its forward ranks are
merged into one, else TP::

    rank = t + offset of the pipeline + (TP_f + k TP) * (group + groups * stage)
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ..errors import ConfigError
from ..pipe_schedules import Placement
from .layout import ParallelLayout
from .rank_order import DEEPSPEED_ORDER, RankOrder

FORWARD_ROLE, BACKWARD_ROLE = "forward", "backward"


@dataclass(frozen=True)
class DisaggregatedLayout(ParallelLayout):
    """World with forward and backward ranks; the placement has forward devices.

    ``data_parallel_size`` counts pipeline groups. The optimizer's data-parallel size is k times as large.

    Attributes:
        order: global rank at every position of the numbering above; None: the position itself.
    """

    order: tuple[int, ...] | None = None

    @property
    def forward_tensor_parallel_size(self) -> int:
        """Number of ranks TP_f per forward device."""
        return self.tensor_parallel_size // self.placement.merged

    @property
    def block(self) -> int:
        """Number of ranks per stage of a pipeline group."""
        return self.forward_tensor_parallel_size + self.placement.replicas * self.tensor_parallel_size

    @property
    def world_size(self) -> int:
        return self.placement.stages * self.data_parallel_size * self.block

    def rank(self, device: int, data: int, tensor: int) -> int:
        """Return the global rank of a device of group ``data``. A merged device has one rank for all ``tensor``."""
        stage, pipe = self.stage_and_pipe(device)
        size = self.forward_tensor_parallel_size
        offset = min(tensor, size - 1) if pipe is None else size + pipe * self.tensor_parallel_size + tensor
        position = offset + self.block * (data + self.data_parallel_size * stage)
        return position if self.order is None else self.order[position]

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        position = rank if self.order is None else self.order.index(rank)
        block, offset = divmod(position, self.block)
        stage, data = divmod(block, self.data_parallel_size)
        size = self.forward_tensor_parallel_size
        if offset < size:
            return self.placement.forward_devices[stage], data, offset
        pipe, tensor = divmod(offset - size, self.tensor_parallel_size)
        return self.placement.pipes[pipe][stage], data, tensor

    def stage_and_pipe(self, device: int) -> tuple[int, int | None]:
        """Return the stage of a device and its pipe; the pipe of a forward device is None."""
        forwards = self.placement.forward_devices
        if device in forwards:
            return forwards.index(device), None
        pipe = next(p for p, devices in enumerate(self.placement.pipes) if device in devices)
        return self.placement.pipes[pipe].index(device), pipe

    def role(self, rank: int) -> str:
        stage_and_pipe = self.stage_and_pipe(self.coordinates(rank)[0])
        return FORWARD_ROLE if stage_and_pipe[1] is None else BACKWARD_ROLE

    def tensor_ranks(self, device: int) -> int:
        is_forward = device in self.placement.forward_devices
        return self.forward_tensor_parallel_size if is_forward else self.tensor_parallel_size

    def peers(self, rank: int, device: int) -> tuple[int, ...]:
        """Return the ranks of ``device`` that exchange messages with ``rank``: all if ``rank`` is merged, else one."""
        own_device, data, tensor = self.coordinates(rank)
        if self.tensor_ranks(device) > self.tensor_ranks(own_device):
            return tuple(self.rank(device, data, t) for t in range(self.tensor_parallel_size))
        return (self.rank(device, data, tensor),)

    def device_ranks(self, device: int, data: int) -> list[int]:
        return [self.rank(device, data, t) for t in range(self.tensor_ranks(device))]

    def groups(self) -> dict[str, list[list[int]]]:
        """Return the rank lists of every kind of group, and the pairs (forward rank, backward rank).

        A "hand-over" pair sends an output to the backward rank of the next stage. A "weights" pair copies the
        weights of a stage to its forward rank.
        """
        placement, groups = self.placement, range(self.data_parallel_size)
        forwards = placement.forward_devices
        devices_of_groups = [(device, g) for device in range(placement.num_devices) for g in groups]
        pipelines = [(devices, g) for g in groups for devices in (forwards, *placement.pipes)]
        hand_overs = [
            (devices[0], devices[1], g)
            for g in groups
            for pipe in placement.pipes
            for devices in zip(forwards, pipe[1:], strict=False)
        ]
        table = {
            "tensor": [self.device_ranks(device, g) for device, g in devices_of_groups],
            "pipeline": [
                [self.rank(device, g, t) for device in devices]
                for devices, g in pipelines
                for t in range(self.tensor_ranks(devices[0]))
            ],
            "data": [
                [self.rank(device, g, t) for g in groups]
                for device in range(placement.num_devices)
                for t in range(self.tensor_ranks(device))
            ],
            "mirror": [
                [self.rank(device, g, t) for device in devices]
                for devices in placement.replica_groups
                for g in groups
                for t in range(self.tensor_parallel_size)
            ],
            "forward": [[r for d in forwards for g in groups for r in self.device_ranks(d, g)]],
            "backward": [
                [r for pipe in placement.pipes for d in pipe for g in groups for r in self.device_ranks(d, g)]
            ],
            "hand-over": self._pairs(hand_overs),
            "weights": self._pairs(
                [(d, placement.pipes[0][s], g) for s, d in enumerate(forwards) for g in groups]
            ),
        }
        if placement.replicas == 1:
            del table["mirror"]
        return {
            name: sorted(rank_lists) if name in ("tensor", "hand-over", "weights") else rank_lists
            for name, rank_lists in table.items()
        }

    def _pairs(self, device_pairs: list[tuple[int, int, int]]) -> list[list[int]]:
        """Return [forward rank, backward rank] of every tensor rank, for (forward device, backward device, group)."""
        return [
            [self.rank(forward, g, t), self.rank(backward, g, t)]
            for forward, backward, g in device_pairs
            for t in range(self.tensor_parallel_size)
        ]


def make_layout(
    placement: Placement,
    tensor_parallel_size: int,
    data_parallel_size: int,
    rank_order: RankOrder = DEEPSPEED_ORDER,
) -> ParallelLayout:
    if not placement.forward_devices:
        return ParallelLayout(placement, tensor_parallel_size, data_parallel_size, rank_order)
    if rank_order != DEEPSPEED_ORDER:
        raise ConfigError(
            f'ds_ext.rank_order: schedules with forward ranks number their ranks by role (got "{rank_order}"). Remove '
            "the key, or --use-tp-pp-dp-mapping. To choose the hosts of the forward ranks, use "
            '"fbd": {"forward_hosts": [...]}.'
        )
    merged = placement.merged
    if merged not in (1, tensor_parallel_size):
        raise ConfigError(
            f"merge_forward_tensor_parallel: must be 1 or tensor_parallel_size {tensor_parallel_size} (got {merged}). "
            'Use "fbd": {"merge_forward_tensor_parallel": true} for the latter.'
        )
    return DisaggregatedLayout(placement, tensor_parallel_size, data_parallel_size)


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def host_key(name: str) -> str:
    """Return the identity of a host: its name without domain, or its address in canonical notation."""
    return str(ipaddress.ip_address(name)) if is_address(name) else name.partition(".")[0]


def place_by_hosts(
    layout: DisaggregatedLayout,
    hosts: Sequence[str],
    forward_hosts: Sequence[str],
    addresses: Sequence[Collection[str]] | None = None,
) -> DisaggregatedLayout:
    """Return ``layout``, which has the default order, with its forward ranks on ``forward_hosts``.

    Args:
        hosts: host name of every rank, as reported by its operating system.
        forward_hosts: hosts of the forward ranks: names, with or without domain, or IP addresses.
        addresses: IP addresses of every rank's host; None: unknown.
    """
    forward_keys = {host_key(name) for name in forward_hosts}
    names = [host_key(name) for name in hosts]
    keys = [
        {name, *map(host_key, own_addresses)}
        for name, own_addresses in zip(names, addresses or [()] * len(names), strict=True)
    ]
    unknown = sorted(forward_keys.difference(*keys))
    if unknown:
        raise ConfigError(
            f"ds_ext.fbd.forward_hosts: no rank runs on this host (got {unknown[0]!r}). Use hosts of the job: "
            f"{', '.join(sorted(set(names)))}."
        )
    forward_ranks = [rank for rank, rank_keys in enumerate(keys) if rank_keys & forward_keys]
    backward_ranks = [rank for rank, rank_keys in enumerate(keys) if not rank_keys & forward_keys]
    positions = range(layout.world_size)
    default = replace(layout, order=None)
    forward = [position for position in positions if default.role(position) == FORWARD_ROLE]
    backward = [position for position in positions if default.role(position) == BACKWARD_ROLE]
    if len(forward) != len(forward_ranks):
        raise ConfigError(
            f"ds_ext.fbd.forward_hosts: {', '.join(sorted(forward_keys))} must run the {len(forward)} forward ranks "
            f"and no others (got {len(forward_ranks)} ranks). Start {len(forward)} ranks there and {len(backward)} on "
            "other hosts (slots in the hostfile)."
        )
    order = dict(zip((*forward, *backward), (*forward_ranks, *backward_ranks), strict=True))
    return replace(layout, order=tuple(order[position] for position in positions))
