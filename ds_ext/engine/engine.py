"""Engine that runs any lowered timetable, instruction by instruction. It compares no schedule's name.

It differs from DeepSpeed's PipelineEngine in four points. Tensors, losses and gradients live in the buffer that an
instruction names. Micro-batches are fetched by id. Messages carry their shapes and go to any peer without blocking.
Checkpoints fit any schedule and sizes. Everything else (optimizer, ZeRO-1, learning rate, monitors) is the parent's.

Read it from top to bottom: construction, the step loop, a handler per instruction, data, train_batch and eval_batch,
checkpoints, failures.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.pipe import schedule as ds
from deepspeed.runtime.pipe.engine import PipelineEngine as DeepSpeedPipelineEngine
from torch import Tensor
from torch.autograd import profiler
from torch.profiler import record_function

from ..comm.host_watch import require_hosts
from ..comm.transport import Transport, create_transport
from ..config.deepspeed_json import precision
from ..errors import ConfigError
from ..launch.failure import first_line, lost_peer
from ..pipe_schedules.bridge import (
    BackwardInput,
    BackwardWeight,
    CopyActivation,
    CopyGrad,
    RecomputeForward,
    TimetableSchedule,
)
from ..pipe_schedules.check.program import check
from ..pipe_schedules.inference import forward_timetable
from ..pipe_schedules.lower import lower
from ..planner.job_plan import JobPlan
from ..tensor_parallel import WeightGradients, deferrable, deferring
from .batches import Batches, IteratorBatches, MicroBatches, StepData, check_first_batch
from .busy import BusyClock
from .checkpoint.folder import has_checkpoint
from .checkpoint.load import load_checkpoint
from .checkpoint.save import save_checkpoint
from .checkpoint.states import parameters_of
from .checkpoint.together import by_rank_0
from .checkpoint.trial import try_folder
from .dynamic import messages as dynamic
from .dynamic.order import DynamicSchedule, decided_steps
from .grad_sync import DynamicReduction, EagerReduction, Gradients, clip_grad_norm, why_not_eager
from .loss_watch import LossWatch
from .messages import Kind, StageMessages, link_credits, pack
from .module import PipelineModule
from .stage import Buffer, DeferralReport, StageForward, loss_of
from .tracing.recorder import Tracer

logger = logging.getLogger(__name__)

_RECEIVES = {ds.RecvActivation: Kind.ACTIVATION, ds.RecvGrad: Kind.GRADIENT}
_NOTHING = nullcontext()


class PipelineEngine(DeepSpeedPipelineEngine):
    """Trains a :class:`ds_ext.PipelineModule`; made by :func:`ds_ext.initialize`.

    Attributes:
        plan: job plan; the source of timetable, program, simulation, reductions and rules.
        schedule: schedule of a training step; ``running`` is that of the present or last step or evaluation.
        pipe_buffers: storage of the live (stage, micro-batch) pairs, by buffer id.
        transport: moves the messages between stages.
        batches: source of the training micro-batches; None without data.
        busy: clock of this rank's computations.
        gradients: gradients of this rank's parameters.
        reduction: their eager reduction; None where they are reduced after the last backward.
        tracer: records the timeline; None without traces.
        loss_watch: counts steps whose loss is not finite.
        activity: what the engine does at present, for errors.
        bubble_measured: share of the last step in which an average rank did not compute; None before it.
        deferred_share: share of the trained elements whose gradients the first step deferred; None before it, and for
            schedules with whole backwards.
    """

    module: PipelineModule
    # Also read by the parent's constructor.
    batches: Batches | None = None
    activity = "setting up"

    # --- construction ---

    def __init__(self, **kwargs: Any) -> None:
        # The parent's first positional argument is has_bool_tensors: keywords only.
        super().__init__(**kwargs)
        # DeepSpeed would cut activations into slices over tensor-parallel ranks; ours travel whole.
        self.is_pipe_partitioned = self.is_grad_partitioned = False
        self.plan, self.layout = self.module.plan, self.module.layout
        self.last_stage = self.layout.placement.stages - 1
        self.schedule = self.running = self._make_schedule()
        self._inference_schedules: dict[int, TimetableSchedule] = {}
        self.pipe_buffers: list[Buffer] = []
        self._forward = StageForward(self.module)
        self._deferral: DeferralReport | None = None  # until the first step is over
        self.deferred_share: float | None = None
        if self.plan.timetable.split_backwards:
            self._deferral = DeferralReport(self.module, self.plan.timetable.schedule)
        self._checked_batches: set[bool] = set()  # of the first training step, and of the first evaluation
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._compute_loss = True
        self._kept_outputs: dict[int, Any] | None = None
        self.busy = BusyClock(self.device)
        self.bubble_measured: float | None = None
        settings, options = self.plan.settings, self.plan.settings.transport_options
        transport = create_transport(
            settings.transport,
            timeout_s=options.timeout_s,
            device=self.device,
            pairs=self._links(),
            node_ips=options.node_ips,
            polled=self.plan.rules is not None,
        )
        self.gradients = Gradients(self.optimizer, self.mpu.get_data_parallel_group())
        eager = self._reduces_eagerly()
        self.tracer: Tracer | None = None
        if settings.trace.dir is not None:
            self.tracer = Tracer(
                settings.trace,
                self.global_rank,
                self.layout,
                self.busy,
                transport=transport.name,
                eager=eager,
                timeout_s=options.timeout_s,
            )
        self.reduction = self._make_reduction() if eager else None
        self.use_transport(transport)
        # DeepSpeed's default scale of fp16, 0, is dynamic: it skips steps to find one.
        deepspeed_json = self.plan.job.deepspeed
        seeks_scale = precision(deepspeed_json) == "fp16" and not deepspeed_json["fp16"].get("loss_scale")
        held = parameters_of(self.module, self.layout.tensor_parallel_size).values()
        self.loss_watch = LossWatch(held, self.gradients, settings.max_nonfinite_losses, seeks_scale)

    @property
    def bubble_simulated(self) -> float:
        """Share of a simulated step in which an average device does not compute."""
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

    def _links(self) -> dict[tuple[int, int], int]:
        """Return the messages that a receiver holds at most, by (sender, receiver), of all schedules that will run."""
        found = link_credits(self.layout, [self.plan.program, self._inference_schedule(1).program])
        if self.plan.rules is not None:
            for link, held in dynamic.link_credits(self.layout, self.plan.rules).items():
                found[link] = max(held, found.get(link, 0))
        return found

    def use_transport(self, transport: Transport) -> None:
        """Exchange the messages between stages over another transport from the next step on.

        Raises ConfigError for one that cannot report arrivals, where the order is decided at run time.
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
        self._messages = self._static_messages

    def _reduces_eagerly(self) -> bool:
        """Return whether the JSON asks for eager reductions and they can be made."""
        if not self.plan.settings.eager_gradient_sync:
            return False
        reason = why_not_eager(self)
        if reason is not None:
            logger.debug("gradients are reduced after the last backward: %s", reason)
        return reason is None

    def _make_reduction(self) -> EagerReduction:
        device = self.module.device_index
        starts, dtype = self.plan.reductions[device], self.communication_data_type
        if self.plan.rules is None:
            return EagerReduction(self.gradients, self.module, starts, dtype, self.tracer)
        ops = self.plan.timetable.orders[device]
        return DynamicReduction(self.gradients, self.module, starts, dtype, self.tracer, ops)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches between steps; the timetable is made and proven anew.

        Raises ConfigError, and changes nothing, when the schedule cannot have that many.
        """
        steps, rest = divmod(train_batch_size, self.micro_batch_size * self.dp_world_size)
        plan = None if rest or steps < 1 else self._resized_plan(steps)
        super().set_train_batch_size(train_batch_size)  # refuses what does not divide
        assert plan is not None
        self.plan = plan
        self.schedule = self._make_schedule()
        if self.reduction is not None:
            self.reduction = self._make_reduction()
        if isinstance(self.batches, IteratorBatches):
            self.batches = self._as_batches(self.batches.iterator, self.micro_batches)

    def _resized_plan(self, gradient_accumulation_steps: int) -> JobPlan:
        return self.plan.resized(gradient_accumulation_steps)

    # --- the step loop ---

    def _train_schedule(self) -> TimetableSchedule:
        return self.schedule

    def _exec_schedule(self, pipe_schedule: TimetableSchedule) -> None:
        """Run the instructions in order; receives are posted some instructions before they are needed."""
        self._reserve_pipe_buffers(pipe_schedule.num_pipe_buffers())
        self.running = pipe_schedule
        if isinstance(pipe_schedule, DynamicSchedule):
            assert self._dynamic_messages is not None
            self._messages = self._dynamic_messages
            steps = decided_steps(pipe_schedule, self._dynamic_messages)
        else:
            self._messages, steps = self._static_messages, pipe_schedule.steps()
        trains = pipe_schedule.program.timetable.trains
        self._load_step(trains)
        self._loss_sum.zero_()
        self.busy.start_step()
        window: deque[ds.PipeInstruction] = deque()
        for step in steps:
            for instruction in step:
                if type(instruction) in _RECEIVES:
                    self._messages.post(
                        _RECEIVES[type(instruction)],
                        instruction.stage,
                        instruction.micro_batch,
                        instruction.peer,
                    )
                window.append(instruction)
                if len(window) > pipe_schedule.lookahead:
                    self.execute(window.popleft())
        while window:
            self.execute(window.popleft())
        if self._deferral is not None and trains:
            self.deferred_share, self._deferral = self._deferral.finish(), None

    def _reserve_pipe_buffers(self, num_buffers: int) -> None:
        self.pipe_buffers += [Buffer() for _ in range(num_buffers - len(self.pipe_buffers))]

    def execute(self, instruction: ds.PipeInstruction) -> None:
        """Call the handler of an instruction. An error gets a note with the place in the timetable."""
        handler = self._INSTRUCTION_MAP[type(instruction)]
        tracer = self.tracer if self.tracer and self.tracer.active else None
        begin = 0.0 if tracer is None else tracer.now()
        try:
            if profiler._is_profiler_enabled:  # naming costs as much as some handlers do
                with record_function(instruction.label):
                    handler(self, **instruction.kwargs)
            else:
                handler(self, **instruction.kwargs)
        except Exception as error:
            if tracer is not None:
                tracer.failed(instruction)
            self.activity = f"{instruction.label}, {self.activity}"
            error.add_note(self._where(instruction, "stopped" if lost_peer(error) else "failed"))
            self.transport.abort(f"{type(error).__name__}: {error}")
            raise
        if tracer is not None:
            tracer.executed(instruction, begin)

    # --- handlers, in the order of the table below ---

    def _exec_load_micro_batch(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        inputs, labels = self._data.get(micro_batch)
        buffer = self.pipe_buffers[buffer_id]
        if stage == 0:
            buffer.inputs = self._to_device(inputs)
        if stage == self.last_stage:
            buffer.labels = None if labels is None else self._to_device(labels)

    def _exec_forward_pass(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        buffer, number = self.pipe_buffers[buffer_id], self._data.first_id + micro_batch
        assert buffer.inputs is not None
        splits = (stage, micro_batch) in self.running.program.timetable.split_backwards
        with self.busy, deferrable() if splits else _NOTHING:
            outputs = self._forward(stage, buffer.inputs, self.global_steps, number)
            if stage == self.last_stage:
                self._end_of_pipe(buffer, micro_batch, outputs)
        buffer.outputs = pack(outputs, f"stage {stage}")
        if not torch.is_grad_enabled():
            buffer.inputs = None

    def _end_of_pipe(self, buffer: Buffer, micro_batch: int, outputs: Any) -> None:
        """Keep the outputs and the loss of a micro-batch, as the caller of the step asks."""
        labels, buffer.labels = buffer.labels, None
        if self._kept_outputs is not None:
            self._kept_outputs[micro_batch] = outputs
        if self._compute_loss:
            loss = loss_of(self.module.loss_fn, outputs, labels)
            self._loss_sum += loss.detach()
            if torch.is_grad_enabled():
                buffer.loss = loss

    def _exec_backward_pass(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        with self.busy, self.gradients.accumulating():
            self._backward(buffer_id, stage)
        self._reduce_after(stage, micro_batch)

    def _exec_backward_input(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        later = self.pipe_buffers[buffer_id].weights = WeightGradients()
        with self.busy, self.gradients.accumulating(), deferring(later):
            self._backward(buffer_id, stage)

    def _exec_backward_weight(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        buffer = self.pipe_buffers[buffer_id]
        later, buffer.weights = buffer.weights, None
        assert later is not None
        if self._deferral is not None:
            self._deferral.add(later)
        with self.busy, self.gradients.accumulating():
            later.compute()
        self._reduce_after(stage, micro_batch)

    def _backward(self, buffer_id: int, stage: int) -> None:
        buffer = self.pipe_buffers[buffer_id]
        buffer.backward(self._scale)
        if stage == 0:
            buffer.inputs = None

    def _exec_send_activations(self, buffer_id: int, stage: int, micro_batch: int, peer: int) -> None:
        outputs = self.pipe_buffers[buffer_id].outputs
        assert outputs is not None
        self._messages.send(Kind.ACTIVATION, outputs, stage + 1, micro_batch, peer)

    def _exec_recv_activations(self, buffer_id: int, stage: int, micro_batch: int, peer: int) -> None:
        tensors = self._messages.receive(Kind.ACTIVATION, stage, micro_batch)
        self.pipe_buffers[buffer_id].set_inputs(tensors)

    def _exec_send_grads(self, buffer_id: int, stage: int, micro_batch: int, peer: int) -> None:
        grads = self.pipe_buffers[buffer_id].take_input_grads()
        self._messages.send(Kind.GRADIENT, grads, stage - 1, micro_batch, peer)

    def _exec_recv_grads(self, buffer_id: int, stage: int, micro_batch: int, peer: int) -> None:
        self.pipe_buffers[buffer_id].grads = self._messages.receive(Kind.GRADIENT, stage, micro_batch)

    def _exec_copy_activation(self, buffer_id: int, to_buffer: int, stage: int, micro_batch: int) -> None:
        outputs = self.pipe_buffers[buffer_id].outputs
        assert outputs is not None
        self.pipe_buffers[to_buffer].set_inputs(tuple(t.detach() for t in outputs))

    def _exec_copy_grad(self, buffer_id: int, to_buffer: int, stage: int, micro_batch: int) -> None:
        self.pipe_buffers[to_buffer].grads = self.pipe_buffers[buffer_id].take_input_grads()

    def _exec_reduce_tied_grads(self) -> None:
        self.gradients.sum_tied(self.module.get_tied_weights_and_groups())

    def _exec_reduce_grads(self) -> None:
        self.loss_watch.before_reduction(self.global_steps + 1)
        if self.reduction is None:
            self.gradients.fill_missing(self.module.parameters())
            super()._exec_reduce_grads()
        else:
            self.reduction.finish()

    def _exec_optimizer_step(self) -> None:
        if self.gradient_clipping() == 0 and not isinstance(self.optimizer, DeepSpeedOptimizer):
            self.clip_fp32_gradients()  # DeepSpeed does not measure the norm then
        super()._exec_optimizer_step()

    _INSTRUCTION_MAP: ClassVar[dict[type[ds.PipeInstruction], Callable[..., None]]] = {
        **DeepSpeedPipelineEngine._INSTRUCTION_MAP,
        ds.LoadMicroBatch: _exec_load_micro_batch,
        ds.ForwardPass: _exec_forward_pass,
        RecomputeForward: _exec_forward_pass,
        ds.BackwardPass: _exec_backward_pass,
        BackwardInput: _exec_backward_input,
        BackwardWeight: _exec_backward_weight,
        ds.SendActivation: _exec_send_activations,
        ds.RecvActivation: _exec_recv_activations,
        ds.SendGrad: _exec_send_grads,
        ds.RecvGrad: _exec_recv_grads,
        CopyActivation: _exec_copy_activation,
        CopyGrad: _exec_copy_grad,
        ds.ReduceTiedGrads: _exec_reduce_tied_grads,
        ds.ReduceGrads: _exec_reduce_grads,
        ds.OptimizerStep: _exec_optimizer_step,
    }

    def _reduce_after(self, stage: int, micro_batch: int) -> None:
        if self.reduction is not None:
            self.reduction.after(stage, micro_batch)

    def _scale(self, loss: Tensor) -> Tensor:
        """Average over micro-batches (the reduction averages over ranks) and apply the fp16 loss scale."""
        loss = loss / self.gradient_accumulation_steps()
        return self.optimizer.scale_if_loss(loss) if isinstance(self.optimizer, DeepSpeedOptimizer) else loss

    def clip_fp32_gradients(self) -> None:
        """Clip by a norm that counts every parameter of the model once; see grad_sync.py."""
        self._global_grad_norm = clip_grad_norm(
            self.module.parameters(),
            self.gradient_clipping(),
            tensor_rank=self.mpu.get_slice_parallel_rank(),
            model_group=self.mpu.get_model_parallel_group(),
        )

    # --- data ---

    def _build_data_iter(self, dataset: Any) -> None:
        # Called by the parent's constructor when initialize() got training_data.
        self.batches = MicroBatches(dataset, self.micro_batch_size, collate=self.collate_fn, repeat=True)

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Take micro-batches from a loader; see set_dataiterator."""
        self.set_dataiterator(iter(loader))

    def set_dataiterator(self, iterator: Iterator[Any] | Batches | None) -> None:
        """Take micro-batches by id from Batches, or from an iterator over this data-parallel rank's in order.

        An iterator yields (inputs, labels), gradient_accumulation_steps of them a step, on every rank that
        holds a first or a last stage. The data-parallel rank is ``engine.mpu.get_data_parallel_rank()``.
        """
        if iterator is None or iterator is not getattr(self.batches, "iterator", None):
            self.batches = self._as_batches(iterator, self.micro_batches)

    def _as_batches(self, source: Iterator[Any] | Batches | None, micro_batches: int) -> Batches | None:
        if source is None or isinstance(source, Batches):
            return source
        if not isinstance(source, Iterator):
            raise ConfigError(
                f"micro-batches come from an iterator, and a {type(source).__name__} is none: give iter(...) of it "
                f"once and keep that, or each step would begin at its first sample."
            )
        return IteratorBatches(source, self.mpu.get_data_parallel_rank(), micro_batches)

    def _load_step(self, trains: bool) -> None:
        """Prepare the data of a step; check them before the first training step and the first evaluation."""
        assert self.batches is not None
        self._data = StepData(self.batches, self.module.data_index * self.running.micro_batches)
        if trains not in self._checked_batches:
            check_first_batch(self._data, self.running.program, self.running.stage_id, self.transport.abort)
            self._checked_batches.add(trains)

    def _to_device(self, batch: Any) -> tuple[Tensor, ...]:
        return tuple(t.to(self.device, non_blocking=True).detach() for t in pack(batch, "the data"))

    # --- train_batch and eval_batch ---

    def train_batch(self, data_iter: Iterator[Any] | Batches | None = None) -> Tensor:
        """Take one optimizer step over N micro-batches a pipeline group.

        Returns the mean loss of all micro-batches, on every rank.

        Raises:
            ConfigError: there are no data.
            NonFiniteLoss: the loss was not finite in ``max_nonfinite_losses`` steps in a row.
        """
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        if self.batches is None:
            raise ConfigError(
                "train_batch() has no data: give training_data to initialize(), or data_iter to train_batch()."
            )
        step, skipped = self.global_steps + 1, self.skipped_steps
        with self._in_activity(f"step {step}"):
            if self.tracer is not None:
                self.tracer.start_step(step, self.plan.timetable)
            loss = super().train_batch()
            if self.tracer is not None:
                self.tracer.end_step()
            self.loss_watch.loss(step, float(loss), self.skipped_steps > skipped)
        self.batches.advance(self.running.micro_batches * self.layout.data_parallel_size)
        return loss

    def eval_batch(
        self,
        data_iter: Iterator[Any] | Batches,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Compute forwards only, without dropout. Returns the mean loss, on every rank.

        Args:
            data_iter: as for train_batch.
            return_logits: return (loss, {micro-batch: outputs}), with the outputs of the last stages on this rank.
            compute_loss: False leaves the loss out (None).
            reduce_output, bcast_loss: as DeepSpeed's; the loss is always the mean, and returned on all ranks.
            num_micro_batches: per data-parallel rank; the training number by default.

        Raises:
            ConfigError: for another reduce_output than "avg".
        """
        if reduce_output != "avg":
            raise ConfigError(
                f'reduce_output must be "avg"; got {reduce_output!r}. For outputs of single micro-batches use '
                f"return_logits=True."
            )
        num_micro_batches = num_micro_batches or self.micro_batches
        train_batches, self.batches = self.batches, self._as_batches(data_iter, num_micro_batches)
        assert self.batches is not None
        outputs: dict[int, Any] = {}
        self._compute_loss, self._kept_outputs = compute_loss, outputs if return_logits else None
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        try:
            with (
                self._in_activity(f"evaluation after step {self.global_steps}"),
                torch.no_grad(),
                self.tracer.evaluation() if self.tracer else nullcontext(),
            ):
                self._exec_schedule(self._inference_schedule(num_micro_batches))
                loss = self._aggregate_total_loss() if compute_loss else None
            self.batches.advance(self.running.micro_batches * self.layout.data_parallel_size)
        finally:
            self.batches, self._kept_outputs = train_batches, None
            for module, training in modes:  # a user may have put some to sleep
                module.training = training
        if loss is not None and self.global_rank == 0 and self.monitor.enabled:
            self.monitor.write_events([("Train/Samples/eval_loss", loss.item(), self.global_samples)])
        return (loss, outputs) if return_logits else loss

    def _aggregate_total_loss(self) -> Tensor:
        """Return the mean over all micro-batches of all groups, on every rank; also measure the bubble."""
        busy_s, span_s = self.busy.read()
        numbers = [float(self._loss_sum), busy_s, span_s, *self._shared_numbers()]
        row = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row)
        table = torch.stack(rows)
        losses, busy, spans = table[:, :3].unbind(1)
        self._take_shared_numbers(table[:, 3:])
        self.bubble_measured = 1 - float(busy.mean() / spans.max().clamp(min=1e-9))
        return (losses.sum() / (self._loss_copies() * self.running.micro_batches)).float()

    def _loss_copies(self) -> int:
        """Return the ranks with the loss of a micro-batch: all tensor-parallel ranks of a last stage compute it."""
        return self.layout.tensor_parallel_size * self.layout.data_parallel_size

    def _shared_numbers(self) -> list[float]:
        """Return numbers of this rank that all ranks get with the loss."""
        return []

    def _take_shared_numbers(self, rows: Tensor) -> None:
        """Take the shared numbers of all ranks, a row each."""

    # --- checkpoints ---

    @property
    def in_checkpoints(self) -> bool:
        """True where checkpoints contain this rank's weights; False where they are another rank's."""
        return True

    @property
    def first_in_checkpoints(self) -> int:
        """Rank that writes everything that is the same on all ranks."""
        return 0

    def weights_loaded(self) -> None:
        """Do what follows on all ranks after a checkpoint was loaded; nothing here."""

    def try_checkpoint_folder(self, save_dir: str | os.PathLike[str]) -> None:
        """Find out before the first step whether checkpoints can be saved to ``save_dir``; a call of all ranks.

        Every rank writes a small file, and rank 0 reads them and compares the free room with one checkpoint's size.
        Raises ConfigError, the same on every rank.
        """
        with self._in_activity(f"trying the folder {save_dir}"):
            try_folder(self, Path(save_dir))

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write ``save_dir/tag`` (by default ``global_step<N>``); arguments and result are DeepSpeed's.

        The checkpoint gets its name when all of it is on the disk: a run that is killed leaves the last one whole.
        Raises what :func:`.checkpoint.save.save_checkpoint` does.
        """
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        with self._in_activity(f"saving the checkpoint {tag}"):
            save_checkpoint(
                self, Path(save_dir), tag, client_state or {}, save_latest, not exclude_frozen_parameters
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
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load ``load_dir/tag`` (by default the current one), whatever schedule and sizes it was written under.

        Arguments and result are DeepSpeed's: (path, client state); (None, None) when there is no checkpoint and no tag
        is given. Raises what :func:`.checkpoint.load.load_checkpoint` does, and ConfigError for a ``custom_load_fn``.
        """
        if custom_load_fn is not None:
            raise ConfigError("custom_load_fn must be None: weights are read from the layers' files.")
        with self._in_activity(f"loading a checkpoint from {load_dir}"):
            if tag is None and not by_rank_0(lambda: has_checkpoint(Path(load_dir))):
                logger.warning("there is no checkpoint in %s", load_dir)
                return None, None
            path, client_state = load_checkpoint(
                self,
                Path(load_dir),
                None if tag is None else str(tag),
                strict=load_module_strict,
                with_optimizer=load_optimizer_states and not load_module_only,
                with_scheduler=load_lr_scheduler_states and not load_module_only,
                with_counters=not load_module_only,
            )
            self.weights_loaded()
        return str(path), client_state

    # --- failures ---

    @contextmanager
    def _in_activity(self, activity: str) -> Iterator[None]:
        """Add ``activity`` to the first line of an error about a rank that is gone or silent.

        Args:
            activity: such as ``step 4``; an instruction that fails puts its own name before it.
        """
        self.activity = activity
        try:
            require_hosts()
            yield
        except Exception as error:
            if lost_peer(error):
                first, more = first_line(error), str(error).splitlines()[1:]
                context = "; ".join(filter(None, [self.activity, self._describe_ranks(first)]))
                error.args = ("\n".join([f"{first} ({context})", *more]),)
            raise

    def _describe_ranks(self, text: str) -> str:
        """Return the roles of the ranks that an error names; empty where their numbers are enough."""
        return ""

    def _where(self, instruction: ds.PipeInstruction, how: str) -> str:
        """Return the rank x step grid with an arrow at the computation that ``instruction`` belongs to."""
        return (
            f"rank {self.global_rank} (device {self.module.device_index} of its pipeline) {how} in {self.activity}:\n"
            f"{self.running.picture(instruction)}"
        )
