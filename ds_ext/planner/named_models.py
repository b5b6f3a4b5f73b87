"""Sizes of published models by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..errors import ScheduleError
from ..model.config import Experts, LatentAttention, TransformerConfig

# Fields that the models of the Llama family have in common.
LLAMA: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
    }
)


def _gpt(layers: int, hidden: int, heads: int, vocab: int = 50257, seq: int = 2048) -> TransformerConfig:
    return TransformerConfig(layers, hidden, heads, seq, vocab)


def _llama(
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    groups: int | None,
    vocab: int,
    seq: int,
    channels: int | None = None,
    base: float = 1e4,
) -> TransformerConfig:
    return TransformerConfig(
        layers,
        hidden,
        heads,
        seq,
        vocab,
        ffn_hidden_size=ffn,
        num_query_groups=groups,
        kv_channels=channels,
        rotary_base=base,
        untie_embeddings_and_output_weights=True,
        **LLAMA,
    )


def _qwen25(layers: int, hidden: int, heads: int, ffn: int, groups: int) -> TransformerConfig:
    return replace(_llama(layers, hidden, heads, ffn, groups, 152064, 8192, base=1e6), add_qkv_bias=True)


def _qwen3(layers: int, hidden: int, heads: int, ffn: int) -> TransformerConfig:
    model = _llama(layers, hidden, heads, ffn, 8, 151936, 8192, channels=128, base=1e6)
    return replace(model, qk_layernorm=True, layernorm_epsilon=1e-6)


def _mixture(
    layers: int,
    hidden: int,
    heads: int,
    groups: int,
    channels: int,
    vocab: int,
    experts: Experts,
    base: float = 1e6,
    **changes: Any,
) -> TransformerConfig:
    model = _llama(layers, hidden, heads, experts.width, groups, vocab, 8192, channels, base)
    return replace(model, experts=experts, **changes)


# GPT-2: Radford et al. 2019. GPT-3: arXiv 2005.14165, table 2.1, with the usual 16 heads for 1.3b and hidden size 5120
# for 13b. 10b: ZeRO-Offload (arXiv 2101.06840, table 2). 22b to 1t: arXiv 2205.05198, table 3. Llama 2: arXiv
# 2307.09288. Llama 3: arXiv 2407.21783, table 3. Mistral: arXiv 2310.06825, table 1. Qwen2.5: arXiv
# 2412.15115, table 1. Qwen3: arXiv 2505.09388, tables 1 and 2, and the folders' config.json. Mixtral: arXiv
# 2401.04088, table 1, and the config.json of 8x22b. gpt-oss: arXiv 2508.10925, table 1. DeepSeek-V3: arXiv 2412.19437,
# section 4.2, without the layer that predicts a second token.
MODELS: Mapping[str, TransformerConfig] = MappingProxyType(
    {
        "gpt-124m": _gpt(12, 768, 12, seq=1024),
        "gpt-355m": _gpt(24, 1024, 16, seq=1024),
        "gpt-774m": _gpt(36, 1280, 20, seq=1024),
        "gpt-1.5b": _gpt(48, 1600, 25, seq=1024),
        "gpt-1.3b": _gpt(24, 2048, 16),
        "gpt-2.7b": _gpt(32, 2560, 32),
        "gpt-6.7b": _gpt(32, 4096, 32),
        "gpt-10b": _gpt(50, 4096, 32, seq=1024),
        "gpt-13b": _gpt(40, 5120, 40),
        "gpt-22b": _gpt(48, 6144, 64, vocab=51200),
        "gpt-175b": _gpt(96, 12288, 96, vocab=51200),
        "gpt-530b": _gpt(105, 20480, 128, vocab=51200),
        "gpt-1t": _gpt(128, 25600, 160, vocab=51200),
        "llama-2-7b": _llama(32, 4096, 32, 11008, None, 32000, 4096),
        "llama-2-13b": _llama(40, 5120, 40, 13824, None, 32000, 4096),
        "llama-2-70b": _llama(80, 8192, 64, 28672, 8, 32000, 4096),
        "llama-3-8b": _llama(32, 4096, 32, 14336, 8, 128256, 8192, base=5e5),
        "llama-3-70b": _llama(80, 8192, 64, 28672, 8, 128256, 8192, base=5e5),
        "llama-3.1-405b": _llama(126, 16384, 128, 53248, 8, 128256, 8192, base=5e5),
        "mistral-7b": _llama(32, 4096, 32, 14336, 8, 32000, 8192),
        "qwen2.5-7b": _qwen25(28, 3584, 28, 18944, 4),
        "qwen2.5-72b": _qwen25(80, 8192, 64, 29568, 8),
        "qwen3-8b": _qwen3(36, 4096, 32, 12288),
        "qwen3-32b": _qwen3(64, 5120, 64, 25600),
        "mixtral-8x7b": _mixture(32, 4096, 32, 8, 128, 32000, Experts(8, 2, 14336)),
        "mixtral-8x22b": _mixture(56, 6144, 48, 8, 128, 32768, Experts(8, 2, 16384)),
        "qwen3-30b-a3b": _mixture(48, 2048, 32, 4, 128, 151936, Experts(128, 8, 768), qk_layernorm=True),
        "qwen3-235b-a22b": _mixture(94, 4096, 64, 4, 128, 151936, Experts(128, 8, 1536), qk_layernorm=True),
        "gpt-oss-20b": _mixture(
            24, 2880, 64, 8, 64, 201088, Experts(32, 4, 2880), 1.5e5, add_bias_linear=True
        ),
        "gpt-oss-120b": _mixture(
            36, 2880, 64, 8, 64, 201088, Experts(128, 4, 2880), 1.5e5, add_bias_linear=True
        ),
        "deepseek-v3": _mixture(
            *(61, 7168, 128, 128, 192, 129280),
            Experts(256, 8, 2048, shared_width=2048, dense_layers=3, fp32_router=True),
            1e4,
            ffn_hidden_size=18432,
            latent=LatentAttention(1536, 512, 128, 64, 128),
        ),
    }
)


# Names of published models with experts: sizes such as 8x7b and 30b-a3b, and families.
_EXPERTS = re.compile(r"mixtral|moe|\dx\d+b|\d+b-a\d|deepseek-(v[2-9]|r1$)|gpt-oss|dbrx|llama-4|kimi-k2")


def named_model(name: str) -> TransformerConfig:
    model = MODELS.get(name.lower())
    if model is None and _EXPERTS.search(name.lower()):
        raise ScheduleError(
            f"model: unknown name of a mixture of experts (got {name!r}). Use one of "
            f"{', '.join(key for key, model in MODELS.items() if model.experts)}, or a folder with config.json."
        )
    if model is None:
        near = difflib.get_close_matches(name.lower(), MODELS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ScheduleError(
            f"model: unknown name (got {name!r}).{hint} Use one of {', '.join(MODELS)}, or a folder with config.json."
        )
    return model
