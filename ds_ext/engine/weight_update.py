"""Update of a rank's weights: reduction of the gradients, loss scale, clipping, and master weights.

DeepSpeed's or torch's optimizer takes the step itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer, ZeROOptimizer
from deepspeed.runtime.pipe import schedule as ds
from torch import Tensor

from ..config.schedulers import require_plain_step
from ..errors import ConfigError
from ..pipe_schedules.reductions import order_of_reductions
from .checkpoint.master_weights import MasterWeights
from .checkpoint.states import parameters_of
from .deepspeed_api.handlers import is_patch
from .deepspeed_api.names import loss_scaler
from .grad_norm import clip_grad_norm
from .grad_sync import EagerReduction, Gradients, as_real, why_not_eager
from .losses.step import Loss
from .losses.watch import LossWatch
from .weight_gathers import WeightGathers

logger = logging.getLogger(__name__)


class WeightUpdate:
    """Update of the weights with the optimizer that the engine has now. A script may give it another one.

    Args:
        engine: :class:`.engine.PipelineEngine`.

    Attributes:
        gradients: gradients of this rank's parameters.
        masters: fp32 master weights.
        reduction: eager reduction of the gradients; None: they are reduced after the last backward.
        gathers: gathers that overlap with the next step; None: DeepSpeed gathers at the end of the step.
        loss_watch: counter of consecutive steps with a non-finite loss or gradient.

    Raises:
        ConfigError: the scheduler cannot be stepped without arguments.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        if engine.lr_scheduler is not None:
            scheduler = type(engine.lr_scheduler).__name__
            fix = "Give step() defaults, or step the scheduler in the script after train_batch()."
            require_plain_step("lr_scheduler", scheduler, engine.lr_scheduler.step, fix)
        parameters = parameters_of(engine.module, engine.layout.tensor_parallel_size).values()
        names = {
            local.parameter: f"{local.name} of {engine.module.layer_names[local.layer]}"
            for local in parameters
        }
        self.gradients = Gradients(self._optimizer, engine.mpu.get_data_parallel_group(), names)
        self.masters = MasterWeights(self._optimizer)
        self.reduction = self._make_reduction() if self.is_eager(engine) else None
        self.gathers = self._make_gathers()
        scaler, settings = loss_scaler(self._optimizer), engine.plan.settings
        self.loss_watch = LossWatch(
            parameters,
            self.gradients,
            settings.max_nonfinite_losses,
            dynamic_scale=scaler is not None and scaler.dynamic,
            allows_zeros=settings.allow_zero_norm,
        )
        self._dependencies = _dependencies(engine)

    @staticmethod
    def is_eager(engine: Any) -> bool:
        """Return whether the JSON enables eager reductions and the engine supports them; log why it does not."""
        if not engine.plan.settings.eager_gradient_sync or not engine.role.has_gradients:
            return False
        if any(is_patch(engine.handlers[kind]) for kind in (ds.ReduceGrads, ds.ReduceTiedGrads)):
            obstacle = "a script replaced the handler of the reduction"
        else:
            obstacle = why_not_eager(engine)
        if obstacle is not None:
            logger.debug("eager_gradient_sync: no effect, because %s", obstacle)
        return obstacle is None

    def _make_reduction(self) -> EagerReduction:
        engine = self._engine
        device = engine.module.device_index
        order = order_of_reductions(engine.plan.program, device)
        dtype = engine.communication_data_type
        scatters = engine.plan.settings.overlap_across_steps
        return EagerReduction(self.gradients, engine.module, order, dtype, engine.tracer, scatters)

    def _make_gathers(self) -> WeightGathers | None:
        engine, optimizer = self._engine, self._optimizer
        if not engine.plan.settings.overlap_across_steps or not isinstance(optimizer, ZeROOptimizer):
            return None
        return WeightGathers(optimizer, engine.module, engine.tracer)

    def is_outdated(self) -> bool:
        """Return whether a script has changed what this object depends on.

        Raises ConfigError for an optimizer without the fp32 weights of DeepSpeed's.
        """
        engine = self._engine
        if _dependencies(engine) == self._dependencies:
            return False
        had_fp32_weights = isinstance(self._optimizer, DeepSpeedOptimizer)
        if had_fp32_weights and not isinstance(engine.optimizer, DeepSpeedOptimizer):
            raise ConfigError(
                f"optimizer: ZeRO and half precision keep the fp32 weights and the shards in DeepSpeed's optimizer "
                f"(got {type(engine.optimizer).__name__} after initialize). Pass it to initialize(optimizer=...)."
            )
        return True

    def resize(self) -> None:
        """Use the plan's timetable, which has got another number of micro-batches."""
        if self.reduction is not None:
            self.reduction = self._make_reduction()

    # --- in a step ---

    def wait_for_weights(self, stage: int | None = None) -> None:
        """Wait until the weights of a stage are gathered; None: those of all stages."""
        if self.gathers is not None:
            self.gathers.wait(stage)

    @contextmanager
    def overlapping(self) -> Iterator[None]:
        """Context of an optimizer step that reads the ranks' parts of the gradients, and starts to gather the weights.

        It does nothing for a job without "overlap_across_steps".
        """
        if self.gathers is None:
            yield
            return
        with self.gathers.replacing(), self.gradients.norm_of_parts():
            yield

    def scale(self, loss: Loss) -> Tensor:
        """Return the root of a backward: the loss divided by the counts of the step, times the fp16 loss scale."""
        root = self._engine.step_losses.backward_root(loss, self._engine.gradient_accumulation_steps())
        is_deepspeed = isinstance(self._optimizer, DeepSpeedOptimizer)
        return self._optimizer.scale_if_loss(root) if is_deepspeed else root

    def begin_reduction(self, step: int, module: Any) -> None:
        """Check the gradients of a step before their reduction; with eager reductions, the remaining ones."""
        remaining = module.parameters() if self.reduction is None else self.reduction.parameters[None]
        self.loss_watch.record_gradients(step, remaining)
        if module.placeholder is not None:
            # The bf16 optimizer needs at least one gradient.
            with (self.gradients.accumulating or nullcontext)():
                (0 * module.placeholder).sum().backward()

    def reduce_stage(self, step: int, stage: int) -> None:
        """Check the gradients of a stage, and start their reduction. It does nothing without eager reductions."""
        if self.reduction is not None:
            self.loss_watch.record_gradients(step, self.reduction.parameters[stage])
            self.reduction.start(stage)

    def reduce_fp64(self, gradients: list[Tensor], average: bool) -> list[Tensor]:
        """Reduce the fp64 gradients, which DeepSpeed does not, and return the others, complex ones as real views."""
        real = [as_real(gradient) for gradient in gradients]
        doubles = [gradient for gradient in real if gradient.dtype == torch.float64]
        if doubles:
            self.gradients.reduce(doubles, average=average)
        return [gradient for gradient in real if gradient.dtype != torch.float64]

    def clip_fp32(self) -> float:
        """Clip with a norm that counts every parameter of the model once, and return the norm; see grad_norm.py."""
        mpu = self._engine.mpu
        return clip_grad_norm(
            self._engine.module.parameters(),
            self._engine.gradient_clipping(),
            tensor_rank=mpu.get_slice_parallel_rank(),
            model_group=mpu.get_model_parallel_group(),
        )


def _dependencies(engine: Any) -> list[Any]:
    """Return what a script may change between steps, and an update depends on."""
    return [engine.optimizer, engine.lr_scheduler, engine.handlers, engine.communication_data_type]
