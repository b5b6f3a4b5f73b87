"""Activations that decoder layers of transformers keep, against the planner's sizes of the same model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from ds_ext.experts import replace_experts
from ds_ext.model.config import Experts, LatentAttention
from ds_ext.planner.activations import layer_activations
from ds_ext.planner.training_sizes import TrainingSizes
from tests.allocations import AllocatedBytes

BATCH, TOKENS, WIDTH, HEADS, GROUPS, INNER = 2, 256, 64, 4, 2, 192
SIZES = TrainingSizes(
    num_layers=2,
    hidden_size=WIDTH,
    num_attention_heads=HEADS,
    num_query_groups=GROUPS,
    ffn_hidden_size=INNER,
    seq_length=TOKENS,
    vocab_size=128,
    micro_batch=BATCH,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    swiglu=True,
    normalization="RMSNorm",
    position_embedding_type="rope",
    add_bias_linear=False,
)


EXPERTS = Experts(number=4, per_token=2, width=INNER)


def kept_bytes(family: str, layers: int, **sizes: int) -> int:
    """Return the bytes that exist between forward and backward of a model without its head."""
    config: Any = AutoConfig.for_model(
        family,
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        vocab_size=128,
        attn_implementation="sdpa",
        **{"num_key_value_heads": GROUPS, "head_dim": WIDTH // HEADS, **sizes},
    )
    model = AutoModel.from_config(config).to(torch.bfloat16)
    replace_experts(model)
    ids_BS = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    with AllocatedBytes() as allocated:
        before = allocated.live
        outputs = model(ids_BS, use_cache=False)
        kept = allocated.live - before
        del outputs
    return kept


@pytest.mark.parametrize(("family", "normalized"), [("llama", False), ("qwen2", False), ("qwen3", True)])
def test_activations_of_a_layer(family: str, normalized: bool) -> None:
    measured = (kept_bytes(family, 4) - kept_bytes(family, 2)) / 2
    planned = layer_activations(replace(SIZES, qk_layernorm=normalized), "none").kept
    assert planned == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(("family", "normalized"), [("mixtral", False), ("qwen3_moe", True)])
def test_activations_of_a_layer_with_experts(family: str, normalized: bool) -> None:
    number = "num_local_experts" if family == "mixtral" else "num_experts"
    sizes = {number: EXPERTS.number, "num_experts_per_tok": EXPERTS.per_token, "moe_intermediate_size": INNER}
    measured = (kept_bytes(family, 4, **sizes) - kept_bytes(family, 2, **sizes)) / 2
    planned = layer_activations(replace(SIZES, qk_layernorm=normalized, experts=EXPERTS), "none").kept
    assert planned == pytest.approx(measured, rel=0.05)


def test_activations_of_a_layer_with_latent_attention() -> None:
    latent = LatentAttention(query_rank=48, kv_rank=32, unrotated=16, rotated=8, value=24)
    sizes = {
        **{"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
        **{"v_head_dim": 24, "head_dim": 8, "num_key_value_heads": HEADS, "n_routed_experts": EXPERTS.number},
        **{"num_experts_per_tok": EXPERTS.per_token, "n_shared_experts": 1, "moe_intermediate_size": INNER},
        **{"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    }
    measured = (kept_bytes("deepseek_v3", 4, **sizes) - kept_bytes("deepseek_v3", 2, **sizes)) / 2
    experts = replace(EXPERTS, shared_width=INNER, fp32_router=True)
    planned = layer_activations(
        replace(SIZES, num_query_groups=None, experts=experts, latent=latent), "none"
    ).kept
    assert planned == pytest.approx(measured, rel=0.05)
