"""Flags of the Llama family become the config of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_ext.errors import ConfigError
from ds_ext.model.config import RopeScaling, TransformerConfig
from ds_ext.recipes.models.bert import BertConfig
from ds_ext.recipes.models.gpt import GPTConfig
from ds_ext.recipes.training.arguments import parse
from ds_ext.recipes.training.script_flags import Model
from ds_ext.recipes.training.setup import model_fields


def fields(tmp_path: Path, *flags: str, model: Model = "gpt", **train: Any) -> dict[str, Any]:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"train_batch_size": 8, "ds_ext": {"train": train}}))
    args, job = parse(f"train_{model}.py", ["--deepspeed_config", str(path), *flags], model)
    return model_fields(args, job)


def test_without_flags_the_model_is_gpt2(tmp_path: Path) -> None:
    common: dict[str, Any] = {"vocab_size": 50, "recompute": "none"}  # the job plan decides the latter
    sizes = fields(tmp_path, "--num-layers", "2") | common
    assert GPTConfig(**sizes) == GPTConfig(2, 128, 4, 128, 50)
    assert BertConfig(**fields(tmp_path, model="bert") | common).num_layers == 8


def test_flags_and_keys_of_a_llama(tmp_path: Path) -> None:
    flags = (
        "--position-embedding-type rope --rotary-base 500000 --rotary-percent 0.5 --use-rope-scaling "
        "--rope-scaling-factor 32 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --group-query-attention "
        "--num-query-groups 2 --kv-channels 64 --disable-bias-linear --add-qkv-bias --qk-layernorm "
        "--untie-embeddings-and-output-weights --window-size 4095,0 --reset-position-ids --reset-attention-mask"
    )
    keys = {
        "position_embedding_type": "rope",
        "rotary_base": 500000,
        "rotary_percent": 0.5,
        "use_rope_scaling": True,
        "rope_scaling_factor": 32,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-6,
        "swiglu": True,
        "group_query_attention": True,
        "num_query_groups": 2,
        "kv_channels": 64,
        "disable_bias_linear": True,
        "add_qkv_bias": True,
        "qk_layernorm": True,
        "untie_embeddings_and_output_weights": True,
        "window_size": "4095,0",
        "reset_position_ids": True,
        "reset_attention_mask": True,
    }
    sizes = fields(tmp_path, *flags.split())
    assert sizes == fields(tmp_path, **keys)
    expected = {
        "position_embedding_type": "rope",
        "rotary_base": 500000.0,
        "rotary_percent": 0.5,
        "rope_scaling": RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "swiglu": True,
        "num_query_groups": 2,
        "kv_channels": 64,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "qk_layernorm": True,
        "untie_embeddings_and_output_weights": True,
        "sliding_window": 4096,
        "reset_position_ids": True,
        "reset_attention_mask": True,
    }
    assert {key: sizes[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ("--hidden-size 4096 --swiglu --ffn-hidden-size 11008", "ffn_hidden_size", 11008),
        ("--group-query-attention", "num_query_groups", 1),
        ("--window-size (7,0)", "sliding_window", 8),
    ],
)
def test_defaults_are_megatrons(tmp_path: Path, flags: str, field: str, value: int) -> None:
    assert fields(tmp_path, *flags.split())[field] == value


@pytest.mark.parametrize(("hidden", "width"), [(768, 2048), (4096, 10880), (16, 64)])
def test_the_inner_width_with_swiglu_is_megatrons(tmp_path: Path, hidden: int, width: int) -> None:
    """Rounded down to 64. The planner and a model built in Python have the same."""
    flags = ("--hidden-size", str(hidden), "--swiglu")
    sizes: dict[str, Any] = fields(tmp_path, *flags) | {"vocab_size": 50, "recompute": "none"}
    assert TransformerConfig(**sizes).ffn_size == width
    assert GPTConfig(2, hidden, 4, 8, 32, swiglu=True).ffn_size == width


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ("--num-query-groups 2", r"^--num-query-groups: .*2"),
        ("--window-size 4096", r"^--window-size: .*4096"),
        ("--window-size 7,1", r"^--window-size: .*7,1"),
    ],
)
def test_contradictions(tmp_path: Path, flags: str, pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        fields(tmp_path, *flags.split())


def test_bert_has_none_of_these_flags(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--swiglu"):
        fields(tmp_path, "--swiglu", model="bert")
    with pytest.raises(ConfigError, match=r"^train\.swiglu"):
        fields(tmp_path, model="bert", swiglu=True)
    with pytest.raises(ConfigError, match=r"^swiglu: .*True"):
        BertConfig(2, 16, 2, 8, 32, swiglu=True)
