"""BERT for the tests: a model as one chain, random micro-batches, and a plain training loop as the yardstick."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from ds_ext.recipes.models.bert import BertConfig, BertLoss, bert_layer_specs
from ds_ext.tensor_parallel import IGNORE_INDEX, DropoutClock, TensorParallel
from tests.losses import learned, share, step_counts
from tests.reference import ReferenceRun

Batch = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""((tokens_BS, types_BS, mask_BS), (labels_BS, swapped_B)) of one micro-batch."""


class BertChain(nn.Module):
    """All layers of a BERT, one after the other; tied specs share one module."""

    def __init__(self, config: BertConfig, tp: TensorParallel, clock: DropoutClock) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        self.calls: list[Callable[..., tuple[Tensor, ...]]] = []
        tied: dict[str, nn.Module] = {}
        for index, spec in enumerate(bert_layer_specs(config, tp, clock)):
            if isinstance(spec, TiedLayerSpec):
                if spec.key not in tied:
                    tied[spec.key] = self.layers[str(index)] = spec.build()
                self.calls.append(partial(spec.forward_fn, tied[spec.key]))
            else:
                assert isinstance(spec, LayerSpec)
                self.layers[str(index)] = spec.build()
                self.calls.append(self.layers[str(index)])

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for call in self.calls:
            inputs = call(inputs)
        return inputs

    def parameters_by_layer(self) -> dict[str, nn.Parameter]:
        """Parameters by "layer index.name in the layer"."""
        return {name.removeprefix("layers."): p for name, p in self.named_parameters()}


def random_bert_batches(
    config: BertConfig, steps: int, micro_batches: int, micro_batch_size: int = 2, seed: int = 7
) -> list[list[Batch]]:
    """``batches[step][micro_batch]``: random ids, mostly low, a border between the sentences, padding, masked words.

    Every micro-batch has other lengths and another number of masked words.
    """
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    def sample() -> tuple[Tensor, ...]:
        length = config.seq_length
        end = number(length // 2, length + 1)
        border, places_S = number(2, end - 1), torch.arange(length)
        ids_S = (config.vocab_size * torch.rand(length, generator=generator) ** 3).long()
        masked_S = (torch.rand(length, generator=generator) < 0.3) & (places_S < end)
        masked_S[number(0, end)] = True
        tokens_S = torch.where(masked_S | (places_S >= end), 0, ids_S)
        labels_S = torch.where(masked_S, ids_S, IGNORE_INDEX)
        types_S = ((places_S >= border) & (places_S < end)).long()
        return tokens_S, types_S, places_S < end, labels_S, torch.tensor(number(0, 2))

    def batch() -> Batch:
        samples = [sample() for _ in range(micro_batch_size)]
        tokens, types, seen, labels, swapped = (torch.stack(part) for part in zip(*samples, strict=True))
        return (tokens, types, seen), (labels, swapped) if config.order_classes else (labels,)

    return [[batch() for _ in range(micro_batches)] for _ in range(steps)]


def train_bert_reference(
    config: BertConfig, batches: Sequence[Sequence[Batch]], lr: float, momentum: float, clip: float
) -> ReferenceRun:
    """One process, SGD, the micro-batches of a step one after the other."""
    tp, clock = TensorParallel(), DropoutClock()
    model, loss_fn = BertChain(config, tp, clock), BertLoss(config, tp)
    update = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    losses, norms = [], []
    for step, micro_batches in enumerate(batches):
        total, counts = 0.0, step_counts(loss_fn, [labels for _, labels in micro_batches])
        for index, (inputs, labels) in enumerate(micro_batches):
            clock.set(step, index)
            loss = share(loss_fn(model(inputs), labels), counts)
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        update.step()
        update.zero_grad()
    return ReferenceRun(
        learned(losses), norms, {n: p.detach() for n, p in model.parameters_by_layer().items()}
    )
