"""Conversion of a Hugging Face model, training with the script, and conversion back."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_ext.__main__ import main
from ds_ext.recipes.data.tokenizer import load_tokenizer
from tests.launch.forked import run_forked
from tests.launch.jobs import ROOT

pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")


def test_the_script_trains_a_model_of_transformers(
    config: Path,
    corpus: Path,
    tmp_path: Path,
    free_port: Callable[[], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tests.hf_models import loaded, random_gpt2

    tokenizer = load_tokenizer(corpus)
    source, checkpoint, saved, back = (tmp_path / name for name in ("source", "checkpoint", "saved", "back"))
    # The heads and the inner width differ from those of the JSON.
    sizes = {"n_embd": 16, "n_layer": 4, "n_head": 4, "n_inner": 48, "n_positions": 16}
    random_gpt2(**sizes, vocab_size=tokenizer.vocab_size).save_pretrained(source)
    shutil.copy(corpus / "tokenizer.json", source)
    assert main(["convert", str(source), "--from", "hf", str(checkpoint)]) == 0

    lines = capsys.readouterr().out.replace("\\\n", "").splitlines()
    line = next(line for line in lines if line.startswith("then: "))
    script, *flags = shlex.split(line.removeprefix("then: deepspeed --num_gpus RANKS "))
    flags[flags.index("JSON")], flags[flags.index("DATA")] = config.name, str(corpus)
    words = [str(ROOT / script), *flags, "--save", str(saved), "--train-iters", "3", "--eval-iters", "0"]
    results = run_forked([words] * 2, tmp_path, port=free_port())
    assert [result.returncode for result in results] == [0, 0], results
    assert f"resumed from {checkpoint / 'step_0'} at step 0" in results[0].stdout

    # The checkpoint contains the number of heads and the path of the tokenizer.
    assert main(["convert", str(saved), "--to", "hf", str(back)]) == 0
    output = capsys.readouterr().out
    assert all(str(value) in output for value in (back, saved / "step_3", "GPT2LMHeadModel", "tokenizer: "))
    assert load_tokenizer(back).fingerprint == tokenizer.fingerprint
    after = json.loads((back / "config.json").read_text())
    assert (after["n_head"], after["n_inner"], after["eos_token_id"]) == (4, 48, tokenizer.eod_id)
    before, trained = (safetensors.load_file(folder / "model.safetensors") for folder in (source, back))
    loaded("GPT2LMHeadModel", back)
    for name, weight in before.items():
        assert 0 < (trained[name] - weight).abs().max() < 0.01, name  # three steps of at most 1e-3 each
