"""Ends with the forms of losses that scripts return: metrics, dictionaries, scaled and weighted losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from .ends import (
    IGNORED,
    CountedCrossEntropy,
    End,
    cross_entropy,
    cross_entropy_sum,
    draw_targets,
    head_layers,
    mean_square,
    some_labels,
    token_labels,
)


def _accuracy(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.argmax(-1) == labels).float().mean()


def _loss_and_accuracy(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return cross_entropy(outputs, labels), _accuracy(outputs, labels)


def _loss_and_detached(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    loss = cross_entropy(outputs, labels)
    return loss, loss.detach()


def _loss_and_perplexity(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    loss = cross_entropy(outputs, labels)
    return loss, loss.detach().exp()


def _loss_and_dict(outputs: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return cross_entropy(outputs, labels), {"acc": _accuracy(outputs, labels)}


def _scaled_mean(outputs: Tensor, labels: Tensor) -> Tensor:
    return 3 * cross_entropy(outputs, labels)


def _scaled_pair(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    total, count = cross_entropy_sum(outputs, labels)
    return 0.5 * total, count


def _square_pair(outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Return the sum over all numbers of the labels, and their count, a number of Python."""
    return (outputs.float() - labels.float()).square().sum(), labels.numel()


class _Weighted:
    """Pair of a weighted sum and the sum of the weights, no whole number."""

    def __call__(self, outputs: Tensor, labels: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        targets, weights = labels
        squares = (outputs.float() - targets.float()).square().mean(-1, keepdim=True)
        return (weights.float() * squares).sum(), self.counts(labels)

    def counts(self, labels: tuple[Tensor, Tensor]) -> Tensor:
        """Return the sum of the weights."""
        return labels[1].float().sum()


class _Terms:
    """Two terms, each with its count."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        counts = self.counts(labels)
        total, _ = cross_entropy_sum(outputs, labels)
        squares = outputs.float().logsumexp(-1).square().sum()
        return {"tokens": (total, counts["tokens"]), "size": (0.1 * squares, counts["size"])}

    def counts(self, labels: Tensor) -> dict[str, Tensor]:
        """Return the labels that are not ignored, and all tokens."""
        return {"tokens": (labels != IGNORED).sum(), "size": torch.tensor(labels.numel())}


class _WithAdditional:
    """Mean with additional losses, which are reported only."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.additional_losses = {
            "accuracy": _accuracy(outputs, labels),
            "size": outputs.float().square().mean(),
        }
        return cross_entropy(outputs, labels)


class _CountedWithAdditional(CountedCrossEntropy):
    """Pair with additional losses."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        self.additional_losses = {"size": outputs.float().square().mean()}
        return super().__call__(outputs, labels)


class _WithoutLabels:
    """Mean that uses no labels."""

    def __call__(self, outputs: Tensor, labels: Any) -> Tensor:
        return mean_square(outputs, F.normalize(outputs.detach().float(), dim=-1))


def _weighted_targets(length: int, generator: Generator) -> tuple[Tensor, Tensor]:
    return draw_targets(length, generator), torch.rand(length, 1, generator=generator)


def _form(sample: Any, layers: Any, loss: Any, **options: Any) -> End:
    return End(sample, layers, loss, drawn=False, **options)


WITHOUT_COUNTS = ("loss_pair", "scaled_pair", "square_pair")  # pairs whose counts follow from the losses only
LOSS_FORMS: dict[str, End] = {
    "loss_and_accuracy": _form(token_labels, head_layers, lambda: _loss_and_accuracy, metric=True),
    "loss_and_detached": _form(token_labels, head_layers, lambda: _loss_and_detached, metric=True),
    "loss_and_perplexity": _form(token_labels, head_layers, lambda: _loss_and_perplexity, metric=True),
    "loss_and_dict": _form(token_labels, head_layers, lambda: _loss_and_dict, metric=True),
    "scaled_mean": _form(token_labels, head_layers, lambda: _scaled_mean),
    "scaled_pair": _form(some_labels, head_layers, lambda: _scaled_pair, pairs=True),
    "square_pair": _form(draw_targets, list, lambda: _square_pair, pairs=True),
    "weighted_pair": _form(_weighted_targets, list, _Weighted, pairs=True),
    "terms": _form(some_labels, head_layers, _Terms, pairs=True),
    "additional": _form(token_labels, head_layers, _WithAdditional, additional=True),
    "additional_of_pair": _form(
        some_labels, head_layers, _CountedWithAdditional, pairs=True, additional=True
    ),
    "without_labels": _form(draw_targets, list, _WithoutLabels),
}
