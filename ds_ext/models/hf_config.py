"""Conversion between our configs and the ``config.json`` of Hugging Face's transformers, for GPT-2 and BERT."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from ds_ext.errors import ConfigError
from ds_ext.models.bert import TOKEN_TYPES, BertConfig
from ds_ext.models.config import TransformerConfig
from ds_ext.models.gpt import GPTConfig

# Key of config.json -> values that our models support: first transformers' default, then values with the same meaning.
_GPT2_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (GPTConfig.layernorm_epsilon,),
    "tie_word_embeddings": (True,),
    "add_cross_attention": (False,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "quantization_config": (None,),
}
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
# Fields that do not follow from the shapes of the weights. A checkpoint stores them.
UNSEEN = ("num_attention_heads", "layernorm_epsilon", "hidden_dropout", "attention_dropout", "init_std")


def unseen_in_weights(config: TransformerConfig) -> dict[str, int | float]:
    """Return the fields of a config that do not follow from the shapes of its weights."""
    return {key: getattr(config, key) for key in UNSEEN}


def to_json(config: TransformerConfig, end_of_text: int | None = None) -> dict[str, Any]:
    """Return the ``config.json`` of a model.

    Args:
        config: sizes; a BertConfig for a BERT, any other for a GPT.
        end_of_text: id of the end-of-text token of a GPT; None: unknown.
    """
    if isinstance(config, BertConfig):
        classes = config.order_classes
        return {
            "architectures": ["BertForMaskedLM" if classes is None else "BertForPreTraining"],
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
            "dtype": "float32",
        }
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
        "dtype": "float32",
    }


def from_json(values: Mapping[str, Any], weights: Collection[str]) -> TransformerConfig:
    """Return the GPTConfig or BertConfig for a ``config.json``.

    Args:
        values: content of ``config.json``.
        weights: names of the model's weights, which show whether a BERT has the sentence-order head.

    Raises:
        ConfigError: if the architecture or one of its settings is not supported.
    """
    kind = values.get("model_type")
    if kind not in ("gpt2", "bert"):
        raise ConfigError(f'model_type: only "gpt2" and "bert" can be converted (got {json.dumps(kind)}).')
    for key, supported in (_GPT2_SUPPORTED if kind == "gpt2" else _BERT_SUPPORTED).items():
        value = values.get(key, supported[0])
        if value not in supported:
            raise ConfigError(
                f"{key}: only models with {' or '.join(map(json.dumps, supported))} can be converted (got "
                f"{json.dumps(value)})."
            )

    def size(key: str) -> int:
        value = values.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{key}: must be an integer (got {json.dumps(value)}).")
        return value

    def number(key: str, default: float) -> float:
        value = values.get(key, default)
        if not isinstance(value, int | float):
            raise ConfigError(f"{key}: must be a number (got {json.dumps(value)}).")
        return value

    if kind == "gpt2":
        return GPTConfig(
            num_layers=size("n_layer"),
            hidden_size=size("n_embd"),
            num_attention_heads=size("n_head"),
            seq_length=size("n_positions"),
            vocab_size=size("vocab_size"),
            ffn_hidden_size=None if values.get("n_inner") is None else size("n_inner"),
            hidden_dropout=number("resid_pdrop", 0.1),
            attention_dropout=number("attn_pdrop", 0.1),
            init_std=number("initializer_range", 0.02),
        )
    return BertConfig(
        num_layers=size("num_hidden_layers"),
        hidden_size=size("hidden_size"),
        num_attention_heads=size("num_attention_heads"),
        seq_length=size("max_position_embeddings"),
        vocab_size=size("vocab_size"),
        ffn_hidden_size=size("intermediate_size"),
        hidden_dropout=number("hidden_dropout_prob", 0.1),
        attention_dropout=number("attention_probs_dropout_prob", 0.1),
        init_std=number("initializer_range", 0.02),
        order_classes=2 if SENTENCE_HEAD in weights else None,
    )
