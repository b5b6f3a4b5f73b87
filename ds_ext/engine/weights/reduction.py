"""Reductions of gradients that overlap with later computations.

DeepSpeed reduces all gradients after the last backward of a step. An eager reduction starts right after the last
backward of a stage and overlaps with later computations. The engine waits for it before the optimizer step. The
averages are the same, so the rest of the step is DeepSpeed's.

ZeRO's optimizers read the gradients of this rank's part of every parameter group. A reduce-scatter of a group computes
only these averages, with half the bytes of an all-reduce.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from ..deepspeed_api.attributes import set_attribute
from ..deepspeed_api.names import model_groups
from ..module import PipelineModule
from ..tracing.recorder import Tracer
from ..types import Optimizer
from .gradients import Gradients, as_real, copy_parts, flatten

# The older name, before torch 2.13, is deprecated.
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def why_not_eager(engine: DeepSpeedEngine) -> str | None:
    """Return why the engine does not support eager reductions, as a clause that follows "because"; None if it does."""
    optimizer = engine.optimizer
    if dist.get_world_size(engine.mpu.get_data_parallel_group()) == 1:
        return "there is one data-parallel rank"
    if not engine.gradient_average or engine.gradient_predivide_factor() != 1.0:
        return "gradients are not averaged, or are divided before the reduction"
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        if optimizer.cpu_offload or optimizer.overlap_comm:
            return "the optimizer is offloaded or overlaps reductions itself"
        if not optimizer.contiguous_gradients:
            return '"contiguous_gradients" is false'
    return None


def parameters_by_reduction(
    module: PipelineModule, order: Sequence[int]
) -> dict[int | None, list[nn.Parameter]]:
    """Return a dict of stage -> parameters to reduce with it; None -> parameters tied to other ranks.

    A parameter used by several stages belongs to the last one in ``order``. Gradients of tied parameters are first
    summed over the ranks of the tie.
    """
    tied = {id(weight) for weight, _ in module.get_tied_weights_and_groups()}
    last: dict[int, int | None] = {}
    for stage in order:
        for parameter in module.stage_parameters(stage):
            last[id(parameter)] = None if id(parameter) in tied else stage
    by_stage: dict[int | None, list[nn.Parameter]] = {stage: [] for stage in (None, *order)}
    for parameter in module.parameters():
        if parameter.requires_grad:
            by_stage[last.get(id(parameter))].append(parameter)
    return by_stage


class EagerReduction:
    """Reductions of one rank that overlap with later computations.

    Args:
        order: stages of this rank, in the order of their reductions.
        scatters: True to reduce-scatter parameter groups of one stage.

    Attributes:
        parameters: stage -> parameters that are reduced with it; None -> those tied to other ranks.
    """

    def __init__(
        self,
        gradients: Gradients,
        module: PipelineModule,
        order: Sequence[int],
        dtype: torch.dtype,
        tracer: Tracer | None,
        scatters: bool = False,
    ) -> None:
        self._gradients, self._dtype, self._tracer = gradients, dtype, tracer
        self.parameters = parameters_by_reduction(module, order)
        self._groups = {
            stage: gradients.groups_within(parameters) if scatters else []
            for stage, parameters in self.parameters.items()
        }
        self._pending: deque[tuple[Work, Tensor, list[Tensor]]] = deque()
        # Parameters, and reduced flags of those with a gradient.
        self._used: list[tuple[list[nn.Parameter], Tensor]] = []

    def start(self, stage: int) -> None:
        """Start to average the gradients of a stage. All replicas call this in one order; the plan has been checked."""
        # Free the buffers of finished reductions before the next one needs memory.
        while self._pending and self._pending[0][0].is_completed():
            self._finish_oldest()
        self._reduce(stage)

    def finish(self) -> None:
        """Wait for all reductions, and pass the averages to DeepSpeed's optimizer."""
        self._reduce(None)
        while self._pending:
            self._finish_oldest()
        for parameters, flags in self._used:
            self._gradients.drop_unused(parameters, (flags != 0).tolist())
        self._used.clear()
        optimizer = self._gradients.optimizer
        if isinstance(optimizer, DeepSpeedZeroOptimizer):
            with _without_averaging(optimizer):
                optimizer.set_gradient_accumulation_boundary(True)
                optimizer.reduce_gradients(pipeline_parallel=True)

    def _finish_oldest(self) -> None:
        work, average, gradients = self._pending.popleft()
        work.wait()
        if gradients:
            copy_parts(average, gradients)

    def _reduce(self, stage: int | None) -> None:
        """Start the reduction of a stage; None: of the parameters that are tied to other ranks.

        Where gradients may be missing, flags of the used parameters are reduced with them.
        """
        parameters = self.parameters[stage]
        used = self._gradients.fill_missing(parameters)
        if self._gradients.share_memory:
            # Backwards of other stages would add these, which are zeros then, to sums that the reduction writes to.
            for parameter in parameters:
                parameter.grad = None
        if self._groups[stage]:
            scattered = set()
            for index in self._groups[stage]:
                scattered.update(map(id, model_groups(self._gradients.optimizer)[index]))
                self._start(stage, *self._gradients.flat_group(index, self._dtype), is_group=True)
            parameters = [parameter for parameter in parameters if id(parameter) not in scattered]
        gradients = [as_real(g) for g in map(self._gradients.get, parameters) if g is not None]
        if self._gradients.may_be_missing and gradients:
            flags = torch.tensor(used, dtype=gradients[0].dtype, device=gradients[0].device)
            gradients.append(flags)
            self._used.append((parameters, flags))
        for dtype in sorted({g.dtype for g in gradients}, key=str):
            copied = [g for g in gradients if g.dtype == dtype]
            reduced_dtype = dtype if dtype == torch.float64 else self._dtype
            if dtype == reduced_dtype and self._gradients.share_memory:
                in_place, copied = joined_views(copied)
                for view in in_place:
                    self._start(stage, view, [])
            if copied:
                self._start(stage, flatten(copied).to(reduced_dtype), copied)

    def _start(
        self, stage: int | None, flat: Tensor, gradients: list[Tensor], is_group: bool = False
    ) -> None:
        """Start to average a vector over the replicas; ``gradients`` receive its parts at the end.

        Of a whole parameter group, this rank gets the averages of its part.
        """
        group, data_parallel_size = self._gradients.group, self._gradients.data_parallel_size
        flat.div_(data_parallel_size)
        begin = 0.0 if self._tracer is None else self._tracer.now()
        average = flat
        if is_group:
            average = flat.chunk(data_parallel_size)[dist.get_rank(group)]
            work = _reduce_scatter(average, flat, group)
        else:
            work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None
        self._pending.append((work, average, gradients))
        if self._tracer is not None:
            self._tracer.reducing(stage, flat, begin, work)


def _reduce_scatter(part: Tensor, flat: Tensor, group: ProcessGroup | None) -> Work | None:
    if dist.get_backend(group) == "gloo":  # torch's reduce-scatter would all-reduce a copy
        return dist.all_reduce(flat, group=group, async_op=True)
    return _SCATTER(part, flat, group=group, async_op=True)


@contextmanager
def _without_averaging(optimizer: Optimizer) -> Iterator[None]:
    """Context in which ZeRO moves gradients to its partitions without communication."""

    # Sums in another dtype than the weights have a buffer for each partition.
    move = optimizer._add_full_reduction_to_compact_grad_partition
    with set_attribute(optimizer, "average_tensor", move):
        yield


def joined_views(tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return views of two or more tensors that follow each other in a storage, and the tensors without a neighbor.

    Neighbors are contiguous, and in the order of ``tensors``. The bf16 optimizer sums all gradients of a parameter
    group in one tensor, so that a few views hold those of a stage.
    """
    by_storage: dict[int, list[list[Tensor]]] = {}
    for tensor in tensors:
        runs = by_storage.setdefault(tensor.untyped_storage().data_ptr(), [])
        if runs and tensor.is_contiguous() and _follows(tensor, runs[-1][-1]):
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    every_run = [run for runs in by_storage.values() for run in runs]
    joined = [run[0].as_strided((sum(t.numel() for t in run),), (1,)) for run in every_run if len(run) > 1]
    return joined, [run[0] for run in every_run if len(run) == 1]


def _follows(tensor: Tensor, last: Tensor) -> bool:
    return last.is_contiguous() and tensor.storage_offset() == last.storage_offset() + last.numel()
