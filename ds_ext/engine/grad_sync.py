"""Eager gradient synchronization: a stage's gradients are averaged while later computations still run.

DeepSpeed reduces all gradients after the last backward of a step. Here the reduction of a stage starts right after its
last backward, without waiting, and is waited for before the optimizer step. What comes out are the same averages, so
the rest of the step is DeepSpeed's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ..pipe_schedules.ops import BACKWARD, BACKWARD_WEIGHT


class EagerReduction:
    """The reductions of one rank in one step.

    Args:
        engine: an initialized engine, whose optimizer's kind and communication settings count.
            Its plan has the computation after which each stage is finished.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.group = engine.mpu.get_data_parallel_group()
        device = engine.module.device_index
        self._starts = {
            (op.stage, op.micro_batch): stages for op, stages in engine.plan.reductions[device].items()
        }
        order = [stage for stages in self._starts.values() for stage in stages]
        self._parameters = _by_last_stage(engine.module, order)
        self._under_way: list[tuple[Any, Tensor, list[Tensor]]] = []

    def after(self, stage: int, micro_batch: int) -> None:
        """Start the reductions that the last backward of (stage, micro-batch) makes possible."""
        for finished in self._starts.get((stage, micro_batch), ()):
            self._start(finished)

    def finish(self) -> None:
        """Wait for all reductions, and hand the averages to DeepSpeed's optimizer."""
        self._start(None)
        for work, average, gradients in self._under_way:
            work.wait()
            for gradient, mean in zip(gradients, _unflatten_dense_tensors(average, gradients), strict=True):
                gradient.copy_(mean)
        self._under_way.clear()
        optimizer = self.engine.optimizer
        if isinstance(optimizer, ZeROOptimizer) and hasattr(optimizer, "reduce_gradients"):
            with _averaged_already(optimizer):
                optimizer.set_gradient_accumulation_boundary(True)
                optimizer.reduce_gradients(pipeline_parallel=True)

    def _start(self, stage: int | None) -> None:
        tracer = self.engine.tracer
        parameters = self._parameters[stage]
        fill_missing_gradients(self.engine, parameters)
        gradients = [g for g in (gradient_of(self.engine, p) for p in parameters) if g is not None]
        kinds = sorted({g.dtype for g in gradients}, key=str)
        for mine in ([g for g in gradients if g.dtype == kind] for kind in kinds):
            flat = _flatten_dense_tensors(mine).to(self.engine.communication_data_type)
            flat.div_(dist.get_world_size(self.group))
            begin = tracer and tracer.now()
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            self._under_way.append((work, flat, mine))
            if tracer is not None:
                tracer.reducing(stage, flat, begin, work)


class DynamicReduction(EagerReduction):
    """Eager reductions of an order decided at run time, where the last backward of a stage is not known in advance.

    A stage is finished when the device has counted all its backwards. All ranks of a collective start their reductions
    in the same order: that of the plan, a run under the costs of the JSON.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        ops = engine.plan.timetable.ranks[engine.module.device_index]
        self._backwards = Counter(op.stage for op in ops if op.kind in (BACKWARD, BACKWARD_WEIGHT))
        self._order = [stage for stages in self._starts.values() for stage in stages]
        self._left, self._waiting = Counter(self._backwards), list(self._order)

    def after(self, stage: int, micro_batch: int) -> None:
        """Count a backward of ``stage``, and start the reductions whose turn has come."""
        self._left[stage] -= 1
        while self._waiting and not self._left[self._waiting[0]]:
            self._start(self._waiting.pop(0))

    def finish(self) -> None:
        """Wait for all reductions, and hand the averages to DeepSpeed's optimizer."""
        assert not self._waiting, "every backward of the step has been counted"
        super().finish()
        self._left, self._waiting = Counter(self._backwards), list(self._order)


def gradient_of(engine: Any, parameter: nn.Parameter) -> Tensor | None:
    """Return the sum of a parameter's gradients over the micro-batches, where the optimizer keeps it."""
    optimizer = engine.optimizer
    if isinstance(optimizer, ZeROOptimizer) and hasattr(optimizer, "get_gradient_for_reduction"):
        return optimizer.get_gradient_for_reduction(parameter)
    return getattr(parameter, "_hp_grad", None) if engine.using_bf16_optimizer else parameter.grad


def reduce_tied_gradients(engine: Any) -> None:
    """Sum the gradients of tied parameters over the ranks that hold them; zeros where a rank did not use one."""
    for parameter, group in engine.module.get_tied_weights_and_groups():
        if gradient_of(engine, parameter) is None:
            _fill(engine.optimizer, [parameter])
        dist.all_reduce(gradient_of(engine, parameter), group=group)


def fill_missing_gradients(engine: Any, parameters: Iterable[nn.Parameter]) -> None:
    """Zeros for parameters without a gradient, as a layer may have used others of its parameters on another replica.

    Replicas reduce the same parameters in the same order. DeepSpeed does so too, but not with ZeRO.
    """
    if engine.using_bf16_optimizer or dist.get_world_size(engine.mpu.get_data_parallel_group()) == 1:
        return  # the first has its sums from the beginning
    _fill(engine.optimizer, parameters)


def _fill(optimizer: Any, parameters: Iterable[nn.Parameter]) -> None:
    apart = getattr(optimizer, "use_grad_accum_attribute", False)
    name, dtype = ("grad_accum", optimizer.gradient_accumulation_dtype) if apart else ("grad", None)
    for parameter in parameters:
        if parameter.requires_grad and getattr(parameter, name, None) is None:
            setattr(parameter, name, torch.zeros_like(parameter, dtype=dtype))


def why_not_eager(engine: Any) -> str | None:
    """What makes eager synchronization impossible with this JSON, or needless; None when it can be done."""
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


def _by_last_stage(module: Any, order: list[int]) -> dict[int | None, list[nn.Parameter]]:
    """Stage -> the parameters whose gradients are complete with it; None -> those tied to other ranks.

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
    """ZeRO's own way from gradients to partitions, without its communication."""

    def keep(tensor: Tensor, communication_data_type: torch.dtype) -> None:
        if not optimizer.reduce_scatter:
            optimizer._add_full_reduction_to_compact_grad_partition(tensor, communication_data_type)

    optimizer.average_tensor = keep
    try:
        yield
    finally:
        del optimizer.average_tensor
