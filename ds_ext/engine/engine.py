"""The engine: runs any lowered timetable with one short handler per instruction. It compares no names.

What differs from DeepSpeed's PipelineEngine: tensors live in the buffer that the instruction names; loss and
gradients belong to a buffer, not to the engine; micro-batches are fetched by id; messages carry their shapes
and go to any peer without blocking. Everything else (optimizer, ZeRO-1, checkpoints, learning rate, monitors)
is the parent's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer, ZeROOptimizer
from deepspeed.runtime.pipe import schedule as ds
from deepspeed.runtime.pipe.engine import PipelineEngine as DeepSpeedPipelineEngine
from torch import Tensor
from torch.profiler import record_function

from ..comm.transport import create_transport
from ..errors import ConfigError
from ..pipe_schedules import Program
from ..pipe_schedules.bridge import CopyActivation, CopyGrad, TimetableSchedule
from ..pipe_schedules.check import check
from ..pipe_schedules.inference import forward_timetable
from ..pipe_schedules.lower import lower
from ..pipe_schedules.render import order_grid
from ..pipe_schedules.simulate import simulate
from .batches import Batches, IteratorBatches
from .busy import BusyClock
from .grad_norm import clip_grad_norm
from .messages import Kind, StageMessages, directed_pairs, pack, unpack
from .micro_batches import MicroBatches
from .module import PipelineModule

# Instructions: far enough that a receive is posted before the computation in front of it starts.
_LOOKAHEAD = 8
_RECEIVES = {ds.RecvActivation: Kind.ACTIVATION, ds.RecvGrad: Kind.GRADIENT}


class PipelineEngine(DeepSpeedPipelineEngine):
    """Trains a :class:`ds_ext.PipelineModule`; made by :func:`ds_ext.initialize`.

    Attributes:
        bubble_simulated, bubble_measured: share of the last step in which an average rank did not compute.
    """

    module: PipelineModule
    batches: Batches | None = None

    def __init__(self, **kwargs: Any) -> None:
        # The parent's first positional argument is has_bool_tensors: keywords only.
        super().__init__(**kwargs)
        # DeepSpeed would cut activations into slices over tensor-parallel ranks; ours travel whole.
        self.is_pipe_partitioned = self.is_grad_partitioned = False
        self.layout, self.last_stage = self.module.layout, self.module.layout.placement.stages - 1
        self.pipe_buffers.update({"grads": [], "losses": []})
        self._inference_schedules: dict[int, TimetableSchedule] = {}
        self._schedule, self.bubble_simulated = self._make_schedule(self.micro_batches)
        self._running = self._schedule
        self._fetched: dict[int, Any] = {}
        self._busy = BusyClock(self.device)
        self.bubble_measured: float | None = None
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._compute_loss, self._kept_outputs = True, None
        options = self.module.settings.transport_options
        self.transport = create_transport(
            self.module.settings.transport,
            timeout_s=options.timeout_s,
            device=self.device,
            pairs=directed_pairs(self.layout, [self._schedule.program, self._inference_schedule(1).program]),
        )
        self._messages = StageMessages(self.transport, self.layout, self.global_rank)

    # --- schedules ---

    def _make_schedule(self, gradient_accumulation_steps: int) -> tuple[TimetableSchedule, float]:
        """The timetable of a training step, proven, and its simulated bubble."""
        micro_batches = gradient_accumulation_steps * self.layout.placement.replicas
        timetable = self.module.settings.timetable(micro_batches)
        return self._bridge(lower(timetable)), simulate(timetable).bubble

    def _bridge(self, program: Program) -> TimetableSchedule:
        check(program)
        return TimetableSchedule(program, self.module.device_index)

    def _train_schedule(self) -> TimetableSchedule:
        return self._schedule

    def _inference_schedule(self, micro_batches: int) -> TimetableSchedule:
        if micro_batches not in self._inference_schedules:
            placement = self.layout.placement
            timetable = forward_timetable(placement, micro_batches * placement.replicas)
            self._inference_schedules[micro_batches] = self._bridge(lower(timetable))
        return self._inference_schedules[micro_batches]

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches between steps; the timetable is made and proven anew.

        Raises ConfigError, and changes nothing, when the schedule cannot have that many.
        """
        steps, rest = divmod(train_batch_size, self.micro_batch_size * self.dp_world_size)
        made = None if rest or steps < 1 else self._make_schedule(steps)
        super().set_train_batch_size(train_batch_size)  # refuses what does not divide
        assert made is not None
        self._schedule, self.bubble_simulated = made
        if isinstance(self.batches, IteratorBatches):
            self.batches = self._as_batches(self.batches.iterator, self.micro_batches)

    def _exec_schedule(self, pipe_schedule: TimetableSchedule) -> None:
        """Run the instructions in order; receives are posted some instructions before they are needed."""
        self._reserve_pipe_buffers(pipe_schedule.num_pipe_buffers())
        self._running = pipe_schedule
        self._fetched.clear()
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
                if len(window) > _LOOKAHEAD:
                    self._execute(window.popleft())
        while window:
            self._execute(window.popleft())

    def _execute(self, instruction: ds.PipeInstruction) -> None:
        handler = self._INSTRUCTION_MAP[type(instruction)]
        try:
            with record_function(instruction.label):
                handler(self, **instruction.kwargs)
        except Exception as error:
            error.add_note(self._where(instruction))
            raise

    def _where(self, instruction: ds.PipeInstruction) -> str:
        """The rank x step grid with an arrow at the computation that ``instruction`` belongs to."""
        device, program = self.module.device_index, self._running.program
        mine = program.ranks[device]
        at = next(i for i, other in enumerate(mine) if other is instruction.source)
        upcoming = [i.op for i in mine[at:] if i.op is not None]
        step = program.timetable.ranks[device].index(upcoming[0]) if upcoming else None
        return (
            f"rank {self.global_rank} (device {device} of its pipeline) failed in {instruction.label}, step "
            f"{self.global_steps}:\n{order_grid(program.timetable, rank=device, step=step)}"
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
        return IteratorBatches(source, self.mpu.get_data_parallel_rank(), micro_batches)

    def _fetch(self, micro_batch: int) -> Any:
        """(inputs, labels); a rank that holds both ends of a pipe asks twice, and reads once."""
        if micro_batch not in self._fetched:
            assert self.batches is not None
            self._fetched[micro_batch] = self.batches.get(self._global_id(micro_batch))
        return self._fetched[micro_batch]

    def _global_id(self, micro_batch: int) -> int:
        """Id of a micro-batch of this pipeline group among those of all groups."""
        return self.module.data_index * self._running.micro_batches + micro_batch

    # --- the two verbs ---

    def train_batch(self, data_iter: Iterator[Any] | Batches | None = None) -> Tensor:
        """One optimizer step over N micro-batches a pipeline group.

        Returns the mean loss of all micro-batches, on every rank. Raises ConfigError without data.
        """
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        if self.batches is None:
            raise ConfigError(
                "train_batch() has no data: give training_data to initialize(), or data_iter to train_batch()."
            )
        loss = super().train_batch()
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
        self.module.eval()
        try:
            with torch.no_grad():
                self._exec_schedule(self._inference_schedule(num_micro_batches))
                loss = self._aggregate_total_loss() if compute_loss else None
            self.batches.advance(self._running.micro_batches * self.layout.data_parallel_size)
        finally:
            self.batches, self._kept_outputs = train_batches, None
            self.module.train()
        if loss is not None and self.global_rank == 0 and self.monitor.enabled:
            self.monitor.write_events([("Train/Samples/eval_loss", loss.item(), self.global_samples)])
        return (loss, outputs) if return_logits else loss

    # --- handlers: each takes what its instruction carries ---

    def _exec_load_micro_batch(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        inputs, labels = self._fetch(micro_batch)
        if stage == 0:
            self.pipe_buffers["inputs"][buffer_id] = self._to_device(inputs)
        if stage == self.last_stage:
            self.pipe_buffers["labels"][buffer_id] = None if labels is None else self._to_device(labels)

    def _exec_forward_pass(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        inputs, step = unpack(map(_enter, self.pipe_buffers["inputs"][buffer_id])), self.global_steps
        with self._busy.computing():
            outputs = self.module.forward_stage(stage, inputs, step, self._global_id(micro_batch))
            if stage == self.last_stage:
                self._end_of_pipe(buffer_id, micro_batch, outputs)
        self.pipe_buffers["outputs"][buffer_id] = pack(outputs, f"stage {stage}")
        if not torch.is_grad_enabled():
            self.pipe_buffers["inputs"][buffer_id] = None

    def _end_of_pipe(self, buffer_id: int, micro_batch: int, outputs: Any) -> None:
        """The loss of a micro-batch; with no loss function the outputs are the loss, as in DeepSpeed."""
        labels, self.pipe_buffers["labels"][buffer_id] = self.pipe_buffers["labels"][buffer_id], None
        if self._kept_outputs is not None:
            self._kept_outputs[micro_batch] = outputs
        if self._compute_loss:
            loss_fn = self.module.loss_fn
            loss = (
                outputs if loss_fn is None else loss_fn(outputs, None if labels is None else unpack(labels))
            )
            self.pipe_buffers["losses"][buffer_id] = loss
            self._loss_sum += loss.detach()

    def _exec_backward_pass(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        buffers = self.pipe_buffers
        with self._busy.computing(), self._accumulating():
            if stage == self.last_stage:
                self._scale(buffers["losses"][buffer_id]).backward()
            else:
                outputs = [t for t in buffers["outputs"][buffer_id] if t.is_floating_point()]
                pairs = zip(outputs, buffers["grads"][buffer_id], strict=True)
                roots = [(output, grad) for output, grad in pairs if output.requires_grad]
                torch.autograd.backward([o for o, _ in roots], [g for _, g in roots])
        for key in ("outputs", "grads", "losses"):
            buffers[key][buffer_id] = None
        if stage == 0:
            buffers["inputs"][buffer_id] = None

    def _exec_copy_activation(self, buffer_id: int, to_buffer: int, stage: int, micro_batch: int) -> None:
        outputs = self.pipe_buffers["outputs"][buffer_id]
        self.pipe_buffers["inputs"][to_buffer] = tuple(_leaf(t.detach()) for t in outputs)

    def _exec_copy_grad(self, buffer_id: int, to_buffer: int, stage: int, micro_batch: int) -> None:
        self.pipe_buffers["grads"][to_buffer] = self._take_input_grads(buffer_id)

    def _exec_send_activations(self, buffer_id: int, stage: int, micro_batch: int, peer: int) -> None:
        outputs = [t.detach() for t in self.pipe_buffers["outputs"][buffer_id]]
        self._messages.send(Kind.ACTIVATION, outputs, stage + 1, micro_batch, peer)

    def _exec_send_grads(self, buffer_id: int, stage: int, micro_batch: int, peer: int) -> None:
        self._messages.send(Kind.GRADIENT, self._take_input_grads(buffer_id), stage - 1, micro_batch, peer)

    def _exec_recv_activations(self, buffer_id: int, stage: int, micro_batch: int, peer: int) -> None:
        tensors = self._messages.receive(Kind.ACTIVATION, stage, micro_batch)
        self.pipe_buffers["inputs"][buffer_id] = tuple(map(_leaf, tensors))

    def _exec_recv_grads(self, buffer_id: int, stage: int, micro_batch: int, peer: int) -> None:
        self.pipe_buffers["grads"][buffer_id] = self._messages.receive(Kind.GRADIENT, stage, micro_batch)

    def _exec_optimizer_step(self) -> None:
        if self.gradient_clipping() == 0 and not isinstance(self.optimizer, DeepSpeedOptimizer):
            self.clip_fp32_gradients()  # nobody else measures the norm then
        super()._exec_optimizer_step()

    _INSTRUCTION_MAP: ClassVar[dict[type[ds.PipeInstruction], Any]] = {
        **DeepSpeedPipelineEngine._INSTRUCTION_MAP,
        ds.LoadMicroBatch: _exec_load_micro_batch,
        ds.ForwardPass: _exec_forward_pass,
        ds.BackwardPass: _exec_backward_pass,
        ds.SendActivation: _exec_send_activations,
        ds.RecvActivation: _exec_recv_activations,
        ds.SendGrad: _exec_send_grads,
        ds.RecvGrad: _exec_recv_grads,
        CopyActivation: _exec_copy_activation,
        CopyGrad: _exec_copy_grad,
        ds.OptimizerStep: _exec_optimizer_step,
    }

    # --- gradients and loss ---

    def _take_input_grads(self, buffer_id: int) -> tuple[Tensor, ...]:
        """Gradients of the floating-point inputs; zeros for one that the stage did not use."""
        inputs, self.pipe_buffers["inputs"][buffer_id] = self.pipe_buffers["inputs"][buffer_id], None
        return tuple(
            torch.zeros_like(t) if t.grad is None else t.grad for t in inputs if t.is_floating_point()
        )

    def _scale(self, loss: Tensor) -> Tensor:
        """Average over micro-batches (the reduction averages over ranks) and apply the fp16 loss scale."""
        loss = loss / self.gradient_accumulation_steps()
        return self.optimizer.scale_if_loss(loss) if isinstance(self.optimizer, DeepSpeedOptimizer) else loss

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        """ZeRO and bf16 optimizers move gradients to buffers of their own after each backward."""
        managed = isinstance(self.optimizer, ZeROOptimizer)
        if managed:
            self.optimizer.backward_prologue()
        yield
        if managed:
            self.optimizer.backward_epilogue()

    def clip_fp32_gradients(self) -> None:
        """Clip by a norm that counts every parameter of the model once; see grad_norm.py."""
        self._global_grad_norm = clip_grad_norm(
            self.module.parameters(),
            self.gradient_clipping(),
            tensor_rank=self.mpu.get_slice_parallel_rank(),
            model_group=self.mpu.get_model_parallel_group(),
        )

    def _aggregate_total_loss(self) -> Tensor:
        """Mean over all micro-batches of all groups, on every rank; measures the bubble on the way."""
        busy, span = self._busy.read()
        mine = torch.tensor([float(self._loss_sum), busy, span], dtype=torch.float64, device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        losses, busy_s, span_s = torch.stack(everyone).unbind(1)
        self.bubble_measured = 1 - float(busy_s.mean() / span_s.max().clamp(min=1e-9))
        # Every tensor-parallel rank of a last stage computed the same loss.
        ranks = self.layout.tensor_parallel_size * self.layout.data_parallel_size
        return (losses.sum() / (ranks * self._running.micro_batches)).float()

    def _to_device(self, batch: Any) -> tuple[Tensor, ...]:
        return tuple(t.to(self.device, non_blocking=True).detach() for t in pack(batch, "the data"))


def _leaf(tensor: Tensor) -> Tensor:
    """A stage's input: the start of its graph, where training needs one."""
    return tensor.requires_grad_(torch.is_grad_enabled() and tensor.is_floating_point())


class _Enter(torch.autograd.Function):
    """The same memory as a tensor that is no leaf: a stage may begin with an operation in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _enter(tensor: Tensor) -> Tensor:
    return _Enter.apply(tensor) if tensor.requires_grad else tensor
