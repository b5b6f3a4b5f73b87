"""Stages of layers: the body of the model, at its end with the head and the loss."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from ...errors import ConfigError
from ...tensor_parallel import current_slice, deferrable
from ..losses.local import LocalLosses, join_losses
from ..messages import join_outputs, pack, unpack
from ..module import PipelineModule
from ..step import Step
from ..types import Batch
from .buffer import Buffer
from .stage import Stage

# torch's errors for inputs with a wrong dtype.
_DTYPE_ERROR = re.compile(r"dtype|scalar type|should be the same")
_alias = torch.ops.aten._unsafe_view.default
Forward = Callable[[int, tuple[Tensor, ...], int, int], Batch]  # such as :class:`StageForward`


class Body(Stage):
    """Stage of layers.

    Args:
        compute: returns the outputs of a stage for (stage, inputs, steps done, global number of the micro-batch).
    """

    loads_labels = False  # of the data

    def __init__(self, stage: int, compute: Forward, losses: LocalLosses, device: torch.device) -> None:
        self.stage, self.compute, self.losses, self._device = stage, compute, losses, device
        self.reads_data = stage == 0

    def load(self, step: Step, buffer: Buffer, micro_batch: int, slice_index: int) -> None:
        inputs, labels = step.data.take(micro_batch)
        if self.reads_data:
            buffer.inputs = self._slice(step, inputs, slice_index)
        if self.loads_labels and labels is not None:
            labels = step.sequences.shift_before_cut(self.losses.shift_labels, labels)
            buffer.labels = self._slice(step, labels, slice_index)

    def _slice(self, step: Step, batch: Batch, slice_index: int) -> tuple[Tensor, ...]:
        tensors = step.sequences.cut(pack(batch, "the data"), slice_index)
        return tuple([t.to(self._device, non_blocking=True).detach() for t in tensors])

    def forward(self, step: Step, buffer: Buffer, micro_batch: int, slice_index: int) -> None:
        if step.splits and (self.stage, micro_batch) in step.splits:
            with deferrable():
                self._forward(step, buffer, micro_batch, slice_index)
        else:
            self._forward(step, buffer, micro_batch, slice_index)

    def _forward(self, step: Step, buffer: Buffer, micro_batch: int, slice_index: int) -> None:
        assert buffer.inputs is not None
        with step.sequences.forward(self.stage, micro_batch, slice_index, buffer.inputs):
            outputs = self.compute(
                self.stage, buffer.inputs, step.steps_done, step.data.first_id + micro_batch
            )
            self._store_loss(step, buffer, micro_batch, slice_index, outputs)
        buffer.outputs, buffer.kept = pack(outputs, f"stage {self.stage}"), None
        if not torch.is_grad_enabled():
            buffer.inputs = None

    def _store_loss(
        self, step: Step, buffer: Buffer, micro_batch: int, slice_index: int, outputs: Batch
    ) -> None:
        """Compute and store the loss of the outputs; only the last stage has one."""

    def backward(self, step: Step, buffer: Buffer, micro_batch: int, slice_index: int) -> None:
        with step.sequences.backward(self.stage, micro_batch, slice_index) as (roots, leaves):
            buffer.backward(step.backwards, roots, leaves)
        if self.reads_data:
            buffer.inputs = None

    def outputs_for(self, target: int, step: Step, buffer: Buffer, item: int) -> tuple[Tensor, ...]:
        return buffer.take_outputs()

    def accept_activations(self, source: int, buffer: Buffer, tensors: tuple[Tensor, ...]) -> None:
        buffer.set_inputs(tensors)

    def grads_for(self, target: int, buffer: Buffer) -> tuple[Tensor, ...]:
        return buffer.take_input_grads()

    def accept_grads(self, source: int, buffer: Buffer, grads: tuple[Tensor, ...]) -> None:
        buffer.grads = grads


class LastBody(Body):
    """Last stage of layers, whose outputs give the loss."""

    loads_labels = True

    def _store_loss(
        self, step: Step, buffer: Buffer, micro_batch: int, slice_index: int, outputs: Batch
    ) -> None:
        store_loss(self.losses, step, buffer, micro_batch, slice_index, outputs)


def store_loss(
    losses: LocalLosses, step: Step, buffer: Buffer, micro_batch: int, slice_index: int, outputs: Batch
) -> None:
    """Store what the step needs of a slice's outputs: outputs, loss, and the root of its backward."""
    labels, buffer.labels = buffer.labels, None
    evaluation, weight, current = step.evaluation, step.data.weight(micro_batch), current_slice()
    if evaluation.outputs is not None and weight:
        joined = losses.return_logits(outputs)
        if slice_index and current is not None:
            joined = join_outputs(evaluation.outputs[micro_batch], joined, current.length)
        evaluation.outputs[micro_batch] = joined
    if evaluation.computes_loss:
        loss = step.sequences.loss(losses.compute, outputs, labels)
        losses.add(loss, weight if current is None else weight * current.length / current.total)
        if evaluation.losses is not None and weight:
            earlier = (evaluation.losses[micro_batch],) if slice_index else ()
            evaluation.losses[micro_batch] = join_losses((*earlier, loss))
        if torch.is_grad_enabled():
            buffer.loss = loss


class StageForward:
    def __init__(self, module: PipelineModule) -> None:
        self._module = module

    def __call__(
        self, stage: int, inputs: tuple[Tensor, ...], steps_done: int, global_micro_batch: int
    ) -> Batch:
        """Return the outputs of a stage. ``steps_done`` and ``global_micro_batch`` seed random layers."""
        # Inputs are leaves, on which torch does not allow in-place operations. An identity hides the leaves.
        try:
            return self._module.forward_stage(
                stage, unpack([_non_leaf(tensor) for tensor in inputs]), steps_done, global_micro_batch
            )
        except RuntimeError as error:
            self._check_input_dtypes(error, stage, inputs)
            raise

    def _check_input_dtypes(self, error: RuntimeError, stage: int, inputs: tuple[Tensor, ...]) -> None:
        """Raise ConfigError if the first stage failed because its inputs and weights have different dtypes."""
        if stage != 0 or not _DTYPE_ERROR.search(str(error)):
            return
        input_dtypes = {t.dtype for t in inputs if t.is_floating_point()}
        weight_dtypes = {p.dtype for p in self._module.stage_parameters(0) if p.is_floating_point()}
        if weight_dtypes and input_dtypes - weight_dtypes:
            got = ", ".join(sorted(map(str, input_dtypes)))
            expected = ", ".join(sorted(map(str, weight_dtypes)))
            raise ConfigError(
                f"inputs: the first stage computes in {expected} (got inputs of {got}). Cast them with "
                f"inputs.to({expected}) in the first layer, in the dataset or in collate_fn."
            ) from error


def _non_leaf(tensor: Tensor) -> Tensor:
    """Return the same memory, not as a leaf and not as a view, on which torch forbids in-place operations too."""
    return _alias(tensor, tensor.shape) if tensor.requires_grad else tensor
