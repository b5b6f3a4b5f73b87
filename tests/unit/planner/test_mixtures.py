"""Sizes of mixtures of experts equal those of transformers' models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ds_ext.errors import ConfigError, ScheduleError
from ds_ext.model.config import Experts, LatentAttention, TransformerConfig
from ds_ext.model.hf_decoder import is_of_transformers
from ds_ext.model.mixture import decoder_fields_like_llama, experts_of
from ds_ext.pipe_schedules.placement import linear
from ds_ext.planner.named_models import MODELS
from ds_ext.planner.training_sizes import TrainingSizes

transformers: Any = pytest.importorskip("transformers")
QWEN3 = {
    **{"num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4},
    **{"head_dim": 128, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8},
    **{"moe_intermediate_size": 768, "tie_word_embeddings": False},
}
# Name, config, and elements of a layer that the planner leaves out: sinks, gates, norms of whole queries and keys.
CASES: list[tuple[str, Any, float]] = [
    ("mixtral-8x7b", transformers.MixtralConfig(sliding_window=None), 0),
    ("qwen3-30b-a3b", transformers.Qwen3MoeConfig(**QWEN3), 0),
    ("gpt-oss-120b", transformers.GptOssConfig(), 64),
    ("gpt-oss-20b", transformers.GptOssConfig(num_hidden_layers=24, num_local_experts=32), 64),
    ("", transformers.Qwen2MoeConfig(num_hidden_layers=4, mlp_only_layers=[1]), 2048 * 3 / 4),
    ("", transformers.Qwen3MoeConfig(**{**QWEN3, "num_hidden_layers": 4, "decoder_sparse_step": 2}), 0),
    ("", transformers.OlmoeConfig(num_hidden_layers=2), 4096),
    ("deepseek-v3", transformers.DeepseekV3Config(), 0),
    ("", transformers.DeepseekV3Config(q_lora_rank=None, num_hidden_layers=4, first_k_dense_replace=1), 0),
]


def sizes_of(model: TransformerConfig) -> TrainingSizes:
    return TrainingSizes.of_model(model)


@pytest.mark.parametrize(("name", "config", "missing"), CASES)
def test_parameters_are_those_of_transformers(name: str, config: Any, missing: float) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    total = sum(p.numel() for p in model.parameters()) - missing * config.num_hidden_layers
    inside = sum(p.numel() for key, p in model.named_parameters() if ".experts." in key)
    values = config.to_dict()
    experts = experts_of(values)
    assert experts is not None
    active = total - inside + inside * experts.per_token // experts.number
    sizes = sizes_of(TransformerConfig(**decoder_fields_like_llama(values, experts)))
    assert sizes.device_parameters(linear(1), 0) == pytest.approx(total, rel=1e-12)
    assert sizes.active_parameters == pytest.approx(active, rel=1e-12)
    if name:
        named = sizes_of(MODELS[name])
        assert (named.layer_parameters, named.experts) == (sizes.layer_parameters, experts)
        assert named.active_parameters == sizes.active_parameters


def test_tensor_parallelism_divides_the_experts() -> None:
    sizes = sizes_of(MODELS["mixtral-8x7b"])
    half = replace(sizes, tensor_parallel=2)
    whole = 2 * half.layer_parameters - sizes.layer_parameters  # on both ranks: norms and router
    assert whole == 2 * 4096 + 8 * 4096
    with pytest.raises(ScheduleError, match=r"experts 8 .*got 16"):
        replace(sizes, tensor_parallel=16)


def test_tensor_parallelism_does_not_divide_a_latent_attention() -> None:
    sizes = sizes_of(MODELS["deepseek-v3"])
    half, attention = replace(sizes, tensor_parallel=2), sizes.attention_work
    assert sizes.rank_flops == sizes.forward_flops
    replicated = 2 * sizes.seq_length * sizes.num_layers * attention.total
    assert 2 * half.rank_flops - sizes.rank_flops == pytest.approx(replicated)
    norms, router = 2 * 7168 + 1536 + 512, sizes.sparse_share * 256 * 7168
    both = 2 * half.layer_parameters - sizes.layer_parameters
    assert both == pytest.approx(attention.matrices + norms + router)


@pytest.mark.parametrize("numbers", [(-1, 8, 4, 4, 4), (8, 0, 4, 4, 4), (8, 8, 4, 0, 4)], ids=str)
def test_wrong_sizes_of_a_latent_attention(numbers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="kv_lora_rank: "):
        LatentAttention(*numbers)


@pytest.mark.parametrize(
    "numbers", [(4, 0, 8), (4, 5, 8), (4, 2, 0), (4, 2, 8, -1), (4, 2, 8, 0, -1)], ids=str
)
def test_wrong_numbers_of_experts(numbers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="experts: "):
        Experts(*numbers)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("family", ["Gemma3Text", "Phi3", "Olmo2", "Granite", "GPTNeoX", "Starcoder2"])
def test_sizes_of_other_decoders_are_close(family: str) -> None:
    """Norms and biases that a Llama lacks are not counted."""
    config = getattr(transformers, f"{family}Config")(
        **{"num_hidden_layers": 4, "hidden_size": 1024, "num_attention_heads": 8, "intermediate_size": 3072},
        **{"vocab_size": 32000, "pad_token_id": 0},
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    values = {**config.to_dict(), "architectures": [f"{family}ForCausalLM"]}
    assert is_of_transformers(values)
    sizes = sizes_of(TransformerConfig(**decoder_fields_like_llama(values, None)))
    total = sum(parameter.numel() for parameter in model.parameters())
    assert sizes.device_parameters(linear(1), 0) == pytest.approx(total, rel=5e-3)
