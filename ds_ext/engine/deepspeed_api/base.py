"""DeepSpeed's pipeline engine, with private methods replaced so that any timetable runs.

In DeepSpeed, a rank holds one stage of one replica, and every optimizer reduces and clips what that rank holds.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.pipe import schedule as ds
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from ...comm.transport import Transport
from ...errors import ConfigError
from ...experts import ExpertLoads
from ...pipe_schedules.bridge import Audit, EndOfStep, GatherStage, ReduceStage, TimetableSchedule, WaitStage
from ...planner.job_plan import JobPlan
from ..all_ranks import gather_rows
from ..batches import Batches, MapDataset, MicroBatches
from ..executor import Executor
from ..losses.watch import LossWatch
from ..module import PipelineModule, Unpicklable
from ..placeholders import fill_groups
from ..recovery.audit import StepAudit
from ..recovery.recovery import Recovery
from ..role import Role
from ..step_report import Gathered
from ..types import Groups, Optimizer, Record
from ..weights.trained import TrainedParameters
from ..weights.update import WeightUpdate
from .handlers import ENGINE_HANDLERS, Handlers


@contextmanager
def without_memory_lines() -> Iterator[None]:
    """Context in which DeepSpeed's bf16 optimizer prints no use of memory, which it does in every run."""
    print_usage = bf16_optimizer.see_memory_usage
    bf16_optimizer.see_memory_usage = lambda message, force=False: None
    try:
        yield
    finally:
        bf16_optimizer.see_memory_usage = print_usage


class AdaptedEngine(PipelineEngine, Unpicklable):
    """DeepSpeed's engine for the stages of a timetable. See :class:`..engine.PipelineEngine` for the attributes."""

    module: PipelineModule
    transport: Transport
    executor: Executor
    handlers: Handlers
    update: WeightUpdate
    trained: TrainedParameters
    loss_watch: LossWatch
    plan: JobPlan
    role: Role
    schedule: TimetableSchedule
    recovery: Recovery | None
    audit: StepAudit | None
    expert_loads: ExpertLoads
    batches: Batches | None = None  # the parent's constructor sets it
    # Every rank has all experts, see initialize.py: they are reduced as other layers.
    has_moe_layers = property(lambda self: False, lambda self, value: None)
    _gathered: Gathered | None
    _stages: Sequence[int] | None = None  # the parent's constructor reads it
    # Of this class and its bases, as they were when the handlers were taken.
    _instruction_maps: Sequence[Handlers] = ()

    @abstractmethod
    def gather_numbers(self) -> Gathered: ...

    @property
    def gathered(self) -> Gathered: ...

    @abstractmethod
    def _advance(self) -> None:
        """Advance the source of the data past the micro-batches of the current step or evaluation."""

    def _broadcast_model(self) -> None:
        # DeepSpeed views every parameter as bytes, which tensors without dimensions do not allow.
        scalars = [parameter for parameter in self.module.parameters() if parameter.dim() == 0]
        for parameter in scalars:
            parameter.data = parameter.data.view(1)
        super()._broadcast_model()
        for parameter in scalars:
            parameter.data = parameter.data.view(())

    def _build_data_iter(self, dataset: MapDataset) -> None:
        # The parent's constructor calls this if initialize() got training_data.
        self.batches = MicroBatches(dataset, self.micro_batch_size, collate=self.collate_fn, repeat=True)

    def _configure_optimizer(self, client_optimizer: Optimizer, model_parameters: Groups) -> None:
        if callable(client_optimizer):  # its groups are not known before
            optimizer: Optimizer = client_optimizer(model_parameters)
            fill_groups(self.module, optimizer.param_groups)
            self.param_names = {parameter: name for name, parameter in self.module.named_parameters()}

            def return_optimizer(_: object) -> Optimizer:
                return optimizer

            client_optimizer = return_optimizer

        super()._configure_optimizer(client_optimizer, model_parameters)

    # --- position in the pipeline ---

    @property
    def last_stage(self) -> int:
        return self.num_stages - 1

    def is_first_stage(self) -> bool:
        """Return whether this rank loads inputs: it holds the first stage of a pipe, maybe beside other stages."""
        # The parent's constructor sends a tensor to each stage before and behind, to connect them. Nothing uses these
        # connections, and gloo cannot send a GPU tensor. So each rank is first and last until its stages are known.
        return self._stages is None or 0 in self._stages

    def is_last_stage(self) -> bool:
        """Return whether this rank loads labels: it holds the last stage of a pipe, maybe beside other stages."""
        return self._stages is None or self.last_stage in self._stages

    def _rank_of_stage(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank that holds a stage in this rank's copy of the model.

        ``kwargs`` are other coordinates, as for DeepSpeed's ``grid.stage_to_global``.
        """
        coordinate = self.grid.topology().get_coord(self.global_rank)
        place = coordinate._replace(pipe=self.module.pipe_coordinate(stage_id), **kwargs)
        return self.grid.topology().get_rank(**place._asdict())

    # --- the step ---

    def _train_schedule(self) -> TimetableSchedule:
        return self.schedule

    def _aggregate_total_loss(self) -> Tensor:
        """Return the mean loss of all micro-batches of all groups, on every rank."""
        return self.gathered.losses.loss

    def get_lr(self) -> list[float]:
        """Return the learning rates of the parameter groups; on a forward rank (FBD), those of the last step."""
        return super().get_lr() if self.role.rates is None else self.role.rates

    # --- handlers of the instructions for the weights ---

    def _exec_reduce_tied_grads(self) -> None:
        with self.trained.before_changes():
            self.update.gradients.sum_tied(self.module.get_tied_weights_and_groups())

    def _exec_wait_stage(self, stage: int) -> None:
        self.update.wait_for_weights(stage)

    def _exec_reduce_stage(self, stage: int) -> None:
        with self.trained.before_changes():
            self.update.reduce_stage(self.global_steps + 1, stage)

    def _exec_reduce_grads(self) -> None:
        self.transport.settle()  # the reduction and the optimizer may make the host wait for the GPU
        with self.trained.before_changes():
            self.update.prepare_reduction(self.global_steps + 1, self.module)
            if self.update.reduction is not None:
                self.update.reduction.finish()
            else:
                self._reduce_with_deepspeed()

    def _reduce_with_deepspeed(self) -> None:
        """Reduce all gradients, after the last backward: without eager reductions."""
        gradients = self.update.gradients
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        used = gradients.fill_missing(trained)
        if gradients.needs_reduction:
            super()._exec_reduce_grads()
        gradients.drop_unused_by_all(trained, used)

    def _get_gradients_for_reduction(self) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        gradients, expert_gradients = super()._get_gradients_for_reduction()
        return self.update.reduce_unsupported_dtypes(gradients), expert_gradients

    def _exec_audit(self) -> None:
        if self.audit is not None:
            self.audit.finish()

    def _exec_optimizer_step(self) -> None:
        if self.optimizer is None:
            raise ConfigError(
                "optimizer: missing (got None). Add it to the JSON, pass it to initialize(), or set engine.optimizer."
            )
        correction = self.gather_numbers().losses.correction  # the counts of labels give it
        self.update.reduce_unfrozen()
        with (
            self.update.gradients.corrected(correction, self.module.parameters()),
            self.update.overlapping(),
        ):
            if self.gradient_clipping() == 0 and not isinstance(self.optimizer, DeepSpeedOptimizer):
                self.clip_fp32_gradients()  # without clipping, DeepSpeed does not measure the norm
            super()._exec_optimizer_step()

    def _exec_gather_stage(self, stage: int) -> None:
        self.update.gather_stage(stage)

    @torch.no_grad()
    def _exec_end_of_step(self) -> None:
        is_late = self._gathered is None  # a script replaced the handler of the optimizer step
        gathered = self.gather_numbers() if is_late else self.gathered
        correction, has_changed = gathered.losses.correction, any(rank.num_changed for rank in gathered.ranks)
        if is_late and (correction != 1 or has_changed):
            cause = "requires_grad: a change" if correction == 1 else "loss_fn: a pair (sum, count)"
            raise ConfigError(
                f"{cause} needs this engine's handler of OptimizerStep (got a replaced one). Call that handler, "
                "or add a method counts(labels) to the loss."
            )
        self.expert_loads.update_biases_and_reset()
        self._advance()
        if values := self.role.optimizer_values():
            self.role.set_optimizer_values(gather_rows(values, self.device))
        if self.recovery is not None:
            self.recovery.end_step()

    def _take_model_step(self, lr_kwargs: Record | None) -> None:
        # DeepSpeed takes a TypeError of the scheduler for a missing argument, and steps again with the batch size.
        scheduler, self.lr_scheduler = self.lr_scheduler, None
        try:
            super()._take_model_step(lr_kwargs)
        finally:
            self.lr_scheduler = scheduler
        if scheduler is not None and self._step_applied:
            scheduler.step()

    _INSTRUCTION_MAP: ClassVar[dict[type[ds.PipeInstruction], Callable[..., None]]] = {
        **PipelineEngine._INSTRUCTION_MAP,
        **ENGINE_HANDLERS,
        ReduceStage: _exec_reduce_stage,
        WaitStage: _exec_wait_stage,
        ds.ReduceTiedGrads: _exec_reduce_tied_grads,
        ds.ReduceGrads: _exec_reduce_grads,
        Audit: _exec_audit,
        ds.OptimizerStep: _exec_optimizer_step,
        GatherStage: _exec_gather_stage,
        EndOfStep: _exec_end_of_step,
    }

    def clip_fp32_gradients(self) -> None:
        """Clip with a norm that counts every parameter of the model once; see weights/norm.py."""
        self._global_grad_norm = self.update.clip_fp32()
