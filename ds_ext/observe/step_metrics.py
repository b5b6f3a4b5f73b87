"""Metrics of one step, as the metrics file has them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step, with the keys of the metrics file (docs/reference.md, "Metrics")."""

    step: int
    loss: float
    grad_norm: float | None
    lr: float
    iter_time_s: float
    samples_per_s: float
    tokens_per_s: float | None
    tflops_per_device: float | None
    mfu: float | None
    consumed_samples: int
    schedule: str
    transport: str
    peak_memory_bytes: int
    bubble_measured: float | None
    bubble_simulated: float
    losses: dict[str, float] = field(default_factory=dict)
    validation_loss: float | None = None
    validation_losses: dict[str, float] = field(default_factory=dict)
    snapshot_s: float | None = None
    recovered_from_step: int | None = None
    tokens: int | None = None
    epoch: float | None = None
    expert_load: float | None = None
    idle_experts: float | None = None

    def as_json(self) -> str:
        """Return the line of the metrics file. Numbers that are not finite become null, because JSON has no NaN."""
        return json.dumps(_finite(asdict(self)), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
