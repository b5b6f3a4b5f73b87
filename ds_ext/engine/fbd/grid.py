"""DeepSpeed's grid with separate forward and backward ranks: one grid per role, with the ranks of that role only.

To DeepSpeed's engine the backward ranks are the whole world: pipe = PP, data = k x groups, model = TP. Its optimizers,
ZeRO-1 partitions, norms and overflow checks see no others. The forward ranks are another world with another engine. All
processes create a process group together, so every rank creates the groups of both roles in the same order.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import deepspeed.runtime.pipe.module as host
import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid

from ...comm import host_watch
from ...parallel.fbd import BACKWARD_ROLE, FORWARD_ROLE, DisaggregatedLayout, place_by_hosts
from ...parallel.layout import ParallelLayout
from ..topology import FoldedTopology


class RoleGrid(PipelineParallelGrid):
    """Grid of this rank's role; ``topology`` is that role's."""

    def __init__(self, topology: FoldedTopology, process_group: Any = None) -> None:
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._topo = topology
        self.data_parallel_size = topology.get_dim("data")
        self.pipe_parallel_size = topology.get_dim("pipe")
        self.model_parallel_size = self.slice_parallel_size = max(topology.get_dim("model"), 1)
        self.stage_id, self.data_parallel_id = self.get_stage_id(), self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self.p2p_groups = []
        for role in (FORWARD_ROLE, BACKWARD_ROLE):
            self._make_groups(FoldedTopology(topology.layout, role))

    def _make_groups(self, topology: FoldedTopology) -> None:
        """Create all groups of one role; keep those of this rank."""
        data, model = topology.get_dim("data"), max(topology.get_dim("model"), 1)
        for index in range(data):
            ranks = sorted(topology.get_axis_list(axis="data", idx=index))
            group = dist.new_group(ranks=ranks)
            if self.global_rank in ranks:
                self.ds_model_proc_group, self.ds_model_world_size = group, len(ranks)
                self.ds_model_rank = ranks.index(self.global_rank)
        for ranks in topology.get_axis_comm_lists("data"):
            group = dist.new_group(ranks=ranks)
            if self.global_rank in ranks:
                self.dp_group, self.dp_proc_group = ranks, group
        for ranks in topology.get_axis_comm_lists("pipe"):
            group = dist.new_group(ranks=ranks)
            if self.global_rank in ranks:
                self.pp_group, self.pp_proc_group = ranks, group
        slices = topology.get_axis_comm_lists("model") if model > 1 else [[r] for r in topology.ranks()]
        for ranks in slices:
            group = dist.new_group(ranks=ranks)
            if self.global_rank in ranks:
                self.slice_group, self.slice_proc_group = ranks, group


def on_hosts(layout: ParallelLayout, forward_hosts: Sequence[str] | None) -> ParallelLayout:
    """Return the layout with its forward ranks on ``forward_hosts``, unless that is None; a collective call.

    Raises:
        ConfigError: the hosts do not fit.
    """
    if forward_hosts is None or not isinstance(layout, DisaggregatedLayout):
        return layout
    hosts: list[Any] = [None] * dist.get_world_size()
    torch.distributed.all_gather_object(hosts, (socket.gethostname(), host_watch.own_addresses()))
    names, addresses = zip(*hosts, strict=True)
    return place_by_hosts(layout, names, forward_hosts, addresses)


@contextlib.contextmanager
def grid_of_role(layout: ParallelLayout) -> Iterator[None]:
    """Let DeepSpeed's module build the grid of the role: it takes the class by a name of its file."""
    if not isinstance(layout, DisaggregatedLayout):
        yield
        return
    theirs = host.PipelineParallelGrid
    host.PipelineParallelGrid = RoleGrid
    try:
        yield
    finally:
        host.PipelineParallelGrid = theirs
