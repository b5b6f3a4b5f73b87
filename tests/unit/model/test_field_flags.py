"""A field of a config is stated once: its flag, its key in "train" and its place in the planner follow from it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import pytest

from ds_ext.model.config import PLANNED, RopeScaling, TransformerConfig
from ds_ext.model.field_flags import add_flags, fields_of, flag, flags_of, keys_of
from ds_ext.model.hf_decoder import decoder_fields
from ds_ext.planner.auto import model_of_train, training_sizes
from ds_ext.planner.training_sizes import TrainingSizes
from ds_ext.recipes.models.bert import BertConfig
from ds_ext.recipes.training.arguments import parse
from ds_ext.recipes.training.script_flags import by_spelling

SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "vocab_size": 100,
}


@dataclass(frozen=True)
class Wide(TransformerConfig):
    """A model with fields that no file but this one contains.

    Args:
        lanes: number of lanes,
            which the test adds.
        shape: shape of a lane.
        flat: 50% of the lanes are flat.
    """

    lanes: int = 3
    shape: Literal["round", "square"] = "round"
    flat: bool = field(default=False, metadata=flag("lane_flat"))


def parsed(config: type, *words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_flags(parser, flags_of(config).values())
    return vars(parser.parse_args(words))


def test_a_new_field_has_a_flag_and_a_key() -> None:
    keys = parsed(Wide, "--lanes", "5", "--shape", "square", "--lane-flat", "--num-layers", "2")
    assert (keys["lanes"], keys["shape"], keys["lane_flat"], keys["num_layers"]) == (5, "square", True, 2)
    config = Wide(**{**fields_of(Wide, keys), "vocab_size": 100})
    assert (config.lanes, config.shape, config.flat, config.num_layers) == (5, "square", True, 2)
    written = keys_of(Wide, config)
    assert {key: written[key] for key in ("lanes", "shape", "lane_flat")} == {
        "lanes": 5,
        "shape": "square",
        "lane_flat": True,
    }
    assert Wide(**fields_of(Wide, written)) == config
    assert keys_of(Wide, Wide(**SIZES)).keys() == SIZES.keys()
    assert flags_of(Wide)["lanes"].help == "number of lanes, which the test adds"
    help_text = argparse.ArgumentParser()
    add_flags(help_text, [flags_of(Wide)["flat"]])
    assert "50% of the lanes" in help_text.format_help()
    with pytest.raises(SystemExit):
        parsed(Wide, "--shape", "flat")


@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_the_scripts_have_the_flag_of_every_field(model: Any) -> None:
    flags = by_spelling(model)
    names = {f"--{one.key.replace('_', '-')}" for one in flags_of(TransformerConfig).values()}
    assert names <= flags.keys() if model == "gpt" else names & flags.keys() > {"--num-layers", "--seed"}
    assert model == "gpt" or not flags.keys() & {"--norm-epsilon", "--vocab-size", "--swiglu"}
    without = {one.name for one in fields(TransformerConfig)} - flags_of(TransformerConfig).keys()
    assert without == {"sequence_parallel", "sliding_window_layers", "experts", "latent", "pad_token_id"}


# Field -> fields with another value of it; for the other fields, a number is halved and a switch is set.
CHANGES: dict[str, dict[str, Any]] = {
    "vocab_size": {"vocab_size": 200},
    "ffn_hidden_size": {"ffn_hidden_size": 96},
    "max_position_embeddings": {"max_position_embeddings": 64},
    "recompute": {"recompute": "full"},
    "recompute_interval": {"recompute_interval": 2, "recompute": "selective"},
    "transformer_impl": {"transformer_impl": "transformer_engine"},
    "position_embedding_type": {"position_embedding_type": "rope"},
    "rope_scaling": {
        "rope_scaling": RopeScaling("llama3", 4.0, 1.0, 4.0, 8192),
        "position_embedding_type": "rope",
    },
    "normalization": {"normalization": "RMSNorm"},
    "num_query_groups": {"num_query_groups": 2},
    "kv_channels": {"kv_channels": 8},
    "add_bias_linear": {"add_bias_linear": False},
    "sliding_window": {"sliding_window": 9},
    "lora_rank": {"lora_rank": 8},
}


@pytest.mark.parametrize("name", flags_of(TransformerConfig))
def test_a_field_survives_flags_and_train(name: str) -> None:
    default = getattr(TransformerConfig(**SIZES), name)
    changes = CHANGES.get(name) or {name: type(default)(default / 2) if default else True}
    config = TransformerConfig(**{**SIZES, **changes})
    assert getattr(config, name) != default
    train = keys_of(TransformerConfig, config)
    assert TransformerConfig(**fields_of(TransformerConfig, train)) == config
    words = [
        f"--{key.replace('_', '-')}{'' if value is True else f'={value}'}"
        for key, value in train.items()
        if value is not None and value is not False
    ]
    args, _ = parse("train_gpt.py", ["--lr", "1e-3", "--micro-batch-size", "1", *words])
    assert TransformerConfig(**fields_of(TransformerConfig, vars(args))) == config
    if name in PLANNED:
        model = model_of_train(train, config.vocab_size)
        assert model is not None and getattr(training_sizes({}, model, 1, 1, 1), name) == getattr(
            config, name
        )


def test_the_planner_and_bert_have_all_fields() -> None:
    names = {one.name for one in fields(TransformerConfig)}
    for config in (TrainingSizes, BertConfig):
        assert names <= {one.name for one in fields(config)}
    config = TransformerConfig(**SIZES, recompute="full", rotary_base=5.0)
    sizes = TrainingSizes.of_model(config, data_parallel=2)
    assert {name: getattr(sizes, name) for name in names} == vars(config)
    assert sizes.data_parallel == 2


@pytest.mark.parametrize(("written", "expected"), [(None, None), (0, 0), (7, 7), (-1, 82)])
def test_the_padding_row_of_a_folder(written: int | None, expected: int | None) -> None:
    """torch counts negative rows from the end."""
    values = {
        **{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4},
        **{"intermediate_size": 64, "vocab_size": 83, "max_position_embeddings": 16, "pad_token_id": written},
    }
    assert TransformerConfig(**decoder_fields(values)).pad_token_id == expected
