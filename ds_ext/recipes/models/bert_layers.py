"""Layers of BERT (Devlin et al. 2018): post-LN, with bidirectional attention that ignores padding.

Shapes: B samples of a micro-batch, S tokens (with sequence parallelism those of this rank), D hidden size. ``mask_BS``
is False for padding and holds all tokens on every rank.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_ext.model.config import TransformerConfig
from ds_ext.recipes.models.layers import MLP, LayerNorm, SelfAttention, hidden_dropout, recomputed
from ds_ext.tensor_parallel import (
    DropoutClock,
    InitMethod,
    TensorParallel,
    gather_from_sequence_parallel_region,
    keyed_normal,
    linear,
    shared_parameters,
)


class BertSelfAttention(SelfAttention):
    """Bidirectional attention with a mask. Weights have the same layout as GPT's."""

    causal: ClassVar[bool] = False


class BertMLP(MLP):
    """MLP with the exact GELU."""

    gelu: ClassVar[str] = "none"


class BertLayer(nn.Module):
    """Post-LN transformer layer. ``layer`` is its number in the whole model, from 0."""

    def __init__(
        self, config: TransformerConfig, layer: int, tp: TensorParallel, clock: DropoutClock
    ) -> None:
        super().__init__()
        self.clock = clock
        self.recompute = config.recomputes(layer) == "full"
        self.self_attention = BertSelfAttention(config, layer, tp, clock)
        self.attention_dropout = hidden_dropout(config, layer, "attention_output", tp, clock)
        self.attention_layernorm = LayerNorm(config, tp)
        self.mlp = BertMLP(config, layer, tp)
        self.mlp_dropout = hidden_dropout(config, layer, "mlp_output", tp, clock)
        self.mlp_layernorm = LayerNorm(config, tp)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Map (hidden_BSD, mask_BS) to the same shapes, on all ranks."""
        hidden_BSD, mask_BS = inputs
        if self.recompute:
            return recomputed(self.clock, self._layer, hidden_BSD, mask_BS), mask_BS
        return self._layer(hidden_BSD, mask_BS), mask_BS

    def _layer(self, hidden_BSD: Tensor, mask_BS: Tensor) -> Tensor:
        attended_BSD = self.self_attention(hidden_BSD, mask_BS[:, None, None, :])
        hidden_BSD = self.attention_layernorm(hidden_BSD + self.attention_dropout(attended_BSD))
        return self.mlp_layernorm(hidden_BSD + self.mlp_dropout(self.mlp(hidden_BSD)))


class BertHeads(nn.Module):
    """Heads of the two objectives, masked words and sentence order.

    All weights are replicated: they are few compared with a layer's, and need no communication.
    """

    def __init__(self, config: TransformerConfig, tp: TensorParallel, order_classes: int | None) -> None:
        super().__init__()
        self.sequence_tp = tp if config.sequence_parallel else TensorParallel()
        size = config.hidden_size

        def dense(outputs: int, name: str) -> nn.Linear:
            init = keyed_normal(config.init_std, config.seed, config.num_layers, name)
            return _linear(size, outputs, init)

        self.transform = dense(size, "lm_head.transform.weight")
        self.transform_layernorm = LayerNorm(config, tp)
        self.pooler = self.classifier = None
        if order_classes is not None:
            self.pooler = dense(size, "pooler.weight")
            self.classifier = dense(order_classes, "binary_head.weight")

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Map (hidden_BSD, mask_BS) to (transformed_BSD, order_B2), to one tensor without a sentence-order head.

        ``transformed_BSD`` is the input of the output layer, whose weight is that of the word embeddings. ``order_B2``
        are the logits for segments in order (0) and swapped (1), from the pooled first token.
        """
        hidden_BSD, _ = inputs
        weight, bias = shared_parameters(self.sequence_tp, self.transform.weight, self.transform.bias)
        transformed_BSD = self.transform_layernorm(F.gelu(linear(hidden_BSD, weight, bias)))
        if self.pooler is None or self.classifier is None:
            return (transformed_BSD,)
        pooled_BD = torch.tanh(self.pooler(_first_token(hidden_BSD, self.sequence_tp)))
        return transformed_BSD, self.classifier(pooled_BD)


def _first_token(hidden_BSD: Tensor, tp: TensorParallel) -> Tensor:
    """Return the first token of every sample on all ranks: hidden_BSD to (B, D)."""
    if tp.size == 1:
        return hidden_BSD[:, 0]
    first_BD = gather_from_sequence_parallel_region(hidden_BSD[:, :1], tp)[:, 0]
    if first_BD.requires_grad:
        # All ranks compute the same head, so each has the full gradient, and the gather sums them.
        first_BD.register_hook(lambda grad: grad / tp.size)
    return first_BD


def _linear(inputs: int, outputs: int, init: InitMethod) -> nn.Linear:
    """Return torch's layer with weights filled by ``init`` in fp32.

    It is created on the meta device, because the constructor would otherwise use the global generator.
    """
    layer = nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")
    weight = torch.empty(outputs, inputs, dtype=torch.float32, device="cpu")
    init(weight)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.zero_()
    return layer
