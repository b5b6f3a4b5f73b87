"""The engines that are compared, ours and others', each built from the same layers and made to run one step.

Imported by the ranks only: it needs torch and DeepSpeed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import DualPipeVModule, LayerSpec
from deepspeed.pipe import PipelineModule as DeepSpeedPipelineModule
from deepspeed.runtime.pipe.schedule import BackwardPass, DualPipeVSchedule, ForwardPass
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as torch_schedules

from ..engine import PipelineModule, initialize
from ..pipe_schedules import Timetable, get_schedule
from ..pipe_schedules.ops import BACKWARD, FORWARD, Op
from ..pipe_schedules.placement import Placement, linear, looped, v
from ..pipe_schedules.registry import import_modules
from ..pipe_schedules.text import loads
from .emulated import EmulatedDevice, EmulatedLayer, exact_timers, make_batches, rows_of
from .ranks import Job
from .requests import options_for, read_request, timetable_for
from .slow_links import Delay, slow_down

Step = Callable[[], float | None]


@dataclass(frozen=True)
class Built:
    """An engine of this rank. ``step()`` trains one step and gives its loss where it is known.

    A step that comes after those of other engines begins with cold caches, so every second one counts. Each of those
    has a draw of the jitter, the same for every engine: one draw alone can favour an order by twice its gain.
    """

    step: Step
    timetable: Timetable
    device: EmulatedDevice

    def run(self) -> tuple[float, float, float, float | None]:
        """(start, end, milliseconds computed, loss); the times are of a clock that all processes of a host share."""
        self.device.start_step()
        self.step()
        dist.barrier()
        self.device.start_step()
        start = time.perf_counter()
        loss = self.step()
        self.device.draw()
        return start, self.device.last_end, self.device.computed_ms, loss


def build(name: str, job: Job) -> Built:
    """The engine called ``name`` on this rank: a rival's of ``RIVALS``, or ours with the schedule of that name."""
    exact_timers()
    import_modules(job.modules, "--import")
    built = RIVALS[name](job) if name in RIVALS else _ours(name, job)
    built.device.split_backwards = built.timetable.split_backwards
    return built


def config_of(job: Job, replicas: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": rows_of(job.message_kb),
        "gradient_accumulation_steps": job.micro_batches // replicas,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "steps_per_print": 10**9,
    }


def _batches(job: Job) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return make_batches(job.micro_batches, rows_of(job.message_kb))


def _layers(device: EmulatedDevice, placement: Placement) -> list[LayerSpec]:
    return [LayerSpec(EmulatedLayer, stage, device) for stage in range(placement.stages)]


# --- ours ---


class SameBatches:
    """Batches that are the same in every step."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def get(self, micro_batch: int) -> Any:
        return self.batches[micro_batch]

    def advance(self, micro_batches: int) -> None:
        """The next step reads them again."""


def _ours(request: str, job: Job) -> Built:
    schedule, _ = read_request(request)
    options = options_for(request, job.costs)
    timetable = timetable_for(request, job.devices, job.micro_batches, job.costs)
    section = {
        "schedule": schedule.name,
        "pipeline_parallel_size": job.devices,
        "schedule_options": options,
        "transport_options": {"timeout_s": job.timeout_s},
    }
    config = {**config_of(job, timetable.placement.replicas), "ds_ext": section}
    device = EmulatedDevice(job.costs, timetable.placement)
    layers = _layers(device, timetable.placement)
    model = PipelineModule(layers, config, loss_fn=F.mse_loss, clock=device, partition_method="uniform")
    engine, *_ = initialize(model=model, config=config)
    if job.costs.comm:
        slow_down(engine, _delays(device, timetable), job.costs.comm * (1 - job.costs.jitter) / 1000)
    batches = SameBatches(_batches(job))
    return Built(lambda: float(engine.train_batch(batches)), timetable, device)


def _delays(device: EmulatedDevice, timetable: Timetable) -> Delay:
    """What a message takes, as the simulator has it, jitter included; ranks are devices here."""

    def delay(source: int, target: int, op: Op) -> float:
        if op.kind != FORWARD:
            op = op._replace(kind=timetable.dependencies.gradient_kind(op.stage, op.micro_batch))
        costs = device.costs
        return costs.delay(source, target) * costs.factor(op, message=True) / 1000

    return delay


# --- DeepSpeed's own ---


def _deepspeed(job: Job, module: type[Any], timetable: Timetable) -> Built:
    device = EmulatedDevice(job.costs, timetable.placement)
    layers = _layers(device, timetable.placement)
    model = module(layers, num_stages=job.devices, loss_fn=F.mse_loss, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=model, config=config_of(job, 1))
    batches = itertools.cycle(_batches(job))
    return Built(lambda: float(engine.train_batch(data_iter=batches)), timetable, device)


def _deepspeed_1f1b(job: Job) -> Built:
    timetable = get_schedule("1f1b").timetable(job.devices, job.micro_batches)
    return _deepspeed(job, DeepSpeedPipelineModule, timetable)


def _deepspeed_dualpipev(job: Job) -> Built:
    """Its weight gradients come with the input gradients; the order is read off its instructions."""
    devices, micro_batches = job.devices, job.micro_batches
    kinds = {ForwardPass: FORWARD, BackwardPass: BACKWARD}

    def order(rank: int) -> tuple[Op, ...]:
        ops = []
        for instructions in DualPipeVSchedule(micro_batches, devices, rank).steps():
            for instruction in instructions:
                if type(instruction) in kinds:
                    stage = 2 * devices - 1 - rank if instruction.phase else rank
                    ops.append(Op(kinds[type(instruction)], instruction.buffer_id % micro_batches, stage))
        return tuple(ops)

    timetable = Timetable("dualpipev", v(devices), micro_batches, tuple(map(order, range(devices))))
    return _deepspeed(job, DualPipeVModule, timetable)


# --- torch.distributed.pipelining ---


def _torch(job: Job, schedule_class: type[Any], placement: Placement) -> Built:
    stages = placement.stages_of(dist.get_rank())
    device = EmulatedDevice(job.costs, placement)
    layers = [EmulatedLayer(stage, device) for stage in stages]
    parts = [
        pipelining.PipelineStage(layer, stage, placement.stages, torch.device("cpu"))
        for layer, stage in zip(layers, stages, strict=True)
    ]
    several = issubclass(schedule_class, torch_schedules.PipelineScheduleMulti)
    schedule = schedule_class(
        parts if several else parts[0], n_microbatches=job.micro_batches, loss_fn=F.mse_loss
    )
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.01)
    inputs, labels = map(torch.cat, zip(*_batches(job), strict=True))  # torch cuts them again
    is_first, is_last = 0 in stages, placement.stages - 1 in stages

    def step() -> float | None:
        losses: list[torch.Tensor] = []
        target: dict[str, Any] = {"target": labels, "losses": losses} if is_last else {}
        schedule.step(*((inputs,) if is_first else ()), **target)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if losses else None

    return Built(step, _torch_plan(job, schedule, several), device)


def _torch_plan(job: Job, schedule: Any, several: bool) -> Timetable:
    """The order of all ranks, as torch has planned it."""
    if not several:
        return get_schedule("1f1b").timetable(job.devices, job.micro_batches)
    rows = (schedule.pipeline_order[rank] for rank in range(job.devices))
    return loads("\n".join(",".join("" if action is None else str(action) for action in row) for row in rows))


RIVALS: dict[str, Callable[[Job], Built]] = {
    "deepspeed_1f1b": _deepspeed_1f1b,
    "deepspeed_dualpipev": _deepspeed_dualpipev,
    "torch_1f1b": lambda job: _torch(job, torch_schedules.Schedule1F1B, linear(job.devices)),
    "torch_interleaved_1f1b": lambda job: _torch(
        job, torch_schedules.ScheduleInterleaved1F1B, looped(job.devices, 2)
    ),
    "torch_zbv": lambda job: _torch(job, torch_schedules.ScheduleZBVZeroBubble, v(job.devices)),
    "torch_dualpipev": lambda job: _torch(job, torch_schedules.ScheduleDualPipeV, v(job.devices)),
}
