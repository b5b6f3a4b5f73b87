"""Engines under test: ours, DeepSpeed's and torch's, with the same layers, batches and optimizer.

Only ranks import it: it needs torch and DeepSpeed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import DualPipeVModule, LayerSpec
from deepspeed.pipe import PipelineModule as DeepSpeedPipelineModule
from deepspeed.runtime.pipe.schedule import BackwardPass, DualPipeVSchedule, ForwardPass

from ds_ext.engine import PipelineModule, initialize
from ds_ext.pipe_schedules import Timetable, get_schedule
from ds_ext.pipe_schedules.ops import BACKWARD, BACKWARD_WEIGHT, FORWARD, Op
from ds_ext.pipe_schedules.placement import v
from ds_ext.pipe_schedules.registry import import_modules

from .command import costs_on, options_for, slices_of, timetable_for
from .emulated import (
    HEAD_ROWS,
    EmulatedDevice,
    EmulatedHeadPart,
    EmulatedLayer,
    emulated_device,
    make_batches,
    rows_of,
    set_exact_timers,
)
from .ranks import Job
from .slow_links import Delay, slow_down
from .torch_rivals import TORCH_SCHEDULES, TorchEngine, TorchSchedule

Step = Callable[[], float | None]  # trains one step; returns the loss if this rank has it
_SGD = {"type": "SGD", "params": {"lr": 0.01}}


class SameBatches:
    """Batches that are the same in every step."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def get(self, micro_batch: int) -> Any:
        """Return a batch of this step."""
        return self.batches[micro_batch]

    def advance(self, micro_batches: int) -> None:
        """Begin the next step, which reads the same batches."""


@dataclass(frozen=True)
class Workload:
    """Model, batches and optimizer that all engines of a benchmark share.

    Args:
        layers: specs of the model's layers.
        batches: (inputs, labels) of every micro-batch.
        precision: DeepSpeed's section for the precision; empty for fp32.
    """

    layers: Sequence[LayerSpec]
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]]
    loss_fn: Callable[..., Any] = F.mse_loss
    partition_method: str = "uniform"
    optimizer: Mapping[str, Any] = field(default_factory=lambda: _SGD)
    precision: Mapping[str, Any] = field(default_factory=dict)

    def in_ours(
        self, job: Job, timetable: Timetable, clock: Any = None, **section: Any
    ) -> tuple[Any, Callable[[], float]]:
        """Return our engine for ``timetable``, and its step.

        Args:
            section: additional keys for the JSON's ``"ds_ext"``.
        """
        keys = {
            "schedule": timetable.schedule,
            "pipeline_parallel_size": timetable.placement.devices_per_pipe,
            "print_plan": False,
            "transport_options": {"timeout_s": job.timeout_s},
        }
        config = {**self._config(), "ds_ext": keys | section}
        model = PipelineModule(
            list(self.layers),
            config,
            loss_fn=self.loss_fn,
            clock=clock,
            partition_method=self.partition_method,
        )
        engine, *_ = initialize(model=model, config=config)
        batches = SameBatches(self.batches)
        return engine, lambda: float(engine.train_batch(batches))

    def in_deepspeeds(
        self, num_stages: int, module: type[Any] = DeepSpeedPipelineModule
    ) -> tuple[Any, Callable[[], float]]:
        """Return DeepSpeed's engine, and its step."""
        model = module(
            list(self.layers),
            num_stages=num_stages,
            loss_fn=self.loss_fn,
            partition_method=self.partition_method,
        )
        engine, *_ = deepspeed.initialize(model=model, config=self._config())
        batches = itertools.cycle(self.batches)
        return engine, lambda: float(engine.train_batch(data_iter=batches))

    def _config(self) -> dict[str, Any]:
        return {
            "train_batch_size": len(self.batches[0][0]) * len(self.batches),
            "train_micro_batch_size_per_gpu": len(self.batches[0][0]),
            **self.precision,
            "optimizer": self.optimizer,
            "gradient_clipping": 0.0,  # torch's schedules do not clip, and DeepSpeed's norm is that of one stage
            "steps_per_print": 10**9,
        }


# --- engines with emulated layers ---


@dataclass(frozen=True)
class Emulated:
    """Engine of this rank with layers that wait.

    A step that follows other engines' steps begins with cold caches, so only every second step counts. Each of these
    draws new jitter, the same for all engines, because a single draw can favor an order by more than its gain.
    """

    step: Step
    timetable: Timetable
    device: EmulatedDevice

    def run(self) -> tuple[float, float, float, float | None]:
        """Return (start, end of the last pass, milliseconds computed, loss) of one step."""
        self.device.start_step()
        self.step()
        self.device.finish()
        dist.barrier()
        self.device.start_step()
        start = time.perf_counter()
        loss = self.step()
        self.device.finish()
        self.device.next_seed()
        return start, self.device.last_end, self.device.computed_ms, loss


def build(name: str, job: Job) -> Emulated:
    """Build the engine called ``name``: one of ``RIVALS``, or ours with the schedule of that request."""
    set_exact_timers()
    import_modules(job.modules, "--import")
    engine = RIVALS[name](job) if name in RIVALS else _ours(name, job)
    device, timetable = engine.device, engine.timetable
    device.split_backwards = timetable.split_backwards
    order = timetable.orders[dist.get_rank()]
    device.head_ops = [op for op in order if timetable.placement.is_head_part(op.stage)]
    return engine


def emulated_workload(job: Job, device: EmulatedDevice) -> Workload:
    """Return a model of emulated layers, one per stage, and its batches."""
    parts, rows = device.placement.head_parts, rows_of(job.message_kb)
    layers = [LayerSpec(EmulatedLayer, stage, device) for stage in range(device.placement.stages)]
    batches = make_batches(job.micro_batches, rows, device.slices)
    if parts:
        head = LayerSpec(torch.nn.Identity)
        head.in_parts = lambda parts: [LayerSpec(EmulatedHeadPart, i, parts, device) for i in range(parts)]
        tokens = (torch.arange(batches[0][0].size(1)) % (parts * HEAD_ROWS)).unsqueeze(0)
        return Workload([*layers, head], [(inputs, tokens) for inputs, _ in batches], sum_of_losses)
    return Workload(layers, batches, F.mse_loss if device.slices == 1 else squared_error)


def squared_error(outputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the squared error of a slice and the number of its values; over all slices, their ratio is mse_loss."""
    return F.mse_loss(outputs, labels, reduction="sum"), labels.numel()


def sum_of_losses(losses: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the sum of the losses of the tokens, which the parts of a head compute, and their number."""
    return losses.sum(), labels.numel()


sum_of_losses.takes_token_losses = True  # pyright: ignore[reportFunctionMemberAccess]


def _ours(request: str, job: Job) -> Emulated:
    parts, slices = job.vocabulary_parallel_head, slices_of(request)
    timetable = timetable_for(request, job.num_ranks, job.micro_batches, job.costs, parts)
    costs = costs_on(timetable.placement, job.costs)
    device = emulated_device(job.device, costs, timetable.placement, slices)
    section = {"schedule_options": options_for(request, costs), "sequence_slices": slices}
    section["vocabulary_parallel_head"] = parts
    engine, step = emulated_workload(job, device).in_ours(job, timetable, clock=device, **section)
    if job.costs.comm:
        slow_down(engine, _delay(device, timetable), job.costs.comm * (1 - job.costs.jitter) / 1000)
    return Emulated(step, timetable, device)


def _delay(device: EmulatedDevice, timetable: Timetable) -> Delay:
    """Return the simulator's delay of a message, jitter included; ranks are devices here."""

    def delay(source: int, target: int, op: Op) -> float:
        micro_batch, index = divmod(op.micro_batch, timetable.slices)  # of the item in the tag
        op = op._replace(micro_batch=micro_batch, slice=index)
        dependencies, costs = timetable.dependencies, device.costs
        if timetable.placement.is_head_part(op.stage) and op.kind != FORWARD:
            op = op._replace(kind=BACKWARD_WEIGHT)
        elif op.kind != FORWARD:
            op = op._replace(kind=dependencies.gradient_kind(op.stage, op.micro_batch))
        delay_ms = costs.delay(source, target) * dependencies.tensors(op)
        return delay_ms * costs.jitter_factor(op, message=True) / 1000

    return delay


def _deepspeed(job: Job, module: type[Any], timetable: Timetable) -> Emulated:
    placement = timetable.placement
    device = emulated_device(job.device, costs_on(placement, job.costs), placement)
    _, step = emulated_workload(job, device).in_deepspeeds(job.num_ranks, module)
    return Emulated(step, timetable, device)


def _1f1b(job: Job) -> Timetable:
    return get_schedule("1f1b").timetable(job.num_ranks, job.micro_batches)


def _deepspeed_dualpipev(job: Job) -> Emulated:
    """Build DeepSpeed's DualPipeV, with the timetable of its instructions; its backwards are whole."""
    devices, micro_batches = job.num_ranks, job.micro_batches
    kinds = {ForwardPass: FORWARD, BackwardPass: BACKWARD}

    def order(rank: int) -> tuple[Op, ...]:
        return tuple(
            Op(
                kinds[type(instruction)],
                micro_batch=instruction.buffer_id % micro_batches,
                stage=2 * devices - 1 - rank if instruction.phase else rank,
            )
            for instructions in DualPipeVSchedule(micro_batches, devices, rank).steps()
            for instruction in instructions
            if type(instruction) in kinds
        )

    timetable = Timetable("dualpipev", v(devices), micro_batches, tuple(map(order, range(devices))))
    return _deepspeed(job, DualPipeVModule, timetable)


def _torch(job: Job, schedule: TorchSchedule) -> Emulated:
    placement = schedule.placement(job.num_ranks)
    device = emulated_device(job.device, costs_on(placement, job.costs), placement)
    modules = {
        stage: EmulatedLayer(stage, device).to(job.torch_device())
        for stage in placement.stages_of(dist.get_rank())
    }
    batches = emulated_workload(job, device).batches
    engine = TorchEngine(
        schedule,
        modules,
        batches,
        F.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        job.torch_device(),
    )
    return Emulated(engine.step, engine.timetable, device)


RIVALS: dict[str, Callable[[Job], Emulated]] = {
    "deepspeed_1f1b": lambda job: _deepspeed(job, DeepSpeedPipelineModule, _1f1b(job)),
    "deepspeed_dualpipev": _deepspeed_dualpipev,
    **{name: partial(_torch, schedule=schedule) for name, schedule in TORCH_SCHEDULES.items()},
}
