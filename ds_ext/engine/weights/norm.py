"""Norm of the gradients of a model copy, in which every parameter counts once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ...errors import ConfigError
from ..all_ranks import on_all_ranks
from ..deepspeed_api.attributes import set_attribute
from ..types import Optimizer


def counts_here(parameter: Tensor, tensor_rank: int) -> bool:
    """Return whether this rank counts the parameter or its shard in a norm. One rank per model copy does.

    Copies of a tie on later ranks have ``ds_pipe_replicated`` set, and tensor-parallel shards have ``model_parallel``
    set. All other parameters are replicated over the tensor-parallel ranks, and the first of these ranks counts them.
    """
    if getattr(parameter, PIPE_REPLICATED, False):
        return False
    return tensor_rank == 0 or getattr(parameter, "model_parallel", False)


def let_parameters_differ(optimizer: Optimizer) -> None:
    """Allow the ranks of a model copy to have different parameter groups.

    ZeRO reduces one norm per group over these ranks, one after the other; here it is one norm. The bf16 optimizer fails
    on a rank whose gradients other ranks count, so its norm gets a zero.
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        _join_zero_norms(optimizer)
    elif type(optimizer) is BF16_Optimizer:
        _pad_bf16_norm(optimizer)


def share_loss_scale(engine: DeepSpeedEngine) -> None:
    """Set the loss scale of fp16 weights on ranks with fp32 weights too. All ranks must call this together.

    ZeRO scales the loss, and divides the gradients, on the ranks where the first parameter of its optimizer is fp16.
    """
    optimizer = engine.optimizer
    dtype = optimizer.dtype if isinstance(optimizer, DeepSpeedZeroOptimizer) else None
    dtypes = on_all_ranks(lambda: dtype)
    if {torch.float16, torch.bfloat16} <= {*dtypes}:
        ranks = f"fp16 on rank {dtypes.index(torch.float16)}, bf16 on rank {dtypes.index(torch.bfloat16)}"
        raise ConfigError(
            "zero_optimization.stage: ZeRO scales the loss for fp16 weights, and not for bf16 weights (got "
            f"{ranks}). Cast the layers to one of them, or use stage 0."
        )
    if torch.float16 not in dtypes or dtype in (None, torch.float16):
        return
    optimizer.loss_scaler = CreateLossScaler(
        torch.float16, engine.loss_scale(), engine.dynamic_loss_scale(), engine.dynamic_loss_scale_args()
    )
    optimizer.dynamic_loss_scale = optimizer.loss_scaler.dynamic


def _join_zero_norms(optimizer: DeepSpeedZeroOptimizer) -> None:
    def joint_norm(norm_type: int = 2) -> Tensor:
        if optimizer.cpu_offload:
            parameters = [p for of_group in optimizer.params_in_partition for p in of_group]
            return optimizer.complete_grad_norm_calculation_for_cpu_offload(parameters)
        # Padding follows the gradients of a group, and is not always marked.
        pairs = [
            (gradient * optimizer.loss_scale if optimizer._muon_update_lacks_loss_scale(i) else gradient, p)
            for i, parameters in enumerate(optimizer.params_in_partition)
            for gradient, p in zip(optimizer.averaged_gradients[i], parameters, strict=False)
        ]
        return optimizer.get_grad_norm_direct(*(zip(*pairs, strict=True) if pairs else ([], [])), norm_type)

    optimizer.scaled_global_norm = joint_norm


def _pad_bf16_norm(optimizer: BF16_Optimizer) -> None:
    get_gradients = optimizer.get_grads_for_norm

    def padded_gradients(for_clipping: bool = False) -> object:
        if for_clipping:
            return get_gradients(for_clipping)
        gradients, expert_gradients = get_gradients()
        return gradients or [
            torch.zeros((), device=get_accelerator().current_device_name())
        ], expert_gradients

    optimizer.get_grads_for_norm = padded_gradients


@contextmanager
def measuring_bf16_norm(optimizer: BF16_Optimizer, measure: Callable[[], Tensor]) -> Iterator[None]:
    """Context in which the bf16 optimizer takes the norm that ``measure`` returns."""
    get_gradients = optimizer.get_grads_for_norm

    def get_norms(for_clipping: bool = False) -> object:
        # DeepSpeed expects tensors to measure, and those of experts by group; for clipping, all gradients.
        return get_gradients(for_clipping) if for_clipping else ([measure()], {})

    with set_attribute(optimizer, "get_grads_for_norm", get_norms):
        yield


@contextmanager
def correcting_zero(optimizer: DeepSpeedZeroOptimizer, factor: float) -> Iterator[None]:
    """Context in which a step of ZeRO multiplies its fp32 gradients and their norm by ``factor``."""
    scaled_norm, unscale = optimizer.scaled_global_norm, optimizer.unscale_and_clip_grads

    def norm(*args: object, **kwargs: object) -> Tensor:
        value = scaled_norm(*args, **kwargs)
        return torch.where(value >= 0, value * factor, value)  # -1: not finite

    def correct_then_clip(partitions: list[Tensor], total_norm: object) -> None:
        multiply(partitions, factor)
        unscale(partitions, total_norm)

    with (
        set_attribute(optimizer, "scaled_global_norm", norm),
        set_attribute(optimizer, "unscale_and_clip_grads", correct_then_clip),
    ):
        yield


def multiply(tensors: Iterable[Tensor], factor: float) -> None:
    for tensor in tensors:
        tensor.mul_(factor)


def clip_grad_norm(
    parameters: Iterable[Tensor], max_norm: float, *, tensor_rank: int, model_group: ProcessGroup | None
) -> float:
    """Scale all gradients so that their global 2-norm is at most ``max_norm``; 0: only measure the norm.

    Every parameter counts once. DeepSpeed's ``clip_grad_norm_`` (fp32, ZeRO stage 0) counts only the parameters of the
    first pipeline stage and those marked ``model_parallel``, so its norm is too small.

    The gradients must already be reduced over data-parallel ranks. ``model_group`` has the ranks that hold one copy of
    the model (all stages and shards). Returns the norm before clipping.
    """
    parameters = list(parameters)
    counted = [p.grad for p in parameters if p.grad is not None and counts_here(p, tensor_rank)]
    device = parameters[0].device if parameters else torch.device("cpu")
    half = [gradient for gradient in counted if gradient.dtype in (torch.float16, torch.bfloat16)]
    others = [gradient for gradient in counted if gradient.dtype not in (torch.float16, torch.bfloat16)]
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in half]
    norms = [norm.to(device, torch.float64) for norm in (get_total_norm(others), *norms)]
    square = torch.stack(norms).square().sum()
    dist.all_reduce(square, group=model_group)
    norm = square.sqrt()
    if max_norm > 0:
        # Tensor-parallel ranks count other parameters, but have the same ones.
        exact = any(p.grad is not None and p.grad.dtype == torch.float64 for p in parameters)
        clip_grads_with_norm_(parameters, max_norm, norm if exact else norm.float())
    return float(norm)
