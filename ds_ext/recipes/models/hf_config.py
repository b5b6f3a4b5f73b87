"""Conversion between our configs and the ``config.json`` of Hugging Face's transformers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any, Literal

from ds_ext.errors import ConfigError
from ds_ext.model.config import TRAINED_FIELDS, WEIGHT_FIELDS, RopeScaling, TransformerConfig
from ds_ext.model.hf_decoder import decoder_fields, llama_json
from ds_ext.model.json_values import integer, number, require_supported
from ds_ext.recipes.models.bert import TOKEN_TYPES, BertConfig
from ds_ext.recipes.models.gpt import GPTConfig

# Key of config.json -> values that our models support: first transformers' default, then values with the same meaning.
_BERT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu",),
    "layer_norm_eps": (BertConfig.layernorm_epsilon,),
    "tie_word_embeddings": (True,),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "position_embedding_type": ("absolute",),
    "type_vocab_size": (TOKEN_TYPES,),
    "quantization_config": (None,),
}
SENTENCE_HEAD = "cls.seq_relationship.weight"
# Fields that decide what the weights compute, but do not all follow from their shapes. A checkpoint stores them.
_SIZES = ("num_layers", "hidden_size", "vocab_size", "ffn_hidden_size", "max_position_embeddings")
_SEEN = (*_SIZES, "experts", "latent")
COMPUTED = tuple(name for name in WEIGHT_FIELDS if name not in _SEEN)
_BERT_UNSEEN = ("num_attention_heads", "layernorm_epsilon", *TRAINED_FIELDS)
UNSEEN = (*COMPUTED, "max_position_embeddings", *TRAINED_FIELDS)


def unseen_in_weights(config: TransformerConfig) -> dict[str, Any]:
    """Return the fields that do not follow from the shapes of the weights, as plain values."""
    if isinstance(config, BertConfig):
        return {key: getattr(config, key) for key in _BERT_UNSEEN}
    values = {key: getattr(config.resolved(), key) for key in UNSEEN}
    scaling, layers = config.rope_scaling, config.sliding_window_layers
    return {
        **values,
        "rope_scaling": None if scaling is None else asdict(scaling),
        "sliding_window_layers": None if layers is None else list(layers),
    }


def saved_fields(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Invert :func:`unseen_in_weights`."""
    fields = {key: saved[key] for key in UNSEEN if key in saved}
    if fields.get("rope_scaling") is not None:
        fields["rope_scaling"] = RopeScaling(**fields["rope_scaling"])
    if fields.get("sliding_window_layers") is not None:
        fields["sliding_window_layers"] = tuple(fields["sliding_window_layers"])
    return fields


def is_gpt2(config: TransformerConfig) -> bool:
    """Return whether a GPT has the layers of GPT-2. Its weights then have GPT-2's names in transformers."""
    return (
        config.position_embedding_type == "learned_absolute"
        and config.normalization == "LayerNorm"
        and config.query_groups == config.num_attention_heads
        and config.head_size * config.num_attention_heads == config.hidden_size
        and config.add_bias_linear
        and not (config.swiglu or config.qk_layernorm or config.untie_embeddings_and_output_weights)
    )


def to_json(
    config: TransformerConfig,
    end_of_text: int | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> dict[str, Any]:
    """Return the ``config.json`` of a GPT, or of a BERT for a BertConfig.

    ``end_of_text`` is the id of the end-of-text token of a GPT; None: unknown.
    """
    if isinstance(config, BertConfig):
        return _bert_json(config, dtype)
    if is_gpt2(config):
        return _gpt2_json(config, end_of_text, dtype)
    return llama_json(config, end_of_text, dtype)


def _bert_json(config: BertConfig, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["BertForMaskedLM" if config.order_classes is None else "BertForPreTraining"],
        "model_type": "bert",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.ffn_size,
        "max_position_embeddings": config.positions,
        "type_vocab_size": TOKEN_TYPES,
        "hidden_act": "gelu",
        "layer_norm_eps": config.layernorm_epsilon,
        "hidden_dropout_prob": config.hidden_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "initializer_range": config.init_std,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "dtype": dtype,
    }


def _gpt2_json(config: TransformerConfig, end_of_text: int | None, dtype: str) -> dict[str, Any]:
    if config.sliding_window is not None:
        raise ConfigError(
            f"sliding_window: GPT2LMHeadModel of transformers has none (got {config.sliding_window}). This model "
            f"cannot be converted."
        )
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_attention_heads,
        "n_inner": config.ffn_size,
        "n_positions": config.positions,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.layernorm_epsilon,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
        "initializer_range": config.init_std,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "tie_word_embeddings": True,
        "dtype": dtype,
    }


def from_json(values: Mapping[str, Any], weights: Collection[str]) -> TransformerConfig:
    """Return the GPTConfig or BertConfig for a ``config.json``.

    The names of the ``weights`` show whether a BERT has the sentence-order head.
    """
    if values.get("model_type") != "bert":
        return GPTConfig(**decoder_fields(values, "bert"))
    require_supported(values, _BERT_SUPPORTED)
    return BertConfig(
        num_layers=integer(values, "num_hidden_layers"),
        hidden_size=integer(values, "hidden_size"),
        num_attention_heads=integer(values, "num_attention_heads"),
        seq_length=integer(values, "max_position_embeddings"),
        vocab_size=integer(values, "vocab_size"),
        ffn_hidden_size=integer(values, "intermediate_size"),
        hidden_dropout=number(values, "hidden_dropout_prob", 0.1),
        attention_dropout=number(values, "attention_probs_dropout_prob", 0.1),
        init_std=number(values, "initializer_range", 0.02),
        order_classes=2 if SENTENCE_HEAD in weights else None,
    )
