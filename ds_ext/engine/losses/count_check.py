"""Comparison of the count that a loss function returns with the number of labels, counted in several ways."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Number = Tensor | float
WAYS = 52  # to count labels: bits that a float64 has for them


def check_count(count: Tensor, tensors: Sequence[object]) -> Tensor:
    """Return the count, the number of labels in the first way, and for every way whether it differs from the count.

    ``tensors`` are the labels, and masks beside them; without any, the count must be whole.
    """
    numbers = torch.full((WAYS,), -1.0, dtype=torch.float64, device=count.device)  # no count is -1
    for way, number in enumerate(_numbers_of_labels(tensors)[:WAYS] or [count.round()]):
        numbers[way] = number
    return torch.cat((count[None], numbers[:1], (numbers != count).double()))


def join_checks(checks: Sequence[Tensor]) -> Tensor:
    """Return the returned count and the number of labels of several checks, and a bit for each way that differs."""
    total = torch.stack(list(checks)).sum(0)
    bits = 2.0 ** torch.arange(WAYS, dtype=torch.float64, device=total.device)
    return torch.cat((total[:2], (bits * (total[2:] > 0)).sum()[None]))


def _numbers_of_labels(tensors: Sequence[object]) -> list[Number]:
    """Return the number of labels by every way to count them, in each tensor.

    Ways are: labels other than -100, all, other than 0 (a mask), neither negative nor nan; the same ones without the
    first token of each sample; and samples. A way that does not apply is -1.
    """
    numbers: list[Number] = []
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_nested:
            continue
        t = tensor.detach()
        t = t.real if t.is_complex() else t if t.is_floating_point() or t.dtype == torch.bool else t.long()
        # A class is no mask: an accuracy may equal it.
        is_mask = position > 0 or t.dtype == torch.bool or (t.dim() > 1 and t.numel() > 1)
        ways: list[Number] = []
        for part in (t, t[:, 1:]) if t.dim() > 1 and t.size(1) > 1 else (t,):
            marked = (part != 0).sum() if is_mask else -1.0
            valid = part.isfinite() if part.is_floating_point() else part >= 0
            ways += [(part != -100).sum(), float(part.numel()), marked, valid.sum()]
        numbers += [*ways, *[-1.0] * (8 - len(ways)), float(len(t) if t.dim() else 1)]
    return numbers
