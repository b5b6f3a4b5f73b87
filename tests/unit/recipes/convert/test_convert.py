"""Conversion of Hugging Face models to checkpoints and back, bit by bit."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ext.__main__ import main
from ds_ext.engine.checkpoint.file import read_plain, write_plain
from ds_ext.engine.checkpoint.folder import check_contents, open_checkpoint
from ds_ext.engine.checkpoint.lock import FolderLock
from ds_ext.engine.checkpoint.save import STATE_FILE
from ds_ext.errors import ConfigError
from ds_ext.hf.folder import ModelFolder
from ds_ext.model.config import RopeScaling
from ds_ext.recipes.convert.hf_model import HuggingFaceModel
from ds_ext.recipes.convert.to_hf import _make_config
from ds_ext.recipes.convert.tokenizer_files import find_generation, origin_of
from ds_ext.recipes.data.tokenizer import load_tokenizer, train_bpe
from ds_ext.recipes.data.tokenizer_base import Tokenizer
from ds_ext.recipes.data.wordpiece import train_wordpiece
from ds_ext.recipes.models.bert import BertConfig
from ds_ext.recipes.models.gpt import GPTConfig
from ds_ext.recipes.models.hf_config import from_json, to_json
from ds_ext.recipes.training.checkpoint_fit import check_load
from tests.chat_folders import write_tokenizer
from tests.hf_models import (
    BERT,
    GPT,
    LLAMA_FAMILY,
    MASKED_ONLY,
    llama_model,
    loaded,
    logits_difference,
    random_bert,
    random_gpt2,
    random_llama,
)
from tests.ranks import fork_server

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

TEXT = ["the pipe takes a batch and hands it on until all is through. " * 9, "Another one, here: don't!"]
KINDS: dict[str, tuple[GPTConfig | BertConfig, Callable[[], Any]]] = {
    "GPT2LMHeadModel": (GPT, random_gpt2),
    "BertForPreTraining": (BERT, random_bert),
    "BertForMaskedLM": (MASKED_ONLY, lambda: random_bert("BertForMaskedLM")),
}


def convert(*words: object) -> None:
    assert main(["convert", *map(str, words)]) == 0


def layers(folder: Path) -> dict[str, Tensor]:
    """Return "layer.name" -> weight of a checkpoint of one rank."""
    weights = {}
    for path in sorted(folder.glob("*/layer_*")):
        weights |= {f"{int(path.name[6:8])}.{key}": value for key, value in read_plain(path).items()}
    return weights


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", LLAMA_FAMILY)
def test_llama_family_bit_by_bit(name: str, tmp_path: Path) -> None:
    """Convert fp32 weights, and weights in bf16 in several files, to a checkpoint and back."""
    config, kind, _ = LLAMA_FAMILY[name]
    hf_model = random_llama(name)
    source, checkpoint, back, half = (tmp_path / part for part in ("source", "checkpoint", "back", "half"))
    hf_model.save_pretrained(source)
    values = json.loads((source / "config.json").read_text())
    assert from_json(values, []) == dataclasses.replace(config, make_vocab_size_divisible_by=128)
    convert(source, "--from", "hf", checkpoint)
    check_contents(*open_checkpoint(checkpoint))
    weights = layers(checkpoint)
    assert logits_difference(config, weights, hf_model) < 1e-5
    for suffix in (".bin", ".idx"):
        (tmp_path / f"data{suffix}").touch()
    flags = argparse.Namespace(load=str(checkpoint), data_path=[str(tmp_path / "data")])
    check_load(flags, HuggingFaceModel(source).config)
    with pytest.raises(ConfigError, match=r"rotary_base .*, here 123"):
        check_load(flags, dataclasses.replace(config, rotary_base=123.0))

    convert(checkpoint, "--to", "hf", back)
    assert same(*(safetensors.load_file(folder / "model.safetensors") for folder in (source, back)))
    after = json.loads((back / "config.json").read_text())
    assert (after["model_type"], from_json(after, [])) == (values["model_type"], from_json(values, []))
    assert logits_difference(config, weights, loaded(kind, back)) < 1e-5

    hf_model.bfloat16().save_pretrained(half, max_shard_size="50KB")
    assert len(list(half.glob("model-*.safetensors"))) > 1
    convert(half, "--from", "hf", tmp_path / "half_checkpoint")
    for dtype in ("bfloat16", "float32"):
        convert(tmp_path / "half_checkpoint", "--to", "hf", tmp_path / dtype, "--dtype", dtype)
        written = safetensors.load_file(tmp_path / dtype / "model.safetensors")
        expected = {
            key: value.to(getattr(torch, dtype))
            for path in half.glob("model-*.safetensors")
            for key, value in safetensors.load_file(path).items()
        }
        assert same(written, expected) and {value.dtype for value in written.values()} == {
            getattr(torch, dtype)
        }


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Model, changed values of its config.json, expected fields.
READ: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama2", {"rope_parameters": None, "rope_theta": 5e5}, {"rotary_base": 5e5, "rope_scaling": None}),
    ("llama2", {"rope_parameters": None, "rope_scaling": None}, {"rotary_base": 1e4, "rope_scaling": None}),
    (
        "llama2",
        {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE},
        {"rotary_base": 5e5, "rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)},
    ),
    (
        "llama2",
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rotary_base": 1e4, "rope_scaling": RopeScaling("linear", 4.0)},
    ),
    (
        "qwen3",
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}},
        {"rotary_base": 1e6, "rope_scaling": RopeScaling("yarn", 4.0, original_max_position_embeddings=12)},
    ),
    (
        "llama2",
        {"head_dim": None, "num_key_value_heads": None},
        {"kv_channels": None, "num_query_groups": None},
    ),
    ("llama2", {"head_dim": 8}, {"kv_channels": None}),
    ("mistral", {"sliding_window": None}, {"sliding_window": None}),
    ("qwen2", {"use_sliding_window": False}, {"sliding_window": None, "sliding_window_layers": None}),
    (
        "qwen2",
        {"layer_types": None, "max_window_layers": 2},
        {"sliding_window": 4, "sliding_window_layers": (2,)},
    ),
    ("qwen2", {"layer_types": None, "max_window_layers": 0}, {"sliding_window_layers": None}),
    ("qwen2", {"layer_types": None, "max_window_layers": 3}, {"sliding_window": None}),
]


@pytest.mark.parametrize(("name", "changes", "expected"), READ)
def test_spellings_of_config_json(name: str, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    values = llama_model(name).config.to_dict() | changes
    config = from_json(values, [])
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama2", {"hidden_act": "gelu"}, ("hidden_act: ", '"silu"', '"gelu"')),
        ("llama2", {"attention_bias": True}, ("attention_bias: ", "mlp_bias", "true")),
        ("llama2", {"mlp_bias": True}, ("attention_bias: ", "true", "false")),
        ("qwen3", {"attention_bias": True}, ("attention_bias: ", "false", "true")),
        ("llama2", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ("rope_scaling: ", "dynamic")),
        (
            "llama2",
            {"rope_scaling": {"type": "longrope", "long_factor": [1]}},
            ("rope_scaling: ", "longrope"),
        ),
        ("llama2", {"rope_scaling": {"type": "linear"}}, ("rope_scaling: ", "factor")),
        (
            "llama2",
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": "1"}},
            ("rope_scaling: ", "attention_factor", '"1"'),
        ),
        (
            "llama2",
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_slow": 0}},
            ("rope_scaling: ", "beta_slow", "0"),
        ),
        ("llama2", {"rope_parameters": {"full_attention": {"rope_theta": 1}}}, ("rope_parameters: ",)),
        ("llama2", {"partial_rotary_factor": 0.5}, ("partial_rotary_factor: ", "1.0", "0.5")),
        ("llama2", {"rms_norm_eps": "1e-5"}, ("rms_norm_eps: ", '"1e-5"')),
        ("llama2", {"vocab_size": None}, ("vocab_size: ", "null")),
        ("llama2", {"num_key_value_heads": 3}, ("num_query_groups: ", "3")),
        ("llama2", {"quantization_config": {"bits": 4}}, ("quantization_config: ", '{"bits": 4}')),
        ("mistral", {"layer_types": ["full_attention"] * 3}, ("layer_types: ", "full_attention")),
        ("qwen2", {"layer_types": ["full_attention"]}, ("layer_types: ", "3")),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, ("layer_types: ", "chunked_attention")),
    ],
)
def test_unsupported_settings(name: str, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    values = llama_model(name).config.to_dict() | changes
    with pytest.raises(ConfigError) as refused:
        from_json(values, [])
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    "changes", [{"rotary_percent": 0.5}, {"swiglu": False}, {"normalization": "LayerNorm"}]
)
def test_models_without_a_class_in_transformers(changes: dict[str, Any]) -> None:
    config = dataclasses.replace(LLAMA_FAMILY["llama2"][0], **changes)
    with pytest.raises(ConfigError, match=f"^{next(iter(changes))}: "):
        to_json(config)


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_bit_by_bit(kind: str, tmp_path: Path) -> None:
    config, make = KINDS[kind]
    hf_model = make()
    source, checkpoint, back, again = (tmp_path / name for name in ("source", "checkpoint", "back", "again"))
    hf_model.save_pretrained(source)
    convert(source, "--from", "hf", checkpoint)
    check_contents(*open_checkpoint(checkpoint))
    weights = layers(checkpoint)
    assert logits_difference(config, weights, hf_model) < 1e-5

    convert(checkpoint, "--to", "hf", back)
    assert same(*(safetensors.load_file(folder / "model.safetensors") for folder in (source, back)))
    assert logits_difference(config, weights, loaded(kind, back)) < 1e-5
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, back))
    values = {key: value for key, value in after.items() if not key.endswith("os_token_id")}
    assert values == {key: before.get(key, after[key]) for key in values}

    # Convert one checkpoint of a folder to several files.
    several = tmp_path / "several"
    convert(checkpoint / "step_0", "--to", "hf", several, "--max-shard-gb", 30e-6)
    shards = sorted(several.glob("model-*.safetensors"))
    assert len(shards) > 3 and shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    assert all(path.stat().st_size < 33e3 for path in shards)
    assert same(hf_model.state_dict(), loaded(kind, several).state_dict())
    convert(several, "--from", "hf", again)
    assert same(layers(again), weights)


def test_other_spellings_and_precisions(tmp_path: Path) -> None:
    """Convert files like those of GPT-2's and BERT's authors (no prefix, masks, gamma and beta) in half precision."""
    first, second = tmp_path / "gpt2", tmp_path / "bert"
    for folder, model in ((first, random_gpt2()), (second, random_bert())):
        model.half().save_pretrained(folder)
        path = folder / "model.safetensors"
        tensors = safetensors.load_file(path)
        old_names = {
            name.removeprefix("transformer.")
            .replace("LayerNorm.weight", "LayerNorm.gamma")
            .replace("LayerNorm.bias", "LayerNorm.beta"): value
            for name, value in tensors.items()
        }
        if folder is first:
            old_names |= {f"h.{i}.attn.bias": torch.ones(1, 1, 12, 12) for i in range(3)}
            old_names["lm_head.weight"] = old_names["wte.weight"].clone()
        else:
            old_names["bert.embeddings.position_ids"] = torch.arange(12)
        safetensors.save_file(old_names, path)
        convert(folder, "--from", "hf", tmp_path / f"{folder.name}_checkpoint")
        convert(tmp_path / f"{folder.name}_checkpoint", "--to", "hf", tmp_path / f"{folder.name}_back")
        back = safetensors.load_file(tmp_path / f"{folder.name}_back" / "model.safetensors")
        assert same(back, {name: value.float() for name, value in tensors.items()})


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("GPT2LMHeadModel", lambda: train_bpe(TEXT, 300)),
        ("BertForPreTraining", lambda: train_wordpiece(TEXT, 60)),
    ],
)
def test_the_tokenizer_is_copied(
    kind: str, make: Callable[[], Tokenizer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, other = make(), train_bpe(["some other text"], 290)
    source, checkpoint, back = (tmp_path / name for name in ("source", "checkpoint", "back"))
    model = (random_gpt2 if kind == "GPT2LMHeadModel" else random_bert)(vocab_size=tokenizer.vocab_size)
    model.save_pretrained(source)
    tokenizer.save(source)
    convert(source, "--from", "hf", checkpoint)
    script = "train_gpt.py" if kind == "GPT2LMHeadModel" else "train_bert.py"
    output = " ".join(capsys.readouterr().out.replace("\\\n", "").split())
    assert f"{script} --deepspeed_config JSON --load {checkpoint} --num-layers 3" in output
    assert "note:" not in output and f"prepare --tokenizer {source}" in output
    state = read_plain(checkpoint / "step_0" / "mp_rank_00_model_states.pt")
    assert state["tokenizer"] == tokenizer.fingerprint

    convert(checkpoint, "--to", "hf", tmp_path / "without")
    assert load_tokenizer(tmp_path / "without").fingerprint == tokenizer.fingerprint
    assert "--tokenizer" not in capsys.readouterr().out
    source.rename(tmp_path / "moved")
    convert(checkpoint, "--to", "hf", tmp_path / "after_a_move")
    assert "--tokenizer" in capsys.readouterr().out
    (tmp_path / "moved").rename(source)
    (tmp_path / "other").mkdir()
    other.save(tmp_path / "other")
    words = ["convert", str(checkpoint), "--to", "hf", str(back), "--tokenizer", str(tmp_path / "other")]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --tokenizer: ")
    assert tokenizer.fingerprint in error and other.fingerprint in error
    (source / "chat_template.jinja").write_text("{{ messages }}")
    convert(checkpoint, "--to", "hf", back, "--tokenizer", source)
    assert (back / "chat_template.jinja").read_text() == "{{ messages }}"
    assert load_tokenizer(back).fingerprint == tokenizer.fingerprint
    text = "the pipe takes Another batch"
    loaded_again = transformers.AutoTokenizer.from_pretrained(back)
    assert loaded_again(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)
    if kind == "GPT2LMHeadModel":
        assert json.loads((back / "config.json").read_text())["eos_token_id"] == tokenizer.eod_id


# Model, changed values of its config.json, values in the error.
REFUSED: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("gpt2", {"model_type": "gemma"}, ("model_type: ", '"gpt2"', '"bert"', '"gemma"')),
    ("gpt2", {"activation_function": "gelu"}, ("activation_function: ", '"gelu_new"', '"gelu"')),
    ("gpt2", {"layer_norm_epsilon": 1e-6}, ("layer_norm_epsilon: ", "1e-05", "1e-06")),
    ("gpt2", {"tie_word_embeddings": False}, ("tie_word_embeddings: ", "true", "false")),
    ("gpt2", {"add_cross_attention": True}, ("add_cross_attention: ", "false", "true")),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ("scale_attn_by_inverse_layer_idx: ", "true")),
    ("gpt2", {"quantization_config": {"bits": 4}}, ("quantization_config: ", "null", '{"bits": 4}')),
    ("gpt2", {"n_head": "4"}, ("n_head: ", '"4"')),
    ("gpt2", {"attn_pdrop": None}, ("attn_pdrop: ", "null")),
    ("gpt2", {"n_head": 5}, ("hidden_size: ", "5")),
    ("gpt2", {"n_inner": 64}, ("transformer.h.0.mlp.c_fc.weight: ", "32 x 64", "got 32 x 80")),
    ("gpt2", {"n_layer": 4}, ("transformer.h.3.ln_1.weight: ", "got missing")),
    ("gpt2", {"n_layer": 2}, ("transformer.h.2.attn.c_attn.bias: ", "got 96")),
    ("bert", {"hidden_act": "gelu_new"}, ("hidden_act: ", '"gelu"', '"gelu_new"')),
    ("bert", {"layer_norm_eps": 1e-5}, ("layer_norm_eps: ", "1e-12", "1e-05")),
    ("bert", {"is_decoder": True}, ("is_decoder: ", "false", "true")),
    ("bert", {"position_embedding_type": "relative_key"}, ("position_embedding_type: ", '"relative_key"')),
    ("bert", {"vocab_size": 84}, ("word_embeddings.weight: ", "84 x 32", "got 83 x 32")),
]


def test_unsupported_models_and_damaged_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = {"gpt2": tmp_path / "gpt2", "bert": tmp_path / "bert"}
    random_gpt2().save_pretrained(folders["gpt2"])
    random_bert().save_pretrained(folders["bert"])
    checkpoint = tmp_path / "checkpoint"
    capsys.readouterr()

    def refused(values: tuple[object, ...], *words: object) -> None:
        assert main(["convert", *map(str, words)]) == 2
        output, error = capsys.readouterr()
        assert not output and error.count("\n") == 1
        assert all(str(value) in error for value in values), error

    for kind, changes, values in REFUSED:
        path = folders[kind] / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | changes))
        refused(values, folders[kind], "--from", "hf", checkpoint)
        path.write_text(json.dumps(config))
    assert not checkpoint.exists()

    gpt2 = folders["gpt2"]
    weights = gpt2 / "model.safetensors"
    data = weights.read_bytes()
    tensors = safetensors.load_file(weights)
    safetensors.save_file(tensors | {"transformer.wte.weight": torch.ones(83, 32).to(torch.int8)}, weights)
    refused(("transformer.wte.weight: ", "I8"), gpt2, "--from", "hf", checkpoint)
    weights.write_bytes(data[:100])
    refused((f"{weights}: ",), gpt2, "--from", "hf", checkpoint)
    weights.rename(gpt2 / "pytorch_model.bin")
    refused((f"{gpt2}: ", "pytorch_model.bin", "save_pretrained"), gpt2, "--from", "hf", checkpoint)
    refused(("config.json: ", "save_pretrained"), tmp_path, "--from", "hf", checkpoint)

    convert(folders["bert"], "--from", "hf", checkpoint)
    capsys.readouterr()
    refused(("OUTPUT: ", checkpoint), folders["bert"], "--from", "hf", checkpoint)
    back = tmp_path / "back"
    refused(("SOURCE: ", tmp_path), tmp_path, "--to", "hf", back)
    heads = ("--num-attention-heads", 8)
    refused((f"{heads[0]}: ", "4", "8"), checkpoint, "--to", "hf", back, *heads)
    refused(("OUTPUT: ", checkpoint), checkpoint, "--to", "hf", checkpoint)
    refused(("--tokenizer: ",), folders["bert"], "--from", "hf", back, "--tokenizer", tmp_path)
    layer = checkpoint / "step_0" / "layer_03-model_states.pt"
    saved = layer.read_bytes()
    layer.write_bytes(saved[:-200] + bytes(100) + saved[-100:])
    refused((layer,), checkpoint, "--to", "hf", back)
    assert not back.exists() and not list(tmp_path.glob(".back*"))


def hold(folder: Path, pipe: Connection) -> None:
    """Lock a folder as a job that trains, until a message arrives."""
    FolderLock(folder, "first").take()
    pipe.send(os.getpid())
    pipe.recv()


def test_the_folder_of_a_running_job_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random_gpt2().save_pretrained(tmp_path / "gpt2")
    ours, theirs = fork_server().Pipe()
    job = fork_server().Process(target=hold, args=(tmp_path / "saved", theirs))
    job.start()
    process = ours.recv()
    words = ["convert", str(tmp_path / "gpt2"), "--from", "hf", str(tmp_path / "saved")]
    assert main(words) == 2 and f"process {process} on host " in capsys.readouterr().err
    ours.send(None)
    job.join()
    assert main(words) == 0


@pytest.mark.parametrize("make", [random_gpt2, random_bert, lambda: random_llama("qwen2")])
def test_tied_weights_must_be_equal(make: Callable[[], Any], tmp_path: Path) -> None:
    """Load a copy of a tied weight if it is equal; transformers does not tie weights that differ."""
    hf_model = make()
    hf_model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.load_file(path)
    head = (
        "cls.predictions.decoder.weight"
        if isinstance(hf_model, transformers.BertForPreTraining)
        else "lm_head.weight"
    )
    weight = hf_model.get_output_embeddings().weight.detach()
    safetensors.save_file(tensors | {head: weight.clone()}, path)
    HuggingFaceModel(tmp_path)
    safetensors.save_file(tensors | {head: weight * 2}, path)
    with pytest.raises(ConfigError, match=f"^{head}: "):
        HuggingFaceModel(tmp_path)


@pytest.mark.parametrize("inside", [True, False])
def test_an_index_names_files_of_its_folder_only(tmp_path: Path, inside: bool) -> None:
    folder, tensors = tmp_path / "model", {"a": torch.ones(2)}
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    safetensors.save_file(tensors, (folder if inside else tmp_path) / "part.safetensors")
    for file in (
        ["part.safetensors"] if inside else ["../part.safetensors", str(tmp_path / "part.safetensors")]
    ):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
        if inside:
            assert torch.equal(ModelFolder(folder).read("a"), tensors["a"])
            continue
        with pytest.raises(ConfigError, match=r"part\.safetensors"):
            ModelFolder(folder)


def test_a_single_file_comes_before_an_index(tmp_path: Path) -> None:
    """A folder with both, e.g. of two saved models, loads as in transformers."""
    random_llama("llama2").save_pretrained(tmp_path, max_shard_size="50KB")
    names = HuggingFaceModel(tmp_path).folder.names
    state = {name: value + 1 for name, value in loaded("LlamaForCausalLM", tmp_path).state_dict().items()}
    safetensors.save_file(state, tmp_path / "model.safetensors")
    expected = loaded("LlamaForCausalLM", tmp_path).state_dict()
    folder = HuggingFaceModel(tmp_path).folder
    assert same({name: folder.read(name) for name in names}, expected) and same(expected, state)


@pytest.mark.parametrize(
    "change", [{"data_offsets": [2, 128]}, {"dtype": "F64"}, {"shape": [16]}, {"shape": None}]
)
def test_headers_that_contradict_the_data(change: dict[str, Any], tmp_path: Path) -> None:
    """Bytes, dtype and shape of a tensor must agree, as in the package safetensors."""
    random_llama("llama2").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"] |= change
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(ConfigError, match=r"model\.safetensors: "):
        HuggingFaceModel(tmp_path)


def test_checkpoints_of_other_models_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ds_ext.engine.checkpoint.folder import publish, start_writing

    written = start_writing(tmp_path, "own")
    files = {"mp_rank_00_model_states.pt": write_plain(written / "mp_rank_00_model_states.pt", {})}
    record = {"shape": [4, 4], "shard": [4, 4], "dim": None, "layer": 0, "key": "linear.weight"}
    publish(written, "own", {"job": {}, "files": files, "parameters": {"0.linear.weight": record}})
    assert main(["convert", str(tmp_path), "--to", "hf", str(tmp_path / "hf")]) == 2
    error = capsys.readouterr().err
    assert "own: " in error and "0.linear.weight" in error


@pytest.mark.parametrize("name", ["llama2", "llama3"])
def test_rope_needs_the_settings_that_weights_do_not_show(name: str, tmp_path: Path) -> None:
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    random_llama(name).save_pretrained(source)
    convert(source, "--from", "hf", checkpoint)
    folder, manifest = open_checkpoint(checkpoint)
    shapes = {f"{r['layer']}.{r['key']}": tuple(r["shape"]) for r in manifest["parameters"].values()}
    state = read_plain(folder / STATE_FILE)
    assert _make_config(folder, shapes, state, None).position_embedding_type == "rope"
    del state["model"]
    with pytest.raises(ConfigError, match='"model"') as caught:
        _make_config(folder, shapes, state, 4)
    assert str(folder) in str(caught.value) and "0.word_embeddings.weight" not in str(caught.value)


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


GENERATION = {
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": 0,
    "do_sample": True,
    "temperature": 0.6,
}


@pytest.mark.parametrize("name", LLAMA_FAMILY)
def test_settings_of_generation_return(name: str, tmp_path: Path) -> None:
    source, checkpoint, back = (tmp_path / part for part in ("source", "checkpoint", "back"))
    model = random_llama(name)
    model.generation_config = transformers.GenerationConfig(**GENERATION, top_p=0.9)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config, key, GENERATION[key])
    model.save_pretrained(source)
    write_tokenizer(source, "{{ messages }}")
    for file in ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja"):
        if not (source / file).exists():
            (source / file).write_text("{}")
    convert(source, "--from", "hf", checkpoint)
    convert(checkpoint, "--to", "hf", back)
    for file in sorted(path.name for path in source.iterdir()):
        if file.endswith((".safetensors", "config.json", "tokenizer.json")):
            continue
        assert (back / file).read_bytes() == (source / file).read_bytes(), file
    before, after = (transformers.AutoConfig.from_pretrained(path).to_dict() for path in (source, back))
    # The last two follow from the sizes, or have no effect without layers of other kinds.
    ignored = {"_name_or_path", "transformers_version", "head_dim", "max_window_layers"}
    assert {k: v for k, v in after.items() if k not in ignored} == {
        k: v for k, v in before.items() if k not in ignored
    }
    before, after = (transformers.GenerationConfig.from_pretrained(path).to_dict() for path in (source, back))
    assert after == before and after["eos_token_id"] == [2, 3]
    first, second = (transformers.AutoTokenizer.from_pretrained(path) for path in (source, back))
    assert first.special_tokens_map == second.special_tokens_map
    assert first.chat_template == second.chat_template
    assert first.get_vocab() == second.get_vocab()


def test_settings_of_generation_of_a_tokenizer(tmp_path: Path) -> None:
    """A model that began with random weights has those of its tokenizer."""
    folder = write_tokenizer(tmp_path / "tokenizer", "{{ messages }}")
    declared = read(folder, "tokenizer_config.json") | {"bos_token": {"content": "<s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(declared))
    tokenizer: Any = load_tokenizer(folder)
    ids = {"bos_token_id": tokenizer.vocab["<s>"]}
    assert find_generation({}, (tokenizer, folder)) == {"config.json": ids, "generation_config.json": None}
    assert find_generation({}, None) == {"config.json": {}, "generation_config.json": None}
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, "eos_token_id": [1, 2]}))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    expected = {"config.json": {"eos_token_id": [1, 2]}, "generation_config.json": GENERATION}
    assert find_generation({}, (tokenizer, folder)) == expected == origin_of(folder, None)["generation"]
    assert find_generation({"generation": {"config.json": {}}}, (tokenizer, folder)) == {"config.json": {}}
