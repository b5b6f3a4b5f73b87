"""Detection of steps that do not train: non-finite losses and gradients, and gradients that are all zero.

Too many consecutive non-finite steps, or one step whose gradients are all zero, stop the training run.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ConfigError, NonFiniteLoss
from ..all_ranks import on_all_ranks
from ..parameters import LocalParameter
from ..weights.gradients import Gradients

logger = logging.getLogger(__name__)


class LossWatch:
    """Counter of consecutive bad steps. Steps are numbered from 1.

    In a bad step, the loss is not finite, or the optimizer skips the step because a gradient is not finite.

    Args:
        limit: number of consecutive bad steps after which training stops; 0: never stop.
        allows_zeros: whether the gradients of a step may all be zero.
    """

    def __init__(
        self,
        parameters: Iterable[LocalParameter],
        limit: int,
        allows_zeros: bool,
    ) -> None:
        self.limit = limit
        self._allows_zeros = allows_zeros
        self.in_a_row = 0
        self._parameters = [
            (local.layer, local.name, local.parameter) for local in parameters if local.parameter.numel() > 0
        ]
        # Step, and largest magnitude of every gradient by (layer, parameter). Of two steps: a non-finite gradient first
        # changes the weights, and then the loss of the next step.
        self._largest: deque[tuple[int, dict[tuple[int, str], Tensor]]] = deque(maxlen=2)
        self._first_bad: tuple[int, int, str] | None = None  # step, rank and parameter

    def record_gradients(self, step: int, parameters: Iterable[Tensor], gradients: Gradients) -> None:
        """Store the largest magnitude in gradients of ``parameters``, on the device. Call before their reduction."""
        ids = set(map(id, parameters))
        if not self._largest or self._largest[-1][0] != step:
            self._largest.append((step, {}))
        for layer, name, parameter in self._parameters:
            is_trained = id(parameter) in ids and parameter.requires_grad
            if is_trained and (gradient := gradients.get(parameter)) is not None:
                self._largest[-1][1][layer, name] = torch.linalg.vector_norm(gradient, torch.inf)

    def check_loss(self, step: int, loss: float, skipped: bool, searches_scale: bool = False) -> None:
        """Check the loss of a step, the same on all ranks. All ranks must call this together.

        A step is ``skipped`` if the optimizer found a non-finite gradient and did not change the weights. It does not
        count if fp16 ``searches_scale`` by it.
        """
        if searches_scale:
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
            raise NonFiniteLoss(
                f"loss or gradients: not finite in {self.limit} consecutive steps, {step - self.limit + 1} to {step} "
                f"(got loss {loss} in the last one). {_describe(self._first_bad)} Lower the learning rate, clip "
                f'gradients or check the data. "ds_ext": {{"max_nonfinite_losses": N}} sets the limit; 0: no limit.',
                self._first_bad,
            ).of_all_ranks()

    def check_norm(self, step: int, loss: float, norm: float | None, counts_labels: bool) -> None:
        """Check the norm of the gradients of a step; None: not measured. All ranks must call this together.

        A loss of exactly 0 has nothing to train, so its step only gets a warning, once. Loss and norm are the same on
        all ranks. ``counts_labels`` is False if no label of the step was counted.
        """
        if norm != 0 or not counts_labels or self._allows_zeros:
            return
        if loss == 0:
            self._allows_zeros = True
            if dist.get_rank() == 0:
                logger.warning("step %d: loss and gradients are 0. Later cases are not reported.", step)
            return
        of_ranks = on_all_ranks(lambda: [name for _, name, p in self._parameters if p.requires_grad])
        names = [name for names in of_ranks for name in names]
        if not names:
            raise ConfigError(
                f"requires_grad: no parameter is trained in step {step} (got False for all). Set it on some of them."
            ).of_all_ranks()
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ConfigError(
            f"loss_fn: the gradients of all trained parameters are 0 in step {step} (got norm 0 and loss {loss:g} for "
            f"{', '.join(names[:3])}{more}). Compute the loss from outputs that depend on these parameters, or allow "
            f'such steps with "ds_ext": {{"allow_zero_norm": true}}.'
        ).of_all_ranks()

    def _first_bad_gradient(self) -> tuple[int, int, str] | None:
        """Return (step, rank, parameter) for the last bad layer in the earliest bad step; its backward runs first.

        All ranks must call this together. None if all gradients of the last two steps were finite.
        """
        bad = [
            (-step, layer, name, dist.get_rank())  # the largest tuple is the first to be bad
            for step, largest in self._largest
            for (layer, name), value in largest.items()
            if not value.isfinite()
        ]
        candidates = [candidate for candidate in on_all_ranks(lambda: max(bad, default=None)) if candidate]
        if not candidates:
            return None
        negative_step, _, name, rank = max(candidates)
        return -negative_step, rank, name


def _describe(first: tuple[int, int, str] | None) -> str:
    if first is None:
        return "All gradients were finite."
    step, rank, parameter = first
    return f"First non-finite gradient: {parameter} on rank {rank} in step {step}."
