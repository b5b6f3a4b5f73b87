"""Global gradient norm and clipping that count every parameter once.

DeepSpeed's own ``clip_grad_norm_`` (fp32, ZeRO stage 0) sums only the parameters of the first pipeline stage
and those marked ``model_parallel``, so every stage is clipped by a norm that is too small.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def counts_here(parameter: Tensor, tensor_rank: int) -> bool:
    """True on the one rank of a model copy that contributes this parameter (or this shard of it) to a norm.

    Tied copies on later ranks carry ``ds_pipe_replicated``. Tensor-parallel shards carry ``model_parallel``;
    what is not sharded is replicated over the tensor-parallel ranks.
    """
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return tensor_rank == 0 or getattr(parameter, "model_parallel", False)


def clip_grad_norm(
    parameters: Iterable[Tensor], max_norm: float, *, tensor_rank: int, model_group: ProcessGroup | None
) -> float:
    """Scale all gradients so that their global 2-norm is at most ``max_norm``; 0 only measures.

    Args:
        parameters: all parameters of this rank, their gradients already reduced over data-parallel ranks.
        tensor_rank: this rank's tensor-parallel rank.
        model_group: the ranks that hold one copy of the model together (all stages, all shards).

    Returns:
        The norm before clipping.
    """
    parameters = list(parameters)
    counted = [p.grad for p in parameters if p.grad is not None and counts_here(p, tensor_rank)]
    device = parameters[0].device if parameters else torch.device("cpu")
    square = get_total_norm(counted).to(device, torch.float64).square()
    dist.all_reduce(square, group=model_group)
    norm = square.sqrt()
    if max_norm > 0:
        clip_grads_with_norm_(parameters, max_norm, norm.float())
    return float(norm)
