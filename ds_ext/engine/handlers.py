"""One short handler per instruction. Tensors live in the buffer that the instruction names, never in the engine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer, ZeROOptimizer
from deepspeed.runtime.pipe import schedule as ds
from deepspeed.runtime.pipe.engine import PipelineEngine as DeepSpeedPipelineEngine
from torch import Tensor

from ..errors import ConfigError
from ..pipe_schedules.bridge import (
    BackwardInput,
    BackwardWeight,
    CopyActivation,
    CopyGrad,
    RecomputeForward,
    TimetableSchedule,
)
from ..tensor_parallel import DeferralWatch, WeightGradients, backward, deferrable, deferring
from .batch_form import require_pair
from .batches import Batches
from .busy import BusyClock
from .grad_norm import clip_grad_norm
from .grad_sync import EagerReduction, fill_missing_gradients, reduce_tied_gradients
from .loss_watch import LossWatch
from .messages import Kind, StageMessages, pack, unpack
from .module import PipelineModule

_NOTHING = nullcontext()
# How torch refuses to write to a tensor whose gradient it is to give.
_WRITES_TO_LEAF = "leaf Variable that requires grad"
# How torch and its layers refuse inputs of another precision than their weights.
_OTHER_DTYPE = re.compile(r"dtype|scalar type|should be the same")


class InstructionHandlers(DeepSpeedPipelineEngine):
    """What the instructions of a lowered timetable do; :class:`.engine.PipelineEngine` runs them.

    ``pipe_buffers`` holds by buffer: inputs, outputs, labels, losses, grads (those of the outputs), and weights (the
    weight gradients that are still to be computed).
    """

    module: PipelineModule
    batches: Batches | None
    last_stage: int
    _running: TimetableSchedule
    _messages: StageMessages
    _busy: BusyClock
    _eager: EagerReduction | None
    loss_watch: LossWatch | None
    _deferral: DeferralWatch | None  # in the first step, of a schedule that splits backwards
    _fetched: dict[int, tuple[Any, Any]]
    _loss_sum: Tensor
    _compute_loss: bool
    _kept_outputs: dict[int, Any] | None
    _writing_stages: set[int]  # those that begin with an operation in place

    def _exec_load_micro_batch(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        inputs, labels = self._fetch(micro_batch)
        if stage == 0:
            self.pipe_buffers["inputs"][buffer_id] = self._to_device(inputs)
        if stage == self.last_stage:
            self.pipe_buffers["labels"][buffer_id] = None if labels is None else self._to_device(labels)

    def _exec_forward_pass(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        inputs, number = self.pipe_buffers["inputs"][buffer_id], self._global_id(micro_batch)
        split = (stage, micro_batch) in self._running.program.timetable.split_backwards
        with self._busy, deferrable() if split else _NOTHING:
            outputs = self._forward(stage, inputs, number)
            if stage == self.last_stage:
                self._end_of_pipe(buffer_id, micro_batch, outputs)
        self.pipe_buffers["outputs"][buffer_id] = pack(outputs, f"stage {stage}")
        if not torch.is_grad_enabled():
            self.pipe_buffers["inputs"][buffer_id] = None

    def _forward(self, stage: int, inputs: tuple[Tensor, ...], number: int) -> Any:
        """The outputs of a stage. Its inputs are leaves, which only a stage that writes to them has to be spared."""
        if stage not in self._writing_stages:
            try:
                return self.module.forward_stage(stage, unpack(inputs), self.global_steps, number)
            except RuntimeError as error:
                if _WRITES_TO_LEAF not in str(error):
                    self._refuse_dtypes(error, stage, inputs)
                    raise
                self._writing_stages.add(stage)
        return self.module.forward_stage(stage, unpack(map(_enter, inputs)), self.global_steps, number)

    def _refuse_dtypes(self, error: RuntimeError, stage: int, inputs: tuple[Tensor, ...]) -> None:
        """Raise ConfigError where the model failed because its inputs have another precision."""
        if stage != 0 or not _OTHER_DTYPE.search(str(error)):
            return
        given = {t.dtype for t in inputs if t.is_floating_point()}
        weights = {p.dtype for p in self.module.stage_parameters(0) if p.is_floating_point()}
        if weights and given - weights:
            theirs, ours = (", ".join(sorted(map(str, kinds))) for kinds in (given, weights))
            raise ConfigError(
                f"inputs: the first stage computes in {ours} (got inputs of {theirs}). Cast them with "
                f"inputs.to({ours}) in the first layer, in the data set or in collate_fn."
            ) from error

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
            self.pipe_buffers["losses"][buffer_id] = loss = _as_scalar(loss)
            if torch.is_grad_enabled() and not loss.requires_grad:
                raise ConfigError(
                    "loss_fn: its loss has no gradient (got a tensor without grad_fn). Compute it from the outputs, "
                    "without detach() or torch.no_grad()."
                )
            self._loss_sum += loss.detach()

    def _exec_backward_pass(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        with self._busy, self._accumulating():
            self._backward(buffer_id, stage)
        self._reduce_after(stage, micro_batch)

    def _exec_backward_input(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        later = self.pipe_buffers["weights"][buffer_id] = WeightGradients()
        with self._busy, self._accumulating(), deferring(later):
            self._backward(buffer_id, stage)

    def _exec_backward_weight(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        later, self.pipe_buffers["weights"][buffer_id] = self.pipe_buffers["weights"][buffer_id], None
        if self._deferral is not None:
            self._deferral.add(later)
        with self._busy, self._accumulating():
            later.compute()
        self._reduce_after(stage, micro_batch)

    def _backward(self, buffer_id: int, stage: int) -> None:
        """Back through the graph of a buffer, from its loss or the gradients of its outputs."""
        buffers = self.pipe_buffers
        if stage == self.last_stage:
            roots = [(self._scale(buffers["losses"][buffer_id]), None)]
        else:
            outputs = [t for t in buffers["outputs"][buffer_id] if _differentiable(t)]
            pairs = zip(outputs, buffers["grads"][buffer_id], strict=True)
            roots = [(output, grad) for output, grad in pairs if output.requires_grad]
        backward([output for output, _ in roots], [grad for _, grad in roots])
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
        self._messages.send(
            Kind.ACTIVATION, self.pipe_buffers["outputs"][buffer_id], stage + 1, micro_batch, peer
        )

    def _exec_send_grads(self, buffer_id: int, stage: int, micro_batch: int, peer: int) -> None:
        self._messages.send(Kind.GRADIENT, self._take_input_grads(buffer_id), stage - 1, micro_batch, peer)

    def _exec_recv_activations(self, buffer_id: int, stage: int, micro_batch: int, peer: int) -> None:
        tensors = self._messages.receive(Kind.ACTIVATION, stage, micro_batch)
        self.pipe_buffers["inputs"][buffer_id] = tuple(map(_leaf, tensors))

    def _exec_recv_grads(self, buffer_id: int, stage: int, micro_batch: int, peer: int) -> None:
        self.pipe_buffers["grads"][buffer_id] = self._messages.receive(Kind.GRADIENT, stage, micro_batch)

    def _reduce_after(self, stage: int, micro_batch: int) -> None:
        if self._eager is not None:
            self._eager.after(stage, micro_batch)

    def _exec_reduce_tied_grads(self) -> None:
        reduce_tied_gradients(self)

    def _exec_reduce_grads(self) -> None:
        if self.loss_watch is not None:
            self.loss_watch.gradients(self.global_steps + 1)
        if self._eager is None:
            fill_missing_gradients(self, self.module.parameters())
            super()._exec_reduce_grads()
        else:
            self._eager.finish()

    def _exec_optimizer_step(self) -> None:
        if self.gradient_clipping() == 0 and not isinstance(self.optimizer, DeepSpeedOptimizer):
            self.clip_fp32_gradients()  # nobody else measures the norm then
        super()._exec_optimizer_step()

    _INSTRUCTION_MAP: ClassVar[dict[type[ds.PipeInstruction], Any]] = {
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

    # --- data ---

    def _fetch(self, micro_batch: int) -> tuple[Any, Any]:
        """(inputs, labels); a rank that holds both ends of a pipe asks twice, and reads once."""
        if micro_batch not in self._fetched:
            assert self.batches is not None
            batch = self.batches.get(self._global_id(micro_batch))
            self._fetched[micro_batch] = require_pair(batch, self.batches)
        return self._fetched[micro_batch]

    def _global_id(self, micro_batch: int) -> int:
        """Id of a micro-batch of this pipeline group among those of all groups."""
        return self.module.data_index * self._running.micro_batches + micro_batch

    def _to_device(self, batch: Any) -> tuple[Tensor, ...]:
        return tuple(t.to(self.device, non_blocking=True).detach() for t in pack(batch, "the data"))

    # --- gradients ---

    def _take_input_grads(self, buffer_id: int) -> tuple[Tensor, ...]:
        """Gradients of the inputs that can have one; zeros for one that the stage did not use."""
        inputs, self.pipe_buffers["inputs"][buffer_id] = self.pipe_buffers["inputs"][buffer_id], None
        return tuple(_take_grad(t) for t in inputs if _differentiable(t))

    def _scale(self, loss: Tensor) -> Tensor:
        """Average over micro-batches (the reduction averages over ranks) and apply the fp16 loss scale."""
        loss = loss / self.gradient_accumulation_steps()
        return self.optimizer.scale_if_loss(loss) if isinstance(self.optimizer, DeepSpeedOptimizer) else loss

    def _accumulating(self) -> AbstractContextManager[None]:
        """ZeRO and bf16 optimizers move gradients to buffers of their own after each backward."""
        return _managed(self.optimizer) if isinstance(self.optimizer, ZeROOptimizer) else _NOTHING

    def clip_fp32_gradients(self) -> None:
        """Clip by a norm that counts every parameter of the model once; see grad_norm.py."""
        self._global_grad_norm = clip_grad_norm(
            self.module.parameters(),
            self.gradient_clipping(),
            tensor_rank=self.mpu.get_slice_parallel_rank(),
            model_group=self.mpu.get_model_parallel_group(),
        )


@contextmanager
def _managed(optimizer: Any) -> Iterator[None]:
    optimizer.backward_prologue()
    yield
    optimizer.backward_epilogue()


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _leaf(tensor: Tensor) -> Tensor:
    """A stage's input: the start of its graph, where training needs one."""
    return tensor.requires_grad_(torch.is_grad_enabled() and _differentiable(tensor))


def _take_grad(tensor: Tensor) -> Tensor:
    """Its gradient, which it loses: a split backward keeps the tensor for the weight gradients."""
    grad, tensor.grad = tensor.grad, None
    return torch.zeros_like(tensor) if grad is None else grad


def _as_scalar(loss: Any) -> Tensor:
    if isinstance(loss, int | float):
        raise ConfigError(
            f"loss_fn: it must return a tensor, which has a gradient (got the {type(loss).__name__} {loss}). Return "
            f"the loss itself, without .item() or float()."
        )
    if not torch.is_tensor(loss) or loss.numel() != 1:
        what = (
            f"a tensor of shape {tuple(loss.shape)}" if torch.is_tensor(loss) else f"a {type(loss).__name__}"
        )
        raise ConfigError(
            f"the loss of a micro-batch must be one number; loss_fn (or, without one, the last layer) gives {what}. "
            f"Take its mean."
        )
    return loss.reshape(())


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
