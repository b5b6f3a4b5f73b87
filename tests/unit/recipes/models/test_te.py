"""Transformer Engine's layer without a GPU: errors and the mapping of its parameters."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ds_ext.errors import ConfigError
from ds_ext.recipes.models.bert import BertConfig
from ds_ext.recipes.models.gpt import GPTConfig
from ds_ext.recipes.models.layers import TransformerLayer
from ds_ext.recipes.models.te import check_version, copy_weights
from ds_ext.tensor_parallel import DropoutClock, TensorParallel

PLAIN = GPTConfig(2, 16, 2, 8, 32, hidden_dropout=0.0, attention_dropout=0.0)


@pytest.mark.parametrize(
    ("change", "keys_and_values"),
    [
        ({"hidden_dropout": 0.1}, r"hidden_dropout .*attention_dropout .*0\.1 and 0\b"),
        ({"sequence_parallel": True}, "sequence_parallel"),
        ({"recompute": "selective"}, "--recompute-granularity selective"),
        ({"position_embedding_type": "rope"}, "position_embedding_type .*rope"),
        ({"swiglu": True}, "swiglu .*True"),
        ({"num_query_groups": 1}, "num_query_groups .*1"),
        ({"kv_channels": 4}, "kv_channels .*4"),
        ({"add_bias_linear": False, "add_qkv_bias": True}, "add_qkv_bias .*True"),
        ({"qk_layernorm": True}, "qk_layernorm .*True"),
        ({"sliding_window": 4}, "sliding_window .*4"),
        ({"reset_attention_mask": True}, "reset_attention_mask .*True"),
    ],
)
def test_unsupported_settings_are_refused(change: dict[str, Any], keys_and_values: str) -> None:
    with pytest.raises(ConfigError, match=f"^--transformer-impl: .*{keys_and_values}"):
        replace(PLAIN, transformer_impl="transformer_engine", **change)


def test_unsupported_hosts_and_models_are_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this host has a GPU")
    with pytest.raises(ConfigError, match=r"^--transformer-impl: .*CUDA"):
        replace(PLAIN, transformer_impl="transformer_engine")
    with pytest.raises(ConfigError, match=r"^--transformer-impl: .*BERT"):
        BertConfig(2, 16, 2, 8, 32, transformer_impl="transformer_engine")


@pytest.mark.parametrize("version", ["1.13.0", "3.0", "unknown"])
def test_versions_with_other_arguments_are_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--transformer-impl: .*{re.escape(version)}"):
        check_version(version)


@pytest.mark.parametrize("version", ["2.0", "2.3.0+abc", "2.14.0.dev1"])
def test_version_2_is_accepted(version: str) -> None:
    check_version(version)


class _TransformerEngineParameters(nn.Module):
    """Parameters of TransformerLayer of Transformer Engine 2, by its names, with the shapes of one rank."""

    def __init__(self, size: int, ffn: int, biases: bool = True) -> None:
        super().__init__()

        def vectors(module: nn.Module, **sizes: tuple[int, ...]) -> nn.Module:
            for name, shape in sizes.items():
                if biases or not name.endswith("bias"):
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


def test_weights_are_copied_with_their_sharding() -> None:
    te_layer: Any = _TransformerEngineParameters(16, 64)
    layer: Any = TransformerLayer(PLAIN, 1, TensorParallel(), DropoutClock())
    copy_weights(te_layer, layer)
    qkv = te_layer.self_attention.layernorm_qkv
    assert torch.equal(qkv.weight, layer.self_attention.linear_qkv.weight) and qkv.weight.partition_dim == 0
    assert torch.equal(te_layer.layernorm_mlp.fc2_weight, layer.mlp.linear_fc2.weight)
    assert te_layer.layernorm_mlp.fc2_weight.partition_dim == 1
    assert not hasattr(te_layer.self_attention.proj.bias, "partition_dim")
    assert not any(parameter.isnan().any() for parameter in te_layer.parameters())
    del te_layer.layernorm_mlp.fc2_bias
    with pytest.raises(ConfigError, match=r"^--transformer-impl: .*layernorm_mlp\.fc2_bias"):
        copy_weights(te_layer, layer)


def test_weights_without_biases_are_copied() -> None:
    te_layer: Any = _TransformerEngineParameters(16, 64, biases=False)
    config = replace(PLAIN, normalization="RMSNorm", add_bias_linear=False)
    layer: Any = TransformerLayer(config, 1, TensorParallel(), DropoutClock())
    copy_weights(te_layer, layer)
    assert torch.equal(te_layer.self_attention.proj.weight, layer.self_attention.linear_proj.weight)
    with pytest.raises(ConfigError, match=r"^--transformer-impl: .*bias"):
        copy_weights(_TransformerEngineParameters(16, 64), layer)
