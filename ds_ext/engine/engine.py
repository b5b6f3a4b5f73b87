"""Engine that runs the program of any timetable. It does not depend on the name of a schedule.

It differs from DeepSpeed's PipelineEngine in four ways. Tensors, losses and gradients belong to the buffer of an
instruction. Micro-batches are fetched by id. Messages carry their shapes and go to any peer without blocking.
Checkpoints load with any schedule and sizes. Everything else (optimizer, ZeRO-1, learning rate, monitors) is inherited.

The :class:`.executor.Executor` runs the instructions. Order of this file: construction, changes between steps, data,
train_batch and eval_batch, checkpoints. :mod:`.deepspeed_api.base` replaces DeepSpeed's other methods.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import torch
from deepspeed.runtime.pipe import engine as pipe
from deepspeed.runtime.pipe import schedule as ds
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER
from torch import Tensor

from ..comm.transport import Transport, create_transport
from ..errors import ConfigError
from ..launch.stop import CALL, StopRequests
from ..parallel.layout import ParallelLayout
from ..pipe_schedules.bridge import TimetableSchedule
from .activity import Activity
from .all_ranks import collective_device, gather_rows, on_all_ranks
from .batches import Batches, IteratorBatches, MapDataset
from .checkpoint.background import BackgroundSave
from .checkpoint.events import CheckpointEvents
from .checkpoint.load import choose, load_checkpoint
from .checkpoint.run import this_run
from .checkpoint.save import finish_save, save_checkpoint
from .checkpoint.trial import check_states, try_folder
from .data_feed import DataFeed
from .deepspeed_api.base import AdaptedEngine, without_memory_lines
from .deepspeed_api.device import read_peak_memory
from .deepspeed_api.handlers import bind_handlers, merge_patches
from .deepspeed_api.names import loss_scaler, require_built
from .deferral import DeferralReport
from .evaluation import Evaluation
from .executor import Executor
from .expert_loads import make_expert_loads
from .losses.local import LocalLosses
from .losses.watch import LossWatch
from .modes import evaluating, training
from .module import PipelineModule
from .parameters import parameters_of
from .placeholders import hide_placeholders
from .recovery.audit import StepAudit
from .recovery.recovery import Recovered, Recovery
from .replica_buffers import ReplicaBuffers
from .role import Role
from .schedules import Schedules
from .stages import stages_of
from .stages.body import StageForward
from .stages.sequences import sequences_of
from .step import BackwardContext
from .step_data import StepData, require_data
from .step_report import Gathered, RankNumbers, StepReport, gather_step, report_property
from .tracing.clock import BusyClock
from .tracing.recorder import Tracer
from .types import Batch, Json, Record
from .weights.norm import let_parameters_differ, share_loss_scale
from .weights.trained import TrainedParameters
from .weights.update import WeightUpdate

logger = logging.getLogger(__name__)


class PipelineEngine(AdaptedEngine):
    """Engine of a :class:`ds_ext.PipelineModule`, created by :func:`ds_ext.initialize`.

    Args:
        role: role of this rank; None: it trains its stages.
        **kwargs: arguments of DeepSpeed's engine.

    Attributes:
        plan: job plan, with timetable, program, simulation, reductions and rules.
        schedule: schedule of a training step.
        executor: what runs the instructions.
        transport: transport of the messages between stages.
        batches: source of the training micro-batches; None without data.
        feed: micro-batches of the steps, from ``batches``.
        local_losses: losses of this rank in a step.
        busy: clock of this rank's computations.
        update: gradients, reduction and master weights, with the current optimizer.
        handlers: instruction class -> handler, with those that a script replaced.
        tracer: recorder of the timeline; None without tracing.
        activity: current activity, its time limit, and the failure of a step.
        stops: requests of this rank to end the run.
        report: measurements of the last training step; None before the first one.
        agg_additional_losses, eval_additional_losses: means of the loss's terms and of the module's additional losses
            in the last training step and in the last evaluation, by name.
        run_facts: what runs and where, from :func:`.facts.run_facts`.
        checkpoint_events: checkpoints saved, loaded and recovered so far.
        saving: last save in the background; None after :meth:`wait_for_save`.
        run: identity of this run, which its checkpoints and its record contain.
        recovery: snapshots in host memory; None without the section "recovery".
        audit: audits of the steps; None without ``audit_interval``.
    """

    module: PipelineModule
    role = Role()  # the parent's constructor reads it

    # --- construction ---

    def __init__(self, *, role: Role | None = None, **kwargs: object) -> None:
        # Keywords only: the parent's first positional argument is has_bool_tensors.
        with without_memory_lines():
            super().__init__(**kwargs)
        require_built(self, self.optimizer)
        require_built(loss_scaler(self.optimizer))
        self.role, self.plan = role or Role(), self.module.plan
        self._set_up_stages()
        self._set_up_transport()
        self._set_up_optimizer()
        self._set_up_run()
        with self.activity.during("setting up"):
            self.role.start(self)

    def _set_up_stages(self) -> None:
        """Set up the stages, their data and the executor. DeepSpeed's engine, the plan and the role must exist."""
        hide_placeholders(self.module)
        # Otherwise DeepSpeed would send only a slice of the activations from each tensor-parallel rank.
        self.is_pipe_partitioned = self.is_grad_partitioned = False
        self._stages = self.module.stages
        self.num_stages = self.layout.placement.stages
        self.is_pipe_parallel = self.layout.placement.num_devices > 1
        self.grid.stage_to_global = self._rank_of_stage
        # DeepSpeed counts the micro-batches of this rank's pipeline, all other code those of a pipeline that trains.
        self.micro_batches //= self.role.pipelines
        settings = self.plan.settings
        self.activity = Activity(settings.transport_options.timeout_s, self.role.describe_ranks, self._where)
        self.local_losses = LocalLosses(self.module, self.device)
        self.feed = DataFeed(self)
        stages = stages_of(self.module, StageForward(self.module), self.local_losses, self.device)
        sequences = sequences_of(self.module, self.plan)
        self.executor = Executor(stages, sequences, self.activity.report_failure)
        self.pipe_buffers = self.executor.buffers  # of the live (stage, micro-batch) pairs, by buffer id
        self._schedules = Schedules(self.layout, self.module.device_index, settings.sequence_slices)
        self.schedule = self.executor.schedule = self._schedules.training(self.plan)
        self._take_handlers()
        self._deferral: DeferralReport | None = None  # of the first step
        if self.plan.timetable.split_backwards:
            self._deferral = DeferralReport(self.module, self.plan.timetable.schedule, self.executor.buffers)
        self.busy = BusyClock(self.device)

    def _set_up_transport(self) -> None:
        """Set up the transport and the tracer. The schedules, the handlers and the busy clock must exist."""
        settings, options = self.plan.settings, self.plan.settings.transport_options
        transport = create_transport(
            settings.transport,
            timeout_s=options.timeout_s,
            device=self.device,
            pairs=self._schedules.max_held(self.plan) | self.role.max_held(),
            node_ips=options.node_ips,
            polled=self.plan.rules is not None,
        )
        self.tracer: Tracer | None = None
        if settings.trace.dir is not None:
            eager = WeightUpdate.is_eager(self)
            self.tracer = Tracer.from_module(self.module, self.busy, transport.name, eager)
        self.use_transport(transport)

    def _set_up_optimizer(self) -> None:
        """Set up the update of the weights. The executor, the handlers and the tracer must exist."""
        let_parameters_differ(self.optimizer)
        share_loss_scale(self)
        self.trained = TrainedParameters(self)
        settings, parameters = (
            self.plan.settings,
            parameters_of(self.module, self.layout.tensor_parallel_size),
        )
        limit, allows_zeros = settings.max_nonfinite_losses, settings.allow_zero_norm
        self.loss_watch = LossWatch(parameters.values(), limit, allows_zeros)
        on_all_ranks(self._use_optimizer)  # forward ranks (FBD) have no optimizer

    def _set_up_run(self) -> None:
        """Set up the state of the run, its recovery and its audits. All other parts of the engine must exist."""
        data_parallel_group = self.mpu.get_data_parallel_group()
        device = collective_device(self.device)
        self._replica_buffers = ReplicaBuffers(self.module, data_parallel_group, device)
        self.expert_loads = make_expert_loads(self)
        self.stops = StopRequests()
        self.report: StepReport | None = None
        self._gathered: Gathered | None = None  # of the current step
        self.eval_additional_losses: dict[str, Tensor] | None = None
        self.run = this_run()
        self.run_facts: Record = {}
        self.checkpoint_events = CheckpointEvents()
        self.saving: BackgroundSave | None = None
        settings = self.plan.settings
        check_states(self.optimizer, settings.recovery is not None)
        self.recovery = None if settings.recovery is None else Recovery(self, settings.recovery)
        stop = None if self.recovery is None else self.recovery.stop
        self.audit = None if settings.audit_interval == 0 else StepAudit(self, settings.audit_interval, stop)

    def use_transport(self, transport: Transport) -> None:
        """Use another transport for the messages between stages, from the next step on.

        Raises ConfigError if the order is decided at run time and the transport cannot report arrivals.
        """
        count = None if self.tracer is None else self.tracer.count
        self.transport = self.activity.transport = transport
        self._schedules.connect(transport, self.plan.rules, self.global_rank, count)

    @property
    def layout(self) -> ParallelLayout:
        """Devices, pipeline groups and tensor-parallel ranks of the job."""
        return self.module.layout

    @property
    def current_schedule(self) -> TimetableSchedule:
        """Schedule of the current or last step or evaluation."""
        return self.executor.schedule

    @property
    def random_seed(self) -> int:
        """Seed of the keys from which layers draw; see :func:`ds_ext.tensor_parallel.layer_key`."""
        return self.module.random_seed

    # --- measurements: of the last training step (None before the first one), and of its simulation ---

    step_s = report_property(lambda report: report.seconds)
    step_lr = report_property(lambda report: report.lr)
    bubble_measured = report_property(lambda report: report.gathered.bubble)
    peak_memory_of_ranks = report_property(lambda report: report.gathered.peak_memory_of_ranks, ())
    peak_memory_bytes = report_property(lambda report: max(report.gathered.peak_memory_of_ranks))
    tokens = report_property(
        lambda report: report.gathered.losses.tokens
    )  # counted; None with a loss of means

    @property
    def deferred_share(self) -> float | None:
        """Share of the trained elements whose gradients the first step deferred; None without split backwards."""
        return None if self._deferral is None else self._deferral.share

    @property
    def bubble_simulated(self) -> float:
        """Share of the simulated step in which an average device does not compute."""
        return self.plan.simulation.bubble

    # --- changes between steps ---

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches between steps, with a new timetable.

        Raises:
            ConfigError: the schedule does not support the number. Nothing is changed.
            ValueError: the samples do not fill whole micro-batches of every pipeline.
        """
        per_step = self.micro_batch_size * self.dp_world_size * self.role.pipelines
        micro_batches, rest = divmod(train_batch_size, per_step)
        if rest or micro_batches < 1:
            raise ValueError(
                f"train_batch_size: must be a positive multiple of {per_step}, one micro-batch per pipeline (got "
                f"{train_batch_size})."
            )
        plan = self.plan.resized(micro_batches)
        super().set_train_batch_size(train_batch_size)
        self.plan, self.micro_batches = plan, micro_batches
        self.schedule = self._schedules.training(plan)
        self.trained.find_changes()
        self.update.rebuild_reduction()
        if isinstance(self.batches, IteratorBatches):
            self.batches = self.feed.as_batches(self.batches.iterator, micro_batches)

    def _take_changes(self) -> None:
        """Apply what a script changed since the last step: optimizer, instruction map, dtype of reductions."""
        planned = self.plan.sizes.gradient_accumulation_steps
        if self.micro_batches != planned:
            raise ConfigError(
                f"micro_batches: the timetable has {planned} per data-parallel rank (got {self.micro_batches}). Call "
                f"engine.set_train_batch_size()."
            )
        self._take_handlers()
        self.trained.find_changes()
        if self.update.is_outdated():
            self.update.wait_for_weights()
            self.update.masters.adopt_assigned()  # the next update takes parameters for views of flat buffers
            self._use_optimizer()
        self.update.weights_set = self.update.masters.adopt_changes()

    def _use_optimizer(self) -> None:
        with self.trained.before_changes():
            self.update = WeightUpdate(self, self.trained)
        accumulating = self.update.gradients.accumulating or nullcontext
        parameters = list(self.module.parameters())
        self.executor.backward_context = BackwardContext(self.update.backward_root, accumulating, parameters)

    def _take_handlers(self) -> None:
        """Pass the executor the handlers of DeepSpeed's instruction map, in which a script may replace some."""
        maps = [{**of._INSTRUCTION_MAP} for of in (self, type(self), pipe.PipelineEngine)]
        if maps != self._instruction_maps:
            self.handlers = merge_patches(*maps)
            self.executor.handlers = bind_handlers(self, self.handlers)
            self._instruction_maps = maps

    # --- data ---

    def set_dataloader(self, loader: Iterable[Batch]) -> None:
        """Take micro-batches from a loader; see :meth:`set_dataiterator`. Other ranks than its readers ignore it."""
        if self.is_first_stage() or self.is_last_stage():
            self.set_dataiterator(iter(loader))

    def set_dataiterator(self, iterator: Iterator[Batch] | Batches | None) -> None:
        """Take micro-batches by id from Batches, or in order from an iterator.

        An iterator yields the (inputs, labels) of this data-parallel rank, ``engine.mpu.get_data_parallel_rank()``:
        gradient_accumulation_steps micro-batches per step. Only ranks that hold a first or last stage read it. On a
        forward rank (FBD), it yields those of all backward pipelines of the group, one pipeline after the other.
        """
        if iterator is None or iterator is not getattr(self.batches, "iterator", None):
            self.batches = self.feed.as_batches(iterator, self.micro_batches)

    def _start_step_or_evaluation(self, schedule: TimetableSchedule, computes_loss: bool) -> StepData:
        """Return the micro-batches of a step or an evaluation, which has begun then."""
        trains = schedule.trains
        # The feed comes first: after most of its errors, no step has begun, and the script may continue.
        data = self.feed.start_step(schedule, computes_loss)
        self._gathered = None
        with self.activity.reported():  # only some ranks read labels, so the others must get their errors
            self.local_losses.start_step(trains, read_labels=data.labels if trains else tuple)
        self.activity.begin()
        return data

    # --- train_batch and eval_batch ---

    def train_batch(self, data_iter: Iterator[Batch] | Batches | None = None) -> Tensor:
        """Take one optimizer step over N micro-batches per pipeline group.

        Args:
            data_iter: source of the micro-batches; None: the one of earlier steps, of :meth:`set_dataloader` or of
                ``training_data``. Ranks that are neither first nor last stage need none.

        Returns the mean loss of all micro-batches, on every rank.

        Raises:
            ConfigError: there is no data or no optimizer, or a script changed ``micro_batches``.
                Or all gradients are zero, see ``allow_zero_norm``.
            NonFiniteLoss: the loss was not finite in ``max_nonfinite_losses`` consecutive steps.
        """
        self.run.begin(self.global_steps)
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self._take_changes()
        step, skipped = self.global_steps + 1, self.skipped_steps
        rates, begin = self.get_lr(), time.perf_counter()
        with self.activity.during(f"step {step}"), self.activity.longer_limit(self._may_compile(True)):
            snapshot_s = None if self.recovery is None else self.recovery.snapshot_last_step()
            if self.tracer is not None:
                self.tracer.start_step(step, self.plan.timetable)
            with (
                self.activity.whole_step(self.timers(TRAIN_BATCH_TIMER).reset),
                self._replica_buffers.reporting(),
                training(self.module),
            ):
                # DeepSpeed calls module.train(), _train_schedule(), _exec_schedule() and _aggregate_total_loss().
                loss = super().train_batch()
            if self.tracer is not None:
                self.tracer.end_step()
            self._check_step(step, float(loss), self.skipped_steps > skipped)
        seconds, rate = time.perf_counter() - begin, float(rates[0]) if rates else 0.0
        recovered_from = None if self.recovery is None else self.recovery.take_recovered_step()
        self.report = StepReport(seconds, rate, self._grad_norm(), self.gathered, snapshot_s, recovered_from)
        if self.global_rank == 0 and self.monitor.enabled:
            self.monitor.write_events(self.report.monitor_events(self.global_samples))
        self.role.end_step()
        return loss

    def _check_step(self, step: int, loss: float, is_skipped: bool) -> None:
        searches_scale = is_skipped and any(rank.dynamic_scale for rank in self.gathered.ranks)
        self.loss_watch.check_loss(step, loss, is_skipped, searches_scale)
        counts_labels = self.gathered.losses.correction != 0
        self.loss_watch.check_norm(step, loss, self._grad_norm(), counts_labels)

    def _grad_norm(self) -> float | None:
        """Return the norm of the gradients of the last step, over all ranks; None: not measured."""
        norm = self.get_global_grad_norm()
        return None if norm is None else float(norm)

    def _exec_schedule(self, pipe_schedule: TimetableSchedule, evaluation: Evaluation | None = None) -> None:
        if not isinstance(pipe_schedule, TimetableSchedule):
            raise ConfigError(
                f"schedule: the engine runs the timetable of its job plan (got {type(pipe_schedule).__name__}). Call "
                f"train_batch() or eval_batch(), and write own schedules as in docs/add_a_schedule.md."
            )
        trains = pipe_schedule.trains
        self.executor.messages = self._schedules.messages(pipe_schedule)
        with self.role.executing(pipe_schedule):
            computes_loss = evaluation is None or evaluation.computes_loss
            data = self._start_step_or_evaluation(pipe_schedule, computes_loss)
            self.busy.start_step()
            is_audited = trains and self.audit is not None and self.audit.start_step(self.global_steps + 1)
            audit = self.audit if is_audited else None
            tracer = self.tracer if self.tracer and self.tracer.active else None
            deferral = self._deferral if trains and self.deferred_share is None else None
            # Outermost first: the tracer reads what the busy clock, inside it, has just measured.
            observers = [watch for watch in (audit, tracer, deferral, self.busy) if watch is not None]
            self.executor.run(pipe_schedule, data, self.global_steps, observers, evaluation)
        if deferral is not None:
            deferral.finish()

    def gather_numbers(self) -> Gathered:
        """Gather the losses and measurements of all ranks, once in a step or an evaluation. All ranks call it together.

        In training, this comes before the optimizer step; see :func:`.step_report.gather_step`. It agrees on a stop and
        on the trained parameters, and sets ``agg_additional_losses`` and DeepSpeed's ``total_loss``, a sum over
        micro-batches. :attr:`gathered` has the result.
        """
        self.transport.settle()
        self.role.wait_for_step(self.current_schedule)
        own, step_number = self._own_numbers(), self.executor.current_step.steps_done + 1
        self._gathered = gather_step(own, self.executor.data, self.local_losses, step_number, self.device)
        self._use_gathered(self._gathered)
        return self._gathered

    @property
    def gathered(self) -> Gathered:
        """Losses and measurements of all ranks in the last step or evaluation whose numbers were gathered."""
        assert self._gathered is not None, "gather_numbers() comes first"
        return self._gathered

    def _own_numbers(self) -> RankNumbers:
        """Return the numbers of this rank in the step or evaluation."""
        busy_s, span_s = self.busy.busy_and_span_s()
        batches_read, batches_needed = self.executor.data.ended
        loads = self.expert_loads.read()
        return RankNumbers(
            busy_s=busy_s,
            span_s=span_s,
            peak_memory_bytes=read_peak_memory(self.device),
            weights_set=self.update.take_weights_set(),
            num_changed=len(self.trained.changed) if self.current_schedule.trains else 0,
            stop_cause=self.stops.cause,
            batches_read=batches_read,
            batches_needed=batches_needed,
            dynamic_scale=self.update.has_dynamic_scale,
            expert_load=loads.largest,
            num_idle_experts=loads.idle,
            num_experts=loads.experts,
        )

    def _use_gathered(self, gathered: Gathered) -> None:
        """Agree on a stop and on the trained parameters; in training, set the means of the losses."""
        self.stops.agree_on_stop([rank.stop_cause for rank in gathered.ranks])
        if any(rank.num_changed for rank in gathered.ranks):
            self.update.agree_on_trained()
        if self.current_schedule.trains:
            self.agg_additional_losses = gathered.losses.by_name
            if self.is_last_stage():
                self.total_loss = gathered.losses.loss * self.gradient_accumulation_steps()

    def _advance(self) -> None:
        self.executor.data.source.advance(
            self.current_schedule.micro_batches * self.layout.data_parallel_size
        )

    def eval_batch(
        self,
        data_iter: Iterator[Batch] | Batches | MapDataset,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | Literal["all"] | None = None,
    ) -> Batch:
        """Run forwards only, without dropout, and average the buffers of replicas first. All ranks call it together.

        Args:
            data_iter: source of the micro-batches, as for :meth:`train_batch`; or a dataset, of whose first samples the
                micro-batches are taken, the same ones under every schedule.
            return_logits: return (result, {micro-batch: outputs}), with the outputs of the last stages on this rank.
            compute_loss: compute the loss; False: the result is made of the outputs of the last stage.
            reduce_output: "avg": mean over all micro-batches; None: list with one element per micro-batch of this rank.
            bcast_loss: must be False with ``reduce_output`` None; otherwise all ranks get the loss.
            num_micro_batches: micro-batches per data-parallel rank; None: ``micro_batches``; "all": a whole dataset.

        Returns:
            The mean loss, on every rank. Without ``compute_loss`` or with ``reduce_output`` None: the result on the
            ranks of the last stage, and None on the others.

        Raises:
            ConfigError: an argument, the data or a handler of the script is wrong.
            RuntimeError: an earlier step or evaluation failed after it began.
        """
        evaluation = Evaluation.from_arguments(compute_loss, return_logits, reduce_output, bcast_loss)
        if evaluation.outputs is not None and self.plan.schedule.divides_head:
            name = "return_logits" if return_logits else "compute_loss"
            raise ConfigError(
                f"{name}: no device has whole logits with vocabulary_parallel_head (got {name}={return_logits}). "
                f"Load the checkpoint in a job without vocabulary_parallel_head."
            )
        source, count = self.feed.to_evaluate(data_iter, num_micro_batches)
        self._take_handlers()
        train_batches, self.batches = self.batches, self.feed.as_batches(source, count)
        try:
            with (
                evaluating(self.module),
                self.activity.during(f"evaluation after step {self.global_steps}"),
                self.activity.longer_limit(self._may_compile(False)),
                torch.no_grad(),
                self.tracer.evaluation() if self.tracer else nullcontext(),
                self.activity.whole_step(self.timers(TRAIN_BATCH_TIMER).reset),
            ):
                self.wait_for_weights()
                self.average_buffers()
                self._exec_schedule(self._schedules.inference(count), evaluation)
                loss = None
                if compute_loss:
                    losses = self.gather_numbers().losses
                    loss, self.eval_additional_losses = losses.loss, losses.by_name
                else:
                    self.transport.settle()
                    require_data(self.executor.data, gather_rows(self.executor.data.ended, self.device))
                result = evaluation.result(loss, self.mpu.get_data_parallel_group())
            self._advance()
        finally:
            self.batches = train_batches
        if loss is not None and self.global_rank == 0 and self.monitor.enabled:
            self.monitor.write_events([("Train/Samples/eval_loss", loss.item(), self.global_samples)])
        return (result, evaluation.outputs) if return_logits else result

    def wait_for_weights(self) -> None:
        """Wait until this rank has the weights of the last step, before the script reads or sets a parameter.

        With ``overlap_across_steps``, they may still be gathered when :meth:`train_batch` returns.
        """
        self.update.wait_for_weights()

    def average_buffers(self) -> bool:
        """Set the buffers of all replicas to the same values, and return whether they differed on this rank's replicas.

        All ranks must call this together. Evaluations and :meth:`save_checkpoint` do so.
        """
        differed = self._replica_buffers.average()
        self.role.buffers_averaged(differed)
        return differed

    def _may_compile(self, trains: bool) -> bool:
        """Return whether a step may compile layers or load the kernels of a GPU, during which no rank answers."""
        return not self.feed.has_started(trains) and (self.device.type != "cpu" or self.is_compiled)

    def _where(self, instruction: ds.PipeInstruction, verb: str) -> str:
        """Return the timetable with an arrow at the computation that ``instruction`` belongs to."""
        return (
            f"rank {self.global_rank} (device {self.module.device_index} of its pipeline) {verb} in "
            f"{self.activity.name}{self.module.describe_layers(instruction)}:\n{self.current_schedule.picture(instruction)}"
        )

    # --- checkpoints ---

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Json | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        keep: int = 0,
        background: bool = False,
    ) -> bool:
        """Write ``save_dir/tag`` (None: ``global_step<N>``). Arguments and result are DeepSpeed's, with two more.

        The checkpoint gets its name when it is complete on disk, so a killed run keeps the last complete one.
        Raises the errors of :func:`.checkpoint.save.save_checkpoint`, and those of :meth:`wait_for_save`.

        Args:
            keep: then remove complete checkpoints of training runs except the newest ones; 0: keep all.
            background: return when the state is copied, and write it beside the next steps; see :meth:`wait_for_save`.
        """
        self.wait_for_save()
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        self.run.begin(self.global_steps)
        with (
            self.checkpoint_events.saving(
                Path(save_dir, tag), self.global_steps, lambda: self.saving is not None
            ),
            self.activity.during(f"saving the checkpoint {tag}"),
            self.activity.longer_limit(),
        ):
            self.average_buffers()
            with self.update.masters.with_changes():
                state, with_frozen = client_state or {}, not exclude_frozen_parameters
                self.saving = save_checkpoint(
                    self, Path(save_dir), tag, state, save_latest, with_frozen, keep, background
                )
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: object = None,
    ) -> tuple[str | None, Record | None]:
        """Load ``load_dir/tag`` (None: the current checkpoint), written with any schedule and parallel sizes.

        Arguments and result are the same as DeepSpeed's: (path, client state). The result is (None, None) if ``tag`` is
        None and the folder has no checkpoint; after a restart of the ranks, none that this run has written or loaded.
        A save in the background is completed first. Raises the errors of :meth:`wait_for_save` and
        :func:`.checkpoint.load.load_checkpoint`, and ConfigError for a ``custom_load_fn``.
        """
        if custom_load_fn is not None:
            raise ConfigError("custom_load_fn: must be None. The layer files contain the weights.")
        self.wait_for_save()
        with self.activity.during(f"loading a checkpoint from {load_dir}"), self.activity.longer_limit():
            chosen = choose(self.run, Path(load_dir), tag)
            if chosen is None:
                return None, None
            begin = time.perf_counter()
            self.update.masters.adopt_changes()  # a partial load keeps what the script set
            path, client_state = load_checkpoint(
                self,
                Path(load_dir),
                chosen,
                strict=load_module_strict,
                with_optimizer=load_optimizer_states and not load_module_only,
                with_scheduler=load_lr_scheduler_states and not load_module_only,
                with_counters=not load_module_only,
            )
            self.role.weights_loaded()
            self.checkpoint_events.loaded(path, self.global_steps, begin)
        return str(path), client_state

    def wait_for_save(self) -> None:
        """Wait until the last save in the background is complete. All ranks must call this together.

        The next save and the next load do so first, and the exit of a rank waits for its files.
        """
        save, self.saving = self.saving, None
        if save is not None:
            with (
                self.checkpoint_events.finishing(save),
                self.activity.during(f"saving the checkpoint {save.path.name}"),
                self.activity.longer_limit(),
            ):
                finish_save(save)

    def try_checkpoint_folder(
        self, save_dir: str | os.PathLike[str], tags: Sequence[str] | None = None
    ) -> None:
        """Check that checkpoints can be saved to ``save_dir``. All ranks must call this together.

        Every rank writes a small file. Rank 0 reads the files and compares the free space with a checkpoint's size.
        From now on, no other job can save to the folder. A warning names checkpoints that another run has left there.

        Args:
            tags: names of this run's checkpoints, to warn only of those that it will replace; None: any name.
        """
        with self.activity.during(f"checking the folder {save_dir}"):
            try_folder(self, Path(save_dir), tags)

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
        self.wait_for_save()
        with self.activity.during("loading snapshots"), self.activity.longer_limit():
            self.update.masters.adopt_changes()
            recovered = self.recovery.recover(None if save_dir is None else Path(save_dir))
            if recovered is not None:
                self.trained.find_changes()
                self.trained.agree_on_changes()
                self.trained.find_changes()
                self.update.rebuild_reduction()
                self.role.weights_loaded()
                self.checkpoint_events.recovered(recovered)
        return recovered

    # --- end of the run ---

    def should_stop(self) -> bool:
        """Return whether the run should end now: the same answer on all ranks, after every step and evaluation.

        True after a rank received SIGTERM or SIGUSR1, lost its launcher, or called :meth:`request_stop`. The first call
        takes these signals, unless the script handles them. Save a checkpoint then, and exit with 0. Rank 0 logs step,
        rank and cause at the first True.
        """
        self.stops.listen()
        stop = self.stops.agreed
        if stop is not None and self.global_rank == 0 and not self.stops.is_reported:
            self.stops.is_reported = True
            logger.warning("step %d: stopped, because %s.", self.global_steps, stop)
        return stop is not None

    def request_stop(self) -> None:
        """Request the end of the run. After the next step or evaluation, :meth:`should_stop` is True on all ranks."""
        self.stops.request(CALL)
