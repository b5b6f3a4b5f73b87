"""Operations of gloo on CUDA tensors.

gloo moves bytes between addresses in host memory. torch copies the tensors of most collectives to the host and back
(the CUDA classes of ProcessGroupGloo in torch 2.13). Sends and receives pass the address of GPU memory to the kernel,
and the other operations reject GPU tensors.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# Names as in torch.ops.c10d.
COPIED_BY_TORCH = frozenset(
    (
        *("allreduce_", "broadcast_", "reduce_", "allgather_", "_allgather_base_", "gather_", "scatter_"),
        *("alltoall_", "alltoall_base_", "barrier"),
    )
)


def needs_copy(backend: str, device: str, operation: str) -> bool:
    """Return whether tensors must be copied to the CPU before an operation.

    Args:
        device: type of the tensors' device, such as "cuda".
        operation: name in torch.ops.c10d, such as "reduce_scatter_".
    """
    return backend == "gloo" and device != "cpu" and operation not in COPIED_BY_TORCH


def transferable(tensor: Tensor, operation: str, group: ProcessGroup | None = None) -> Tensor:
    """Return the tensor, or a copy on the CPU if the group's backend cannot use it in this operation."""
    device = tensor.device.type
    # "cuda:nccl" or "cpu:gloo,cuda:nccl"; get_backend() knows only groups with one backend.
    backends = dict(each.split(":") for each in dist.get_backend_config(group).split(","))
    return tensor.cpu() if needs_copy(backends.get(device, ""), device, operation) else tensor
