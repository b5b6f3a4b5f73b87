"""Contracts of a script's layers and loss function, and adapters that read their optional attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from .types import Batch, Function, Layer


class LayerContract(Protocol):
    """Attributes of a layer or of its LayerSpec. Those of parameters are in :mod:`ds_ext.tensor_parallel.layers`.

    Attributes:
        num_parameters: number of parameters, for which a spec need not be built.
        in_parts: of the spec of a head: function of a number of parts; returns their specs. Of the spec of an embedding
            that is tied to it: returns the spec of a layer with the rows of every part.
        cut_sequence: of a layer whose inputs have masks: function(inputs, start, stop) of the inputs of these tokens.
        recompute: whether the backward of the layer recomputes activations.
        check_shards: of a spec: function of a tensor-parallel size above 1, the loss function and whether tokens are
            divided too (``sequence_parallel``); raises ConfigError if the layers of its model have no such shards. They
            are built in :func:`ds_ext.tensor_parallel.building_for`.
    """

    num_parameters: int | None = None
    in_parts: Function | None = None
    cut_sequence: Callable[[Batch, int, int], Batch] | None = None
    recompute: bool = False
    check_shards: Callable[[int, Function | None, bool], None] | None = None


class LossContract(Protocol):
    """Attributes of a loss function beside its call with outputs and labels.

    Attributes:
        counts: function of labels; returns the number of counted ones, or name -> number.
        shift_labels: function of labels; returns those from which the labels of slices are cut.
        return_logits: function of outputs of the last layer; returns what an evaluation returns for them.
        takes_token_losses: with a head in parts, it takes the losses of all tokens, (B, S), instead of logits.
        auxiliary_loss: kind of the loss of routers in it, "pooled" or "per_layer".
    """

    counts: Callable[[Batch], Batch] | None = None
    shift_labels: Callable[[Batch], Batch] | None = None
    return_logits: Callable[[Batch], Batch] | None = None
    takes_token_losses: bool = False
    auxiliary_loss: str | None = None


class AdaptedLayer(LayerContract):
    def __init__(self, layer: Layer) -> None:
        for name in LayerContract.__annotations__:
            setattr(self, name, getattr(layer, name, getattr(LayerContract, name)))


class AdaptedLoss(LossContract):
    def __init__(self, function: Function | None) -> None:
        self.function = function
        self.takes_token_losses = getattr(function, "takes_token_losses", False)
        self.auxiliary_loss = getattr(function, "auxiliary_loss", None)
        for name in ("counts", "shift_labels", "return_logits"):
            method = getattr(function, name, None)  # a module may have a tensor of this name
            setattr(self, name, method if callable(method) else None)


def additional_losses(function: Function | None) -> Mapping[str, Tensor | float] | None:
    """Return the attribute ``additional_losses``, name -> scalar, which a loss function may set in every call."""
    return getattr(function, "additional_losses", None)
