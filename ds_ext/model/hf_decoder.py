"""Conversion between our configs and the ``config.json`` of transformers' decoders.

These are GPT-2, Llama, Mistral, Qwen2 and Qwen3. Does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from ..errors import ANSWERS, ConfigError
from .config import RopeScaling, TransformerConfig
from .json_values import integer, number, refused, require_supported

LLAMA_KINDS = ("llama", "mistral", "qwen2", "qwen3")
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# transformers' defaults for keys that config.json omits.
_GROUPS: Mapping[str, int | None] = {"llama": None, "mistral": 8, "qwen2": 32, "qwen3": 32}
_HEAD_SIZE: Mapping[str, int | None] = {"qwen3": 128}
_WINDOW = 4096
# Key of config.json -> values that our GPT-2 supports: first transformers' default, then values with the same meaning.
_GPT2_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (TransformerConfig.layernorm_epsilon,),
    "tie_word_embeddings": (True,),
    "add_cross_attention": (False,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "quantization_config": (None,),
}
_MAX_WINDOW_LAYERS = 28
_ORIGINAL = "original_max_position_embeddings"
_SCALING = fields(RopeScaling)
_FULL, _SLIDING = "full_attention", "sliding_attention"


def decoder_fields(values: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """Return the fields of a TransformerConfig for the ``config.json`` of a decoder.

    ``others`` are further kinds that the caller supports, for the error.
    """
    kind, text = values.get("model_type"), values.get("text_config")
    for key, value in _experts({**values, **(text if isinstance(text, Mapping) else {})}):
        raise ConfigError(
            f"{key}: layers of ds_ext have no experts (got {value}). Use layers of transformers, as train_gpt.py "
            f"--hf-model does ({ANSWERS})."
        )
    if kind == "gpt2":
        return _gpt2_fields(values)
    if kind not in LLAMA_KINDS:
        *first_kinds, last_kind = map(json.dumps, ("gpt2", *others, *LLAMA_KINDS))
        kinds = f"{', '.join(first_kinds)} and {last_kind}"
        raise ConfigError(f"model_type: only {kinds} can be converted (got {json.dumps(kind)}).")
    return _llama_fields(kind, values)


def is_of_transformers(values: Mapping[str, Any]) -> bool:
    """Return whether a ``config.json`` is that of a decoder without experts that only transformers has layers for."""
    is_decoder = any(str(name).endswith("ForCausalLM") for name in values.get("architectures") or ())
    return is_decoder and values.get("model_type") not in ("gpt2", *LLAMA_KINDS) and not _experts(values)


def _experts(values: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the keys that speak of more than one expert."""
    return [(k, n) for k, n in values.items() if "experts" in k and isinstance(n, int) and n > 1]


def _gpt2_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    require_supported(values, _GPT2_SUPPORTED)
    return {
        "num_layers": integer(values, "n_layer"),
        "hidden_size": integer(values, "n_embd"),
        "num_attention_heads": integer(values, "n_head"),
        "seq_length": integer(values, "n_positions"),
        "vocab_size": integer(values, "vocab_size"),
        "ffn_hidden_size": integer(values, "n_inner", None),
        "hidden_dropout": number(values, "resid_pdrop", 0.1),
        "attention_dropout": number(values, "attn_pdrop", 0.1),
        "init_std": number(values, "initializer_range", 0.02),
    }


def _llama_fields(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    require_supported(values, {"hidden_act": ("silu", "swish"), "quantization_config": (None,)})
    heads = integer(values, "num_attention_heads")
    hidden = integer(values, "hidden_size")
    groups = integer(values, "num_key_value_heads", _GROUPS[kind]) or heads
    head_size = integer(values, "head_dim", _HEAD_SIZE.get(kind))
    window, window_layers = _window(kind, values)
    vocab_size, padding = integer(values, "vocab_size"), integer(values, "pad_token_id", None)
    return {
        "num_layers": integer(values, "num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": None if groups == heads else groups,
        "kv_channels": None if head_size is None or head_size * heads == hidden else head_size,
        "ffn_hidden_size": integer(values, "intermediate_size"),
        "vocab_size": vocab_size,
        "pad_token_id": None if padding is None else padding % vocab_size,  # torch counts -1 from the end
        "seq_length": integer(values, "max_position_embeddings"),
        "max_position_embeddings": integer(values, "max_position_embeddings"),
        "position_embedding_type": "rope",
        **_rope(values),
        "normalization": "RMSNorm",
        "layernorm_epsilon": number(values, "rms_norm_eps", 1e-6),
        "swiglu": True,
        "add_bias_linear": _has_biases(kind, values),
        "add_qkv_bias": kind == "qwen2",
        "qk_layernorm": kind == "qwen3",
        "untie_embeddings_and_output_weights": not _flag(values, "tie_word_embeddings"),
        "sliding_window": window,
        "sliding_window_layers": window_layers,
        "hidden_dropout": 0.0,
        "attention_dropout": number(values, "attention_dropout", 0.0),
        "init_std": number(values, "initializer_range", 0.02),
    }


def llama_json(config: TransformerConfig, end_of_text: int | None, dtype: str) -> dict[str, Any]:
    """Return the ``config.json`` of a model of the Llama family.

    ``end_of_text`` is the id of the end-of-text token; None: unknown.
    """
    kind = _kind(config)
    return {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        **common_json(config, end_of_text, dtype),
        **_biases(kind, config),
        **_windows(kind, config),
    }


def common_json(config: TransformerConfig, end_of_text: int | None, dtype: str) -> dict[str, Any]:
    """Return the keys that Llamas and mixtures made of their layers have."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.query_groups,
        "head_dim": config.head_size,
        "intermediate_size": config.ffn_size,
        "max_position_embeddings": config.positions,
        "hidden_act": "silu",
        "rms_norm_eps": config.layernorm_epsilon,
        "rope_parameters": _rope_parameters(config),
        "attention_dropout": config.attention_dropout,
        "initializer_range": config.init_std,
        "bos_token_id": None,
        "eos_token_id": end_of_text,
        "pad_token_id": config.pad_token_id,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "dtype": dtype,
    }


# --- from config.json ---


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rotary_base`` and ``rope_scaling`` from ``rope_parameters``, or from the older ``rope_scaling``."""
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    parameters = values.get(key) or {}
    if not isinstance(parameters, Mapping) or any(isinstance(v, Mapping) for v in parameters.values()):
        raise refused(key, parameters, "only an object of numbers can be converted")
    require_supported({**values, **parameters}, {"partial_rotary_factor": (1.0, None)})
    base = number(parameters, "rope_theta", number(values, "rope_theta", 10000.0))
    try:
        return {"rotary_base": base, "rope_scaling": _rope_scaling(values, parameters)}
    except (ConfigError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(f"{key}: {error}") from None


def _rope_scaling(values: Mapping[str, Any], parameters: Mapping[str, Any]) -> RopeScaling | None:
    """Return the scaling in ``parameters``, an object of ``values``; None without scaling."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return None
    scaling = {f.name: parameters[f.name] for f in _SCALING if parameters.get(f.name) is not None}
    require_supported(scaling, {"truncate": (True, False)})
    for name in scaling.keys() - {"rope_type", "truncate"}:
        number(scaling, name, 0.0)
    if kind in ("llama3", "yarn"):
        longest = integer(values, "max_position_embeddings")
        original = values.get(_ORIGINAL, scaling.get(_ORIGINAL, longest))
        scaling = {"factor": longest / original, **scaling, _ORIGINAL: original}
    return RopeScaling(**{"factor": 0.0, **scaling, "rope_type": kind})


def _has_biases(kind: str, values: Mapping[str, Any]) -> bool:
    if kind == "qwen3":
        require_supported(values, {"attention_bias": (False,)})
    if kind != "llama":
        return False
    attention, mlp = _flag(values, "attention_bias"), _flag(values, "mlp_bias")
    if attention != mlp:
        raise refused(
            "attention_bias", attention, f"only the value of mlp_bias, {json.dumps(mlp)}, can be converted"
        )
    return attention


def _window(kind: str, values: Mapping[str, Any]) -> tuple[int | None, tuple[int, ...] | None]:
    """Return ``sliding_window`` and ``sliding_window_layers``."""
    if kind == "llama":
        return None, None
    layers = integer(values, "num_hidden_layers")
    if kind == "mistral":
        types = values.get("layer_types")
        if types and types != [_SLIDING] * layers:
            # transformers' AutoModelForCausalLM builds a Ministral.
            raise refused("layer_types", types, f"a Mistral can have only {_SLIDING}")
        return integer(values, "sliding_window", _WINDOW), None
    window = integer(values, "sliding_window", _WINDOW) if _flag(values, "use_sliding_window") else None
    window_layers = _qwen_window_layers(values, layers)
    if window is None or not window_layers:
        return None, None
    return window, None if len(window_layers) == layers else window_layers


def _qwen_window_layers(values: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the numbers of the layers that would have a window, from ``layer_types`` or ``max_window_layers``."""
    types = values.get("layer_types")
    if types is None:
        first = integer(values, "max_window_layers", _MAX_WINDOW_LAYERS) or 0
        return tuple(range(first, layers))
    if not isinstance(types, list) or len(types) != layers or not {*types} <= {_FULL, _SLIDING}:
        raise refused("layer_types", types, f"must contain {layers} times {_FULL} or {_SLIDING}")
    return tuple(layer for layer, name in enumerate(types) if name == _SLIDING)


def _flag(values: Mapping[str, Any], key: str) -> bool:
    require_supported(values, {key: (False, True)})
    return bool(values.get(key, False))


# --- to config.json ---


def _kind(config: TransformerConfig) -> str:
    """Return the ``model_type`` of a model. Raises ConfigError if transformers has no equal model."""
    kind = "llama"
    if config.qk_layernorm:
        kind = "qwen3"
    elif config.add_qkv_bias and not config.add_bias_linear:
        kind = "qwen2"
    elif config.sliding_window is not None:
        kind = "mistral"
    needed = {
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "normalization": "RMSNorm",
        "swiglu": True,
        **({} if kind == "llama" else {"add_bias_linear": False}),
        **({"add_qkv_bias": False} if kind == "qwen3" else {}),
        **({"sliding_window_layers": None} if kind == "mistral" else {}),
    }
    for name, value in needed.items():
        if getattr(config, name) != value:
            raise ConfigError(
                f"{name}: {_CLASSES[kind]} of transformers has {json.dumps(value)} (got "
                f"{json.dumps(getattr(config, name))}). This model cannot be converted."
            )
    return kind


def _rope_parameters(config: TransformerConfig) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_theta": config.rotary_base, "rope_type": "default"}
    if config.rope_scaling is not None:
        values = asdict(config.rope_scaling)
        parameters |= {
            field.name: values[field.name] for field in _SCALING if values[field.name] != field.default
        }
    return parameters


def _biases(kind: str, config: TransformerConfig) -> dict[str, Any]:
    if kind == "llama":
        return {"attention_bias": config.add_bias_linear, "mlp_bias": config.add_bias_linear}
    return {"attention_bias": False} if kind == "qwen3" else {}


def _windows(kind: str, config: TransformerConfig) -> dict[str, Any]:
    if kind == "llama":
        return {}
    if kind == "mistral":
        return {"sliding_window": config.sliding_window}
    sliding = [config.window(layer) is not None for layer in range(config.num_layers)]
    first = sliding.index(True) if True in sliding else config.num_layers
    return {
        "use_sliding_window": True in sliding,
        "sliding_window": config.sliding_window,
        "max_window_layers": first,
        "layer_types": [_SLIDING if slides else _FULL for slides in sliding],
    }
