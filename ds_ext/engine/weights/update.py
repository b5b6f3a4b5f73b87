"""Update of a rank's weights: reduction of the gradients, loss scale, clipping, and master weights.

DeepSpeed's or torch's optimizer takes the step itself.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer, ZeROOptimizer
from deepspeed.runtime.pipe import schedule as ds
from torch import Tensor, nn

from ...config.schedulers import require_plain_step
from ...errors import ConfigError
from ...pipe_schedules.reductions import order_of_reductions
from ...tensor_parallel import is_sharded
from ..checkpoint.optimizer_states import OptimizerStates
from ..deepspeed_api.handlers import is_patch
from ..deepspeed_api.names import loss_scaler
from ..engine_state import EngineState
from ..losses.local import Loss
from ..module import PipelineModule
from ..parameters import LocalParameter, parameters_of
from ..types import Optimizer
from .gathers import WeightGathers, require_equal_parts
from .gradients import Gradients, as_real
from .masters import MasterWeights
from .norm import clip_grad_norm
from .reduction import EagerReduction, why_not_eager
from .trained import TrainedParameters

logger = logging.getLogger(__name__)


class WeightUpdate:
    """Update of the weights with the optimizer that the engine has now. A script may give it another one.

    Attributes:
        reduction: eager reduction of the gradients; None: they are reduced after the last backward.
        gathers: gathers that overlap with the next step; None: DeepSpeed gathers at the end of the step.
        weights_set: number of elements that the script set before the current step.
    """

    weights_set: Tensor | int = 0

    def __init__(self, engine: EngineState, trained: TrainedParameters) -> None:
        self._engine, self._trained, self._optimizer = engine, trained, engine.optimizer
        _require_no_closure(engine.optimizer)
        if engine.lr_scheduler is not None:
            scheduler = type(engine.lr_scheduler).__name__
            fix = "Give step() defaults, or step the scheduler in the script after train_batch()."
            require_plain_step("lr_scheduler", scheduler, engine.lr_scheduler.step, fix)
        parameters = parameters_of(engine.module, engine.layout.tensor_parallel_size).values()
        _require_whole_matrices(engine.optimizer, parameters, engine.layout.tensor_parallel_size)
        names = {
            local.parameter: f"{local.name} of {engine.module.layer_names[local.layer]}"
            for local in parameters
        }
        self.gradients = Gradients(self._optimizer, engine.mpu.get_data_parallel_group(), names)
        self.masters = MasterWeights(self._optimizer)
        self.reduction = self._make_reduction() if self.is_eager(engine) else None
        self.gathers = self._make_gathers()
        scaler = loss_scaler(self._optimizer)
        self.has_dynamic_scale = scaler is not None and scaler.dynamic
        self._dependencies = _dependencies(engine)
        self._unfrozen: list[nn.Parameter] = []  # in this step, not reduced with the others

    @staticmethod
    def is_eager(engine: EngineState) -> bool:
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

    def take_weights_set(self) -> int:
        """Return the number of elements that the script set before the current step; 0 from then on."""
        weights_set, self.weights_set = int(self.weights_set), 0
        return weights_set

    def is_outdated(self) -> bool:
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

    def rebuild_reduction(self) -> None:
        """Use the plan's timetable, which has got another number of micro-batches, and the agreed parameters."""
        if self.reduction is not None:
            with self._trained.before_changes():
                self.reduction = self._make_reduction()

    # --- in a step ---

    def wait_for_weights(self, stage: int | None = None) -> None:
        """Wait until the weights of a stage are gathered; None: those of all stages."""
        if self.gathers is not None:
            self.gathers.wait(stage)

    def gather_stage(self, stage: int) -> None:
        """Start to gather the weights of a stage, unless DeepSpeed has gathered them."""
        if self.gathers is not None:
            self.gathers.start(stage)

    def agree_on_trained(self) -> None:
        """Compare the changes of all ranks. All ranks must call this together, after the reductions of the step."""
        self._unfrozen = self._trained.agree_on_changes()
        self._trained.find_changes()
        self.rebuild_reduction()

    def reduce_unfrozen(self) -> None:
        """Reduce the gradients of parameters that are trained since this step."""
        parameters, self._unfrozen = self._unfrozen, []
        ids, gradients = set(map(id, parameters)), self.gradients
        if not ids:
            return
        ties = self._engine.module.get_tied_weights_and_groups()
        gradients.sum_tied((weight, group) for weight, group in ties if id(weight) in ids)
        used = gradients.fill_missing(parameters)
        if gradients.data_parallel_size > 1:
            real = [as_real(gradient) for gradient in map(gradients.get, parameters) if gradient is not None]
            gradients.reduce(real, self._engine.gradient_average, self._engine.communication_data_type)
            gradients.drop_unused_by_all(parameters, used)

    @contextmanager
    def overlapping(self) -> Iterator[None]:
        """Context of an optimizer step that reads the ranks' parts of the gradients, and leaves the weights in parts.

        It does nothing for a job without "overlap_across_steps".
        """
        require_equal_parts(getattr(self._optimizer, "param_groups", ()), self._engine.module.group_sources)
        if self.gathers is None:
            yield
            return
        with self.gathers.replacing(), self.gradients.norm_of_partitions():
            yield

    def backward_root(self, loss: Loss) -> Tensor:
        """Return the root of a backward: the loss divided by the counts of the step, times the fp16 loss scale."""
        root = self._engine.local_losses.backward_root(loss, self._engine.gradient_accumulation_steps())
        is_deepspeed = isinstance(self._optimizer, DeepSpeedOptimizer)
        return self._optimizer.scale_if_loss(root) if is_deepspeed else root

    def prepare_reduction(self, step_number: int, module: PipelineModule) -> None:
        """Before the reduction of a step, check its gradients; with eager reductions, the remaining ones."""
        remaining = module.parameters() if self.reduction is None else self.reduction.parameters[None]
        self._engine.loss_watch.record_gradients(step_number, remaining, self.gradients)
        if module.placeholders:
            # The bf16 optimizer needs at least one gradient. A script may have frozen all parameters.
            with (self.gradients.accumulating or nullcontext)():
                for placeholder in module.placeholders:
                    (0 * placeholder.requires_grad_()).sum().backward()

    def reduce_stage(self, step_number: int, stage: int) -> None:
        """Check the gradients of a stage, and start their reduction. It does nothing without eager reductions."""
        if self.reduction is not None:
            parameters = self.reduction.parameters[stage]
            self._engine.loss_watch.record_gradients(step_number, parameters, self.gradients)
            self.reduction.start(stage)

    def reduce_unsupported_dtypes(self, gradients: list[Tensor]) -> list[Tensor]:
        """Reduce gradients of dtypes that DeepSpeed does not reduce, and return the others, complex ones as real views.

        DeepSpeed does not reduce fp64, and fp16 on processors without arithmetic for it.
        """
        engine, real = self._engine, [as_real(gradient) for gradient in gradients]
        dtypes = get_accelerator().supported_dtypes()
        others = [gradient for gradient in real if gradient.dtype not in dtypes]
        self.gradients.reduce(others, engine.gradient_average, engine.communication_data_type)
        return [gradient for gradient in real if gradient.dtype in dtypes]

    def clip_fp32(self) -> float:
        """Clip with a norm that counts every parameter of the model once, and return the norm; see weights/norm.py."""
        mpu = self._engine.mpu
        return clip_grad_norm(
            self._engine.module.parameters(),
            self._engine.gradient_clipping(),
            tensor_rank=mpu.get_slice_parallel_rank(),
            model_group=mpu.get_model_parallel_group(),
        )


def _require_no_closure(optimizer: Optimizer, *wrappers: object) -> None:
    """Raise ConfigError for an optimizer whose step needs a closure, or that wraps one."""
    if hasattr(optimizer, "param_groups") and hasattr(type(optimizer), "step"):
        step = functools.partial(type(optimizer).step, optimizer)  # that of the object may be a scheduler's
        require_plain_step("optimizer", type(optimizer).__name__, step, "Use AdamW.")
        for value in vars(optimizer).values():
            if not any(value is wrapper for wrapper in (optimizer, *wrappers)):
                _require_no_closure(value, optimizer, *wrappers)


def _require_whole_matrices(
    optimizer: Optimizer, parameters: Iterable[LocalParameter], tensor_ranks: int
) -> None:
    """Raise ConfigError if Muon would orthogonalize the shards of a matrix instead of the matrix."""
    states = OptimizerStates(optimizer)
    if "muon" not in (states.name or "").lower():
        return
    members = {id(p) for group, entries in states.groups() if group.get("use_muon", True) for p in entries}
    for local in parameters:
        shards = tensor_ranks * local.parts
        if shards > 1 and id(local.parameter) in members and is_sharded(local.parameter):
            size = "vocabulary_parallel_head" if tensor_ranks == 1 else f"tensor_parallel_size {tensor_ranks}"
            raise ConfigError(
                f"optimizer.type: {states.name} orthogonalizes whole matrices (got {size} and {local.name}, of which "
                f"this rank has one of {shards} shards). Set use_muon = False on sharded weights, which Adam then "
                f"trains, or use another optimizer."
            )


def _dependencies(engine: EngineState) -> list[object]:
    """Return what an update depends on and a script may replace between steps."""
    return [engine.optimizer, engine.lr_scheduler, engine.handlers, engine.communication_data_type]
