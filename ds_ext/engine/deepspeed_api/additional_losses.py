"""Losses that a model reports in addition to its loss (DeepSpeed's ``PipelineModule.get_additional_losses``)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor

from ...errors import ConfigError
from ..together import together


class AdditionalLosses:
    """Sums of a module's additional losses over the micro-batches of a step, and their means over all ranks.

    Args:
        module: module of this rank; its ``get_additional_losses()`` is called after each loss and returns name ->
            scalar, or None.
    """

    def __init__(self, module: PipelineModule) -> None:
        self._module = module
        self._sums: dict[str, Tensor] = {}
        self._names: list[str] | None = None  # the same on all ranks

    def start_step(self) -> None:
        """Reset the sums."""
        self._sums.clear()

    def add(self) -> None:
        """Add the additional losses of the micro-batch whose loss was just computed."""
        for name, value in self._of_module().items():
            loss = torch.as_tensor(value).detach().double()
            self._sums[name] = self._sums[name] + loss if name in self._sums else loss

    def sums(self) -> list[float]:
        """Return this rank's sums in the order of the names. All ranks must call this together.

        Raises:
            ConfigError: the module reports a name that it did not report in the first step.
        """
        if self._names is None:
            of_ranks = together(lambda: [*self._of_module()])
            self._names = [*dict.fromkeys(name for names in of_ranks for name in names)]
        unknown = [name for name in self._sums if name not in self._names]
        if unknown:
            raise ConfigError(
                f"get_additional_losses: returns new names after the first step (got {', '.join(unknown)}). Return the "
                f"same names in every step, with 0 for a loss that does not apply."
            )
        return [float(self._sums.get(name, 0.0)) for name in self._names]

    def means(self, sums: Tensor, losses: int) -> dict[str, Tensor] | None:
        """Return name -> mean loss; None if no rank reports additional losses.

        Args:
            sums: sums of every rank, one row per rank.
            losses: number of losses that all ranks computed.
        """
        if not self._names:
            return None
        return dict(zip(self._names, (sums.sum(0) / losses).float(), strict=True))

    def _of_module(self) -> Mapping[str, Tensor | float]:
        return self._module.get_additional_losses() or {}
