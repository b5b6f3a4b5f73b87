"""Sizes of ``--hf-model``, and flags that contradict them."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_ext.errors import ConfigError
from ds_ext.model.config import Experts, RopeScaling
from ds_ext.planner.training_sizes import TrainingSizes
from ds_ext.recipes.data.tokenizer import train_bpe
from ds_ext.recipes.models.gpt import GPTConfig
from ds_ext.recipes.models.hf_config import to_json, unseen_in_weights
from ds_ext.recipes.training.arguments import parse
from ds_ext.recipes.training.hf_model import folder_sizes

MODEL = GPTConfig(
    num_layers=6,
    hidden_size=48,
    num_attention_heads=6,
    num_query_groups=2,
    seq_length=64,
    vocab_size=700,
    ffn_hidden_size=100,
    max_position_embeddings=64,
    hidden_dropout=0.0,
    attention_dropout=0.25,
    init_std=0.03,
    position_embedding_type="rope",
    rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 32),
    normalization="RMSNorm",
    layernorm_epsilon=1e-6,
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "llama"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(to_json(MODEL)))
    train_bpe(["a text"], 300).save(path)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Any:
    def parsed(train: dict[str, Any], *flags: object) -> argparse.Namespace:
        path = tmp_path / "job.json"
        path.write_text(json.dumps({"train_batch_size": 8, "ds_ext": {"train": train}}))
        return parse("train_gpt.py", ["--deepspeed_config", str(path), *map(str, flags)])[0]

    return parsed


def test_sizes_come_from_the_folder(run: Any, folder: Path) -> None:
    """The flag overrides the sizes of the JSON; sequence length and explicit dropout stay free."""
    train = {"num_layers": 8, "hidden_dropout": 0.1, "seq_length": 32}
    args = run(train, "--hf-model", folder, "--attention-dropout", 0.5, "--num-layers", 6, "--swiglu")
    assert (args.num_layers, args.hidden_size, args.num_attention_heads) == (6, 48, 6)
    assert (args.ffn_hidden_size, args.vocab_size, args.max_position_embeddings) == (100, 700, 64)
    assert (args.seq_length, args.hidden_dropout, args.attention_dropout) == (32, 0.0, 0.5)
    assert (args.norm_epsilon, args.num_query_groups, args.disable_bias_linear) == (1e-6, 2, True)
    assert args.init_method_std == 0.03
    assert run({"hf_model": str(folder)}).seq_length == 64  # below the default of 128
    assert run({"hf_model": str(folder)}).tokenizer == str(folder)
    assert run({}, "--hf-model", folder, "--tokenizer", "other.json").tokenizer == "other.json"
    (folder / "tokenizer.json").rename(folder / "other.json")
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    with pytest.raises(ConfigError, match="--tokenizer"):
        run({}, "--hf-model", folder)


def test_folder_sizes_rebuild_the_config() -> None:
    sizes = {**folder_sizes(MODEL), "seq_length": 64, "vocab_size": 700}
    trained = {"attention_dropout": 0.25, "hidden_dropout": 0.0, "init_std": 0.03}
    assert unseen_in_weights(GPTConfig(**sizes)) | trained == unseen_in_weights(MODEL)


# JSON, flags, words in the error.
REFUSED: list[tuple[dict[str, Any], tuple[object, ...], tuple[str, ...]]] = [
    ({}, ("--num-layers", 8), ("--num-layers: ", "6", "8")),
    ({}, ("--ffn-hidden-size", 192), ("--ffn-hidden-size: ", "100", "192")),
    ({}, ("--rotary-base", 500000), ("--rotary-base: ", "10000", "500000")),
    ({}, ("--num-query-groups", 3), ("--num-query-groups: ", "2", "3")),
    ({}, ("--qk-layernorm",), ("--qk-layernorm: ", "False", "True")),
    ({}, ("--vocab-size", 300), ("--vocab-size: ", "700", "300")),
    ({}, ("--seq-length", 65), ("--seq-length: ", "64", "65")),
    ({"seq_length": 128}, (), ("seq_length", "64", "128")),
    ({}, ("--max-position-embeddings", 128), ("--max-position-embeddings: ", "64", "128")),
    ({}, ("--transformer-impl", "transformer_engine"), ("--transformer-impl: ", "transformer_engine")),
]


@pytest.mark.parametrize(("train", "flags", "words"), REFUSED)
def test_contradictions(
    run: Any, folder: Path, train: dict[str, Any], flags: tuple[object, ...], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refused:
        run(train, "--hf-model", folder, *flags)
    assert all(word in str(refused.value) for word in words), refused.value


def test_the_json_contradicts_itself(run: Any, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^train\.num_layers: .* has 6 \(got 8\)"):
        run({"hf_model": str(folder), "num_layers": 8})


def save_gemma(path: Path, **changes: Any) -> Path:
    from tests.decoder_models import save_decoder

    save_decoder("Gemma2", path, **changes)
    train_bpe(["a text"], 300).save(path)
    return path


def test_layers_of_transformers_train_other_decoders_and_lora(run: Any, folder: Path, tmp_path: Path) -> None:
    gemma = save_gemma(tmp_path / "gemma")
    args = run({"num_layers": 8}, "--hf-model", gemma)
    assert (args.transformer_impl, args.num_layers, args.hidden_size, args.vocab_size) == (
        "transformers",
        4,
        32,
        67,
    )
    assert (args.num_attention_heads, args.num_query_groups, args.kv_channels, args.ffn_hidden_size) == (
        4,
        2,
        8,
        48,
    )
    assert (args.swiglu, args.untie_embeddings_and_output_weights, args.seq_length) == (True, False, 32)
    assert run({}, "--hf-model", folder).transformer_impl == "local"
    lora = run({"hf_model": str(folder), "lora_rank": 4})
    assert (lora.transformer_impl, lora.lora_rank, lora.num_query_groups) == ("transformers", 4, 2)
    assert run({}, "--hf-model", folder, "--transformer-impl", "transformers").ffn_hidden_size == 100


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--transformer-impl", "local"), ("model_type: ", "gemma2")),
        (("--hidden-dropout", 0.1), ("--hidden-dropout: ", "0.1")),
        (("--num-layers", 8), ("--num-layers: ", "4", "8")),
        (("--seq-length", 33), ("--seq-length: ", "32", "33")),
    ],
)
def test_contradictions_of_other_decoders(
    run: Any, tmp_path: Path, flags: tuple[object, ...], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refused:
        run({}, "--hf-model", save_gemma(tmp_path / "gemma"), *flags)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"recompute": "selective"}, "recompute"),
        ({"recompute": "full", "recompute_interval": 2}, "recompute_interval"),
        ({"reset_position_ids": True}, "reset_position_ids"),
        ({"reset_attention_mask": True}, "reset_attention_mask"),
        ({"transformer_impl": "local", "lora_rank": 2}, "--lora-rank"),
    ],
)
def test_fields_that_layers_of_transformers_lack(changes: dict[str, Any], key: str) -> None:
    config = replace(MODEL, transformer_impl="transformers", lora_rank=2)
    with pytest.raises(ConfigError, match=f"^{key}: "):
        replace(config, **changes)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: .*got 3"):
        config.check_tensor_parallel(3)
    mixture = replace(config, experts=Experts(3, 1, 8))
    mixture.check_tensor_parallel(3)  # the plan of transformers decides, see ds_ext.hf.shards


def test_adapters_need_weights_only() -> None:
    """Frozen weights have no gradients and no optimizer states, and a backward without their gradients is shorter."""
    frozen = replace(MODEL, transformer_impl="transformers", lora_rank=2)
    sizes = TrainingSizes.of_model(frozen, precision="bf16")
    assert (sizes.bytes.weights, sizes.bytes.gradients, sizes.bytes.optimizer) == (2, 0, 0)
    assert frozen.flops_per_sample == MODEL.flops_per_sample * 2 / 3
