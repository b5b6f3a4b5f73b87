"""Head whose rows are divided over the devices of a pipe (arXiv 2411.05288, algorithm 2).

With S stages of other layers and D devices, part i is stage S + i, and stage S + D joins the parts to the loss:

    stage    op                 reads                                      writes
    S - 1    forward            inputs of the stage, labels                hidden states
    S + i    forward            hidden states, labels                      partial losses and their gradient
    S + D    forward            partial losses of all parts, labels        loss; gradients of losses and hidden states
    S - 1    backward           gradient of the hidden states              gradient of the inputs
    S + i    backward_weight    log-sum-exps and gradients of the losses   gradient of the weight

Stage S + D is on the device of stage S - 1. It runs the backward of the loss function too, which is short.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import ConfigError
from ...tensor_parallel import HeadPart as HeadLayer
from ...tensor_parallel import PartialLoss, TokenLosses, backward, combine_losses
from ..losses.local import LocalLosses
from ..step import Step
from .body import Body, Forward, store_loss
from .buffer import Buffer
from .stage import Stage

Labels = dict[int, Tensor]  # by the number of a slice in the step, until its loss is computed


class BodyBeforeHead(Body):
    """Last stage of layers before a head in parts. It keeps ``labels`` for the stage of the loss."""

    loads_labels = True

    def __init__(self, stage: int, compute: Forward, losses: LocalLosses, device: torch.device) -> None:
        super().__init__(stage, compute, losses, device)
        self.waiting_labels: Labels = {}

    def start_step(self) -> None:
        self.waiting_labels.clear()

    def outputs_for(self, target: int, step: Step, buffer: Buffer, item: int) -> tuple[Tensor, ...]:
        """Return what every part gets: the hidden states, and the labels of their tokens."""
        if buffer.kept is None:
            outputs, labels, buffer.labels = buffer.take_outputs(), buffer.labels, None
            if len(outputs) != 1 or labels is None or len(labels) != 1:
                raise ConfigError(
                    f"vocabulary_parallel_head: needs one tensor of hidden states and one of labels (got "
                    f"{len(outputs)} and {len(labels or ())}). Remove vocabulary_parallel_head."
                )
            self.waiting_labels[item] = labels[0]
            targets = step.sequences.shift_after_cut(self.losses.shift_labels, labels[0])
            buffer.kept = outputs[0].detach(), targets
        return buffer.kept


class HeadPart(Stage):
    """Part of the head. Its weight gradient follows the loss."""

    def __init__(self, layer: HeadLayer) -> None:
        self.layer = layer

    def forward(self, step: Step, buffer: Buffer, micro_batch: int, slice_index: int) -> None:
        assert buffer.inputs is not None
        trains = torch.is_grad_enabled()
        partial, buffer.kept = self.layer.partial_loss(*buffer.inputs, with_gradient=trains)
        buffer.outputs = tuple([tensor for tensor in partial if tensor is not None])
        if not trains:
            buffer.inputs = None

    def outputs_for(self, target: int, step: Step, buffer: Buffer, item: int) -> tuple[Tensor, ...]:
        return buffer.take_outputs()

    def accept_activations(self, source: int, buffer: Buffer, tensors: tuple[Tensor, ...]) -> None:
        buffer.inputs = tensors

    def accept_grads(self, source: int, buffer: Buffer, grads: tuple[Tensor, ...]) -> None:
        """Defer the weight gradient, from the log-sum-exps and the gradients of the losses."""
        inputs, kept = buffer.inputs, buffer.kept
        assert inputs is not None
        buffer.inputs = buffer.kept = None
        (hidden, labels), (log_sum_exp, factor) = inputs, grads
        buffer.deferred = self.layer.weight_gradients(hidden, labels, kept, log_sum_exp, factor)


class HeadLoss(Stage):
    """Loss of a head in parts, with the backward of the loss function.

    Args:
        before: the last stage of layers, on the same device.
        layer: any part of the head.
    """

    def __init__(self, before: BodyBeforeHead, layer: HeadLayer, losses: LocalLosses) -> None:
        self._before, self._layer, self._losses = before, layer, losses

    def forward(self, step: Step, buffer: Buffer, micro_batch: int, slice_index: int) -> None:
        joined, losses_BS = self._join(buffer, step.item(micro_batch, slice_index))
        with step.sequences.computing(losses_BS.size(1), slice_index):
            store_loss(self._losses, step, buffer, micro_batch, slice_index, losses_BS)
        loss, buffer.loss = buffer.loss, None
        if loss is not None:
            backward([step.backwards.backward_root(loss)], [None])
            self._set_gradients(buffer, joined, losses_BS)

    def _join(self, buffer: Buffer, item: int) -> tuple[TokenLosses, Tensor]:
        """Return the combined losses of a slice, and the losses of its tokens, in training as a leaf of a graph."""
        partials, buffer.kept = buffer.kept, None
        joined = combine_losses([partial for _, partial in sorted(partials.items())])
        labels_BS = self._before.waiting_labels.pop(item)
        buffer.labels = (labels_BS,)
        return joined, joined.loss.view(labels_BS.shape).requires_grad_(torch.is_grad_enabled())

    def _set_gradients(self, buffer: Buffer, joined: TokenLosses, losses_BS: Tensor) -> None:
        """Set the gradients of the hidden states and those that the parts need, after the backward of the loss."""
        grads_BS = torch.zeros_like(losses_BS) if losses_BS.grad is None else losses_BS.grad
        factor_N = grads_BS.flatten().masked_fill(~joined.is_counted, 0.0)
        buffer.grads = (self._layer.input_gradient(joined, factor_N),)
        buffer.kept = joined.log_sum_exp, factor_N

    def accept_activations(self, source: int, buffer: Buffer, tensors: tuple[Tensor, ...]) -> None:
        if not isinstance(buffer.kept, dict):  # of an earlier slice
            buffer.kept = {}
        buffer.kept[source] = PartialLoss(*tensors)

    def grads_for(self, target: int, buffer: Buffer) -> tuple[Tensor, ...]:
        return buffer.take_grads() if target == self._before.stage else buffer.kept
