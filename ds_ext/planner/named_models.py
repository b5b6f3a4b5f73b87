"""Sizes of published models by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..errors import ScheduleError
from .memory import ModelSizes


def _gpt(layers: int, hidden: int, heads: int, vocab: int = 50257, seq: int = 2048) -> ModelSizes:
    return ModelSizes(layers, hidden, heads, vocab, seq)


def _llama(
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    groups: int,
    vocab: int,
    seq: int,
    channels: int | None = None,
) -> ModelSizes:
    return ModelSizes(
        layers,
        hidden,
        heads,
        vocab,
        seq,
        ffn=ffn,
        query_groups=groups,
        kv_channels=channels,
        swiglu=True,
        untied=True,
        rope=True,
    )


# GPT-2: Radford et al. 2019. GPT-3: arXiv 2005.14165, table 2.1, with the usual 16 heads for 1.3b and hidden size 5120
# for 13b. 10b: ZeRO-Offload (arXiv 2101.06840, table 2). 22b to 1t: arXiv 2205.05198, table 3. Llama 2: arXiv
# 2307.09288. Llama 3: arXiv 2407.21783, table 3. Mistral: arXiv 2310.06825, table 1. Qwen3: arXiv 2505.09388, table 1.
MODELS: Mapping[str, ModelSizes] = MappingProxyType(
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
        "llama-2-7b": _llama(32, 4096, 32, 11008, 32, 32000, 4096),
        "llama-2-70b": _llama(80, 8192, 64, 28672, 8, 32000, 4096),
        "llama-3-8b": _llama(32, 4096, 32, 14336, 8, 128256, 8192),
        "llama-3-70b": _llama(80, 8192, 64, 28672, 8, 128256, 8192),
        "mistral-7b": _llama(32, 4096, 32, 14336, 8, 32000, 8192),
        "qwen3-8b": _llama(36, 4096, 32, 12288, 8, 151936, 8192, channels=128),
        "qwen3-32b": _llama(64, 5120, 64, 25600, 8, 151936, 8192, channels=128),
    }
)


def model_sizes(name: str) -> ModelSizes:
    """Return the sizes of a model in ``MODELS``. Raises ScheduleError for an unknown name."""
    sizes = MODELS.get(name.lower())
    if sizes is None:
        raise ScheduleError(f"model: unknown name (got {name!r}). Use one of {', '.join(MODELS)}.")
    return sizes
