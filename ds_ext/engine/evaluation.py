"""Requests of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Evaluation:
    """Requests of an evaluation to the last stage of this rank. The default is that of a training step.

    Attributes:
        computes_loss: compute the loss.
        outputs: receives the outputs by micro-batch; None: not kept.
        losses: receives the losses by micro-batch; None: not kept.
    """

    computes_loss: bool = True
    outputs: dict[int, Any] | None = None
    losses: dict[int, Any] | None = None
