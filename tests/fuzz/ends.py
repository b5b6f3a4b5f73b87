"""First and last layers of a model, with the inputs, labels and losses that belong to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Generator, Tensor, nn

from ds_ext.tensor_parallel import DividedEmbedding, TensorParallel, chunked_loss

from .kinds import VOCABULARY, WIDTH
from .standard_layers import linear

IGNORED = -100
Sample = Callable[[int, Generator], Any]
"""Function of (length, generator) that returns one sample's inputs, or its labels."""


@dataclass(frozen=True)
class Start:
    """First layers.

    Attributes:
        sample: draws the inputs of a sample.
        layers: returns the layers.
        dtype: dtype of the samples; None: that of the weights.
        drawn: every job may draw it, not only habits.
    """

    sample: Sample
    layers: Callable[[], list[Any]]
    dtype: torch.dtype | None = None
    drawn: bool = True


@dataclass(frozen=True)
class End:
    """Last layers.

    Attributes:
        sample: draws the labels of a sample.
        layers: returns the layers.
        loss: returns the loss function; its result is None if the last layer returns the loss.
        pairs: the loss is a pair (sum, count).
        start: start that the end needs; None: any.
        plain_loss: returns the loss function of the plain process; None: as in the job.
        drawn: every job may draw it, not only habits.
        metric: the loss is the mean in a pair with a metric, which is no count.
        additional: the loss function has additional losses.
    """

    sample: Sample
    layers: Callable[[], list[Any]]
    loss: Callable[[], Any]
    pairs: bool = False
    start: str | None = None
    plain_loss: Callable[[], Any] | None = None
    drawn: bool = True
    metric: bool = False
    additional: bool = False


# --- starts ---


def _floats(length: int, generator: Generator) -> Tensor:
    return torch.randn(length, WIDTH, generator=generator)


def _tokens(length: int, generator: Generator) -> Tensor:
    return torch.randint(VOCABULARY, (length,), generator=generator)


def _short_tokens(length: int, generator: Generator) -> Tensor:
    return _tokens(length, generator).int()


def _floats_and_mask(length: int, generator: Generator) -> tuple[Tensor, Tensor]:
    return _floats(length, generator), torch.rand(length, generator=generator) < 0.7


class ComplexEmbedding(nn.Module):
    """Complex embedding, of which both parts are used."""

    def __init__(self) -> None:
        super().__init__()
        dtype = torch.get_default_dtype().to_complex()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH, dtype=dtype))
        self.linear = linear()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.weight[tokens]
        return self.linear(x.real) + x.imag


class ShiftedEmbedding(nn.Module):
    """Embedding that changes the tokens in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens.add_(1).remainder_(VOCABULARY)
        return self.embedding(tokens)


class MaskedInput(nn.Module):
    """Linear layer of the tokens that a mask leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        x, mask = inputs
        return self.linear(x) * mask.unsqueeze(-1)


class InputInPlace(nn.Module):
    """Linear layer that changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return self.linear(x)


class CastInput(nn.Module):
    """Linear layer of samples in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.to(self.linear.weight.dtype))


def _drawn_rows() -> Tensor:
    return torch.randn(VOCABULARY, WIDTH, generator=Generator().manual_seed(7)) / WIDTH**0.5


def _rows_of_part(part: int, parts: int) -> nn.Parameter:
    """Return drawn rows, with rows of zeros at the end of the last parts."""
    rows = -(-VOCABULARY // parts)
    padded = F.pad(_drawn_rows(), (0, 0, 0, rows * parts - VOCABULARY))
    return nn.Parameter(padded[part * rows : (part + 1) * rows].clone())


class TiedEmbedding(nn.Embedding):
    """Embedding that is tied to the head."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, WIDTH, _weight=_drawn_rows())


class EmbeddingInParts(DividedEmbedding):
    """The same embedding with the rows of every part of the head."""

    def __init__(self, parts: int) -> None:
        rows = [_rows_of_part(part, parts) for part in range(parts)]
        super().__init__(rows, TensorParallel(), VOCABULARY)


def _tied_embedding() -> list[Any]:
    spec = TiedLayerSpec("embedding", TiedEmbedding)
    spec.in_parts = lambda parts: TiedLayerSpec("embedding", EmbeddingInParts, parts)
    return [spec]


STARTS: dict[str, Start] = {
    "floats": Start(_floats, lambda: []),
    "floats_in_place": Start(_floats, lambda: [LayerSpec(InputInPlace)]),
    "floats_and_mask": Start(_floats_and_mask, lambda: [LayerSpec(MaskedInput)]),
    "tokens": Start(_tokens, lambda: [LayerSpec(nn.Embedding, VOCABULARY, WIDTH)]),
    "padded_tokens": Start(
        _short_tokens, lambda: [LayerSpec(nn.Embedding, VOCABULARY, WIDTH, padding_idx=3)]
    ),
    "complex_tokens": Start(_tokens, lambda: [LayerSpec(ComplexEmbedding)]),
    "tokens_in_place": Start(_tokens, lambda: [LayerSpec(ShiftedEmbedding)]),
    "tied_tokens": Start(_tokens, _tied_embedding),
    "fp64_samples": Start(_floats, lambda: [LayerSpec(CastInput)], torch.float64, False),
    "fp32_samples": Start(_floats, lambda: [LayerSpec(CastInput)], torch.float32, False),
    "bf16_samples": Start(_floats, lambda: [LayerSpec(CastInput)], torch.bfloat16, False),
}

# --- ends ---


def draw_targets(length: int, generator: Generator) -> Tensor:
    return torch.tanh(_floats(length, generator))


def _weighted_targets(length: int, generator: Generator) -> tuple[Tensor, Tensor]:
    return draw_targets(length, generator), torch.rand(length, 1, generator=generator)


def token_labels(length: int, generator: Generator) -> Tensor:
    ignored = torch.rand(length, generator=generator) < 0.3
    ignored[0] = False
    return _tokens(length, generator).masked_fill(ignored, IGNORED)


def some_labels(length: int, generator: Generator) -> Tensor:
    """Return labels for pairs: a third of the samples have none."""
    labels = token_labels(length, generator)
    return labels if torch.rand((), generator=generator) < 0.67 else labels.fill_(IGNORED)


def mean_square(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean squared error in fp32."""
    return F.mse_loss(outputs.float(), labels.float())


class WeightedLoss(nn.Module):
    """Squared error with a weight per token."""

    def forward(self, outputs: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
        targets, weights = labels
        return (weights.float() * (outputs.float() - targets.float()).square()).mean()


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of the labels that are not ignored."""
    return F.cross_entropy(outputs.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def cross_entropy_sum(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = outputs.float().flatten(0, 1)
    total = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum()


class CountedCrossEntropy:
    """Pair of a sum and a count that follows from the labels."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return cross_entropy_sum(outputs, labels)

    def counts(self, labels: Tensor) -> Tensor:
        """Return the number of labels that are not ignored."""
        return (labels != IGNORED).sum()


class LinearHead(nn.Module):
    """Weight of a head that the loss function applies in chunks of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return CHUNKED.enter(x, self.weight)


class ChunkedCrossEntropy(CountedCrossEntropy):
    """Pair of a sum and a count, without whole logits."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with mock.patch.object(
            chunked_loss, "chunk_tokens", lambda *_: 3
        ):  # its smallest chunks have thousands
            return CHUNKED.loss(outputs, labels, VOCABULARY), self.counts(labels)


class WholeCrossEntropy(CountedCrossEntropy):
    """The same pair, from whole logits."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return super().__call__(CHUNKED.logits(outputs), labels)


class DividedHead(nn.Module):
    """Head with whole logits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(_drawn_rows())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class PartOfHead(chunked_loss.HeadPart):
    """Part of the same head."""

    def __init__(self, part: int, parts: int) -> None:
        super().__init__(_rows_of_part(part, parts), part, TensorParallel(), VOCABULARY)


def _divided_head(spec: LayerSpec) -> list[Any]:
    spec.in_parts = lambda parts: [LayerSpec(PartOfHead, part, parts) for part in range(parts)]
    return [spec]


class DividedCrossEntropy(CountedCrossEntropy):
    """Pair from whole logits, or from the losses of all tokens that the parts of a head give."""

    takes_token_losses = True

    def __call__(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if outputs.shape == labels.shape:
            return outputs.sum(), self.counts(labels)
        return super().__call__(outputs, labels)


def _mean(pair: tuple[Tensor, Tensor]) -> Tensor:
    return pair[0] / pair[1]


CHUNKED = chunked_loss.ChunkedHead(TensorParallel())


class OutputPair(nn.Module):
    """Output of a linear layer, and its mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, y.float().square().mean()


def _loss_of_pair(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    return mean_square(outputs[0], labels) + 0.1 * outputs[1]


class LossLayer(nn.Module):
    """Last layer that returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).float().square().mean()


def tied_head(module: nn.Module, x: Tensor) -> Tensor:
    """Return logits from the tied embedding."""
    assert isinstance(module.weight, Tensor)
    return F.linear(x, module.weight)


def head_layers() -> list[Any]:
    return [LayerSpec(nn.Linear, WIDTH, VOCABULARY)]


def _tied_head() -> list[Any]:
    return [TiedLayerSpec("embedding", TiedEmbedding, forward_fn=tied_head)]


def _chunked_tied_head(module: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(module.weight, Tensor)
    return CHUNKED.enter(x, module.weight)


def _chunked_tied() -> list[Any]:
    return [TiedLayerSpec("embedding", TiedEmbedding, forward_fn=_chunked_tied_head)]


ENDS: dict[str, End] = {
    "mean_square": End(draw_targets, lambda: [], lambda: mean_square),
    "weighted": End(_weighted_targets, lambda: [], WeightedLoss),
    "head": End(token_labels, head_layers, lambda: cross_entropy),
    "tied_head": End(token_labels, _tied_head, lambda: cross_entropy, start="tied_tokens"),
    "output_pair": End(draw_targets, lambda: [LayerSpec(OutputPair)], lambda: _loss_of_pair),
    "loss_layer": End(draw_targets, lambda: [LayerSpec(LossLayer)], lambda: None),
    "loss_pair": End(some_labels, head_layers, lambda: cross_entropy_sum, pairs=True),
    "counted_pair": End(some_labels, head_layers, CountedCrossEntropy, pairs=True),
    "tied_pair": End(some_labels, _tied_head, CountedCrossEntropy, pairs=True, start="tied_tokens"),
    "divided_head": End(
        some_labels, lambda: _divided_head(LayerSpec(DividedHead)), DividedCrossEntropy, pairs=True
    ),
    "divided_tied_head": End(
        some_labels,
        lambda: _divided_head(*_tied_head()),
        DividedCrossEntropy,
        pairs=True,
        start="tied_tokens",
    ),
    "chunked_head": End(
        token_labels,
        lambda: [LayerSpec(LinearHead)],
        lambda: lambda *pair: _mean(ChunkedCrossEntropy()(*pair)),
        plain_loss=lambda: lambda *pair: _mean(WholeCrossEntropy()(*pair)),
    ),
    "chunked_pair": End(
        some_labels,
        lambda: [LayerSpec(LinearHead)],
        ChunkedCrossEntropy,
        pairs=True,
        plain_loss=WholeCrossEntropy,
    ),
    "chunked_tied_pair": End(
        some_labels,
        _chunked_tied,
        ChunkedCrossEntropy,
        pairs=True,
        start="tied_tokens",
        plain_loss=WholeCrossEntropy,
    ),
}
