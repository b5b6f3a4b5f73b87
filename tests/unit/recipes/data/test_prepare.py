"""The verb `prepare`: its files, repeated and failed runs, and its options."""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_ext.config.job import load_config
from ds_ext.environment import host_devices
from ds_ext.errors import ConfigError
from ds_ext.recipes.data import finetune, prepare
from ds_ext.recipes.data.blend import DEFAULT_SPLIT
from ds_ext.recipes.data.gpt import build_gpt_datasets, samples_per_epoch
from ds_ext.recipes.data.indexed import IndexedTokens
from ds_ext.recipes.data.meta import check_tokenizer, read_meta
from ds_ext.recipes.data.prepare import command_lines
from ds_ext.recipes.data.tokenizer import load_tokenizer
from tests.chat_folders import TEMPLATES, write_tokenizer
from tests.processor import python_s

TEXTS = [
    f"Document {i} tells of {i * i} stages.\n" + "It has words, and more words. " * (i % 5) for i in range(60)
]


def run(*arguments: str | int | Path) -> int:
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    return prepare.run(parser.parse_args([str(argument) for argument in arguments]))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def test_prepared_documents_end_with_the_end_of_document_token(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert run("--source", source, "--output", output, "--vocab-size", 300) == 0

    tokenizer, indexed = load_tokenizer(output), IndexedTokens(output / "text_document")
    assert indexed.num_documents == len(TEXTS)
    for number, text in enumerate(TEXTS):
        *ids, last = indexed.document(number).tolist()
        assert last == tokenizer.eod_id
        assert tokenizer.decode(ids) == text
    assert indexed.tokens.dtype == np.uint16

    meta = read_meta(str(output))
    assert meta is not None
    assert meta["documents"] == len(TEXTS)
    assert meta["tokens"] == len(indexed.tokens)
    assert meta["bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert meta["vocab_size"] == tokenizer.vocab_size == 300
    assert meta["max_token_id"] == indexed.tokens.max()
    _, counts = np.unique(indexed.tokens, return_counts=True)
    shares = counts / counts.sum()
    assert meta["unigram_entropy_nats"] == pytest.approx(-(shares * np.log(shares)).sum())
    check_tokenizer(str(output), tokenizer)
    assert len(build_gpt_datasets(str(output), "9,1", 8, (100, 10, 0), seed=0)[0]) == 100
    printed = capsys.readouterr().out
    command = "deepspeed --num_gpus 4 train_gpt.py --deepspeed_config configs/bitpipe.json"
    assert f"{command} --data-path {output}" in " ".join(printed.replace("\\\n", "").split())
    assert f"{meta['unigram_entropy_nats']:.3f} nats" in printed
    assert not list(tmp_path.rglob(".partial*"))


LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
LLAMA |= {"num_key_value_heads": 4, "vocab_size": 400, "max_position_embeddings": 2048, "dtype": "bfloat16"}


def write_model(folder: Path, **values: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **values}))
    (folder / "model.safetensors").touch()


def next_commands(printed: str) -> list[list[str]]:
    """Return the words of each printed command."""
    lines = printed[printed.index("next: ") :].replace("\\\n", "").splitlines()
    return [line.partition(": ")[2].split() for line in lines]


def test_lines_of_commands_have_at_most_120_columns() -> None:
    words = [
        "deepspeed",
        "train_bert.py",
        *[f"--{'flag' * n}" for n in range(1, 12)],
        "--path",
        "a folder",
        "--last",
    ]
    lines = f"next: {command_lines(words)}".splitlines()
    assert len(lines) > 2 and all(line.endswith(" \\") for line in lines[:-1])
    assert max(map(len, lines)) <= 120
    assert shlex.split(" ".join(line.removesuffix("\\") for line in lines))[1:] == words


def word_after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_the_next_command_trains_the_model_of_the_tokenizer(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, output = tmp_path / "model", tmp_path / "with_model"
    run("--source", source, "--output", model, "--vocab-size", 300)
    run("--source", source, "--output", tmp_path / "tokenizer_only", "--tokenizer", model)
    (words,) = next_commands(capsys.readouterr().out.rpartition("wrote")[2])
    assert word_after(words, "--deepspeed_config") == "configs/bitpipe.json"
    write_model(model, num_hidden_layers=8, max_position_embeddings=64)
    run("--source", source, "--output", output, "--tokenizer", model)
    (words,) = next_commands(capsys.readouterr().out)
    assert (
        word_after(words, "--num_gpus") == str(min(host_devices(), 4) & ~1 or 1) and "train_gpt.py" in words
    )
    assert word_after(words, "--deepspeed_config") == str(output / "finetune.json")
    job = json.loads((output / "finetune.json").read_text())
    train = job["ds_ext"]["train"]
    assert (train["hf_model"], train["data_path"], train["seq_length"]) == (str(model), str(output), 64)
    assert job["optimizer"]["params"]["lr"] < 1e-4
    datasets = build_gpt_datasets(str(output), DEFAULT_SPLIT, 64, (1, 0, 0), seed=0)
    epoch = samples_per_epoch(datasets[0])
    assert epoch is not None
    assert 0 <= train["train_iters"] * job["train_batch_size"] - epoch < job["train_batch_size"]
    run("--source", source, "--output", output, "--tokenizer", model, "--epochs", "2.5")
    job = json.loads((output / "finetune.json").read_text())
    steps = job["ds_ext"]["train"]["train_iters"]
    assert steps == math.ceil(2.5 * epoch / job["train_batch_size"]) > train["train_iters"]
    assert job["scheduler"]["params"]["total_num_steps"] == steps
    assert job["ds_ext"]["train"]["eval_interval"] == train["eval_interval"]
    with pytest.raises(ConfigError, match="--epochs"):
        run("--source", source, "--output", output, "--tokenizer", model, "--epochs", 0)


def test_each_folder_of_data_has_its_own_checkpoints() -> None:
    outputs = ("data/a/chat", "data/chat", "data/b/chat", "/tmp/a/chat", "../a/c")
    folders = [finetune.checkpoints_of(Path(output)) for output in outputs]
    assert folders[1] == "checkpoints/chat"
    assert len(set(folders)) == len(folders) and not any("/data/" in folder for folder in folders)


@pytest.mark.parametrize(
    ("model_type", "layers", "dtype", "packed", "available", "devices", "schedule"),
    [
        ("llama", 8, "bfloat16", True, 8, 4, "zb_v"),
        ("llama", 8, "bfloat16", True, 3, 2, "zb_v"),
        ("llama", 8, "bfloat16", True, 1, 1, "1f1b"),
        ("qwen3", 7, "float16", True, 8, 2, "zb_v"),
        ("llama", 3, "float32", True, 8, 2, "1f1b"),
        ("gemma2", 4, "bfloat16", False, 8, 2, "zb_v"),
        ("mixtral", 8, "bfloat16", False, 8, 4, "zb_v"),
    ],
)
def test_the_next_commands_for_chat_have_jsons_for_the_model(
    model_type: str,
    layers: int,
    dtype: str,
    packed: bool,
    available: int,
    devices: int,
    schedule: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(finetune, "host_devices", lambda: available)
    monkeypatch.setattr(finetune, "host_gpus", lambda: available)
    model, source = write_tokenizer(tmp_path / "model", TEMPLATES["chatml"]), tmp_path / "chat.json"
    experts = {"num_local_experts": 4} if model_type == "mixtral" else {}
    write_model(model, model_type=model_type, num_hidden_layers=layers, dtype=dtype, **experts)
    source.write_text(json.dumps([{"instruction": "one?", "output": "two"}] * 40))
    output = tmp_path / "out"
    run("--format", "chat", "--source", source, "--tokenizer", model, "--output", output)
    commands = next_commands(capsys.readouterr().out)
    assert ["train_gpt.py" in words for words in commands] == [True, True]
    for words, name in zip(commands, ("finetune.json", "lora.json"), strict=True):
        job = json.loads(Path(word_after(words, "--deepspeed_config")).read_text())
        assert str(devices) == words[2]
        assert (job["ds_ext"]["schedule"], job["ds_ext"]["pipeline_parallel_size"]) == (schedule, devices)
        assert job.keys() & {"bf16", "fp16"} == {"bfloat16": {"bf16"}, "float16": {"fp16"}}.get(dtype, set())
        steps, warmup = (job["scheduler"]["params"][f"{key}_num_steps"] for key in ("total", "warmup"))
        assert warmup < steps and job["ds_ext"]["train"]["save_interval"] <= steps
        train = job["ds_ext"]["train"]
        assert Path(word_after(words, "--deepspeed_config")).name == name
        assert steps == train["train_iters"]
        is_lora = name == "lora.json"
        assert train.get("lora_rank") == (8 if is_lora else None)
        # 3 epochs of 39 conversations for training: packed, or one per sample
        assert steps == (1 if packed and not is_lora else 8)
        assert load_config(job).ds_ext.schedule == schedule


@pytest.mark.parametrize(
    ("dtype", "gpus", "has_instructions", "section"),
    [
        ("bfloat16", 1, False, "bf16"),
        ("bfloat16", 0, True, "bf16"),
        ("bfloat16", 0, False, None),
        ("float16", 1, False, "fp16"),
        ("float16", 0, True, None),
        ("float32", 0, False, None),
    ],
)
def test_jobs_use_half_precision_where_it_is_fast(
    dtype: str,
    gpus: int,
    has_instructions: bool,
    section: str | None,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(finetune, "host_gpus", lambda: gpus)
    monkeypatch.setattr(finetune, "has_bf16_instructions", lambda: has_instructions)
    model, output = tmp_path / "model", tmp_path / "prepared"
    run("--source", source, "--output", model, "--vocab-size", 300)
    write_model(model, num_hidden_layers=8, max_position_embeddings=64, dtype=dtype)
    capsys.readouterr()
    run("--source", source, "--output", output, "--tokenizer", model)
    sections = json.loads((output / "finetune.json").read_text()).keys() & {"bf16", "fp16"}
    assert sections == ({section} if section else set())
    assert ("note: " in capsys.readouterr().out) == (section is None and dtype != "float32")


@pytest.mark.parametrize(
    ("words", "positions", "length"),
    [(1, 2048, 512), (900, 2048, 1024), (900, 600, 600), (9000, 40_000, 4096)],
)
def test_the_next_commands_truncate_no_conversation(
    words: int, positions: int, length: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless the model has too few positions, or the conversation is very long."""
    pytest.importorskip("transformers")
    model, source = write_tokenizer(tmp_path / "model", TEMPLATES["chatml"]), tmp_path / "chat.json"
    write_model(model, num_hidden_layers=8, max_position_embeddings=positions)
    source.write_text(json.dumps([{"instruction": "one?", "output": "7 " * words}]))
    run("--format", "chat", "--source", source, "--tokenizer", model, "--output", tmp_path / "out")
    assert len(next_commands(capsys.readouterr().out)) == 2
    jobs = [json.loads((tmp_path / "out" / name).read_text()) for name in ("finetune.json", "lora.json")]
    assert [job["ds_ext"]["train"]["seq_length"] for job in jobs] == [length] * 2
    assert jobs[0]["ds_ext"]["train"]["eval_iters"] == 0  # the valid split of one conversation has none


def test_special_tokens_in_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are counted and named, and tokens only with the flag."""
    source, output = tmp_path / "texts.jsonl", tmp_path / "out"
    texts = ["one<|endoftext|>two<|endoftext|>", "three", "<|endoftext"]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ("--source", source, "--output", output, "--vocab-size", 257)
    for flags, count in (((), 3), (("--parse-special-tokens", "--force"), 5)):
        run(*words, *flags)
        tokens, meta = IndexedTokens(output / "text_document").tokens, read_meta(str(output))
        assert meta is not None
        assert np.count_nonzero(tokens == meta["eod_id"]) == count
        assert meta["special_tokens"] == {"<|endoftext|>": 2}
        assert "<|endoftext|> 2" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="parse_special_tokens"):
        run(*words)


def test_second_run_does_nothing_and_other_arguments_are_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    arguments = ("--source", source, "--output", output, "--vocab-size")
    run(*arguments, 300)
    before = (output / "text_document.bin").stat().st_mtime_ns
    assert run(*arguments, 300) == 0
    assert "--force" in capsys.readouterr().out
    assert (output / "text_document.bin").stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match=r"'vocab_size': 320.*'vocab_size': 300.*--force"):
        run(*arguments, 320)
    assert run(*arguments, 320, "--force") == 0
    assert load_tokenizer(output).vocab_size == 320
    source.write_text(json.dumps({"text": "changed"}) + "\n")
    with pytest.raises(ConfigError, match="source_details"):
        run(*arguments, 320)
    (output / "text_document.idx").unlink()
    assert run(*arguments, 300) == 0
    assert IndexedTokens(output / "text_document").num_documents == 1


def test_failed_run_leaves_the_old_data(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    run("--source", source, "--output", output, "--vocab-size", 300)
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    source.write_text(source.read_text() + "not json\n")
    with pytest.raises(ConfigError, match="line 61"):
        run("--source", source, "--output", output, "--vocab-size", 300, "--force")
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before


def test_failed_run_leaves_no_new_files(source: Path, tmp_path: Path) -> None:
    source.write_text(source.read_text() + "not json\n")
    folder = tmp_path / "folder"
    folder.mkdir()
    for output in (tmp_path / "new" / "folder" / "out", folder, folder / "out"):
        with pytest.raises(ConfigError, match="line 61"):
            run("--source", source, "--output", output, "--vocab-size", 300)
        assert sorted(tmp_path.rglob("*")) == [folder, source]


def test_tokenizer_of_other_data_and_gpt2_files_are_accepted(source: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    run("--source", source, "--output", first, "--vocab-size", 300)
    other = tmp_path / "other.txt"
    other.write_text("Quite another text.\n")
    files = ("--vocab-file", first / "vocab.json", "--merge-file", first / "merges.txt")
    for number, options in enumerate([("--tokenizer", first), files]):
        output = tmp_path / f"second{number}"
        run("--source", other, "--output", output, *options)
        check_tokenizer(str(output), load_tokenizer(first))
        check_tokenizer(f"0.5 {first} 0.5 {output}", load_tokenizer(first))


def test_megatrons_flags(tmp_path: Path) -> None:
    """The same data as with this command's own flags."""
    text = tmp_path / "in.jsonl"
    text.write_text("".join(json.dumps({"content": f"Text number {n}. " * 9}) + "\n" for n in range(40)))
    first, own, megatrons = (tmp_path / name for name in ("first", "own", "megatrons"))
    run("--source", text, "--json-key", "content", "--output", first, "--vocab-size", 280)
    files = ("--vocab-file", first / "vocab.json", "--merge-file", first / "merges.txt")
    run("--source", text, "--json-key", "content", "--output", own, *files)
    flags = ("--tokenizer-type", "GPT2BPETokenizer", "--append-eod", "--workers", 2)
    run("--input", text, "--json-keys", "content", *flags, *files, "--output-prefix", megatrons)
    for name in ("text_document.bin", "text_document.idx"):
        assert (own / name).read_bytes() == (megatrons / name).read_bytes()
    for flags, words in (
        (("--json-keys", "content", "title"), "^--json-keys: .*content title"),
        (("--tokenizer-type", "GPT2BPETokenizer"), "^--tokenizer-type: GPT2BPETokenizer .*--merge-file"),
        (("--workers", 0), "^--workers: .*got 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            run("--input", text, "--output-prefix", tmp_path / "no", *flags)


def test_sentencepiece_replaces_the_files_of_bpe(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    output = tmp_path / "out"
    arguments = ("--source", source, "--output", output)
    run(*arguments, "--vocab-size", 300)
    run(*arguments, "--vocab-size", 330, "--tokenizer-type", "sentencepiece", "--force")
    names = {path.name for path in output.iterdir()}
    assert names == {"text_document.bin", "text_document.idx", "meta.json", "tokenizer.model"}
    tokenizer, indexed = load_tokenizer(output), IndexedTokens(output / "text_document")
    assert tokenizer.decode(indexed.document(7).tolist()[:-1]) == TEXTS[7]
    check_tokenizer(str(output), tokenizer)


def test_contradicting_options_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--merge-file"):
        run("--source", source, "--vocab-file", "x")
    for other in (("--vocab-file", "x", "--merge-file", "y"), ("--vocab-size", 300)):
        with pytest.raises(SystemExit, match="2"):
            run("--source", source, "--tokenizer", "z", *other)
    with pytest.raises(ConfigError, match=r"--output.*--source"):
        run("--source", tmp_path, "--output", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"--source.*absent"):
        run("--source", tmp_path / "absent", "--output", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"--output.*texts"):
        run("--source", source, "--output", source / "out")


def test_command_line_is_built_without_heavy_imports() -> None:
    code = (
        "import argparse, sys; from ds_ext.recipes.data import prepare; "
        "prepare.add_arguments(argparse.ArgumentParser()); "
        "print({'torch', 'numpy', 'megatron', 'tokenizers', 'deepspeed'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_training_and_preparing_never_import_megatron(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words\n" * 100)
    flags = ["--source", str(tmp_path / "text.txt"), "--output", str(tmp_path / "out"), "--vocab-size", "300"]
    code = (
        "import argparse, sys, ds_ext.recipes.data.gpt, ds_ext.engine.batches; "
        "from ds_ext.recipes.data import prepare; parser = argparse.ArgumentParser(); "
        f"prepare.add_arguments(parser); prepare.run(parser.parse_args({flags})); "
        "print([name for name in sys.modules if name.startswith('megatron')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_stdlib_is_prepared_for_real_in_time(tmp_path: Path) -> None:
    code = (
        "import argparse; from ds_ext.recipes.data import prepare; parser = argparse.ArgumentParser(); "
        "prepare.add_arguments(parser); raise SystemExit(prepare.run(parser.parse_args()))"
    )
    command = [sys.executable, "-c", code, "--source", "stdlib", "--output", str(tmp_path / "stdlib")]
    started_s, before = time.monotonic(), os.times()
    result = subprocess.run(command, capture_output=True, text=True)
    used = os.times()
    assert result.returncode == 0, result.stderr
    assert result.stderr == "", "no warnings of the libraries"
    # Processor time does not depend on other work on the machine. It is about 500 times that of the loop.
    cpu_s = used.children_user - before.children_user + used.children_system - before.children_system
    assert cpu_s < 3000 * python_s(), (
        f"{cpu_s:.0f} s of CPU time, {time.monotonic() - started_s:.0f} s in all"
    )
    meta = read_meta(str(tmp_path / "stdlib"))
    assert meta is not None
    assert meta["bytes"] >= 10_000_000
    assert meta["tokens"] > 2_000_000
    assert 5 < meta["unigram_entropy_nats"] < np.log(4096)
    assert meta["vocab_size"] == 4096
