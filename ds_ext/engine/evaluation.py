"""Requests and result of an evaluation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import ConfigError
from .losses.local import Loss, mean_of
from .types import Batch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """Requests of an evaluation to the last stage of this rank. The default is that of a training step.

    Attributes:
        outputs: receives the outputs by micro-batch; None: not kept.
        losses: receives the losses by micro-batch, in the form of :data:`.losses.local.Loss`; None: not kept.
        averages: whether the result is a mean over all micro-batches.
    """

    computes_loss: bool = True
    outputs: dict[int, Batch] | None = None
    losses: dict[int, Loss] | None = None
    averages: bool = True

    @classmethod
    def from_arguments(
        cls, compute_loss: bool, return_logits: bool, reduce_output: str | None, bcast_loss: bool
    ) -> Evaluation:
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
        outputs: dict[int, Batch] | None = {} if return_logits or not compute_loss else None
        losses: dict[int, Loss] | None = {} if reduce_output is None else None
        return cls(compute_loss, outputs, losses, reduce_output == "avg")

    def result(self, loss: Tensor | None, group: ProcessGroup | None) -> Batch:
        """Return the result of the evaluation on this rank; None if it has no last stage and ``loss`` is None.

        ``loss`` is the mean over all ranks; None if no loss was computed. Data-parallel ranks must call this together.
        """
        if self.averages and self.computes_loss:
            return loss
        by_id = self.losses if self.computes_loss else self.outputs
        values = [by_id[number] for number in sorted(by_id)] if by_id else None
        if values and self.computes_loss:
            values = [mean_of(loss) for loss in values]
        return mean_over_ranks(values, group) if values and self.averages else values


def mean_over_ranks(outputs: Sequence[Batch], group: ProcessGroup | None) -> Batch:
    """Return the mean of the outputs of several micro-batches, over all ranks of a group. They call this together.

    ``outputs`` has a tensor or a tuple of tensors for each micro-batch of this rank, of equal shapes.
    """
    if isinstance(outputs[0], tuple | list):
        return [mean_over_ranks(parts, group) for parts in zip(*outputs, strict=True)]
    mean = torch.stack(list(outputs)).sum(0) / len(outputs)
    dist.all_reduce(mean, group=group)
    return mean / dist.get_world_size(group)
