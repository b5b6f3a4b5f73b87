"""View of the engine that its parts have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from deepspeed.runtime.pipe import schedule as ds
from deepspeed.runtime.pipe.topology import PipelineParallelGrid

from ..parallel.layout import ParallelLayout
from ..planner.job_plan import JobPlan
from .batches import Batches
from .checkpoint.run import Run
from .executor import Executor
from .losses.step import StepLosses
from .module import PipelineModule
from .role import Role
from .tracing.recorder import Tracer
from .types import Function, Optimizer, Record, Scheduler


class EngineState(Protocol):
    """Attributes of :class:`.engine.PipelineEngine` that checkpoints, recovery, audits and updates read and change."""

    plan: JobPlan
    module: PipelineModule
    layout: ParallelLayout
    role: Role
    run: Run
    run_facts: Record
    executor: Executor
    step_losses: StepLosses
    tracer: Tracer | None
    handlers: Mapping[type[ds.PipeInstruction], Function]
    batches: Batches | None
    # Of DeepSpeed's engine.
    optimizer: Optimizer
    lr_scheduler: Scheduler
    mpu: PipelineParallelGrid
    config: Record
    device: torch.device
    communication_data_type: torch.dtype
    gradient_average: bool
    dp_world_size: int
    global_rank: int
    global_steps: int
    global_samples: int
    skipped_steps: int

    def gradient_clipping(self) -> float:
        """Return the largest gradient norm of a step; 0: no limit."""
        ...

    def gradient_accumulation_steps(self) -> int: ...

    def wait_for_weights(self) -> None: ...
