"""Learning-rate schedulers: Megatron-LM's, and what the engine requires of all of them and of optimizers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from ..errors import ConfigError

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root")


def require_plain_step(key: str, name: str, step: Callable[..., Any], fix: str) -> None:
    """Raise ConfigError for a scheduler or an optimizer whose bound method ``step`` has required arguments."""
    arguments = inspect.signature(step).parameters.values()
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [a.name for a in arguments if a.default is a.empty and a.kind not in starred]
    if required:
        raise ConfigError(
            f"{key}: the engine calls step() without arguments (got {name}, whose step() requires "
            f"{', '.join(required)}). {fix}"
        )


class MegatronLR(LRScheduler):
    """Linear warm-up, then decay to a minimum (Megatron-LM, ``OptimizerParamScheduler``).

    The first step has the learning rate ``warmup_init_lr`` if there is a warm-up, step ``warmup_num_steps`` + 1 that of
    the optimizer, and all steps after ``total_num_steps`` have ``min_lr``.

    Args:
        optimizer: optimizer whose learning rates are the largest ones.
        total_num_steps: steps until the decay ends, warm-up included.
        decay_style: "linear", "cosine", "inverse-square-root" or "constant".
        min_lr: smallest learning rate of the decay.
        warmup_num_steps: steps of the warm-up; it may be a fraction.
        warmup_init_lr: learning rate of the first step of a warm-up.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: float,
        decay_style: str = "linear",
        min_lr: float = 0.0,
        warmup_num_steps: float = 0.0,
        warmup_init_lr: float = 0.0,
    ) -> None:
        if decay_style not in DECAY_STYLES:
            raise ValueError(f"decay_style must be one of {', '.join(DECAY_STYLES)}")
        if not 0 <= warmup_num_steps < total_num_steps:
            raise ValueError(
                f"warmup_num_steps must be at least 0 and less than total_num_steps {total_num_steps:g}"
            )
        if decay_style == "inverse-square-root" and warmup_num_steps < 1:
            raise ValueError("warmup_num_steps must be at least 1 for inverse-square-root")
        largest = min(group["lr"] for group in optimizer.param_groups)
        if not 0 <= min_lr <= largest:
            raise ValueError(f"min_lr must be from 0 to the learning rate {largest:g}")
        if not 0 <= warmup_init_lr <= largest:
            raise ValueError(f"warmup_init_lr must be from 0 to the learning rate {largest:g}")
        self.total_num_steps, self.decay_style, self.min_lr = total_num_steps, decay_style, min_lr
        self.warmup_num_steps, self.warmup_init_lr = warmup_num_steps, warmup_init_lr
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [self._lr(float(base), self.last_epoch) for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps. The rest is in the JSON, as for DeepSpeed's schedulers."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the steps of a checkpoint, with the arguments of this job."""
        self.last_epoch = state_dict["last_epoch"]
        rates = self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = lr

    def _lr(self, largest: float, step: int) -> float:
        warmup, total = self.warmup_num_steps, self.total_num_steps
        if warmup > 0 and step <= warmup:
            return self.warmup_init_lr + (largest - self.warmup_init_lr) * step / warmup
        if self.decay_style == "constant":
            return largest
        if step > total:
            return self.min_lr
        if self.decay_style == "inverse-square-root":
            return max(self.min_lr, largest * math.sqrt(warmup / step))
        ratio = (step - warmup) / (total - warmup)
        share = 1 - ratio if self.decay_style == "linear" else (math.cos(math.pi * ratio) + 1) / 2
        return self.min_lr + share * (largest - self.min_lr)
