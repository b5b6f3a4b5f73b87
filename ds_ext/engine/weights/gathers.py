"""Gathers of the weights after an optimizer step that still run when the next step starts.

With ZeRO stage 1 and in half precision, every data-parallel rank updates its part of the weights, and gathers the parts
of the others. DeepSpeed waits for this at the end of the step. Here the program has an instruction that starts the
gather of a stage, and one that waits for it before the stage's first op. Whatever else reads weights waits for all:
evaluations, checkpoints, snapshots and audits.

A gather needs parameter groups of single stages, so the groups of a script are split before DeepSpeed builds its
optimizer. A group with several stages would be gathered before the first of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.zero import stage_1_and_2
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from ...errors import ConfigError
from ...pipe_schedules.gathers import order_of_first_use
from ...pipe_schedules.reductions import order_of_reductions
from ..deepspeed_api.names import model_groups
from ..module import PipelineModule
from ..tracing.recorder import Tracer
from ..types import Function, Groups, Optimizer, ParameterGroup, Scheduler
from .reduction import parameters_by_reduction


class WeightGathers:
    """Gathers of one rank, started by stage and waited for in the order of their starts."""

    def __init__(self, optimizer: ZeROOptimizer, module: PipelineModule, tracer: Tracer | None) -> None:
        self._tracer = tracer
        order, first = _order(module), _first_uses(module)
        self._groups: dict[int, list[int]] = {stage: [] for stage in order}  # stage -> parameter groups
        for i, group in enumerate(model_groups(optimizer)):
            self._groups[order[min((first.get(id(p), 0) for p in group), default=0)]].append(i)
        # By parameter group: vector of the weights, this rank's part, and the ranks with the other parts.
        self._updated: dict[int, tuple[Tensor, Tensor, ProcessGroup]] = {}
        self._pending: deque[tuple[int, Work]] = deque()

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Context of an optimizer step, in which DeepSpeed does not gather the weights."""
        self.wait()  # a step may have used no weight of a stage
        modules = bf16_optimizer, stage_1_and_2
        originals = [module.all_gather_dp_groups for module in modules]
        for module in modules:
            module.all_gather_dp_groups = self._take
        try:
            yield
        finally:
            for module, original in zip(modules, originals, strict=True):
                module.all_gather_dp_groups = original

    def _take(
        self,
        groups_flat: Sequence[Tensor],
        partitioned_param_groups: Sequence[Sequence[Tensor]],
        dp_process_group: Sequence[ProcessGroup],
        **_: object,
    ) -> None:
        """Take the arguments of DeepSpeed's ``all_gather_dp_groups``, one per parameter group."""
        for i, group in enumerate(dp_process_group):
            if dist.get_world_size(group) > 1:
                # Of one parameter, the vector is a view of it.
                part = partitioned_param_groups[i][dist.get_rank(group)].detach()
                self._updated[i] = groups_flat[i].detach(), part, group

    def start(self, stage: int) -> None:
        """Start to gather a stage, unless the optimizer has skipped the step."""
        for i in self._groups[stage]:
            if i not in self._updated:
                continue
            flat, part, group = self._updated.pop(i)
            begin = 0.0 if self._tracer is None else self._tracer.now()
            work = dist.all_gather_into_tensor(flat, part, group=group, async_op=True)
            assert work is not None
            if self._tracer is not None:
                self._tracer.gathering(stage, flat, begin, work)
            self._pending.append((stage, work))

    def wait(self, stage: int | None = None) -> None:
        """Wait for the weights of a stage, and of those that are gathered before it; None: of all."""
        while self._pending and (stage is None or any(stage == pending for pending, _ in self._pending)):
            self._pending[0][1].wait()
            self._pending.popleft()


def split_by_stage(groups: Groups, module: PipelineModule) -> tuple[list[ParameterGroup], list[int]]:
    """Return parameter groups of single stages, and for each the index of the group that it is a part of.

    A parameter of several stages, such as a tied embedding, belongs to the first that this rank uses. Parameters whose
    gradients are reduced with other stages have their own group. Parts without elements, and frozen ones, on which
    DeepSpeed fails, are joined to another one.
    """
    first = _first_uses(module)
    reductions = parameters_by_reduction(
        module, order_of_reductions(module.plan.program, module.device_index)
    )
    reduced = {id(p): place for place, parameters in enumerate(reductions.values()) for p in parameters}
    if not all(isinstance(group, Mapping) for group in groups):
        groups = [{"params": list(groups)}]
    parts: list[ParameterGroup] = []
    sources: list[int] = []
    for source, group in enumerate(groups):
        by_place: dict[tuple[int, int], Groups] = {}
        empty = []
        for entry in group["params"]:
            parameter = entry[1] if isinstance(entry, tuple) else entry
            place = first.get(id(parameter), 0), reduced.get(id(parameter), 0)
            trains = parameter.numel() and parameter.requires_grad
            (by_place.setdefault(place, []) if trains else empty).append(entry)
        of_stages = [by_place[place] for place in sorted(by_place)] or [[]]
        of_stages[0] += empty
        parts += [{**group, "params": entries} for entries in of_stages]
        sources += [source] * len(of_stages)
    return parts, sources


def scheduler_of_parts(make: Function, sources: Sequence[int], optimizer: Optimizer) -> Scheduler:
    """Return the scheduler of a script's function, which fails if it needs the number of the script's groups."""
    try:
        return make(optimizer)
    except (ValueError, IndexError) as error:
        raise ConfigError(
            f"lr_scheduler: with overlap_across_steps, the optimizer has {len(sources)} parameter groups on this rank, "
            f"the parts of {max(sources) + 1} by stage (got {type(error).__name__}: {error}). Use one value for all "
            f'groups, put the scheduler in the JSON, whose lists are expanded, or set "overlap_across_steps": false.'
        ) from error


def require_equal_parts(param_groups: Sequence[ParameterGroup], sources: Sequence[int]) -> None:
    """Raise ConfigError if a script has set parts of one group to different values."""
    first: dict[int, int] = {}
    for index, (group, source) in enumerate(zip(param_groups, sources, strict=False)):
        other = param_groups[first.setdefault(source, index)]
        for key, value in group.items():
            if key != "params" and other.get(key) != value:
                raise ConfigError(
                    f"param_groups[{index}][{key!r}]: with overlap_across_steps, groups {first[source]} and {index} "
                    f"are parts of one, by stage, and need equal values (got {other.get(key)} and {value}). Set the "
                    f'value in all parts, or set "overlap_across_steps": false.'
                )


def repeat_lists(values: Mapping[str, object], sources: Sequence[int]) -> dict[str, object]:
    """Return the arguments of a scheduler, with lists of a value per parameter group expanded to the split groups."""
    count = max(sources, default=-1) + 1
    return {
        key: [value[source] for source in sources]
        if isinstance(value, list | tuple) and len(value) == count
        else value
        for key, value in values.items()
    }


def _order(module: PipelineModule) -> list[int]:
    """Return the stages of this rank in the order of their gathers."""
    return order_of_first_use(module.plan.simulation, module.device_index)


def _first_uses(module: PipelineModule) -> dict[int, int]:
    """Return a dict of ``id`` of a parameter -> place of the first stage that uses it in the order of the gathers."""
    first: dict[int, int] = {}
    for place, stage in enumerate(_order(module)):
        for parameter in module.stage_parameters(stage):
            first.setdefault(id(parameter), place)
    return first
