"""The engine: runs any lowered timetable, instruction by instruction. It compares no names.

What differs from DeepSpeed's PipelineEngine: tensors live in the buffer that the instruction names; loss and
gradients belong to a buffer, not to the engine; micro-batches are fetched by id; messages carry their shapes
and go to any peer without blocking; checkpoints fit any schedule and sizes. Everything else (optimizer, ZeRO-1,
learning rate, monitors) is the parent's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule as ds
from torch import Tensor
from torch.autograd import profiler
from torch.profiler import record_function

from ..comm.transport import create_transport
from ..errors import ConfigError
from ..launch.failure import lost_peer
from ..pipe_schedules.bridge import TimetableSchedule
from ..planner.job_plan import JobPlan
from ..tensor_parallel import DeferralWatch, let_defer
from .batch_form import check_first_batch
from .batches import Batches, IteratorBatches
from .busy import BusyClock
from .checkpoint_methods import CheckpointMethods
from .handlers import InstructionHandlers
from .loss_watch import LossWatch
from .messages import Kind, StageMessages
from .micro_batches import MicroBatches
from .schedule_methods import ScheduleMethods
from .tracing.recorder import CountingMessages, Tracer

_RECEIVES = {ds.RecvActivation: Kind.ACTIVATION, ds.RecvGrad: Kind.GRADIENT}


class PipelineEngine(CheckpointMethods, ScheduleMethods, InstructionHandlers):
    """Trains a :class:`ds_ext.PipelineModule`; made by :func:`ds_ext.initialize`.

    Attributes:
        bubble_simulated, bubble_measured: share of the last step in which an average rank did not compute.
        deferred_share: share of the trained elements whose gradients the first step deferred; None before it, and for
            schedules with whole backwards.
    """

    batches: Batches | None = None
    loss_watch: LossWatch | None = None

    def __init__(self, **kwargs: Any) -> None:
        # The parent's first positional argument is has_bool_tensors: keywords only.
        super().__init__(**kwargs)
        # DeepSpeed would cut activations into slices over tensor-parallel ranks; ours travel whole.
        self.is_pipe_partitioned = self.is_grad_partitioned = False
        self.layout, self.last_stage = self.module.layout, self.module.layout.placement.stages - 1
        self.pipe_buffers.update({"grads": [], "losses": [], "weights": []})
        self._inference_schedules: dict[int, TimetableSchedule] = {}
        self._use(self.module.plan)
        self._running = self._schedule
        self._deferral = None
        if self._schedule.program.timetable.split_backwards:
            let_defer(self.module)
            # Until the first step is over.
            self._deferral = DeferralWatch(self.module.parameters())
        self._fetched: dict[int, tuple[Any, Any]] = {}
        self._checked_forms: set[bool] = set()  # of the first training step, and of the first evaluation
        self._busy = BusyClock(self.device)
        self.bubble_measured: float | None = None
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._compute_loss, self._kept_outputs = True, None
        self._writing_stages: set[int] = set()
        options = self.module.settings.transport_options
        self.transport = create_transport(
            self.module.settings.transport,
            timeout_s=options.timeout_s,
            device=self.device,
            pairs=self._links(),
            node_ips=options.node_ips,
            polled=self._schedule.dynamic,
        )
        self.tracer: Tracer | None = None
        self._messages = StageMessages(self.transport, self.layout, self.global_rank)
        self._eager = self._make_eager()
        if self.module.settings.trace.dir is not None:
            self.tracer = Tracer(self)
            self._messages = CountingMessages(self.transport, self.layout, self.global_rank)
            self._messages.tracer = self.tracer
        self._static_messages = self._messages
        self._schedule.start(self._messages)  # refuses a transport that the schedule cannot use

    # --- schedules ---

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches between steps; the timetable is made and proven anew.

        Raises ConfigError, and changes nothing, when the schedule cannot have that many.
        """
        steps, rest = divmod(train_batch_size, self.micro_batch_size * self.dp_world_size)
        plan = None if rest or steps < 1 else self._resized(steps)
        super().set_train_batch_size(train_batch_size)  # refuses what does not divide
        assert plan is not None
        self._use(plan)
        self._eager = self._make_eager()
        if isinstance(self.batches, IteratorBatches):
            self.batches = self._as_batches(self.batches.iterator, self.micro_batches)

    def _resized(self, gradient_accumulation_steps: int) -> JobPlan:
        return self.plan.resized(gradient_accumulation_steps)

    def _exec_schedule(self, pipe_schedule: TimetableSchedule) -> None:
        """Run the instructions in order; receives are posted some instructions before they are needed."""
        self._reserve_pipe_buffers(pipe_schedule.num_pipe_buffers())
        self._running, self._messages = pipe_schedule, pipe_schedule.start(self._static_messages)
        self._fetched.clear()
        trains = pipe_schedule.program.timetable.trains
        if trains not in self._checked_forms:
            check_first_batch(self, pipe_schedule)
            self._checked_forms.add(trains)
        self._loss_sum.zero_()
        self._busy.start_step()
        window: deque[ds.PipeInstruction] = deque()
        for step in pipe_schedule.steps():
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
                    self._execute(window.popleft())
        while window:
            self._execute(window.popleft())
        if self._deferral is not None and trains:
            self._report_deferral()

    def _execute(self, instruction: ds.PipeInstruction) -> None:
        handler = self._INSTRUCTION_MAP[type(instruction)]
        tracer = self.tracer if self.tracer and self.tracer.active else None
        begin = tracer and tracer.now()
        try:
            if profiler._is_profiler_enabled:  # naming costs as much as some handlers do
                with record_function(instruction.label):
                    handler(self, **instruction.kwargs)
            else:
                handler(self, **instruction.kwargs)
        except Exception as error:
            if tracer is not None:
                tracer.failed(instruction)
            self._doing = f"{instruction.label}, {self._doing}"
            error.add_note(self._where(instruction, "stopped" if lost_peer(error) else "failed"))
            self.transport.abort(f"{type(error).__name__}: {error}")
            raise
        if tracer is not None:
            tracer.executed(instruction, begin)

    def _where(self, instruction: ds.PipeInstruction, how: str) -> str:
        """The rank x step grid with an arrow at the computation that ``instruction`` belongs to."""
        return (
            f"rank {self.global_rank} (device {self.module.device_index} of its pipeline) {how} in {self._doing}:\n"
            f"{self._running.picture(instruction)}"
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

    # --- the two verbs ---

    def train_batch(self, data_iter: Iterator[Any] | Batches | None = None) -> Tensor:
        """One optimizer step over N micro-batches a pipeline group.

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
        with self._during(f"step {step}"):
            if self.tracer is not None:
                self.tracer.start_step(step)
            loss = super().train_batch()
            if self.tracer is not None:
                self.tracer.end_step()
            if self.loss_watch is not None:
                self.loss_watch.loss(step, float(loss), self.skipped_steps > skipped)
        self.batches.advance(self._running.micro_batches * self.layout.data_parallel_size)
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
        """Forward only, without dropout. Returns the mean loss, on every rank.

        Args:
            data_iter: as for train_batch.
            return_logits: return (loss, {micro-batch: outputs}), with what the last stages on this rank gave.
            compute_loss: False leaves the loss out (None).
            reduce_output, bcast_loss: as DeepSpeed's; the loss is always the mean, and known everywhere.
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
                self._during(f"evaluation after step {self.global_steps}"),
                torch.no_grad(),
                self.tracer.evaluation() if self.tracer else nullcontext(),
            ):
                self._exec_schedule(self._inference_schedule(num_micro_batches))
                loss = self._aggregate_total_loss() if compute_loss else None
            self.batches.advance(self._running.micro_batches * self.layout.data_parallel_size)
        finally:
            self.batches, self._kept_outputs = train_batches, None
            for module, training in modes:  # a user may have put some to sleep
                module.training = training
        if loss is not None and self.global_rank == 0 and self.monitor.enabled:
            self.monitor.write_events([("Train/Samples/eval_loss", loss.item(), self.global_samples)])
        return (loss, outputs) if return_logits else loss

    # --- loss ---

    def _aggregate_total_loss(self) -> Tensor:
        """Mean over all micro-batches of all groups, on every rank; measures the bubble on the way."""
        busy, span = self._busy.read()
        told = [float(self._loss_sum), busy, span, *self._tell()]
        mine = torch.tensor(told, dtype=torch.float64, device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        losses, busy_s, span_s, *_ = torch.stack(everyone).unbind(1)
        self._learn(torch.stack(everyone)[:, 3:])
        self.bubble_measured = 1 - float(busy_s.mean() / span_s.max().clamp(min=1e-9))
        return (losses.sum() / (self._loss_copies() * self._running.micro_batches)).float()

    def _loss_copies(self) -> int:
        """How many ranks have the loss of a micro-batch: every tensor-parallel rank of a last stage has computed it."""
        return self.layout.tensor_parallel_size * self.layout.data_parallel_size

    def _tell(self) -> list[float]:
        """Numbers of this rank that all ranks learn with the loss."""
        return []

    def _learn(self, told: Tensor) -> None:
        """Numbers of all ranks, a row each."""
