"""Transformer Engine's layer, as far as it goes without a GPU: the errors, and the mapping of its parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ds_ext.errors import ConfigError
from ds_ext.models.bert import BertConfig
from ds_ext.models.gpt import GPTConfig
from ds_ext.models.layers import TransformerLayer
from ds_ext.models.te import start_as
from ds_ext.tensor_parallel import DropoutClock, TensorParallel

PLAIN = GPTConfig(2, 16, 2, 8, 32, hidden_dropout=0.0, attention_dropout=0.0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_dropout": 0.1}, r"dropout must be 0, .* got hidden 0\.1, attention 0\."),
        ({"sequence_parallel": True}, "sequence_parallel must be off"),
        ({"recompute": "selective"}, "--recompute-granularity is none or full"),
    ],
)
def test_what_it_cannot_do_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        replace(PLAIN, transformer_impl="transformer_engine", **change)


def test_what_is_missing_is_said() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match=r"needs CUDA, and torch finds no GPU here\. Use local"):
        replace(PLAIN, transformer_impl="transformer_engine")
    with pytest.raises(ConfigError, match="must be local for BERT"):
        BertConfig(2, 16, 2, 8, 32, transformer_impl="transformer_engine")


class _Theirs(nn.Module):
    """The parameters of TransformerLayer of Transformer Engine 2, by its names, in the shapes of one rank."""

    def __init__(self, size: int, ffn: int) -> None:
        super().__init__()

        def vectors(module: nn.Module, **sizes: tuple[int, ...]) -> nn.Module:
            for name, shape in sizes.items():
                setattr(module, name, nn.Parameter(torch.full(shape, torch.nan)))
            return module

        self.self_attention = nn.Module()
        norm = {"layer_norm_weight": (size,), "layer_norm_bias": (size,)}
        self.self_attention.layernorm_qkv = vectors(
            nn.Module(), weight=(3 * size, size), bias=(3 * size,), **norm
        )
        self.self_attention.proj = vectors(nn.Module(), weight=(size, size), bias=(size,))
        mlp = {"fc1_weight": (ffn, size), "fc1_bias": (ffn,), "fc2_weight": (size, ffn), "fc2_bias": (size,)}
        self.layernorm_mlp = vectors(nn.Module(), **norm, **mlp)


def test_it_starts_as_our_layer() -> None:
    theirs: Any = _Theirs(16, 64)
    ours: Any = TransformerLayer(PLAIN, 1, TensorParallel(), DropoutClock())
    start_as(theirs, ours)
    qkv = theirs.self_attention.layernorm_qkv
    assert torch.equal(qkv.weight, ours.self_attention.linear_qkv.weight) and qkv.weight.partition_dim == 0
    assert torch.equal(theirs.layernorm_mlp.fc2_weight, ours.mlp.linear_fc2.weight)
    assert theirs.layernorm_mlp.fc2_weight.partition_dim == 1
    assert not hasattr(theirs.self_attention.proj.bias, "partition_dim")
    assert not any(parameter.isnan().any() for parameter in theirs.parameters())
    del theirs.layernorm_mlp.fc2_bias
    with pytest.raises(
        ConfigError, match=r"other parameters than this version knows \(layernorm_mlp\.fc2_bias\)"
    ):
        start_as(theirs, ours)
