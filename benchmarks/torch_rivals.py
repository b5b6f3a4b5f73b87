"""Schedules of torch.distributed.pipelining as rivals, with the layers, batches and optimizer of the other engines.

Only ranks import it: it needs torch and DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as torch_schedules

from ds_ext.pipe_schedules import Timetable, get_schedule
from ds_ext.pipe_schedules.placement import Placement, linear, looped, v
from ds_ext.pipe_schedules.text import loads

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class TorchSchedule:
    """One of torch's schedules, and its placement for a number of devices."""

    kind: type[Any]
    placement: Callable[[int], Placement]

    @property
    def has_chunks(self) -> bool:
        """Return whether devices hold several stages."""
        return issubclass(self.kind, torch_schedules.PipelineScheduleMulti)


TORCH_SCHEDULES = {
    "torch_1f1b": TorchSchedule(torch_schedules.Schedule1F1B, linear),
    "torch_interleaved_1f1b": TorchSchedule(
        torch_schedules.ScheduleInterleaved1F1B, lambda devices: looped(devices, 2)
    ),
    "torch_zbv": TorchSchedule(torch_schedules.ScheduleZBVZeroBubble, v),
    "torch_dualpipev": TorchSchedule(torch_schedules.ScheduleDualPipeV, v),
}


class TorchEngine:
    """Stages of this rank under a schedule of torch. Weights in 16 bits have fp32 copies, as in DeepSpeed's engine.

    Args:
        schedule: torch's schedule.
        modules: stage -> its module, on ``device``.
        batches: (inputs, labels) of every micro-batch.
        make_optimizer: creates the optimizer for a list of parameters.
        tied: weights that the first and the last stage share.

    Attributes:
        timetable: order of the ops, as torch plans it.
    """

    def __init__(
        self,
        schedule: TorchSchedule,
        modules: Mapping[int, nn.Module],
        batches: Sequence[tuple[Tensor, Tensor]],
        loss_fn: Loss,
        make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
        device: torch.device,
        tied: Sequence[Tensor] = (),
    ) -> None:
        devices, self._micro_batches = dist.get_world_size(), len(batches)
        placement = schedule.placement(devices)
        last = placement.stages - 1
        parts = [
            pipelining.PipelineStage(module, stage, placement.stages, device)
            for stage, module in modules.items()
        ]
        # Scaling belongs to the step: torch scales a weight once per stage that has it.
        self._schedule = schedule.kind(
            parts if schedule.has_chunks else parts[0],
            n_microbatches=self._micro_batches,
            loss_fn=loss_fn,
            scale_grads=False,
        )
        inputs, labels = (torch.cat(tensors).to(device) for tensors in zip(*batches, strict=True))
        self._inputs = (inputs,) if 0 in modules else ()  # torch splits them again
        self._labels = labels if last in modules else None
        self._parameters = list(dict.fromkeys(p for module in modules.values() for p in module.parameters()))
        self._masters = [
            p if p.dtype == torch.float32 else p.detach().float().requires_grad_() for p in self._parameters
        ]
        self._optimizer = make_optimizer(list(self._masters))
        owners = sorted({placement.pipes[0][0], placement.pipes[0][last]})
        self._tied, self._group = list(tied), None
        if len(owners) > 1 and _tied_anywhere(tied):
            self._group = dist.new_group(owners)
        self.timetable = (
            _planned_by_torch(self._schedule, devices)
            if schedule.has_chunks
            else get_schedule("1f1b").timetable(devices, self._micro_batches)
        )

    def step(self) -> float | None:
        """Train one step. Returns the mean loss on the rank of the last stage."""
        losses: list[Tensor] = []
        target: dict[str, Any] = {} if self._labels is None else {"target": self._labels, "losses": losses}
        self._schedule.step(*self._inputs, **target)
        for weight in self._tied if self._group is not None else ():
            dist.all_reduce(weight.grad, group=self._group)
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            if parameter.grad is not None:
                gradient = parameter.grad.to(master.dtype).div_(self._micro_batches)
                parameter.grad, master.grad = None, gradient
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(self._masters, self._parameters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
        return float(torch.stack(losses).mean()) if losses else None


def build_stages(
    specs: Sequence[LayerSpec], boundaries: Sequence[int], stages: Sequence[int], dtype: torch.dtype
) -> tuple[dict[int, nn.Module], list[Tensor]]:
    """Build the modules of some stages. Returns them and the tied weights among their parameters.

    Args:
        boundaries: stage s has the layers ``boundaries[s]`` to ``boundaries[s + 1]``.
    """
    owners: dict[str, nn.Module] = {}
    tied: list[Tensor] = []

    def build(spec: LayerSpec) -> nn.Module:
        if not isinstance(spec, TiedLayerSpec):
            return spec.build().to(dtype)
        if spec.key not in owners:
            owners[spec.key] = spec.build().to(dtype)
            tied.extend(map(owners[spec.key].get_parameter, spec.tied_weight_attr))
        return _Tied(owners[spec.key], spec.forward_fn)

    modules: dict[int, nn.Module] = {
        stage: nn.Sequential(*map(build, specs[boundaries[stage] : boundaries[stage + 1]]))
        for stage in stages
    }
    return modules, tied


class _Tied(nn.Module):
    """Use of a module whose weight another layer shares."""

    def __init__(self, module: nn.Module, forward_fn: Callable[[nn.Module, Tensor], Tensor] | None) -> None:
        super().__init__()
        self.module, self._forward_fn = module, forward_fn

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x) if self._forward_fn is None else self._forward_fn(self.module, x)


def _tied_anywhere(tied: Sequence[Tensor]) -> bool:
    """Return whether any rank has tied weights. A collective call of all ranks."""
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, len(tied))
    return any(counts)


def _planned_by_torch(schedule: Any, devices: int) -> Timetable:
    rows = (schedule.pipeline_order[device] for device in range(devices))
    return loads("\n".join(",".join("" if action is None else str(action) for action in row) for row in rows))
