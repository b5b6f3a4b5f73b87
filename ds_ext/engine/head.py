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
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ..errors import ConfigError
from ..tensor_parallel import HeadPart, backward, join_shares
from .losses.step import Loss
from .module import PipelineModule
from .stage import Buffer

if TYPE_CHECKING:
    from .executor import Losses


class PipelineHead:
    """Parts of the head on this rank, and the loss of the pipes whose last stage it holds.

    Args:
        module: module with at least one part.
        losses: losses of the micro-batches.

    Attributes:
        loss_stage: stage that joins the parts.
    """

    def __init__(self, module: PipelineModule, losses: Losses) -> None:
        placement = module.layout.placement
        self.first_stage, self.loss_stage = placement.stages, placement.stages + placement.head_parts
        self._losses = losses
        self._parts = {
            stage: cast(HeadPart, layer)
            for stage in module.stages
            if stage >= self.first_stage
            for layer in module.stage_modules(stage).values()
        }
        self._labels: dict[int, Tensor] = {}  # of the micro-batches whose loss is not computed yet

    def start_step(self) -> None:
        """Drop what a failed step has left."""
        self._labels.clear()

    def inputs(self, buffer: Buffer, micro_batch: int) -> tuple[Tensor, ...]:
        """Return the inputs of every part: outputs of the last stage, and labels.

        Raises ConfigError unless both are one tensor.
        """
        if buffer.head_inputs is None:
            outputs, labels, buffer.labels = buffer.take_outputs(), buffer.labels, None
            if len(outputs) != 1 or labels is None or len(labels) != 1:
                raise ConfigError(
                    f"vocabulary_parallel_head: needs one tensor of hidden states and one of labels (got "
                    f"{len(outputs)} and {len(labels or ())}). Remove vocabulary_parallel_head."
                )
            self._labels[micro_batch] = labels[0]
            buffer.head_inputs = outputs[0].detach(), self._losses.shift_labels(labels[0])
        return buffer.head_inputs

    def forward_part(self, stage: int, buffer: Buffer) -> None:
        """Compute the share of a part."""
        assert buffer.inputs is not None
        trains = torch.is_grad_enabled()
        share = self._parts[stage].share(*buffer.inputs, with_gradient=trains)
        buffer.outputs = tuple([tensor for tensor in share if tensor is not None])
        if not trains:
            buffer.inputs = None

    def join(
        self,
        buffer: Buffer,
        micro_batch: int,
        store_loss: Callable[[Tensor], None],
        scale: Callable[[Loss], Tensor],
    ) -> None:
        """Compute the loss of a micro-batch, and in training the gradients that start from it.

        Args:
            buffer: buffer of the loss.
            store_loss: computes the loss of the micro-batch from the losses of the tokens, and stores it in the buffer.
            scale: function of a loss; returns what its backward starts from.
        """
        shares = [share for _, share in sorted(buffer.shares.items())]
        buffer.shares.clear()
        labels_BS = self._labels.pop(micro_batch)
        buffer.labels = (labels_BS,)
        joined = join_shares(shares)
        losses_BS = joined.loss.view(labels_BS.shape).requires_grad_(torch.is_grad_enabled())
        store_loss(losses_BS)
        loss, buffer.loss = buffer.loss, None
        if loss is None:
            return
        backward([scale(loss)], [None])
        grads_BS = torch.zeros_like(losses_BS) if losses_BS.grad is None else losses_BS.grad
        factor_N = grads_BS.flatten().masked_fill(~joined.is_counted, 0.0)
        dtype = cast(Tensor, shares[0].gradient).dtype
        buffer.grads = (next(iter(self._parts.values())).input_gradient(joined, factor_N, dtype),)
        buffer.head_grads = joined.log_sum_exp, factor_N

    def set_grads(self, stage: int, buffer: Buffer, tensors: Sequence[Tensor]) -> None:
        """Let a part compute its weight gradient, from the tensors that :meth:`join` has left in ``head_grads``."""
        inputs, buffer.inputs = buffer.inputs, None
        assert inputs is not None
        buffer.weights = self._parts[stage].weight_gradients(*inputs, *tensors)
