"""Detection of non-finite losses and gradients. Too many consecutive bad steps stop the training run."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import NonFiniteLoss
from ..checkpoint.states import LocalParameter
from ..grad_sync import Gradients
from ..together import together

logger = logging.getLogger(__name__)


class LossWatch:
    """Counter of consecutive bad steps.

    In a bad step, the loss is not finite, or the optimizer skips the step because a gradient is not finite.

    Args:
        parameters: parameters of this rank.
        gradients: gradients of this rank.
        limit: number of consecutive bad steps after which training stops; 0: never stop.
        dynamic_scale: fp16 skips steps to find its loss scale, so skipped steps do not count.

    Attributes:
        in_a_row: number of consecutive bad steps so far.
    """

    def __init__(
        self, parameters: Iterable[LocalParameter], gradients: Gradients, limit: int, dynamic_scale: bool
    ) -> None:
        self.gradients, self.limit, self.dynamic_scale = gradients, limit, dynamic_scale
        self.in_a_row = 0
        self._parameters = [
            (local.layer, local.name, local.parameter) for local in parameters if local.parameter.numel() > 0
        ]
        # Step, (layer, parameter) and largest magnitude of every gradient. Of two steps: a non-finite gradient first
        # changes the weights, and then the loss of the next step.
        self._largest: deque[tuple[int, list[tuple[int, str]], list[Tensor]]] = deque(maxlen=2)
        self._first_bad: tuple[int, int, str] | None = None  # step, rank and parameter

    def record_gradients(self, step: int) -> None:
        """Store the largest magnitude in every gradient of this rank, on the device. Call before the reduction."""
        named_gradients = [
            ((layer, name), gradient)
            for layer, name, parameter in self._parameters
            if parameter.requires_grad and (gradient := self.gradients.get(parameter)) is not None
        ]
        if named_gradients:
            names, gradients = zip(*named_gradients, strict=True)
            largest = [torch.linalg.vector_norm(gradient, torch.inf) for gradient in gradients]
            self._largest.append((step, list(names), largest))

    def loss(self, step: int, loss: float, skipped: bool) -> None:
        """Check the loss of a step. All ranks must call this together.

        Args:
            step: number of the step, from 1.
            loss: loss of the step, the same on all ranks.
            skipped: the optimizer found a non-finite gradient and did not change the weights.

        Raises:
            NonFiniteLoss: on all ranks, after ``limit`` consecutive bad steps.
        """
        if skipped and self.dynamic_scale:
            self._largest.clear()
            return
        if math.isfinite(loss) and not skipped:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        if self.in_a_row == 1:
            self._first_bad = self._first_bad_gradient()
            if dist.get_rank() == 0:
                effect = "step skipped" if skipped else "weights updated"
                logger.warning("step %d: loss %s, %s. %s", step, loss, effect, _describe(self._first_bad))
        if self.in_a_row == self.limit:
            error = NonFiniteLoss(
                f"loss or gradients: not finite in {self.limit} consecutive steps, {step - self.limit + 1} to {step} "
                f"(got loss {loss} in the last one). {_describe(self._first_bad)} Lower the learning rate, clip "
                f'gradients or check the data. "ds_ext": {{"max_nonfinite_losses": N}} sets the limit; 0: no limit.',
                self._first_bad,
            )
            error.reported_by = 0
            raise error

    def _first_bad_gradient(self) -> tuple[int, int, str] | None:
        """Return (step, rank, parameter) for the last bad layer in the earliest bad step; its backward runs first.

        All ranks must call this together. None if all gradients of the last two steps were finite.
        """
        bad = [
            (-step, layer, name, dist.get_rank())  # the largest tuple is the first to be bad
            for step, names, largest in self._largest
            for (layer, name), is_finite in zip(names, torch.stack(largest).isfinite().tolist(), strict=True)
            if not is_finite
        ]
        candidates = [candidate for candidate in together(lambda: max(bad, default=None)) if candidate]
        if not candidates:
            return None
        negative_step, _, name, rank = max(candidates)
        return -negative_step, rank, name


def _describe(first: tuple[int, int, str] | None) -> str:
    if first is None:
        return "All gradients were finite."
    step, rank, parameter = first
    return f"First non-finite gradient: {parameter} on rank {rank} in step {step}."
