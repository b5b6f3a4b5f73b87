"""Steps whose loss or gradients are not finite: training stops after some in a row and names the first gradient."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import NonFiniteLoss
from .checkpoint.states import Held
from .grad_sync import Gradients

logger = logging.getLogger(__name__)


class LossWatch:
    """Count of steps in a row whose loss is not finite, or which the optimizer skipped for gradients that are not.

    Args:
        held: parameters of this rank.
        gradients: of this rank.
        limit: how many of them end the training; 0: any number goes on.
        seeks_scale: a skipped step looks for a loss scale of fp16 and does not count.

    Attributes:
        in_a_row: such steps up to the last step.
    """

    def __init__(self, held: Iterable[Held], gradients: Gradients, limit: int, seeks_scale: bool) -> None:
        self.gradients, self.limit, self.seeks_scale = gradients, limit, seeks_scale
        self.in_a_row = 0
        self._named = [
            (one.layer, one.name, one.parameter)
            for one in held
            if one.parameter.requires_grad and one.parameter.numel() > 0
        ]
        # A bad gradient spoils the weights, and the loss only a step later.
        self._largest: deque[tuple[int, list[tuple[int, str]], list[Tensor]]] = deque(maxlen=2)
        self._first: tuple[int, int, str] | None = None

    def before_reduction(self, step: int) -> None:
        """Keep the largest element of every gradient of this rank, on the device, before they are reduced."""
        found = [
            ((layer, name), gradient)
            for layer, name, parameter in self._named
            if (gradient := self.gradients.of(parameter)) is not None
        ]
        if found:
            names, gradients = zip(*found, strict=True)
            dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
            largest = torch._foreach_norm(dense, torch.inf)  # pyright: ignore[reportPrivateImportUsage]
            self._largest.append((step, list(names), list(largest)))

    def loss(self, step: int, loss: float, skipped: bool) -> None:
        """Count the loss of a step, the same on all ranks; a collective call.

        Args:
            step: from 1.
            skipped: the optimizer found a gradient that was not finite, and left the weights as they were.

        Raises:
            NonFiniteLoss: it was the ``limit``-th such step in a row. The same error on every rank.
        """
        if skipped and self.seeks_scale:
            self._largest.clear()
            return
        if math.isfinite(loss) and not skipped:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        if self.in_a_row == 1:
            self._first = self._first_bad_gradient()
            if dist.get_rank() == 0:
                effect = "the weights stay as they are" if skipped else "the weights changed"
                logger.warning("step %d: loss %s, %s. %s", step, loss, effect, _described(self._first))
        if self.in_a_row == self.limit:
            error = NonFiniteLoss(
                f"loss or gradients: not finite in {self.limit} steps in a row, {step - self.limit + 1} to {step} (the "
                f"last loss is {loss}). "
                f"{_described(self._first)} Lower the learning rate, clip gradients or check the data; "
                f'"ds_ext": {{"max_nonfinite_losses": N}} sets the limit, 0 for none.',
                self._first,
            )
            error.reported_by = 0
            raise error

    def _first_bad_gradient(self) -> tuple[int, int, str] | None:
        """Return (step, rank, parameter) of the earliest step, and in it of the last layer, as backwards run."""
        bad = [
            (-step, layer, name, dist.get_rank())
            for step, names, largest in self._largest
            for (layer, name), value in zip(names, torch.stack(largest).isfinite().tolist(), strict=True)
            if not value
        ]
        everyone: list[tuple[int, int, str, int] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, max(bad, default=None))
        found = max((one for one in everyone if one is not None), default=None)
        return None if found is None else (-found[0], found[3], found[2])


def _described(first: tuple[int, int, str] | None) -> str:
    if first is None:
        return "All gradients were finite."
    step, rank, parameter = first
    return f"First gradient that was not finite: {parameter} on rank {rank} in step {step}."
