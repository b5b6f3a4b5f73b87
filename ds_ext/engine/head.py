"""Head whose rows are divided over the devices of a pipe (arXiv 2411.05288, algorithm 2).

With S stages of other layers and D devices, part i is stage S + i, and stage S + D joins the parts to the loss:

    stage    op                 reads                                      writes
    S - 1    forward            inputs of the stage, labels                hidden states
    S + i    forward            hidden states, labels                      share of the losses and of their gradient
    S + D    forward            shares of all parts, labels                loss; gradients of losses and hidden states
    S - 1    backward           gradient of the hidden states              gradient of the inputs
    S + i    backward_weight    log-sum-exps and gradients of the losses   gradient of the weight

Stage S + D is on the device of stage S - 1. It runs the backward of the loss function too, which is short.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import ConfigError
from ..tensor_parallel import HeadPart, JoinedLoss, join_shares
from .module import PipelineModule
from .stage import Buffer


class PipelineHead:
    """Parts of the head on this rank, and the loss of the pipes whose last stage it holds.

    ``shift_labels`` returns the labels of the tokens for those of a micro-batch. Stage ``loss_stage`` joins the parts.
    """

    def __init__(self, module: PipelineModule, shift_labels: Callable[[Any], Any]) -> None:
        placement = module.layout.placement
        self.first_stage, self.loss_stage = placement.stages, placement.stages + placement.head_parts
        self._shift_labels = shift_labels
        self._parts = {
            stage: cast(HeadPart, layer)
            for stage in module.stages
            if stage >= self.first_stage
            for layer in module.stage_modules(stage).values()
        }
        self._labels: dict[int, Tensor] = {}  # of the slices whose loss is not computed yet

    def start_step(self) -> None:
        self._labels.clear()

    def inputs(self, buffer: Buffer, item: int, are_shifted: bool) -> tuple[Tensor, ...]:
        """Return the inputs of every part: outputs of the last stage, and labels.

        ``item`` is the number of the slice in the step. Labels of slices ``are_shifted`` already.
        """
        if buffer.head_inputs is None:
            outputs, labels, buffer.labels = buffer.take_outputs(), buffer.labels, None
            if len(outputs) != 1 or labels is None or len(labels) != 1:
                raise ConfigError(
                    f"vocabulary_parallel_head: needs one tensor of hidden states and one of labels (got "
                    f"{len(outputs)} and {len(labels or ())}). Remove vocabulary_parallel_head."
                )
            self._labels[item] = labels[0]
            targets = labels[0] if are_shifted else self._shift_labels(labels[0])
            buffer.head_inputs = outputs[0].detach(), targets
        return buffer.head_inputs

    def forward_part(self, stage: int, buffer: Buffer) -> None:
        assert buffer.inputs is not None
        trains = torch.is_grad_enabled()
        share, buffer.logit_grads = self._parts[stage].share(*buffer.inputs, with_gradient=trains)
        buffer.outputs = tuple([tensor for tensor in share if tensor is not None])
        if not trains:
            buffer.inputs = None

    def join(self, buffer: Buffer, item: int) -> tuple[JoinedLoss, Tensor]:
        """Return the joined shares of a slice, and the losses of its tokens, in training as a leaf of a graph.

        The labels are then in the buffer.
        """
        joined = join_shares([share for _, share in sorted(buffer.shares.items())])
        buffer.shares.clear()
        labels_BS = self._labels.pop(item)
        buffer.labels = (labels_BS,)
        return joined, joined.loss.view(labels_BS.shape).requires_grad_(torch.is_grad_enabled())

    def set_gradients(self, buffer: Buffer, joined: JoinedLoss, losses_BS: Tensor) -> None:
        """Set the gradients of the hidden states and those that the parts need, after the backward of the loss."""
        grads_BS = torch.zeros_like(losses_BS) if losses_BS.grad is None else losses_BS.grad
        factor_N = grads_BS.flatten().masked_fill(~joined.is_counted, 0.0)
        buffer.grads = (next(iter(self._parts.values())).input_gradient(joined, factor_N),)
        buffer.head_grads = joined.log_sum_exp, factor_N

    def defer_weight_gradient(self, stage: int, buffer: Buffer, tensors: Sequence[Tensor]) -> None:
        """Defer the weight gradient of a part, from the ``head_grads`` of :meth:`set_gradients`."""
        inputs, kept = buffer.inputs, buffer.logit_grads
        assert inputs is not None
        buffer.inputs = buffer.logit_grads = None
        (hidden, labels), (log_sum_exp, factor) = inputs, tensors
        buffer.weights = self._parts[stage].weight_gradients(hidden, labels, kept, log_sum_exp, factor)
