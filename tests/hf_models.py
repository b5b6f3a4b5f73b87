"""Small random models of transformers, and comparison of their logits with those of ds_ext."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ext.model.config import RopeScaling
from ds_ext.recipes.models.bert import BertConfig
from ds_ext.recipes.models.gpt import GPTConfig
from ds_ext.tensor_parallel import DropoutClock, TensorParallel
from tests.bert_runs import BertChain, random_bert_batches
from tests.reference import Chain, random_batches

transformers: Any = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 12,
    "vocab_size": 83,
    "ffn_hidden_size": 80,
    "make_vocab_size_divisible_by": 8,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
GPT, BERT = GPTConfig(**SIZES), BertConfig(**SIZES)
MASKED_ONLY = BertConfig(**SIZES, order_classes=None)


_LLAMA: dict[str, Any] = {
    **SIZES,
    "max_position_embeddings": 12,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-6,
    "swiglu": True,
    "add_bias_linear": False,
}
# Model -> its config, class in transformers, and settings of that class beside the sizes. With tensor-parallel size 2,
# the ranks of Qwen2 use one group of keys and values together.
LLAMA_FAMILY: dict[str, tuple[GPTConfig, str, dict[str, Any]]] = {
    "llama2": (
        GPTConfig(**_LLAMA, untie_embeddings_and_output_weights=True),
        "LlamaForCausalLM",
        {},
    ),
    "llama3": (
        GPTConfig(
            **{**_LLAMA, "layernorm_epsilon": 1e-5},
            untie_embeddings_and_output_weights=True,
            num_query_groups=2,
            rotary_base=5e5,
            rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8),
        ),
        "LlamaForCausalLM",
        {
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_theta": 5e5,
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "llama_with_biases": (
        GPTConfig(
            **{**_LLAMA, "add_bias_linear": True},
            kv_channels=16,
            rope_scaling=RopeScaling("linear", 2.0),
        ),
        "LlamaForCausalLM",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0},
        },
    ),
    "mistral": (
        GPTConfig(**_LLAMA, untie_embeddings_and_output_weights=True, num_query_groups=2, sliding_window=5),
        "MistralForCausalLM",
        {"sliding_window": 5},
    ),
    "qwen2": (
        GPTConfig(
            **_LLAMA,
            add_qkv_bias=True,
            num_query_groups=1,
            rotary_base=1e6,
            sliding_window=4,
            sliding_window_layers=(1, 2),
        ),
        "Qwen2ForCausalLM",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
        },
    ),
    "qwen3": (
        GPTConfig(
            **_LLAMA,
            untie_embeddings_and_output_weights=True,
            qk_layernorm=True,
            num_query_groups=2,
            kv_channels=16,
            rope_scaling=RopeScaling("yarn", 2.0, original_max_position_embeddings=6),
        ),
        "Qwen3ForCausalLM",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 6,
            },
        },
    ),
}


def llama_model(name: str, **changes: Any) -> Any:
    """Return a model of LLAMA_FAMILY with transformers' initial weights."""
    config, kind, settings = LLAMA_FAMILY[name]
    hf_config = getattr(transformers, kind).config_class(
        **{
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.ffn_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.query_groups,
            "max_position_embeddings": config.positions,
            "bos_token_id": None,
            "eos_token_id": 0,
            **settings,
            **changes,
        }
    )
    return getattr(transformers, kind)(hf_config).eval()


def random_llama(name: str, **changes: Any) -> Any:
    """Return a model of LLAMA_FAMILY with no weight equal to zero or one."""
    return _randomized(llama_model(name, **changes))


def random_gpt2(**changes: Any) -> Any:
    """Return a GPT2LMHeadModel with the sizes of ``GPT`` and no weight equal to zero or one."""
    config = transformers.GPT2Config(
        **{
            "vocab_size": GPT.vocab_size,
            "n_positions": GPT.seq_length,
            "n_embd": GPT.hidden_size,
            "n_layer": GPT.num_layers,
            "n_head": GPT.num_attention_heads,
            "n_inner": GPT.ffn_hidden_size,
            "bos_token_id": 0,
            "eos_token_id": 0,
            **changes,
        }
    )
    return _randomized(transformers.GPT2LMHeadModel(config))


def random_bert(kind: str = "BertForPreTraining", **changes: Any) -> Any:
    """Return a BERT with the sizes of ``BERT``."""
    config = transformers.BertConfig(
        **{
            "vocab_size": BERT.vocab_size,
            "max_position_embeddings": BERT.seq_length,
            "hidden_size": BERT.hidden_size,
            "intermediate_size": BERT.ffn_size,
            "num_hidden_layers": BERT.num_layers,
            "num_attention_heads": BERT.num_attention_heads,
            **changes,
        }
    )
    return _randomized(getattr(transformers, kind)(config))


def _randomized(model: Any) -> Any:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


@torch.no_grad()
def logits_difference(config: GPTConfig | BertConfig, weights: dict[str, Tensor], hf_model: Any) -> float:
    """Return the largest difference between the logits of ds_ext's model and of ``hf_model``.

    Args:
        config: sizes of the model.
        weights: "layer.name" -> weight of ds_ext's model, without padding.
        hf_model: model of transformers.
    """
    kind: Any = BertChain if isinstance(config, BertConfig) else Chain
    model = kind(config, TensorParallel(), DropoutClock()).eval()
    parameters = model.parameters_by_layer()
    assert parameters.keys() == weights.keys()
    for name, parameter in parameters.items():
        parameter.zero_()
        parameter[: len(weights[name])].copy_(weights[name])  # the remaining rows are padding
    pairs = (
        _bert_logits(model, config, hf_model)
        if isinstance(config, BertConfig)
        else [(model(tokens := random_batches(config, 1, 1, 4)[0][0][0]), hf_model(tokens).logits)]
    )
    differences = []
    for logits, expected in pairs:
        assert expected.std() > 0.01
        differences.append(float((logits[..., : expected.size(-1)] - expected).abs().max()))
    return max(differences)


def _bert_logits(model: Any, config: BertConfig, hf_model: Any) -> list[tuple[Tensor, Tensor]]:
    (inputs, _), *_ = random_bert_batches(config, 1, 1, 4)[0]
    tokens_BS, types_BS, mask_BS = inputs
    expected = hf_model(input_ids=tokens_BS, token_type_ids=types_BS, attention_mask=mask_BS.long())
    outputs = model(inputs)
    if config.order_classes is None:
        return [(outputs[0], expected.logits)]
    return list(zip(outputs, (expected.prediction_logits, expected.seq_relationship_logits), strict=True))


def loaded(kind: str, folder: Path) -> Any:
    """Load a folder with ``kind.from_pretrained``, without missing or unexpected weights."""
    model, info = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()
