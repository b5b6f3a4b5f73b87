"""DeepSpeed's grid of ranks for placements that hold the model more than once, and for separate forward ranks.

A placement with two replicas (BitPipe) puts the same stages on devices d and D-1-d. The optimizer treats these devices
as data-parallel ranks. The grid is therefore *folded*: ``pipe = D / replicas``, ``data = replicas * DP``.
DeepSpeed's gradient reduction, ZeRO-1 shards, norms, overflow checks and checkpoint writers work on it unchanged.

With ``fbd``, each role has a grid that contains only its ranks. For backward ranks it has pipe = PP,
data = k x groups, model = TP. DeepSpeed's optimizers and norms see no other ranks.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence

import deepspeed.runtime.pipe.module as deepspeed_module
from deepspeed import comm as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, ProcessTopology

from ..comm import host_watch
from ..comm.groups import job_hosts
from ..parallel.fbd import BACKWARD_ROLE, FORWARD_ROLE, DisaggregatedLayout, place_by_hosts
from ..parallel.hosts import Hosts, hosts_in_rank_order
from ..parallel.layout import ParallelLayout
from .all_ranks import on_all_ranks


class FoldedTopology(ProcessTopology):
    """DeepSpeed process topology for a layout; identical to its own pipe x data x model topology if nothing is folded.

    ``role`` is that of its ranks if forward and backward ranks are separate; None: backward.
    """

    def __init__(self, layout: ParallelLayout, role: str | None = None) -> None:
        placement = layout.placement
        groups = placement.replica_groups  # devices by pipeline coordinate
        replicas = placement.replicas
        tp = layout.tensor_parallel_size
        if placement.forward_devices and role == FORWARD_ROLE:
            groups = tuple((device,) for device in placement.forward_devices)
            replicas = 1
            tp //= placement.merged
        dims = {"pipe": len(groups), "data": replicas * layout.data_parallel_size}
        if tp > 1:
            dims["model"] = tp
        super().__init__(axes=list(dims), dims=list(dims.values()))
        self.layout = layout
        self._groups = groups
        self.mapping = {}
        for pipe, devices in enumerate(groups):
            for data in range(layout.data_parallel_size):
                for replica, device in enumerate(devices):
                    for tensor in range(tp):
                        coordinate = {"pipe": pipe, "data": data * replicas + replica}
                        if tp > 1:
                            coordinate["model"] = tensor
                        self.mapping[self.ProcessCoord(**coordinate)] = layout.rank(device, data, tensor)

    def folded_stage(self, device: int) -> int:
        return next(pipe for pipe, devices in enumerate(self._groups) if device in devices)

    def ranks(self) -> list[int]:
        return sorted(self.mapping.values())


class RoleGrid(PipelineParallelGrid):
    """DeepSpeed's grid of the ranks that have this rank's role.

    Every rank creates the process groups of both roles, in the same order. DeepSpeed passes ``process_group``, which
    is ignored.
    """

    def __init__(self, topology: FoldedTopology, process_group: object = None) -> None:
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
    """Return the layout with its forward ranks on ``forward_hosts``. All ranks must call this together.

    ``forward_hosts`` are names or addresses; None keeps the layout.
    """
    if forward_hosts is None or not isinstance(layout, DisaggregatedLayout):
        return layout
    hosts = on_all_ranks(lambda: (socket.gethostname(), host_watch.own_addresses()))
    names, addresses = zip(*hosts, strict=True)
    return place_by_hosts(layout, names, forward_hosts, addresses)


def hosts_of_job() -> Hosts | None:
    """Return the hosts of the job, after init_distributed(); None if ranks are not numbered host by host."""
    return hosts_in_rank_order((host.name, host.ranks) for host in job_hosts())


@contextlib.contextmanager
def grid_of_role(layout: ParallelLayout) -> Iterator[None]:
    """Context in which the constructor of DeepSpeed's PipelineModule builds a :class:`RoleGrid` if ranks have roles."""
    if not isinstance(layout, DisaggregatedLayout):
        yield
        return
    original = deepspeed_module.PipelineParallelGrid
    deepspeed_module.PipelineParallelGrid = RoleGrid
    try:
        yield
    finally:
        deepspeed_module.PipelineParallelGrid = original
