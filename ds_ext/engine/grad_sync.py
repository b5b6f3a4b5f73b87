"""Gradients of a rank: where they are, their reduction over data-parallel ranks, and their norm.

DeepSpeed reduces all gradients after the last backward of a step. In an eager reduction that of a stage starts right
after its last backward, while later computations still run, and is waited for before the optimizer step. The averages
are the same, so the rest of the step is DeepSpeed's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed import ProcessGroup, Work
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..pipe_schedules.ops import BACKWARD, BACKWARD_WEIGHT, Op
from .module import PipelineModule
from .tracing.recorder import Tracer

_NOTHING = nullcontext()


class Gradients:
    """Gradients of a rank's parameters, summed over micro-batches, where the optimizer keeps them.

    Args:
        optimizer: DeepSpeed's or torch's; None on a rank without gradients.
        group: data-parallel ranks.
    """

    def __init__(self, optimizer: Any, group: ProcessGroup | None) -> None:
        self.optimizer, self.group = optimizer, group
        self.replicas = dist.get_world_size(group)
        self._is_zero = isinstance(optimizer, ZeROOptimizer)
        self._has_sums = self._is_zero and hasattr(optimizer, "get_gradient_for_reduction")
        self._is_bf16 = type(optimizer) is BF16_Optimizer

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter; None where no micro-batch used it."""
        if self._has_sums:
            return self.optimizer.get_gradient_for_reduction(parameter)
        return getattr(parameter, "_hp_grad", None) if self._is_bf16 else parameter.grad

    def fill_missing(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set zeros for parameters without a gradient: on another replica a layer may have used them.

        Replicas reduce the same parameters in the same order. DeepSpeed does so too, but not with ZeRO.
        """
        # The bf16 optimizer has its sums from the beginning.
        if not self._is_bf16 and self.replicas > 1:
            self._fill(parameters)

    def sum_tied(self, tied: Iterable[tuple[nn.Parameter, ProcessGroup]]) -> None:
        """Sum the gradients of tied parameters over the ranks that hold them; zeros where a rank did not use one."""
        for parameter, group in tied:
            if self.of(parameter) is None:
                self._fill([parameter])
            dist.all_reduce(self.of(parameter), group=group)

    def accumulating(self) -> AbstractContextManager[None]:
        """Let ZeRO and bf16 optimizers move the gradients of a backward to their buffers."""
        return _managed(self.optimizer) if self._is_zero else _NOTHING

    def _fill(self, parameters: Iterable[nn.Parameter]) -> None:
        apart = getattr(self.optimizer, "use_grad_accum_attribute", False)
        name, dtype = ("grad_accum", self.optimizer.gradient_accumulation_dtype) if apart else ("grad", None)
        for parameter in parameters:
            if parameter.requires_grad and getattr(parameter, name, None) is None:
                setattr(parameter, name, torch.zeros_like(parameter, dtype=dtype))


@contextmanager
def _managed(optimizer: ZeROOptimizer) -> Iterator[None]:
    optimizer.backward_prologue()
    yield
    optimizer.backward_epilogue()


# --- eager reduction ---


class EagerReduction:
    """Reductions of one rank in one step.

    Args:
        gradients: of this rank.
        module: its stages' parameters are reduced.
        starts: last backward of a stage -> the stages whose gradients are reduced from then on.
        dtype: in which gradients travel.
        tracer: records the reductions; None without a trace.
    """

    def __init__(
        self,
        gradients: Gradients,
        module: PipelineModule,
        starts: Mapping[Op, tuple[int, ...]],
        dtype: torch.dtype,
        tracer: Tracer | None,
    ) -> None:
        self._gradients, self._dtype, self._tracer = gradients, dtype, tracer
        self._starts = {(op.stage, op.micro_batch): stages for op, stages in starts.items()}
        self._order = [stage for stages in self._starts.values() for stage in stages]
        self._parameters = _by_last_stage(module, self._order)
        self._under_way: list[tuple[Work, Tensor, list[Tensor]]] = []

    def after(self, stage: int, micro_batch: int) -> None:
        """Start the reductions that the last backward of (stage, micro-batch) makes possible."""
        for finished in self._starts.get((stage, micro_batch), ()):
            self._start(finished)

    def finish(self) -> None:
        """Wait for all reductions, and pass the averages to DeepSpeed's optimizer."""
        self._start(None)
        for work, average, gradients in self._under_way:
            work.wait()
            for gradient, mean in zip(gradients, _unflatten_dense_tensors(average, gradients), strict=True):
                gradient.copy_(mean)
        self._under_way.clear()
        optimizer = self._gradients.optimizer
        if isinstance(optimizer, ZeROOptimizer) and hasattr(optimizer, "reduce_gradients"):
            with _averaged_already(optimizer):
                optimizer.set_gradient_accumulation_boundary(True)
                optimizer.reduce_gradients(pipeline_parallel=True)

    def _start(self, stage: int | None) -> None:
        parameters = self._parameters[stage]
        self._gradients.fill_missing(parameters)
        gradients = [g for g in map(self._gradients.of, parameters) if g is not None]
        for kind in sorted({g.dtype for g in gradients}, key=str):
            same = [g for g in gradients if g.dtype == kind]
            flat = _flatten_dense_tensors(same).to(self._dtype)
            flat.div_(self._gradients.replicas)
            begin = None if self._tracer is None else self._tracer.now()
            work = dist.all_reduce(flat, group=self._gradients.group, async_op=True)
            assert work is not None
            self._under_way.append((work, flat, same))
            if self._tracer is not None and begin is not None:
                self._tracer.reducing(stage, flat, begin, work)


class DynamicReduction(EagerReduction):
    """Eager reductions of an order decided at run time, where the last backward of a stage is not known in advance.

    A stage is finished when the device has counted all its backwards. All ranks of a collective start their reductions
    in the same order: that of the plan, a run under the costs of the JSON.

    Args:
        gradients, module, starts, dtype, tracer: as for :class:`EagerReduction`.
        ops: ops of this device in a step, in any order.
    """

    def __init__(
        self,
        gradients: Gradients,
        module: PipelineModule,
        starts: Mapping[Op, tuple[int, ...]],
        dtype: torch.dtype,
        tracer: Tracer | None,
        ops: Iterable[Op],
    ) -> None:
        super().__init__(gradients, module, starts, dtype, tracer)
        self._backwards = Counter(op.stage for op in ops if op.kind in (BACKWARD, BACKWARD_WEIGHT))
        self._left, self._waiting = Counter(self._backwards), list(self._order)

    def after(self, stage: int, micro_batch: int) -> None:
        """Count a backward of ``stage``, and start the reductions whose turn has come."""
        self._left[stage] -= 1
        while self._waiting and not self._left[self._waiting[0]]:
            self._start(self._waiting.pop(0))

    def finish(self) -> None:
        """Wait for all reductions, and pass the averages to DeepSpeed's optimizer."""
        assert not self._waiting, "every backward of the step has been counted"
        super().finish()
        self._left, self._waiting = Counter(self._backwards), list(self._order)


def why_not_eager(engine: DeepSpeedEngine) -> str | None:
    """Return what makes eager reductions impossible with this JSON, or needless; None when they can be made.

    Args:
        engine: an initialized engine.
    """
    optimizer = engine.optimizer
    if dist.get_world_size(engine.mpu.get_data_parallel_group()) == 1:
        return "there is one data-parallel rank"
    if not engine.gradient_average or engine.gradient_predivide_factor() != 1.0:
        return "gradients are not plainly averaged"
    if engine.has_moe_layers:
        return "there are experts"
    if getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "overlap_comm", False):
        return "the optimizer is offloaded or overlaps by itself"
    if isinstance(optimizer, ZeROOptimizer) and not getattr(optimizer, "contiguous_gradients", True):
        return '"contiguous_gradients" is false'
    return None


def _by_last_stage(module: PipelineModule, order: list[int]) -> dict[int | None, list[nn.Parameter]]:
    """Return stage -> the parameters whose gradients are complete with it, None -> those tied to other ranks.

    A parameter of several stages belongs to the last in ``order``. Tied ones are summed over their ranks first.
    """
    tied = {id(weight) for weight, _ in module.get_tied_weights_and_groups()}
    last: dict[int, int | None] = {}
    for stage in order:
        for parameter in module.stage_parameters(stage):
            last[id(parameter)] = None if id(parameter) in tied else stage
    found: dict[int | None, list[nn.Parameter]] = {stage: [] for stage in (None, *order)}
    for parameter in module.parameters():
        if parameter.requires_grad:
            found[last.get(id(parameter))].append(parameter)
    return found


@contextmanager
def _averaged_already(optimizer: Any) -> Iterator[None]:
    """Let ZeRO move gradients to its partitions without communication."""

    def keep(tensor: Tensor, communication_data_type: torch.dtype) -> None:
        if not optimizer.reduce_scatter:
            optimizer._add_full_reduction_to_compact_grad_partition(tensor, communication_data_type)

    optimizer.average_tensor = keep
    try:
        yield
    finally:
        del optimizer.average_tensor


# --- norm ---


def counts_here(parameter: Tensor, tensor_rank: int) -> bool:
    """Return whether this rank of a model copy contributes the parameter (or its shard) to a norm; one rank does.

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

    Every parameter counts once. DeepSpeed's ``clip_grad_norm_`` (fp32, ZeRO stage 0) sums only the parameters of the
    first pipeline stage and those marked ``model_parallel``, so every stage is clipped by a norm that is too small.

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
