"""The attributes of the engine that its components use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from deepspeed.runtime.pipe import schedule as ds
from deepspeed.runtime.pipe.topology import PipelineParallelGrid

from ..parallel.layout import ParallelLayout
from ..planner.job_plan import JobPlan
from .activity import Activity
from .batches import Batches
from .checkpoint.run import Run
from .executor import Executor
from .losses.local import LocalLosses
from .losses.watch import LossWatch
from .module import PipelineModule
from .role import Role
from .tracing.recorder import Tracer
from .types import Batch, Function, Optimizer, Record, Scheduler


class EngineState(Protocol):
    """Attributes of :class:`.engine.PipelineEngine` that checkpoints, recovery, audits and updates read and change."""

    plan: JobPlan
    module: PipelineModule
    layout: ParallelLayout
    role: Role
    run: Run
    run_facts: Record
    executor: Executor
    local_losses: LocalLosses
    loss_watch: LossWatch
    tracer: Tracer | None
    handlers: Mapping[type[ds.PipeInstruction], Function]
    batches: Batches | None
    activity: Activity
    # Of DeepSpeed's engine.
    optimizer: Optimizer
    lr_scheduler: Scheduler
    mpu: PipelineParallelGrid
    config: Record
    device: torch.device
    communication_data_type: torch.dtype
    gradient_average: bool
    dp_world_size: int
    micro_batches: int
    micro_batch_size: int
    batch_fn: Callable[[Batch], Batch] | None
    collate_fn: Function | None
    global_rank: int
    global_steps: int
    global_samples: int
    skipped_steps: int

    def gradient_clipping(self) -> float:
        """Return the largest gradient norm of a step; 0: no limit."""
        ...

    def gradient_accumulation_steps(self) -> int: ...

    def wait_for_weights(self) -> None: ...
