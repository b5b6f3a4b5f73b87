"""Training from a Hugging Face folder with ``train_gpt.py --hf-model``."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ds_ext.__main__ import main
from ds_ext.launch.process import EXIT_CONFIG
from ds_ext.recipes.data.gpt import build_gpt_datasets
from ds_ext.recipes.data.tokenizer import load_tokenizer
from tests.launch.forked import run_forked
from tests.launch.jobs import ROOT

pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

SEED, SEQ_LENGTH = 1234, 16


def loss_of(model: Any, data: Path, samples: range) -> float:
    """Return the mean loss of a model of transformers on samples of the training order."""
    dataset, _, _ = build_gpt_datasets(str(data), "80,20,0", SEQ_LENGTH, (samples.stop, 0, 0), SEED)
    pairs = [dataset[index] for index in samples]
    tokens_BS, labels_BS = (torch.stack(column) for column in zip(*pairs, strict=True))
    with torch.no_grad():
        return float(F.cross_entropy(model(tokens_BS).logits.flatten(0, 1), labels_BS.flatten()))


def test_training_starts_at_the_loss_of_the_folder(
    config: Path, corpus: Path, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    """The model has more word embeddings than its tokenizer has tokens, and other sizes than the JSON."""
    from tests.hf_models import loaded, random_llama

    folder, other, saved, back = (tmp_path / name for name in ("folder", "other", "saved", "back"))
    vocab_size = load_tokenizer(corpus).vocab_size + 21
    sizes = {"vocab_size": vocab_size, "num_hidden_layers": 4, "max_position_embeddings": 32}
    theirs = random_llama("qwen3", **sizes)
    theirs.config.bos_token_id = theirs.generation_config.bos_token_id = 1
    theirs.generation_config.eos_token_id = [2, 3]
    theirs.save_pretrained(folder, max_shard_size="100KB")
    shutil.copy(corpus / "tokenizer.json", folder)
    # Otherwise transformers splits texts as Qwen3's own tokenizer does.
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    shutil.copytree(folder, other)
    path = next(other.glob("model-*.safetensors"))
    tensors = safetensors.load_file(path)
    tensors[min(tensors)] += 0.01
    safetensors.save_file(tensors, path, metadata={"format": "pt"})

    script = [str(ROOT / "train_gpt.py"), "--deepspeed_config", config.name, "--eval-iters", "0"]
    script += ["--save", str(saved), "--metrics-file", str(tmp_path / "metrics.jsonl"), "--hf-model"]

    def train(*flags: str, folders: tuple[Path, Path] = (folder, folder)) -> Any:
        commands = [[*script, str(path), *flags] for path in folders]
        return run_forked(commands, tmp_path, port=free_port())

    def metrics() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]

    results = train("--train-iters", "4")  # the learning rate of the first two steps is 0
    assert [result.returncode for result in results] == [0, 0], results
    assert f"model     {folder}: qwen3, " in results[0].stdout
    assert len(re.findall(r"^model .* parameters", results[0].stdout, re.MULTILINE)) == 1
    first = metrics()[0]
    batch = first["consumed_samples"]
    assert first["loss"] == pytest.approx(loss_of(theirs, corpus, range(batch)), rel=1e-5)

    # The checkpoint's weights take precedence over those of the folder.
    results = train("--train-iters", "5", "--load", str(saved))
    assert [result.returncode for result in results] == [0, 0], results
    assert f"resumed from {saved / 'step_4'} at step 4" in results[0].stdout
    assert main(["convert", str(saved / "step_4"), "--to", "hf", str(back)]) == 0
    for name in ("generation_config.json", "config.json"):
        before, after = (json.loads((path / name).read_text()) for path in (folder, back))
        ids = {key: value for key, value in before.items() if key.endswith("_token_id")}
        assert ids and ids == {key: after[key] for key in ids}
    trained = loaded("Qwen3ForCausalLM", back)
    assert trained.config.vocab_size == vocab_size
    expected = loss_of(trained, corpus, range(4 * batch, 5 * batch))
    assert metrics()[-1]["step"] == 5 and metrics()[-1]["loss"] == pytest.approx(expected, rel=1e-5)
    assert abs(expected - loss_of(theirs, corpus, range(4 * batch, 5 * batch))) > 1e-3

    results = train("--train-iters", "5", folders=(folder, other))
    assert [result.returncode for result in results] == [EXIT_CONFIG] * 2, results
    assert "contents of --hf-model: " in results[0].stderr
