"""Means of losses that are pairs (sum, count), and their shares of a step, for references of one process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def _terms(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {"": value}


def mean(loss: Any) -> Tensor:
    """Return the mean over the counted labels of one micro-batch, summed over the terms."""
    parts = [total / max(int(count), 1) for total, count in _terms(loss).values()]
    return torch.stack(parts).sum()


def step_counts(loss_fn: Any, labels: Iterable[Any]) -> dict[str, int]:
    """Return the counts of a step with these labels, by term."""
    counts = [_terms(loss_fn.counts(one)) for one in labels]
    return {name: sum(int(count[name]) for count in counts) for name in counts[0]}


def share(loss: Any, counts: Mapping[str, int]) -> Tensor:
    """Return what the loss of a micro-batch adds to the loss of its step."""
    parts = [total / max(counts[name], 1) for name, (total, _) in _terms(loss).items()]
    return torch.stack(parts).sum()


def learned(losses: Sequence[float], unless: str = "") -> list[float]:
    """Return the losses of a reference, which must be finite and fall.

    Processors round in different ways. A job that learns keeps these differences small, a job that diverges multiplies
    them until its numbers mean nothing.

    Args:
        unless: why the last loss need not be below the first one, such as "other samples in every step". It is at most
            twice the first one in any case.
    """
    assert all(map(math.isfinite, losses)), losses
    assert losses[-1] <= 2 * losses[0], losses
    assert unless or len(losses) == 1 or losses[-1] < losses[0], losses
    return [*losses]
