"""`python -m ds_ext convert`: models of transformers become checkpoints and come back bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ext.__main__ import main
from ds_ext.data.tokenizer import load_tokenizer, train_bpe
from ds_ext.data.tokenizer_base import Tokenizer
from ds_ext.data.wordpiece import train_wordpiece
from ds_ext.engine.checkpoint.file import read_plain, write_plain
from ds_ext.engine.checkpoint.folder import check_contents, open_checkpoint
from ds_ext.models.bert import BertConfig
from ds_ext.models.gpt import GPTConfig
from tests.hf_models import BERT, GPT, MASKED_ONLY, loaded, logits_difference, random_bert, random_gpt2

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
    """The weights of a checkpoint that one rank has written, by "layer.name"."""
    found = {}
    for path in sorted(folder.glob("*/layer_*")):
        found |= {f"{int(path.name[6:8])}.{key}": value for key, value in read_plain(path).items()}
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_bit_by_bit(kind: str, tmp_path: Path) -> None:
    config, make = KINDS[kind]
    theirs = make()
    given, ours, back, again = (tmp_path / name for name in ("given", "ours", "back", "again"))
    theirs.save_pretrained(given)
    convert(given, "--from", "hf", ours)
    check_contents(*open_checkpoint(ours))
    weights = layers(ours)
    assert logits_difference(config, weights, theirs) < 1e-5

    convert(ours, "--to", "hf", back)
    assert same(*(safetensors.load_file(folder / "model.safetensors") for folder in (given, back)))
    assert logits_difference(config, weights, loaded(kind, back)) < 1e-5
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (given, back))
    told = {key: value for key, value in after.items() if not key.endswith("os_token_id")}
    assert told == {key: before.get(key, after[key]) for key in told}

    # In several files, and from one of the checkpoints of a folder.
    few = tmp_path / "few"
    convert(ours / "step_0", "--to", "hf", few, "--max-shard-gb", 30e-6)
    shards = sorted(few.glob("model-*.safetensors"))
    assert len(shards) > 3 and shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    assert all(path.stat().st_size < 33e3 for path in shards)
    assert same(theirs.state_dict(), loaded(kind, few).state_dict())
    convert(few, "--from", "hf", again)
    assert same(layers(again), weights)


def test_other_spellings_and_precisions(tmp_path: Path) -> None:
    """The files of GPT-2's and BERT's authors: no prefix and the masks, gamma and beta; and half precision."""
    first, second = tmp_path / "gpt2", tmp_path / "bert"
    for folder, model in ((first, random_gpt2()), (second, random_bert())):
        model.half().save_pretrained(folder)
        path = folder / "model.safetensors"
        tensors = safetensors.load_file(path)
        old = {
            name.removeprefix("transformer.")
            .replace("LayerNorm.weight", "LayerNorm.gamma")
            .replace("LayerNorm.bias", "LayerNorm.beta"): value
            for name, value in tensors.items()
        }
        if folder is first:
            old |= {f"h.{i}.attn.bias": torch.ones(1, 1, 12, 12) for i in range(3)}
            old["lm_head.weight"] = old["wte.weight"].clone()
        else:
            old["bert.embeddings.position_ids"] = torch.arange(12)
        safetensors.save_file(old, path)
        convert(folder, "--from", "hf", tmp_path / f"{folder.name}_ours")
        convert(tmp_path / f"{folder.name}_ours", "--to", "hf", tmp_path / f"{folder.name}_back")
        back = safetensors.load_file(tmp_path / f"{folder.name}_back" / "model.safetensors")
        assert same(back, {name: value.float() for name, value in tensors.items()})


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("GPT2LMHeadModel", lambda: train_bpe(TEXT, 300)),
        ("BertForPreTraining", lambda: train_wordpiece(TEXT, 60)),
    ],
)
def test_the_tokenizer_goes_along(
    kind: str, make: Callable[[], Tokenizer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, other = make(), train_bpe(["some other text"], 290)
    theirs, ours, back = (tmp_path / name for name in ("theirs", "ours", "back"))
    model = (random_gpt2 if kind == "GPT2LMHeadModel" else random_bert)(vocab_size=tokenizer.vocab_size)
    model.save_pretrained(theirs)
    tokenizer.save(theirs)
    convert(theirs, "--from", "hf", ours)
    script = "train_gpt.py" if kind == "GPT2LMHeadModel" else "train_bert.py"
    told = capsys.readouterr().out
    assert f"{script} --deepspeed_config JSON --load {ours} --num-layers 3" in told and "note:" not in told
    assert f"prepare --tokenizer {theirs}" in told
    state = read_plain(ours / "step_0" / "mp_rank_00_model_states.pt")
    assert state["tokenizer"] == tokenizer.fingerprint

    convert(ours, "--to", "hf", tmp_path / "without")
    assert "Give --tokenizer" in capsys.readouterr().out
    (tmp_path / "other").mkdir()
    other.save(tmp_path / "other")
    assert main(["convert", str(ours), "--to", "hf", str(back), "--tokenizer", str(tmp_path / "other")]) == 2
    assert f"is not the one that the model was trained with: its fingerprint is {other.fingerprint}" in (
        capsys.readouterr().err
    )
    convert(ours, "--to", "hf", back, "--tokenizer", theirs)
    assert load_tokenizer(back).fingerprint == tokenizer.fingerprint
    text = "the pipe takes Another batch"
    loaded_again = transformers.AutoTokenizer.from_pretrained(back)
    assert loaded_again(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)
    if kind == "GPT2LMHeadModel":
        assert json.loads((back / "config.json").read_text())["eos_token_id"] == tokenizer.eod_id


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2", {"model_type": "llama"}, 'model_type is "llama"; GPT-2 ("gpt2") and BERT ("bert")'),
    ("gpt2", {"activation_function": "gelu"}, 'activation_function is "gelu"; our models have "gelu_new"'),
    ("gpt2", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06; our models have 1e-05"),
    ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings is false; our models have true"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention is true; our models have false"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true"),
    (
        "gpt2",
        {"quantization_config": {"bits": 4}},
        'quantization_config is {"bits": 4}; our models have null',
    ),
    ("gpt2", {"n_head": "4"}, 'n_head must be a whole number; got "4"'),
    ("gpt2", {"attn_pdrop": None}, "attn_pdrop must be a number; got null"),
    ("gpt2", {"n_head": 5}, "hidden_size must be a multiple of 5"),
    ("gpt2", {"n_inner": 64}, "transformer.h.0.mlp.c_fc.weight is 32 x 80 in"),
    ("gpt2", {"n_layer": 4}, "transformer.h.3.ln_1.weight is missing in"),
    ("gpt2", {"n_layer": 2}, "transformer.h.2.attn.c_attn.bias is 96 in"),
    ("bert", {"hidden_act": "gelu_new"}, 'hidden_act is "gelu_new"; our models have "gelu"'),
    ("bert", {"layer_norm_eps": 1e-5}, "layer_norm_eps is 1e-05; our models have 1e-12"),
    ("bert", {"is_decoder": True}, "is_decoder is true; our models have false"),
    ("bert", {"position_embedding_type": "relative_key"}, 'position_embedding_type is "relative_key"'),
    ("bert", {"vocab_size": 84}, "bert.embeddings.word_embeddings.weight is 83 x 32 in"),
]


def test_what_cannot_be_converted_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = {"gpt2": tmp_path / "gpt2", "bert": tmp_path / "bert"}
    random_gpt2().save_pretrained(folders["gpt2"])
    random_bert().save_pretrained(folders["bert"])
    output = tmp_path / "ours"
    capsys.readouterr()

    def refusal(*words: object) -> str:
        assert main(["convert", *map(str, words)]) == 2
        told = capsys.readouterr()
        assert not told.out and told.err.count("\n") == 1
        return told.err

    for kind, changes, expected in REFUSED:
        path = folders[kind] / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | changes))
        assert expected in refusal(folders[kind], "--from", "hf", output)
        path.write_text(json.dumps(config))
    assert not output.exists()

    weights = folders["gpt2"] / "model.safetensors"
    data = weights.read_bytes()
    tensors = safetensors.load_file(weights)
    safetensors.save_file(tensors | {"transformer.wte.weight": torch.ones(83, 32).to(torch.int8)}, weights)
    assert "is of type I8: quantized" in refusal(folders["gpt2"], "--from", "hf", output)
    weights.write_bytes(data[:100])
    assert f"{weights} is no safetensors file" in refusal(folders["gpt2"], "--from", "hf", output)
    weights.rename(folders["gpt2"] / "pytorch_model.bin")
    assert "may run code that is in it" in refusal(folders["gpt2"], "--from", "hf", output)
    assert "A model's folder is wanted" in refusal(tmp_path, "--from", "hf", output)

    convert(folders["bert"], "--from", "hf", output)
    capsys.readouterr()
    assert f"{output} has checkpoints already" in refusal(folders["bert"], "--from", "hf", output)
    back = tmp_path / "back"
    assert f"{tmp_path} is neither a folder of checkpoints" in refusal(tmp_path, "--to", "hf", back)
    assert "--num-attention-heads 8 contradicts" in refusal(
        output, "--to", "hf", back, "--num-attention-heads", 8
    )
    assert f"{output} exists already" in refusal(output, "--to", "hf", output)
    assert "--tokenizer cannot go with --from" in refusal(
        folders["bert"], "--from", "hf", back, "--tokenizer", tmp_path
    )
    layer = output / "step_0" / "layer_03-model_states.pt"
    saved = layer.read_bytes()
    layer.write_bytes(saved[:-200] + bytes(100) + saved[-100:])
    assert f"{layer} is damaged" in refusal(output, "--to", "hf", back)
    assert not back.exists() and not list(tmp_path.glob(".back*"))


def test_another_model_of_ours_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint of other layers than those of ds_ext.models."""
    from ds_ext.engine.checkpoint.folder import publish, start_writing

    written = start_writing(tmp_path, "own")
    files = {"mp_rank_00_model_states.pt": write_plain(written / "mp_rank_00_model_states.pt", {})}
    record = {"shape": [4, 4], "shard": [4, 4], "dim": None, "layer": 0, "key": "linear.weight"}
    publish(written, "own", {"job": {}, "files": files, "parameters": {"0.linear.weight": record}})
    assert main(["convert", str(tmp_path), "--to", "hf", str(tmp_path / "hf")]) == 2
    told = capsys.readouterr().err
    assert "own is not of a GPT or BERT of ds_ext.models" in told and "It has 0.linear.weight" in told
