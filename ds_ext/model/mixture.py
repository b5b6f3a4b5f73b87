"""Sizes of layers of transformers, from the ``config.json`` of a decoder. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import Experts, LatentAttention
from .json_values import integer

_NUMBER = ("num_local_experts", "num_experts", "n_routed_experts")
# Types of models whose MLP has no gate.
_WITHOUT_GATE = (
    *(
        "gpt_neox",
        "phi",
        "starcoder2",
        "nemotron",
        "falcon",
        "opt",
        "persimmon",
        "gpt_bigcode",
        "arcee",
        "jais2",
    ),
)
_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_top_k",
    "moe_topk",
    "moe_k",
    "top_k_experts",
)


def experts_of(values: Mapping[str, Any]) -> Experts | None:
    """Return the experts of a decoder; None if it has none, or one of another kind."""
    numbers = [values[key] for key in _NUMBER if isinstance(values.get(key), int) and values[key] > 1]
    per_token = [values[key] for key in _PER_TOKEN if isinstance(values.get(key), int)]
    width = values.get("moe_intermediate_size") or values.get("intermediate_size")
    if not numbers or not per_token or not isinstance(width, int):
        return None
    shared = values.get("shared_expert_intermediate_size")
    if shared is None:
        shared = width * (values.get("n_shared_experts") or 0)
    has_fp32_router = values.get("n_routed_experts") is not None  # as DeepSeek-V2, and models made after it
    return Experts(numbers[0], per_token[0], width, shared, _dense_layers(values), has_fp32_router)


def _dense_layers(values: Mapping[str, Any]) -> int:
    """Return the number of layers with an MLP."""
    layers, without = integer(values, "num_hidden_layers"), values.get("mlp_only_layers") or ()
    step, first = values.get("decoder_sparse_step") or 1, values.get("first_k_dense_replace") or 0
    return sum(i < first or i in without or (i + 1) % step > 0 for i in range(layers))


def decoder_fields_like_llama(values: Mapping[str, Any], experts: Experts | None) -> dict[str, Any]:
    """Return the fields of a TransformerConfig for layers of transformers, as far as those of a Llama have them."""
    kind, heads, latent = values.get("model_type"), integer(values, "num_attention_heads"), latent_of(values)
    hidden, head_size = integer(values, "hidden_size"), integer(values, "head_dim", None)
    if latent is not None:
        head_size = latent.head_size
    return {
        "num_layers": integer(values, "num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": integer(values, "num_key_value_heads", heads),
        "kv_channels": head_size or hidden // heads,
        "ffn_hidden_size": integer(
            values, "intermediate_size", *(() if experts is None else (experts.width,))
        ),
        "vocab_size": integer(values, "vocab_size"),
        "seq_length": integer(values, "max_position_embeddings"),
        "max_position_embeddings": integer(values, "max_position_embeddings"),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": kind not in _WITHOUT_GATE,
        "add_bias_linear": kind == "gpt_oss",
        "add_qkv_bias": kind == "qwen2_moe" or bool(values.get("attention_bias")),
        "qk_layernorm": kind == "qwen3_moe" or bool(values.get("use_qk_norm")),
        "untie_embeddings_and_output_weights": not values.get("tie_word_embeddings", False),
        "experts": experts,
        "latent": latent,
        "transformer_impl": "transformers",
    }


def latent_of(values: Mapping[str, Any]) -> LatentAttention | None:
    """Return the sizes of latent attention; None for whole keys and values."""
    rank = integer(values, "kv_lora_rank", 0)
    if not rank:
        return None
    heads = (integer(values, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return LatentAttention(integer(values, "q_lora_rank", 0) or 0, rank, *heads)
