"""``ds_ext.from_transformers``: any decoder of transformers as layers for a PipelineModule."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from ..errors import ConfigError
from ..tensor_parallel import current_slice
from .cut import Cut
from .find import find_cut
from .layers import DecoderLayer, Embedding, FinalNorm, Head, Positions, TiedHead, embed
from .lora import Adapters
from .weights import Source, make_source

IGNORE_INDEX = -100  # label of tokens that do not count, in transformers
_TIE = "embedding"


def from_transformers(
    model_or_folder: nn.Module | str | Path, *, lora: Any = None, dtype: torch.dtype | None = None
) -> tuple[list[LayerSpec], CausalLoss]:
    """Cut a causal language model of transformers into layers for :class:`ds_ext.PipelineModule`.

    The list has the word embedding, the positions, every decoder layer, the final norm and the head. From a folder,
    a rank reads only the weights of its stages, when they are built. The layers of a model in memory are used as they
    are.

    Args:
        model_or_folder: a transformers model, plain or wrapped by peft; or a folder with ``config.json`` and
            safetensors files.
        lora: ``peft.LoraConfig``: freeze all weights and train adapters in the decoder layers; None: train everything,
            or what a model in memory trains.
        dtype: dtype of the weights from a folder; None: as in the folder.

    Returns:
        ``(layers, loss_fn)``. The inputs of a micro-batch are ``ids_BS`` or ``(ids_BS, mask_BS)``, with a mask of 0 for
        padding, and its labels are ``labels_BS``. The loss is the model's: it shifts the labels and ignores -100. All
        counted tokens of a step have the same weight, as with ``num_items_in_batch`` in transformers.

    Raises:
        ConfigError: the model cannot be cut, the folder is incomplete, or a package is missing.
    """
    source = make_source(model_or_folder, dtype)
    cut = find_cut(source)
    adapters = None if lora is None else Adapters(lora, source, cut)
    loss_fn = CausalLoss(source)
    _check_loss(source, cut, loss_fn)
    layers = _layer_specs(source, cut, adapters)
    for layer, num_parameters in zip(layers, _layer_sizes(source, cut), strict=True):
        # PipelineModule divides the layers by their parameters, and builds none of them for this.
        layer.num_parameters = num_parameters
    return layers, loss_fn


def _layer_specs(source: Source, cut: Cut, adapters: Adapters | None) -> list[LayerSpec]:
    """Return word embedding, positions, every decoder layer, final norm and head."""
    arguments = (source, cut, adapters)
    if cut.tied:
        tie = {"tied_weight_attr": ["module.weight"]}
        embedding = TiedLayerSpec(_TIE, Embedding, *arguments, forward_fn=embed, **tie)
        head = TiedLayerSpec(_TIE, Embedding, *arguments, forward_fn=TiedHead(source, cut), **tie)
    else:
        embedding = LayerSpec(Embedding, *arguments)
        head = LayerSpec(Head, *arguments)
    return [
        embedding,
        LayerSpec(Positions, *arguments),
        *(LayerSpec(DecoderLayer, source, cut, index, adapters) for index in range(cut.num_layers)),
        LayerSpec(FinalNorm, *arguments),
        head,
    ]


class CausalLoss:
    """Loss function of the model: (logits_BSV, labels_BS) to (sum, count) of the predicted tokens.

    In slices of sequences, ``labels_BS`` are those of :meth:`shift_labels`.
    """

    def __init__(self, source: Source) -> None:
        self._function = source.loss_function
        self._vocab_size = source.config.get_text_config().vocab_size

    def __call__(self, logits_BSV: Tensor, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
        arguments = {"logits": logits_BSV, "vocab_size": self._vocab_size, "num_items_in_batch": 1}
        if current_slice() is None:
            return self._function(labels=labels_BS, **arguments), self.counts(labels_BS)
        total = self._function(labels=None, shift_labels=labels_BS, **arguments)
        return total, (labels_BS != IGNORE_INDEX).sum()

    def counts(self, labels_BS: Tensor) -> Tensor:
        """Return the number of tokens that the model is trained to predict."""
        return (labels_BS[:, 1:] != IGNORE_INDEX).sum()

    def shift_labels(self, labels_BS: Tensor) -> Tensor:
        """Return the next label of every token, from which the slices of a sample are cut."""
        return nn.functional.pad(labels_BS[:, 1:], (0, 1), value=IGNORE_INDEX)


def _check_loss(source: Source, cut: Cut, loss_fn: CausalLoss) -> None:
    """Raise ConfigError if the model's own forward computes another loss from random logits."""
    head = Head(source, dataclasses.replace(cut, tied=True), None)
    vocab_size = source.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    logits_BSV = torch.randn(1, 6, vocab_size, generator=generator)
    labels_BS = torch.randint(vocab_size, (1, 6), generator=generator)
    labels_BS[0, 2] = IGNORE_INDEX
    head.set_projection(torch.ones(()).expand(vocab_size, cut.width), lambda x_BSD: logits_BSV)
    hidden_BSD = torch.zeros(1, 6, cut.width)
    with torch.no_grad():
        model_loss = float(head.loss(hidden_BSD, labels_BS))
        total, count = loss_fn(head(hidden_BSD), labels_BS)
        logits_loss = float(total / count)
    if not math.isclose(model_loss, logits_loss, rel_tol=1e-5):
        raise ConfigError(
            f"{type(source.config).__name__}: cannot be cut, because its forward adds to the loss of the logits "
            f"(got {model_loss:.6g}, and {logits_loss:.6g} without). Set the extra loss to 0 in the config."
        )


def _layer_sizes(source: Source, cut: Cut) -> list[int]:
    """Return the number of parameters of every pipeline layer, frozen ones included."""
    model = source.skeleton()

    def size(*paths: str) -> int:
        return sum(
            parameter.numel() for path in paths for parameter in model.get_submodule(path).parameters()
        )

    layers = [size(f"{cut.layers}.{index}") for index in range(cut.num_layers)]
    return [size(cut.embedding), size(*cut.before), *layers, size(*cut.after), size(cut.head)]
