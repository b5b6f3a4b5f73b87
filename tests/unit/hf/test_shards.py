"""Refusals of tensor-parallel shards of decoders, and their rows of the vocabulary."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_ext
from ds_ext.errors import ConfigError
from ds_ext.hf.find import find_split
from ds_ext.hf.lora import Adapters
from ds_ext.hf.shards import (
    Entry,
    Shards,
    Vocabulary,
    check_shards,
    divide_embedding,
    divide_rows,
    vocabulary_rows,
)
from ds_ext.hf.weights import make_source
from ds_ext.tensor_parallel import TensorParallel, shard_dim
from tests.decoder_models import HEADS_OF_8, MODELS, MORE_MODELS, random_decoder, save_decoder

transformers: Any = pytest.importorskip("transformers")

SIZES: list[tuple[str, int, dict[str, Any]]] = [
    ("Llama", 2, {}),
    ("Llama", 4, {}),  # of 2 groups of keys and values
    ("Olmo2", 4, {}),  # whole outputs, whatever the groups
    ("Qwen3", 4, HEADS_OF_8),
]
REFUSED: list[tuple[str, int, dict[str, Any], str]] = [
    ("Llama", 3, {}, r"layers\.0\.self_attn\.q_proj \(got 4 heads\)"),
    ("Llama", 8, {}, r"q_proj \(got 4 heads\)"),  # but 2 groups would fit
    ("Llama", 2, {"intermediate_size": 49}, r"mlp\.gate_proj \(got 49 output features\)"),
    ("Llama", 2, {"attention_dropout": 0.1}, "attention_dropout 0.1"),
    ("GPTJ", 2, {"attn_pdrop": 0.1}, "attn_pdrop 0.1"),
    ("Mixtral", 4, {"num_local_experts": 6}, r"mlp\.experts \(got 6 experts\)"),
    ("Llama4Text", 2, MORE_MODELS["Llama4Text"], "packed_rowwise|moe_tp_experts"),
    ("StableLm", 2, {}, "no plan"),
]


@pytest.mark.parametrize(("name", "size", "changes"), SIZES)
def test_models_that_can_be_divided(name: str, size: int, changes: dict[str, Any]) -> None:
    source = make_source(random_decoder(name, **changes), None)
    check_shards(source, find_split(source), None, Vocabulary(), size, None)


@pytest.mark.parametrize(("name", "size", "changes", "problem"), REFUSED)
def test_what_cannot_be_divided_is_named(name: str, size: int, changes: dict[str, Any], problem: str) -> None:
    source = make_source(random_decoder(name, **changes), None)
    with pytest.raises(ConfigError, match=problem):
        check_shards(source, find_split(source), None, Vocabulary(), size, None)


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [("Phi", {"resid_pdrop": 0.1}, "resid_pdrop 0.1"), ("Llama", {}, "lora")],
)
def test_what_cannot_divide_tokens_is_named(name: str, changes: dict[str, Any], problem: str) -> None:
    """Residuals of the same places of every rank's tokens would be dropped; adapters read all tokens."""
    source = make_source(random_decoder(name, **changes), None)
    split, adapters = find_split(source), None
    if problem == "lora":
        peft: Any = pytest.importorskip("peft")
        lora = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
        adapters = Adapters(lora, source, split)
    check_shards(source, split, adapters, Vocabulary(), 2, None)
    with pytest.raises(ConfigError, match=problem):
        check_shards(source, split, adapters, Vocabulary(), 2, None, sequence_parallel=True)


def test_dropout_of_heads_that_a_decoder_lacks_may_stay() -> None:
    source = make_source(random_decoder("GPTNeoX"), None)
    assert source.config.classifier_dropout > 0
    check_shards(source, find_split(source), None, Vocabulary(), 2, None, sequence_parallel=True)


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ({"lora_dropout": 0.1}, "lora_dropout"),
        ({"use_dora": True}, "use_dora"),
        ({"target_modules": [], "target_parameters": ["q_proj.weight"]}, "ParamWrapper"),
        ({"modules_to_save": ["k_proj"]}, "k_proj"),
    ],
)
def test_adapters_that_need_whole_layers_are_refused(setting: dict[str, Any], problem: str) -> None:
    """The forward of the third kind does not call that of its linear layers."""
    peft: Any = pytest.importorskip("peft")
    source = make_source(random_decoder("Llama"), None)
    split = find_split(source)
    lora = peft.LoraConfig(**{"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **setting})
    with pytest.raises(ConfigError, match=problem):
        check_shards(source, split, Adapters(lora, source, split), Vocabulary(), 2, None)


def test_a_divided_model_is_not_divided_again() -> None:
    model = random_decoder("Llama")
    split, group = find_split(make_source(model, None)), object()
    entry = Entry(TensorParallel(0, 2, group))  # pyright: ignore[reportArgumentType]
    Shards(split.plan, split.name, entry).divide("model.layers.0", model.model.layers[0])
    with pytest.raises(ConfigError, match="shards"):
        ds_ext.from_transformers(model)


@pytest.mark.parametrize(
    ("arguments", "problem"), [({"lora_dropout": 0.5}, "lora_dropout"), ({"velora_config": {}}, "Velora")]
)
def test_adapters_of_a_model_in_memory_that_need_whole_layers(
    arguments: dict[str, Any], problem: str
) -> None:
    peft: Any = pytest.importorskip("peft")
    if "velora_config" in arguments and not hasattr(peft.LoraConfig(), "velora_config"):
        pytest.skip("this peft has none")
    lora = peft.LoraConfig(target_modules=["o_proj"], task_type="CAUSAL_LM", **arguments)
    model = peft.get_peft_model(random_decoder("Llama"), lora)
    source = make_source(model, None)
    entry = Entry(TensorParallel(0, 2, object()))  # pyright: ignore[reportArgumentType]
    split = find_split(source)
    with pytest.raises(ConfigError, match=problem):
        Shards(split.plan, split.name, entry).divide("model.layers.0", source.submodule("model.layers.0"))


def test_another_loss_function_gets_whole_logits() -> None:
    source = make_source(random_decoder("Llama"), None)
    layers, loss_fn = ds_ext.from_transformers(source.reference())
    check: Any = layers[0].check_shards
    vocabulary = loss_fn.vocabulary
    check(2, loss_fn, False)
    assert not vocabulary.is_whole
    check(2, lambda logits, labels: logits.sum(), False)
    assert vocabulary.is_whole


def test_optimizers_and_hooks_keep_their_parameters() -> None:
    model = random_decoder("Llama")
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    entry = Entry(TensorParallel(0, 2, object()))  # pyright: ignore[reportArgumentType]
    split = find_split(make_source(model, None))
    Shards(split.plan, split.name, entry).divide("model.layers.0", model.model.layers[0])
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert model.model.layers[0].mlp.up_proj.weight.shape[0] * 2 == model.config.intermediate_size


@pytest.mark.parametrize(("size", "shards", "parts"), [(67, 2, 1), (67, 4, 3), (64, 4, 2), (5, 4, 4)])
def test_every_row_of_a_table_has_one_rank(size: int, shards: int, parts: int) -> None:
    places = [
        vocabulary_rows(size, TensorParallel(rank, shards, object()), part, parts)  # pyright: ignore[reportArgumentType]
        for part in range(parts)
        for rank in range(shards)
    ]
    rows = [row for place in places for row in range(place.start, place.stop)]
    assert len({place.stop - place.start for place in places}) == 1
    assert rows == list(range(len(rows))) and len(rows) >= size


LARGE: dict[str, dict[str, Any]] = {
    "Llama": {  # 3 8B
        **{
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
        **{"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False},
    },
    "Qwen3": {  # 8B
        **{
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
        },
        **{"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False},
    },
    "Gemma3Text": {  # 12B
        **{
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
        },
        **{"num_key_value_heads": 8, "head_dim": 256, "vocab_size": 262208},
    },
}


@pytest.mark.parametrize("name", LARGE)
def test_a_rank_of_four_has_a_quarter_of_the_weights(name: str) -> None:
    """Without norms, which every rank has whole. Gradients and optimizer states have the shapes of the weights."""
    config = getattr(transformers, f"{name}Config")(**LARGE[name])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    whole = {parameter: parameter.numel() for parameter in model.parameters() if parameter.dim() > 1}
    tp = TensorParallel(3, 4, object())  # pyright: ignore[reportArgumentType]
    shards = Shards(model.tp_plan, type(config).__name__, Entry(tp))
    for index, layer in enumerate(model.model.layers):
        shards.divide(f"model.layers.{index}", layer)
    divide_embedding(model.model.embed_tokens, tp)
    if not config.tie_word_embeddings:
        divide_rows(model.lm_head.weight, tp)
    assert sum(whole.values()) > 7e9
    assert sum(parameter.numel() for parameter in whole) <= 0.251 * sum(whole.values())


# --- weights from a folder ---


@pytest.mark.parametrize("name", ["Llama", "GPTNeoX", "Gemma3Text", "Phi3"])
def test_a_rank_reads_only_its_rows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns are read whole, one weight at a time, and norms."""
    config = {**MODELS, **MORE_MODELS}[name]
    source: Any = make_source(save_decoder(name, tmp_path / name, **config), None)
    split, path = find_split(source), "model.layers.1" if name != "GPTNeoX" else "gpt_neox.layers.1"
    tp = TensorParallel(1, 2, object())  # pyright: ignore[reportArgumentType]
    divide = functools.partial(Shards(split.plan, split.name, Entry(tp)).divide, path)
    whole = source.submodule(path)
    divide(whole)
    read: list[str] = []
    read_whole = source._weights.read
    monkeypatch.setattr(source._weights, "read", lambda key: read.append(key) or read_whole(key))
    divided = source.divided(path, divide, tp)
    expected, found = dict(whole.named_parameters()), dict(divided.named_parameters())
    assert found.keys() == expected.keys()
    for key, parameter in found.items():
        assert torch.equal(parameter, expected[key]) and shard_dim(parameter) == shard_dim(expected[key]), key
        assert parameter.requires_grad
    rows = {f"{path}.{key}" for key, parameter in found.items() if shard_dim(parameter) == 0}
    assert rows and not rows & {*read}
