"""Engine that runs the program of any timetable. It does not depend on the name of a schedule.

It differs from DeepSpeed's PipelineEngine in four ways. Tensors, losses and gradients belong to the buffer of an
instruction. Micro-batches are fetched by id. Messages carry their shapes and go to any peer without blocking.
Checkpoints load with any schedule and sizes. Everything else (optimizer, ZeRO-1, learning rate, monitors) is inherited.

The :class:`.executor.Executor` runs the instructions. Order of this file: construction, schedules, handlers of the
instructions for the weights, data, train_batch and eval_batch, checkpoints, failures.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.pipe import schedule as ds
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER
from deepspeed.runtime.pipe.engine import PipelineEngine as DeepSpeedPipelineEngine
from torch import Tensor

from ..comm.groups import first_step_limit_s, limit_waits
from ..comm.host_watch import require_hosts
from ..comm.transport import Transport, create_transport
from ..config.deepspeed_json import precision
from ..config.schedulers import require_plain_step
from ..errors import CheckpointError, ConfigError, CorruptionError
from ..launch.failure import first_line, lost_peer
from ..pipe_schedules.bridge import TimetableSchedule
from ..pipe_schedules.checks.program import check
from ..pipe_schedules.inference import forward_timetable
from ..pipe_schedules.lowering import lower
from ..planner.job_plan import JobPlan
from .batches import (
    Batches,
    IteratorBatches,
    MapDataset,
    MicroBatches,
    NoBatches,
    StepData,
    check_first_batch,
    require_same_samples,
)
from .checkpoint.buffers import ReplicaBuffers
from .checkpoint.load import load_checkpoint
from .checkpoint.master_weights import MasterWeights
from .checkpoint.run import this_run
from .checkpoint.save import save_checkpoint
from .checkpoint.states import OptimizerStates, parameters_of
from .checkpoint.trial import try_folder
from .deepspeed_api.device import peak_memory_bytes
from .deepspeed_api.handlers import is_patch, with_patches
from .deepspeed_api.names import loss_scaler, require_built
from .deferral import DeferralReport
from .dynamic import messages as dynamic
from .dynamic.order import DynamicSchedule
from .evaluation import Evaluation
from .executor import OWN_HANDLERS, Executor
from .grad_sync import (
    EagerReduction,
    Gradients,
    as_real,
    clip_grad_norm,
    let_parameters_differ,
    why_not_eager,
)
from .losses.step import Loss, StepLoss, StepLosses
from .losses.watch import LossWatch
from .messages import StageMessages, link_credits
from .module import PipelineModule
from .recovery.audit import Audit
from .recovery.recovery import Recovered, Recovery
from .stage import StageForward, mean_over_ranks
from .together import by_rank_0, together
from .tracing.clock import BusyClock
from .tracing.recorder import Tracer

logger = logging.getLogger(__name__)


def _of_executor(name: str) -> Callable[..., None]:
    def handler(engine: PipelineEngine, *arguments: Any, **named: Any) -> None:
        getattr(engine.executor, name)(*arguments, **named)

    return handler


# Handlers of the executor, as functions of an engine.
_OF_EXECUTOR = {kind: _of_executor(name) for kind, name in OWN_HANDLERS.items()}


class PipelineEngine(DeepSpeedPipelineEngine):
    """Engine of a :class:`ds_ext.PipelineModule`, created by :func:`ds_ext.initialize`.

    Attributes:
        plan: job plan, with timetable, program, simulation, reductions and rules.
        schedule: schedule of a training step.
        executor: what runs the instructions.
        pipe_buffers: storage of the live (stage, micro-batch) pairs, by buffer id.
        transport: transport of the messages between stages.
        batches: source of the training micro-batches; None without data.
        busy: clock of this rank's computations.
        gradients: gradients of this rank's parameters.
        reduction: eager reduction of the gradients; None: they are reduced after the last backward.
        tracer: recorder of the timeline; None without tracing.
        loss_watch: counter of consecutive steps with a non-finite loss or gradient.
        activity: current activity, for errors.
        step_s: seconds of the last training step on this rank; None before the first one.
        step_lr: learning rate of the last training step, of the first parameter group.
        bubble_measured: share of the last step in which an average rank did not compute; None before the first step.
        peak_memory_of_ranks: peak memory of every rank in bytes; empty before the first step.
        agg_additional_losses: means of the loss's terms and of the module's additional losses in the last training
            step, by name.
        eval_additional_losses: the same, of the last evaluation.
        tokens: counted labels of the last training step; None if the loss function returns means.
        run_facts: what runs and where, from :func:`.facts.run_facts`.
        checkpoint_events: checkpoints saved and loaded so far: ``event`` ("saved", "failed", "loaded" or "recovered"),
            ``path``, ``step``, ``seconds`` taken, and ``at``, its end in seconds since 1970. "recovered" has the other
            attributes of :class:`.recovery.recovery.Recovered` too.
        on_checkpoint_event: function called on this rank after each new event; None: none.
        run: identity of this run, which its checkpoints and its record contain.
        recovery: snapshots in host memory; None without the section "recovery".
        snapshot_s: seconds for this rank's snapshot of the last step and for waiting for copies; None without one.
        audit: audits of the steps; None without ``audit_interval``.
        recovered_from_step: in the first step after a recovery, the step from which it continued; else None.
        deferred_share: share of the trained elements whose gradients the first step deferred; None before that step,
            and for schedules with whole backwards.
    """

    module: PipelineModule
    # The parent's constructor reads these.
    batches: Batches | None = None
    activity = "setting up"
    _stages: Sequence[int] | None = None

    # --- construction ---

    def __init__(self, **kwargs: Any) -> None:
        # Keywords only: the parent's first positional argument is has_bool_tensors.
        super().__init__(**kwargs)
        require_built(self, self.optimizer)
        require_built(loss_scaler(self.optimizer))
        # Otherwise DeepSpeed would send only a slice of the activations from each tensor-parallel rank.
        self.is_pipe_partitioned = self.is_grad_partitioned = False
        self.plan, self.layout = self.module.plan, self.module.layout
        self._stages = self.module.stages
        self.num_stages = self.layout.placement.stages
        self.last_stage = self.num_stages - 1
        self.is_pipe_parallel = self.layout.placement.num_devices > 1
        self.grid.stage_to_global = self._rank_of_stage
        self._inference_schedules: dict[int, TimetableSchedule] = {}
        # Modes with checked batches: training (True), evaluation (False).
        self._checked_modes: set[bool] = set()
        self._losses = StepLosses(
            self.module,
            self.mpu.get_data_parallel_group(),
            counts_here=self.layout.coordinates(self.global_rank)[2] == 0,
            by_micro_batch=self.plan.settings.loss_weighting == "micro_batches",
            in_fp16=precision(self.plan.job.deepspeed) == "fp16",
            device=self.device,
        )
        self.executor = Executor(
            StageForward(self.module), self._losses, self.last_stage, self.device, self._report_failure
        )
        self.pipe_buffers = self.executor.buffers
        self.schedule = self.executor.schedule = self._make_schedule()
        self._instruction_maps: Any = None  # of this class and its bases, as they were then
        self._take_handlers()
        self._deferral: DeferralReport | None = None  # for the first step only
        self.deferred_share: float | None = None
        if self.plan.timetable.split_backwards:
            schedule = self.plan.timetable.schedule
            self._deferral = DeferralReport(self.module, schedule, self.pipe_buffers)
        self._step_loss: StepLoss | None = None  # gathered before the optimizer step
        self.tokens: int | None = None
        self._replica_buffers = ReplicaBuffers(
            self.module, self.mpu.get_data_parallel_group(), self._collective_device
        )
        self.eval_additional_losses: dict[str, Tensor] | None = None
        self.busy = BusyClock(self.device)
        self.step_s: float | None = None
        self.step_lr: float | None = None
        self.bubble_measured: float | None = None
        self.peak_memory_of_ranks: list[int] = []
        self.run_facts: dict[str, Any] = {}
        self.checkpoint_events: list[dict[str, Any]] = []
        self.on_checkpoint_event: Callable[[], None] | None = None
        settings, options = self.plan.settings, self.plan.settings.transport_options
        transport = create_transport(
            settings.transport,
            timeout_s=options.timeout_s,
            device=self.device,
            pairs=self._links(),
            node_ips=options.node_ips,
            polled=self.plan.rules is not None,
        )
        self.tracer: Tracer | None = None
        if settings.trace.dir is not None:
            self.tracer = Tracer(
                settings.trace,
                self.global_rank,
                self.layout,
                self.busy,
                transport=transport.name,
                eager=self._reduces_eagerly(),
                timeout_s=options.timeout_s,
            )
        let_parameters_differ(self.optimizer)
        self._use_optimizer()
        self.use_transport(transport)
        self.run = this_run()
        problems = together(OptimizerStates(self.optimizer).problem)
        if problem := next(filter(None, problems), ""):
            if settings.recovery is not None:
                raise ConfigError(problem)
            if self.global_rank == 0:
                logger.warning("no checkpoint can be saved: %s", problem)
        self.recovery = None if settings.recovery is None else Recovery(self, settings.recovery)
        self.snapshot_s: float | None = None
        self._began = False  # the current step, so that it cannot be repeated
        self._failure: str | None = None  # first failure of a step that had begun
        self.recovered_from_step: int | None = None
        self._recovered_from: int | None = None
        self.audit = None if settings.audit_interval == 0 else Audit(self, settings.audit_interval)
        self._auditing: Audit | None = None  # in an audited step

    @property
    def running(self) -> TimetableSchedule:
        """Schedule of the current or last step or evaluation."""
        return self.executor.schedule

    @property
    def peak_memory_bytes(self) -> int | None:
        """Peak memory of the rank that needs the most; None before the first step."""
        return max(self.peak_memory_of_ranks, default=None)

    @property
    def random_seed(self) -> int:
        """Seed of the keys from which layers draw; see :func:`ds_ext.tensor_parallel.layer_key`."""
        return self.module.random_seed

    @property
    def bubble_simulated(self) -> float:
        """Share of the simulated step in which an average device does not compute."""
        return self.plan.simulation.bubble

    def _make_schedule(self) -> TimetableSchedule:
        device = self.module.device_index
        if self.plan.rules is None:
            return TimetableSchedule(self.plan.program, device)
        return DynamicSchedule(self.plan.program, device, self.plan.rules)

    def _inference_schedule(self, micro_batches: int) -> TimetableSchedule:
        if micro_batches not in self._inference_schedules:
            placement = self.layout.placement
            program = lower(forward_timetable(placement, micro_batches * placement.replicas))
            check(program)
            self._inference_schedules[micro_batches] = TimetableSchedule(program, self.module.device_index)
        return self._inference_schedules[micro_batches]

    def _broadcast_model(self) -> None:
        # DeepSpeed views every parameter as bytes, which tensors without dimensions do not allow.
        scalars = [parameter for parameter in self.module.parameters() if parameter.dim() == 0]
        for parameter in scalars:
            parameter.data = parameter.data.view(1)
        super()._broadcast_model()
        for parameter in scalars:
            parameter.data = parameter.data.view(())

    def _links(self) -> dict[tuple[int, int], int]:
        """Return the credits of every link, by (sender, receiver), for training and evaluation."""
        credits = link_credits(self.layout, [self.plan.program, self._inference_schedule(1).program])
        if self.plan.rules is not None:
            for link, messages in dynamic.link_credits(self.layout, self.plan.rules).items():
                credits[link] = max(messages, credits.get(link, 0))
        return credits

    def use_transport(self, transport: Transport) -> None:
        """Use another transport for the messages between stages, from the next step on.

        Raises ConfigError if the order is decided at run time and the transport cannot report arrivals.
        """
        count = None if self.tracer is None else self.tracer.count
        self.transport = transport
        self._static_messages = StageMessages(transport, self.layout, self.global_rank, count)
        self._dynamic_messages: dynamic.DynamicMessages | None = None
        if self.plan.rules is not None:
            senders = dynamic.senders(self.plan.rules, self.module.device_index)
            self._dynamic_messages = dynamic.DynamicMessages(
                transport, self.layout, self.global_rank, senders, count
            )

    def _use_optimizer(self) -> None:
        """Build what depends on the optimizer. A script may set ``engine.optimizer`` after the construction.

        Raises ConfigError for a scheduler that cannot be stepped without arguments.
        """
        if self.lr_scheduler is not None:
            scheduler = type(self.lr_scheduler).__name__
            fix = "Give step() defaults, or step the scheduler in the script after train_batch()."
            require_plain_step("lr_scheduler", scheduler, self.lr_scheduler.step, fix)
        parameters = parameters_of(self.module, self.layout.tensor_parallel_size).values()
        names = {
            local.parameter: f"{local.name} of {self.module.layer_names[local.layer]}" for local in parameters
        }
        self.gradients = Gradients(self.optimizer, self.mpu.get_data_parallel_group(), names)
        self._masters = MasterWeights(self.optimizer)
        self._weights_set: Tensor | int = 0  # number of elements that the script set before this step
        self.executor.scale, self.executor.accumulating = self.scale, self.gradients.accumulating
        self.executor.parameters = list(self.module.parameters())
        self.reduction = self._make_reduction() if self._reduces_eagerly() else None
        # DeepSpeed's default, 0, is a dynamic loss scale, which skips steps.
        deepspeed_json = self.plan.job.deepspeed
        dynamic_scale = precision(deepspeed_json) == "fp16" and not deepspeed_json["fp16"].get("loss_scale")
        limit = self.plan.settings.max_nonfinite_losses
        self.loss_watch = LossWatch(parameters, self.gradients, limit, dynamic_scale)
        self._used = self._changeable()

    def _reduces_eagerly(self) -> bool:
        """Return whether the JSON enables eager reductions and the engine supports them."""
        if not self.plan.settings.eager_gradient_sync:
            return False
        patched = any(is_patch(self._handlers[kind]) for kind in (ds.ReduceGrads, ds.ReduceTiedGrads))
        reason = "a script replaced the handler of the reduction" if patched else why_not_eager(self)
        if reason is not None:
            logger.debug("eager_gradient_sync: no effect, because %s", reason)
        return reason is None

    def _make_reduction(self) -> EagerReduction:
        device = self.module.device_index
        order = [stage for stages in self.plan.reductions[device].values() for stage in stages]
        ops, dtype = self.plan.timetable.orders[device], self.communication_data_type
        return EagerReduction(self.gradients, self.module, order, ops, dtype, self.tracer)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches between steps, with a new timetable.

        Raises ConfigError, and changes nothing, if the schedule does not support the number.
        """
        steps, rest = divmod(train_batch_size, self.micro_batch_size * self.dp_world_size)
        plan = None if rest or steps < 1 else self._resized_plan(steps)
        super().set_train_batch_size(train_batch_size)  # raises ValueError if there is a remainder
        assert plan is not None
        self.plan = plan
        self.schedule = self._make_schedule()
        if self.reduction is not None:
            self.reduction = self._make_reduction()
        if isinstance(self.batches, IteratorBatches):
            self.batches = self._as_batches(self.batches.iterator, self.micro_batches)

    def _resized_plan(self, gradient_accumulation_steps: int) -> JobPlan:
        return self.plan.resized(gradient_accumulation_steps)

    def _take_handlers(self) -> None:
        """Give the executor the handlers of DeepSpeed's instruction map, in which a script may replace some.

        Raises ConfigError for a handler that does not accept the arguments of its instruction.
        """
        maps = [{**of._INSTRUCTION_MAP} for of in (self, PipelineEngine, DeepSpeedPipelineEngine)]
        if maps == self._instruction_maps:
            return
        self._handlers = with_patches(*maps)
        self.executor.handlers = {
            kind: getattr(self.executor, OWN_HANDLERS[kind])
            if handler is _OF_EXECUTOR.get(kind)
            else functools.partial(handler, self)
            for kind, handler in self._handlers.items()
        }
        self._instruction_maps = maps

    def _train_schedule(self) -> TimetableSchedule:
        return self.schedule

    def _exec_schedule(self, pipe_schedule: TimetableSchedule, evaluation: Evaluation | None = None) -> None:
        """Run the instructions of a step or an evaluation.

        Raises ConfigError for one of DeepSpeed's schedules.
        """
        if not isinstance(pipe_schedule, TimetableSchedule):
            raise ConfigError(
                f"schedule: the engine runs the timetable of its job plan (got {type(pipe_schedule).__name__}). Call "
                f"train_batch() or eval_batch(), and write own schedules as in docs/add_a_schedule.md."
            )
        trains = pipe_schedule.program.timetable.trains
        is_dynamic = isinstance(pipe_schedule, DynamicSchedule)
        messages = self._dynamic_messages if is_dynamic else self._static_messages
        assert messages is not None
        self.executor.messages = messages
        data = self._load_step(pipe_schedule)
        self.busy.start_step()
        audited = trains and self.audit is not None and self.audit.is_due(self.global_steps + 1)
        self._auditing = self.audit if audited else None
        if self._auditing is not None:
            self._auditing.start_step()
        tracer = self.tracer if self.tracer and self.tracer.active else None
        of_step = (self._deferral, self.reduction) if trains else ()
        observers = [one for one in (self._auditing, tracer, *of_step, self.busy) if one is not None]
        self.executor.run(pipe_schedule, data, self.global_steps, observers, evaluation)
        if self._deferral is not None and trains:
            self.deferred_share, self._deferral = self._deferral.finish(), None

    # --- handlers of the instructions for the weights ---

    def _exec_reduce_tied_grads(self) -> None:
        self.gradients.sum_tied(self.module.get_tied_weights_and_groups())

    def _exec_reduce_grads(self) -> None:
        self.transport.settle()  # the reduction and the optimizer may make the host wait for the GPU
        self.loss_watch.before_reduction(self.global_steps + 1)
        if self.module.placeholder is not None:
            # The bf16 optimizer needs at least one gradient.
            with (self.gradients.accumulating or nullcontext)():
                (0 * self.module.placeholder).sum().backward()
        if self.reduction is None:
            trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
            used = self.gradients.fill_missing(trained)
            if self.gradients.needs_reduction:
                super()._exec_reduce_grads()
            self.gradients.drop_unused_by_all(trained, used)
        else:
            self.reduction.finish()

    def _get_gradients_for_reduction(self) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        gradients, expert_gradients = super()._get_gradients_for_reduction()
        real = [as_real(gradient) for gradient in gradients]
        doubles = [gradient for gradient in real if gradient.dtype == torch.float64]
        if doubles:  # DeepSpeed does not reduce fp64
            self.gradients.reduce(doubles, average=self.gradient_average)
        return [gradient for gradient in real if gradient.dtype != torch.float64], expert_gradients

    def _exec_optimizer_step(self) -> None:
        if self.optimizer is None:
            raise ConfigError(
                "optimizer: missing (got None). Add it to the JSON, pass it to initialize(), or set engine.optimizer."
            )
        if self._auditing is not None:
            self._finish_audit(self._auditing)
        self._step_loss = self._gather_losses()
        with self.gradients.corrected(self._step_loss.correction, self.module.parameters()):
            if self.gradient_clipping() == 0 and not isinstance(self.optimizer, DeepSpeedOptimizer):
                self.clip_fp32_gradients()  # without clipping, DeepSpeed does not measure the norm
            super()._exec_optimizer_step()

    def _take_model_step(self, lr_kwargs: Any) -> None:
        # DeepSpeed takes a TypeError of the scheduler for a missing argument, and steps again with the batch size.
        scheduler, self.lr_scheduler = self.lr_scheduler, None
        try:
            super()._take_model_step(lr_kwargs)
        finally:
            self.lr_scheduler = scheduler
        if scheduler is not None and self._step_applied:
            scheduler.step()

    def _finish_audit(self, audit: Audit) -> None:
        try:
            audit.finish()
        except CorruptionError as error:
            if self.recovery is not None and error.lasting:
                self.recovery.stop(str(error))
            raise

    _INSTRUCTION_MAP: ClassVar[dict[type[ds.PipeInstruction], Callable[..., None]]] = {
        **DeepSpeedPipelineEngine._INSTRUCTION_MAP,
        **_OF_EXECUTOR,
        ds.ReduceTiedGrads: _exec_reduce_tied_grads,
        ds.ReduceGrads: _exec_reduce_grads,
        ds.OptimizerStep: _exec_optimizer_step,
    }

    def loss_of(self, outputs: Any, labels: tuple[Tensor, ...] | None) -> Loss:
        """Return the loss of a micro-batch of this step."""
        return self._losses.of(outputs, labels)

    def scale(self, loss: Loss) -> Tensor:
        """Divide by the counts of the step and apply the fp16 loss scale. The reduction averages over ranks."""
        scaled = self._losses.scaled(loss, self.gradient_accumulation_steps())
        return (
            self.optimizer.scale_if_loss(scaled) if isinstance(self.optimizer, DeepSpeedOptimizer) else scaled
        )

    def clip_fp32_gradients(self) -> None:
        """Clip with a norm that counts every parameter of the model once; see grad_sync.py."""
        self._global_grad_norm = clip_grad_norm(
            self.module.parameters(),
            self.gradient_clipping(),
            tensor_rank=self.mpu.get_slice_parallel_rank(),
            model_group=self.mpu.get_model_parallel_group(),
        )

    @property
    def first_micro_batch(self) -> int:
        """Global number of this rank's first micro-batch of the step."""
        return self.executor.data.first_id

    def forward_again(self, stage: int, inputs: tuple[Tensor, ...], number: int) -> Any:
        """Return the outputs of a stage for a micro-batch of this step, by its global number."""
        return self.executor.forward_stage(stage, inputs, self.global_steps, number)

    # --- position in the pipeline ---

    def is_first_stage(self) -> bool:
        """Return whether this rank loads inputs: it holds the first stage of a pipe, maybe beside other stages."""
        # The parent's constructor sends a tensor to each stage before and behind, to connect them. Nothing uses these
        # connections, and gloo cannot send a GPU tensor. So each rank is first and last until its stages are known.
        return self._stages is None or 0 in self._stages

    def is_last_stage(self) -> bool:
        """Return whether this rank loads labels: it holds the last stage of a pipe, maybe beside other stages."""
        return self._stages is None or self.last_stage in self._stages

    def _rank_of_stage(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank that holds a stage, 0..num_stages-1, in this rank's copy of the model.

        Args:
            stage_id: stage.
            **kwargs: other coordinates, as for DeepSpeed's ``grid.stage_to_global``.
        """
        coordinate = self.grid.topology().get_coord(self.global_rank)
        place = coordinate._replace(pipe=self.module.pipe_coordinate(stage_id), **kwargs)
        return self.grid.topology().get_rank(**place._asdict())

    # --- data ---

    def _build_data_iter(self, dataset: Any) -> None:
        # The parent's constructor calls this if initialize() got training_data.
        self.batches = MicroBatches(dataset, self.micro_batch_size, collate=self.collate_fn, repeat=True)

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Take micro-batches from a loader; see :meth:`set_dataiterator`. Other ranks than its readers ignore it."""
        if self.is_first_stage() or self.is_last_stage():
            self.set_dataiterator(iter(loader))

    def set_dataiterator(self, iterator: Iterator[Any] | Batches | None) -> None:
        """Take micro-batches by id from Batches, or in order from an iterator.

        An iterator yields the (inputs, labels) of this data-parallel rank, ``engine.mpu.get_data_parallel_rank()``:
        gradient_accumulation_steps micro-batches per step. Only ranks that hold a first or last stage read it.
        """
        if iterator is None or iterator is not getattr(self.batches, "iterator", None):
            self.batches = self._as_batches(iterator, self.micro_batches)

    def _as_batches(self, source: Iterator[Any] | Batches | None, micro_batches: int) -> Batches | None:
        if source is None or isinstance(source, Batches):
            return source
        if not isinstance(source, Iterator):
            raise ConfigError(
                f"data_iter: must be an iterator, because a loader would restart in every step (got "
                f"{type(source).__name__}). Create one with iter(...) and pass it to every step."
            )
        return IteratorBatches(source, self.mpu.get_data_parallel_rank(), micro_batches)

    def _load_step(self, schedule: TimetableSchedule) -> StepData:
        """Return the data of a step. Check it before the first training step and before the first evaluation."""
        trains = schedule.program.timetable.trains
        batches = NoBatches(self.batch_fn is not None) if self.batches is None else self.batches
        if isinstance(batches, MicroBatches) and self.plan.settings.keyed_random:
            batches.seed = self.random_seed
        first_id = self.module.data_index * schedule.micro_batches
        data = StepData(batches, first_id, schedule, self.global_steps, self.batch_fn)
        if trains not in self._checked_modes:
            total = schedule.micro_batches * self.layout.data_parallel_size
            check_first_batch(data, trains, total, self._abort)
            self._checked_modes.add(trains)
        self._step_loss = None
        try:
            self._losses.start_step(trains, data.labels() if trains else ())
        except Exception as error:
            self._abort(f"{type(error).__name__}: {error}")
            raise
        self._began = True
        return data

    # --- train_batch and eval_batch ---

    def train_batch(self, data_iter: Iterator[Any] | Batches | None = None) -> Tensor:
        """Take one optimizer step over N micro-batches per pipeline group.

        Args:
            data_iter: source of the micro-batches; None: the one of earlier steps, of :meth:`set_dataloader` or of
                ``training_data``. Ranks that are neither first nor last stage need none.

        Returns the mean loss of all micro-batches, on every rank.

        Raises:
            ConfigError: there is no data or no optimizer, or a script changed ``micro_batches``.
            NonFiniteLoss: the loss was not finite in ``max_nonfinite_losses`` consecutive steps.
        """
        if self.recovery is not None:
            self.recovery.complete()
        self.run.begin(self.global_steps)
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self._take_changes()
        step, skipped = self.global_steps + 1, self.skipped_steps
        rates, begin = self.get_lr(), time.perf_counter()
        with self._in_activity(f"step {step}"), self._first_step_limit(trains=True):
            if self.tracer is not None:
                self.tracer.start_step(step, self.plan.timetable)
            with self._whole_step(), self._replica_buffers.reporting():
                loss = super().train_batch()
            if self.tracer is not None:
                self.tracer.end_step()
            self.loss_watch.loss(step, float(loss), self.skipped_steps > skipped)
        self.step_s, self.step_lr = time.perf_counter() - begin, float(rates[0]) if rates else 0.0
        if self.recovery is not None:
            self.recovered_from_step, self._recovered_from = self._recovered_from, None
        self._write_events()
        return loss

    def _write_events(self) -> None:
        """Write to the monitors what DeepSpeed does not: gradient norm, bubble and additional losses."""
        if self.global_rank != 0 or not self.monitor.enabled:
            return
        norm = self.get_global_grad_norm()
        values = {"grad_norm": norm, "bubble": self.bubble_measured, **(self.agg_additional_losses or {})}
        self.monitor.write_events(
            [
                (f"Train/Samples/{name}", float(value), self.global_samples)
                for name, value in values.items()
                if value is not None
            ]
        )

    def _take_changes(self) -> None:
        """Apply what a script changed since the last step: optimizer, instruction map, dtype of reductions.

        Raises ConfigError for a number of micro-batches without a timetable, or an optimizer without fp32 weights.
        """
        planned = self.plan.sizes.gradient_accumulation_steps
        if self.micro_batches != planned:
            raise ConfigError(
                f"micro_batches: the timetable has {planned} per data-parallel rank (got {self.micro_batches}). Call "
                f"engine.set_train_batch_size()."
            )
        self._take_handlers()
        if self._changeable() != self._used:
            if isinstance(self._used[0], DeepSpeedOptimizer) and not isinstance(
                self.optimizer, DeepSpeedOptimizer
            ):
                raise ConfigError(
                    f"optimizer: ZeRO and half precision keep the fp32 weights and the shards in DeepSpeed's optimizer "
                    f"(got {type(self.optimizer).__name__} after initialize). Pass it to initialize(optimizer=...)."
                )
            self._use_optimizer()
        self._weights_set = self._masters.take_changes()

    def _changeable(self) -> list[Any]:
        """Return what a script may change between steps and :meth:`_use_optimizer` depends on."""
        return [self.optimizer, self.lr_scheduler, self._handlers, self.communication_data_type]

    def eval_batch(
        self,
        data_iter: Iterator[Any] | Batches | MapDataset,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run forwards only, without dropout.

        Args:
            data_iter: source of the micro-batches, as for :meth:`train_batch`; or a dataset, of whose first samples the
                micro-batches are taken, the same ones under every schedule.
            return_logits: return (result, {micro-batch: outputs}), with the outputs of the last stages on this rank.
            compute_loss: compute the loss; False: the result is made of the outputs of the last stage.
            reduce_output: "avg": mean over all micro-batches; None: list with one element per micro-batch of this rank.
            bcast_loss: must be False with ``reduce_output`` None; otherwise all ranks get the loss.
            num_micro_batches: micro-batches per data-parallel rank; None: ``engine.micro_batches``.

        Returns:
            The mean loss, on every rank. Without ``compute_loss`` or with ``reduce_output`` None: the result on the
            ranks of the last stage, and None on the others.

        Raises:
            ConfigError: ``reduce_output`` is neither "avg" nor None, or None and ``bcast_loss`` is set.
        """
        if reduce_output not in ("avg", None):
            raise ConfigError(
                f'reduce_output: must be "avg" or None (got {reduce_output!r}). For the outputs of individual '
                f"micro-batches, use return_logits=True."
            )
        if reduce_output is None and compute_loss and bcast_loss:
            raise ConfigError(
                "bcast_loss: the losses of individual micro-batches are not broadcast (got True with reduce_output "
                "None). Pass bcast_loss=False."
            )
        num_micro_batches = num_micro_batches or self.micro_batches
        source: Any = data_iter
        if all(hasattr(type(source), name) for name in ("__len__", "__getitem__")):
            source = MicroBatches(source, self.micro_batch_size, collate=self.collate_fn)
        train_batches, self.batches = self.batches, self._as_batches(source, num_micro_batches)
        outputs: dict[int, Any] = {}
        losses: dict[int, Any] = {}
        evaluation = Evaluation(
            compute_loss,
            outputs if return_logits or not compute_loss else None,
            losses if reduce_output is None else None,
        )
        self._take_handlers()
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        try:
            with (
                self._in_activity(f"evaluation after step {self.global_steps}"),
                self._first_step_limit(trains=False),
                torch.no_grad(),
                self.tracer.evaluation() if self.tracer else nullcontext(),
                self._whole_step(),
            ):
                self.average_buffers()
                self._exec_schedule(self._inference_schedule(num_micro_batches), evaluation)
                loss = self._aggregate_total_loss() if compute_loss else None
                by_id = losses if compute_loss else outputs
                result: Any = [by_id[number] for number in sorted(by_id)] or None
                if reduce_output == "avg":
                    group = self.mpu.get_data_parallel_group()
                    result = loss if compute_loss else result and mean_over_ranks(result, group)
            self.executor.data.source.advance(self.running.micro_batches * self.layout.data_parallel_size)
        finally:
            self.batches = train_batches
            for module, training in modes:  # the user may have put some in evaluation mode
                module.training = training
        if loss is not None and self.global_rank == 0 and self.monitor.enabled:
            self.monitor.write_events([("Train/Samples/eval_loss", loss.item(), self.global_samples)])
        return (result, outputs) if return_logits else result

    def _aggregate_total_loss(self) -> Tensor:
        """Return the mean loss of all micro-batches of all groups, on every rank, and end the step."""
        trains = self.running.program.timetable.trains
        gathered, self._step_loss = self._step_loss, None
        if gathered is None:  # an evaluation, or a script replaced the handler of the optimizer step
            gathered = self._gather_losses()
            if trains and gathered.correction != 1:
                raise ConfigError(
                    "loss_fn: a pair (sum, count) needs this engine's handler of OptimizerStep (got a replaced one). "
                    "Add a method counts(labels), or call the engine's handler."
                )
        if trains:
            self.executor.data.source.advance(self.running.micro_batches * self.layout.data_parallel_size)
            self._end_step()
        return gathered.loss

    def _gather_losses(self) -> StepLoss:
        """Gather the losses and measurements of all ranks, and compare the samples that they read.

        In training, this comes before the optimizer step, so that a step with other samples changes no weight.
        """
        self.transport.settle()
        weights_set, self._weights_set = self._weights_set, 0
        measured = [*self.busy.read(), float(peak_memory_bytes(self.device)), float(weights_set)]
        samples = self.executor.data.checksums()
        rows = self._gather_rows([*measured, *samples, *self._losses.numbers()])
        first_loss = len(measured) + len(samples)
        require_same_samples([row[len(measured) : first_loss] for row in rows])
        busy, spans, peaks, weights, *_ = zip(*rows, strict=True)
        if self.global_rank == 0 and any(weights):
            text = "step %d: the script set %d elements of the weights; the fp32 master weights have their values"
            logger.warning(text, self.global_steps + 1, int(sum(weights)))
        self.peak_memory_of_ranks = [int(peak) for peak in peaks]
        gathered = self._losses.result([row[first_loss:] for row in rows])
        if self.running.program.timetable.trains:
            self.agg_additional_losses, self.tokens = gathered.parts, gathered.tokens
            self.bubble_measured = 1 - sum(busy) / len(busy) / max(*spans, 1e-9)
            if self.is_last_stage():
                self.total_loss = gathered.loss * self.gradient_accumulation_steps()
        else:
            self.eval_additional_losses = gathered.parts
        return gathered

    def _end_step(self) -> None:
        """Take a snapshot, and gather what other ranks need from this rank's optimizer. All ranks have taken their
        snapshots when this returns: the gathering is the vote of :mod:`.recovery.recovery`."""
        shared = self._shared_numbers()
        if self.recovery is not None:
            self.snapshot_s = self.recovery.snapshot()
        if self.recovery is not None or shared:
            rows = self._gather_rows([float(self.global_steps), *shared])
            self._take_shared_numbers([numbers for _, *numbers in rows])

    def _gather_rows(self, numbers: list[float]) -> list[list[float]]:
        """Return the numbers of all ranks, one row per rank. All ranks must call this together."""
        row = torch.tensor(numbers, dtype=torch.float64, device=self._collective_device)
        rows = row.new_empty(dist.get_world_size(), len(numbers))
        dist.all_gather(list(rows), row)
        return rows.tolist()

    @property
    def _collective_device(self) -> torch.device:
        return torch.device("cpu") if dist.get_backend() == "gloo" else self.device

    def average_buffers(self) -> bool:
        """Give the buffers of all replicas the same values, and return whether they differed on this rank's replicas.

        All ranks must call this together. Evaluations and :meth:`save_checkpoint` do so.
        """
        return self._replica_buffers.average()

    def _shared_numbers(self) -> list[float]:
        """Return the numbers of this rank that other ranks need after a step. Every rank returns as many."""
        return []

    def _take_shared_numbers(self, rows: Sequence[Sequence[float]]) -> None:
        """Store the shared numbers of all ranks, one row per rank."""

    # --- checkpoints ---

    @property
    def in_checkpoints(self) -> bool:
        """True if this rank writes and reads checkpoints; False if another rank does so for its weights."""
        return True

    @property
    def first_in_checkpoints(self) -> int:
        """Rank that writes the values that are the same on all ranks."""
        return 0

    def weights_loaded(self) -> None:
        """Hook for subclasses, called on all ranks after a checkpoint has been loaded."""

    def try_checkpoint_folder(
        self, save_dir: str | os.PathLike[str], tags: Sequence[str] | None = None
    ) -> None:
        """Check that checkpoints can be saved to ``save_dir``. All ranks must call this together.

        Every rank writes a small file. Rank 0 reads the files and compares the free space with a checkpoint's size.
        From now on, no other job can save to the folder. A warning names checkpoints that another run has left there.
        Raises the same ConfigError on all ranks.

        Args:
            tags: names of this run's checkpoints, to warn only of those that it will replace; None: any name.
        """
        with self._in_activity(f"checking the folder {save_dir}"):
            try_folder(self, Path(save_dir), tags)

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write ``save_dir/tag`` (None: ``global_step<N>``). Arguments and result are the same as DeepSpeed's.

        The checkpoint gets its name when it is complete on disk, so a killed run keeps the last complete one.
        Raises the errors of :func:`.checkpoint.save.save_checkpoint`.
        """
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        begin, event = time.perf_counter(), "failed"
        self.run.begin(self.global_steps)
        try:
            with self._in_activity(f"saving the checkpoint {tag}"), self._longer_limit():
                self.average_buffers()
                with self._masters.with_changes():
                    save_checkpoint(
                        self,
                        Path(save_dir),
                        tag,
                        client_state or {},
                        save_latest,
                        not exclude_frozen_parameters,
                    )
            event = "saved"
        finally:
            self._add_checkpoint_event(event, Path(save_dir, tag), begin)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load ``load_dir/tag`` (None: the current checkpoint), written with any schedule and parallel sizes.

        Arguments and result are the same as DeepSpeed's: (path, client state). The result is (None, None) if ``tag`` is
        None and the folder has no checkpoint; after a restart of the ranks, none that this run has written or loaded.
        Raises the errors of :func:`.checkpoint.load.load_checkpoint`, and ConfigError for a ``custom_load_fn``.
        """
        if custom_load_fn is not None:
            raise ConfigError("custom_load_fn: must be None. The layer files contain the weights.")
        with self._in_activity(f"loading a checkpoint from {load_dir}"), self._longer_limit():
            # All ranks load the same checkpoint, even if another job writes to the folder.
            named = None if tag is None else str(tag)
            chosen = by_rank_0(lambda: self.run.choose(Path(load_dir), named), CheckpointError)
            if chosen is None:
                own = " that this run wrote or loaded before its restart" * self.run.continues
                if self.global_rank == 0:
                    logger.warning("%s: no checkpoint%s", load_dir, own)
                return None, None
            begin = time.perf_counter()
            self._masters.take_changes()  # a partial load keeps what the script set
            path, client_state = load_checkpoint(
                self,
                Path(load_dir),
                chosen,
                strict=load_module_strict,
                with_optimizer=load_optimizer_states and not load_module_only,
                with_scheduler=load_lr_scheduler_states and not load_module_only,
                with_counters=not load_module_only,
            )
            self.weights_loaded()
            self._add_checkpoint_event("loaded", path, begin)
        return str(path), client_state

    def _add_checkpoint_event(self, event: str, path: Path, begin: float) -> None:
        facts = {
            "path": str(path.absolute()),
            "step": self.global_steps,
            "seconds": time.perf_counter() - begin,
        }
        self._add_event({"event": event, **facts, "at": time.time()})

    def _add_event(self, event: dict[str, Any]) -> None:
        self.checkpoint_events.append(event)
        if self.on_checkpoint_event is not None:
            self.on_checkpoint_event()

    def recover(
        self, data_iter: Batches | None = None, save_dir: str | os.PathLike[str] | None = None
    ) -> Recovered | None:
        """Continue from the newest snapshots in host memory after the launcher has restarted the ranks.

        Call it before the first step, on all ranks; then train from ``engine.global_steps``. Returns None without the
        section "recovery", at the first start, if a snapshot of some rank was lost, and if the snapshots are older than
        the loaded step or the last checkpoint of this run in ``save_dir``, which the script can load then.

        Args:
            data_iter: source of the micro-batches; None: ``training_data``.
            save_dir: folder of this run's checkpoints; None: snapshots are compared with the loaded step only.
        """
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        if self.recovery is None:
            return None
        with self._in_activity("loading snapshots"), self._longer_limit():
            self._masters.take_changes()
            saved = 0
            if save_dir is not None and self.run.continues:
                saved = by_rank_0(lambda: self.run.saved_step(Path(save_dir)), CheckpointError)
            recovered = self.recovery.recover(max(saved, self.global_steps))
            if recovered is not None:
                self._recovered_from = recovered.step
                self.weights_loaded()
                self._report_recovery(recovered)
        return recovered

    def _report_recovery(self, recovered: Recovered) -> None:
        if self.global_rank == 0:
            print(f"{recovered}\n", end="", flush=True)
        facts = asdict(recovered)
        event = {
            "event": "recovered",
            "path": "host memory",
            "seconds": facts.pop("load_s"),
            "at": time.time(),
        }
        self._add_event({**event, **facts})

    # --- failures ---

    @contextmanager
    def _whole_step(self) -> Iterator[None]:
        """Context of a step or an evaluation. If it fails after it began, no other one can follow.

        Raises RuntimeError after an earlier failure: gradients, messages and the other ranks are in an unknown state.
        """
        if self._failure is not None:
            raise RuntimeError(
                f"engine: cannot continue after a failure within a step (got {self._failure}). Start the ranks again, "
                f"and load a checkpoint."
            )
        self._began = False
        try:
            yield
        except BaseException as error:
            self.timers(TRAIN_BATCH_TIMER).reset()
            if self._began:
                self._failure = f"{self.activity}: {type(error).__name__}: {first_line(error)}"
            raise

    def _abort(self, failure: str) -> None:
        self._began = True
        self.transport.abort(failure)

    @contextmanager
    def _first_step_limit(self, trains: bool) -> Iterator[None]:
        """Context with a longer time limit for the first training step and the first evaluation, if they may compile.

        A rank does not answer while it compiles its layers or loads the kernels of a GPU.
        """
        compiles = self.device.type != "cpu" or self.is_compiled
        with nullcontext() if trains in self._checked_modes or not compiles else self._longer_limit():
            yield

    @contextmanager
    def _longer_limit(self) -> Iterator[None]:
        """Context with a longer time limit of waits, for compilations and for disks of different speeds."""
        limit_s = self.plan.settings.transport_options.timeout_s
        self._limit_waits(first_step_limit_s(limit_s))
        try:
            yield
        finally:
            self._limit_waits(limit_s)

    def _limit_waits(self, limit_s: float) -> None:
        self.transport.timeout_s = limit_s
        limit_waits(limit_s)

    @contextmanager
    def _in_activity(self, activity: str) -> Iterator[None]:
        """Context that adds ``activity`` to the first line of an error about a lost or silent rank.

        Args:
            activity: for example ``step 4``; a failed instruction adds its label.
        """
        self.activity = activity
        try:
            require_hosts()
            yield
        except Exception as error:
            if lost_peer(error):
                first, other_lines = first_line(error), str(error).splitlines()[1:]
                context = "; ".join(filter(None, [self.activity, self._describe_ranks(first)]))
                error.args = ("\n".join([f"{first} ({context})", *other_lines]),)
            raise

    def _describe_ranks(self, text: str) -> str:
        """Return the roles of the ranks named in an error; empty if ranks have no roles."""
        return ""

    def _report_failure(self, instruction: ds.PipeInstruction, error: Exception) -> None:
        """Add the position in the timetable to the exception of an instruction, and report it to the peers."""
        self.activity = f"{instruction.label}, {self.activity}"
        error.add_note(self._where(instruction, "stopped" if lost_peer(error) else "failed"))
        self._abort(f"{type(error).__name__}: {error}")

    def _where(self, instruction: ds.PipeInstruction, verb: str) -> str:
        """Return the timetable with an arrow at the computation that ``instruction`` belongs to."""
        return (
            f"rank {self.global_rank} (device {self.module.device_index} of its pipeline) {verb} in {self.activity}:\n"
            f"{self.running.picture(instruction)}"
        )
