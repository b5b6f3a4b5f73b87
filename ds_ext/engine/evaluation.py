"""What a run of forwards computes and keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Evaluation:
    """What the last stage of this rank computes and keeps, by micro-batch. The default is that of a training step.

    Attributes:
        computes_loss: compute the loss.
        outputs: receives the outputs; None: not kept.
        losses: receives the loss of every micro-batch; None: not kept.
    """

    computes_loss: bool = True
    outputs: dict[int, Any] | None = None
    losses: dict[int, Any] | None = None
