"""DeepSpeed's grid for placements that hold the model more than once.

A placement with two replicas (BitPipe) puts the same stages on devices d and D-1-d. To the optimizer the two
are data-parallel ranks of each other, so the grid is *folded*: ``pipe = D / replicas``, ``data = replicas * DP``.
Gradient reduction, ZeRO-1 shards, norms, overflow checks and checkpoint writers of DeepSpeed are then right as
they are.
"""

from __future__ import annotations

from deepspeed.runtime.pipe.topology import ProcessTopology

from ..parallel.fbd import FORWARD_ROLE
from ..parallel.layout import ParallelLayout


class FoldedTopology(ProcessTopology):
    """DeepSpeed's process topology of a layout; its own pipe x data x model topology when nothing folds.

    Args:
        layout: of the whole world.
        role: the ranks of the topology, where forward and backward ranks are separate; backward by default.
    """

    def __init__(self, layout: ParallelLayout, role: str | None = None) -> None:
        groups, tp = layout.placement.replica_groups, layout.tensor_parallel_size
        placement, replicas = layout.placement, layout.placement.replicas
        if placement.forward_devices and role == FORWARD_ROLE:
            groups, replicas, tp = (
                tuple((device,) for device in placement.forward_devices),
                1,
                tp // placement.merged,
            )
        pipe = len(groups)
        axes, dims = ["pipe", "data"], [pipe, replicas * layout.data_parallel_size]
        if tp > 1:
            axes, dims = [*axes, "model"], [*dims, tp]
        super().__init__(axes=axes, dims=dims)
        self.layout, self._groups = layout, groups
        self.mapping = {}
        for p, devices in enumerate(groups):
            for data in range(layout.data_parallel_size):
                for replica, device in enumerate(devices):
                    for tensor in range(tp):
                        coordinate = {"pipe": p, "data": data * replicas + replica}
                        if tp > 1:
                            coordinate["model"] = tensor
                        self.mapping[self.ProcessCoord(**coordinate)] = layout.rank(device, data, tensor)

    def folded_stage(self, device: int) -> int:
        """DeepSpeed's pipeline coordinate of a device."""
        return next(p for p, devices in enumerate(self._groups) if device in devices)

    def ranks(self) -> list[int]:
        """The global ranks of this topology, ascending."""
        return sorted(self.mapping.values())
