"""A checkpoint with the layers of from_transformers becomes a folder of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ds_ext
from ds_ext.__main__ import main
from ds_ext.engine.parameters import parameters_of
from ds_ext.errors import ConfigError
from tests.decoder_models import config_of, micro_batch, random_decoder
from tests.distributed.test_own_layers import Batches
from tests.ranks import Ranks

transformers: Any = pytest.importorskip("transformers")


def train(rank: int, folder: str, saved: str, schedule: str, freeze: bool) -> dict[str, Tensor]:
    """Train, save, and return the weights of this rank by the names of the model."""
    layers, loss_fn = ds_ext.from_transformers(folder)
    config = config_of(schedule, 2, 4)
    module = ds_ext.PipelineModule(layers, config, loss_fn=loss_fn, partition_method="uniform")
    cut = layers[1].module_args[1]
    local = {cut.name_of(p.layer, p.key): p.parameter for p in parameters_of(module, 1).values()}
    if freeze:
        for name, parameter in local.items():
            parameter.requires_grad_("mlp" in name or "fc" in name)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine, *_ = ds_ext.initialize(model=module, optimizer=optimizer, config=config)
    batch: Any = micro_batch  # inputs with a mask
    batches = Batches(batch)
    for _ in range(2):
        engine.train_batch(batches)
    engine.save_checkpoint(saved, exclude_frozen_parameters=freeze)
    weights = {name: parameter.detach().clone() for name, parameter in local.items()}
    engine.transport.close()
    return weights


@pytest.mark.parametrize(
    ("name", "schedule", "freeze"),
    [
        ("Gemma2", "bitpipe_zb", False),
        ("Llama", "zb_v", False),
        ("Mixtral", "1f1b", False),
        ("OPT", "1f1b", True),
    ],
)
def test_a_checkpoint_becomes_a_folder(
    ranks: Ranks, tmp_path: Path, name: str, schedule: str, freeze: bool
) -> None:
    folder, saved, output = tmp_path / "model", tmp_path / "saved", tmp_path / "trained"
    model = random_decoder(name)
    model.generation_config.eos_token_id = [2, 3]
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    by_rank = ranks(2).run(train, str(folder), str(saved), schedule, freeze, timeout_s=75)
    expected = {key: weight for weights in by_rank for key, weight in weights.items()}
    assert main(["convert", str(saved), "--to", "hf", str(output), "--hf-model", str(folder)]) == 0
    trained = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    weights, before = dict(trained.named_parameters()), dict(model.named_parameters())
    assert weights.keys() == expected.keys()
    changed = [key for key in weights if not torch.equal(weights[key], before[key])]
    assert all(torch.equal(weights[key], expected[key]) for key in weights)
    assert len(changed) > 4 and all("mlp" in key or "fc" in key for key in changed) == freeze
    assert json.loads((output / "generation_config.json").read_text())["eos_token_id"] == [2, 3]
    assert (output / "tokenizer_config.json").is_file()


def test_a_folder_of_another_model_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    folder, other, saved = tmp_path / "model", tmp_path / "other", tmp_path / "saved"
    random_decoder("Llama").save_pretrained(folder)
    random_decoder("Llama", intermediate_size=24).save_pretrained(other)
    ranks(2).run(train, str(folder), str(saved), "1f1b", False, timeout_s=75)
    from ds_ext.recipes.convert.decoder import write_decoder_folder

    with pytest.raises(ConfigError, match=r"--hf-model: .*mlp.* of 48 x 32 \(got 24 x 32\)"):
        write_decoder_folder(saved, tmp_path / "out", other, 10**9, "float32")
    assert not (tmp_path / "out").exists()
