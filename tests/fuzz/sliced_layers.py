"""Kinds of layers whose tokens read earlier tokens, also those of earlier slices of the sequence."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from ds_ext.model.config import TransformerConfig
from ds_ext.recipes.models.layers import TransformerLayer
from ds_ext.tensor_parallel import DropoutClock, earlier_slices, slice_start

from .kinds import HEADS, LENGTH, WIDTH, Kind, Place, layer
from .standard_layers import linear


class CachedAttention(nn.Module):
    """Causal attention that joins the keys and values of all slices."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), linear()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        keys, values = zip(*earlier_slices(self, k, v), (k, v), strict=True)
        k, v = torch.cat(keys, 2), torch.cat(values, 2)
        mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=x.device)
        y = F.scaled_dot_product_attention(q, k, v, mask.tril(k.size(2) - q.size(2)))
        return x + self.out(y.transpose(1, 2).flatten(2))


class PreviousToken(nn.Module):
    """Linear layer of the token before, which may be the last one of the slice before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        earlier = earlier_slices(self, x[:, -1:], copy=True)
        before = earlier[-1][0] if earlier else torch.zeros_like(x[:, :1])
        return x + self.linear(torch.cat((before, x[:, :-1]), 1))


class SlicePositions(nn.Module):
    """Learned positions of the tokens in their sample."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.linear = nn.Parameter(0.1 * torch.randn(4 * LENGTH, WIDTH)), linear()

    def forward(self, x: Tensor) -> Tensor:
        start = slice_start()
        return self.linear(x) + self.positions[start : start + x.shape[1]]


def _transformer(place: Place, **fields: Any) -> list[Any]:
    sizes = {"num_layers": 64, "hidden_size": WIDTH, "num_attention_heads": HEADS}
    config = TransformerConfig(
        **sizes,
        seq_length=4 * LENGTH,
        vocab_size=8,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        seed=5,
        **fields,
    )
    return [LayerSpec(TransformerLayer, config, place.number, place.tp, DropoutClock())]


def _gpt(place: Place) -> list[Any]:
    return _transformer(place, sliding_window=3, recompute="full")


def _llama(place: Place) -> list[Any]:
    sizes = {"ffn_hidden_size": 2 * WIDTH, "num_query_groups": 1, "swiglu": True, "add_bias_linear": False}
    names = {"normalization": "RMSNorm", "position_embedding_type": "rope", "recompute": "selective"}
    return _transformer(place, **sizes, **names, qk_layernorm=True)


SLICED: dict[str, Kind] = {
    "cached_attention": layer(CachedAttention),
    "previous_token": layer(PreviousToken),
    "slice_positions": layer(SlicePositions),
    "gpt_layer": Kind(_gpt),
    "llama_layer": Kind(_llama),
}
