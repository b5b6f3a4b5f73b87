"""New weights of a decoder: those that its class draws, the same in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ds_ext
from ds_ext.errors import ConfigError
from ds_ext.hf.find import find_split
from ds_ext.hf.weights import make_source
from tests.decoder_models import EXPERTS_MODELS, MODELS, PLANNED_MODELS
from tests.selection import select

transformers: Any = pytest.importorskip("transformers")
TABLE = {**MODELS, **EXPERTS_MODELS, **PLANNED_MODELS}
WITHOUT_RULE = ("Apertus",)  # its activation has parameters that only its constructor sets
NAMES = sorted({*TABLE} - {*WITHOUT_RULE})


def config_of(name: str, **changes: Any) -> Any:
    return getattr(transformers, f"{name}Config")(**TABLE[name], **changes)


def built(config: Any, seed: int, backwards: bool = False, **arguments: Any) -> dict[str, torch.Tensor]:
    """Return name in the model -> weight, of layers that are built in their order or backwards."""
    layers, _ = ds_ext.from_transformers(config, seed=seed, **arguments)
    split = find_split(make_source(config, None))
    weights: dict[str, torch.Tensor] = {}
    for index in reversed(range(len(layers))) if backwards else range(len(layers)):
        for key, parameter in layers[index].build().named_parameters():
            name = f"{split.embedding}.weight" if key == "module.weight" else split.name_of(index, key)
            weights[name] = parameter.detach()
    return weights


@pytest.mark.parametrize("name", select(NAMES, ["GPT2", "Mixtral", "DeepseekV3", "Gemma3Text"]))
def test_weights_are_those_that_the_class_draws(name: str) -> None:
    """Names, and means and deviations of large weights."""
    config = config_of(name)
    weights = built(config, 1)
    torch.manual_seed(1)
    expected = dict(transformers.AutoModelForCausalLM.from_config(config).named_parameters())
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        if value.numel() >= 256 or value.std(correction=0) == 0:
            assert float(weights[key].mean()) == pytest.approx(float(value.mean()), abs=0.01), key
            deviation = float(value.detach().std(correction=0))
            assert float(weights[key].std(correction=0)) == pytest.approx(deviation, rel=0.3), key


@pytest.mark.parametrize("name", ["Mixtral", "GPT2"])
def test_weights_depend_on_the_seed_alone(name: str) -> None:
    """GPT-2's head is tied to its embedding, as is Mixtral's here."""
    config = config_of(name, tie_word_embeddings=True) if name == "Mixtral" else config_of(name)
    first, again, other = built(config, 1), built(config, 1, backwards=True), built(config, 2)
    assert all(torch.equal(first[key], again[key]) for key in first)
    different = [key for key, value in first.items() if not torch.equal(value, other[key])]
    assert any("mlp" in key for key in different) and any("attn" in key for key in different)


def test_every_layer_has_other_weights() -> None:
    weights = built(config_of("Llama"), 1)
    first, second = (weights[f"model.layers.{i}.self_attn.q_proj.weight"] for i in range(2))
    assert not torch.equal(first, second)


def test_dtype_and_rows() -> None:
    config = config_of("Llama")
    assert {weight.dtype for weight in built(config, 1, dtype=torch.bfloat16).values()} == {torch.bfloat16}
    source = make_source(config, None, 1)
    assert torch.equal(source.rows("lm_head.weight", slice(3, 7)), built(config, 1)["lm_head.weight"][3:7])


@pytest.mark.parametrize("name", WITHOUT_RULE)
def test_a_class_without_a_rule_for_a_weight_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"model_or_folder: .*layers\.0.*alpha_p"):
        built(config_of(name), 1)


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    built(config_of("Llama"), 1)
    assert torch.equal(torch.get_rng_state(), before)
