"""Check that the checkpoint of ``--load`` fits the model, from its manifest and saved state, before launch.

The load itself compares every parameter of every rank again.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...engine.checkpoint.file import read_plain
from ...engine.checkpoint.folder import open_checkpoint
from ...engine.checkpoint.save import STATE_FILE
from ...errors import ConfigError
from ...hf.folder import shape_text
from ...model.config import TransformerConfig
from ..data.meta import read_meta
from ..models.hf import counterparts, num_pipeline_layers
from ..models.hf_config import COMPUTED, unseen_in_weights

# Name of a weight -> field of each of its sizes.
_SIZES = {
    "0.word_embeddings.weight": ("vocab_size", "hidden_size"),
    "1.weight": ("max_position_embeddings",),
    "1.position_embeddings": ("max_position_embeddings",),
    "2.mlp.linear_fc1.weight": ("ffn_hidden_size",),
}
_EMBEDDINGS = ("0.word_embeddings.weight", "1.weight", "1.position_embeddings")
# Field -> fields that decide its default.
_DERIVED = {
    "kv_channels": {"hidden_size", "num_attention_heads"},
    "num_query_groups": {"num_attention_heads"},
}
_SHOWN = 4


def check_load(args: argparse.Namespace, model: TransformerConfig) -> None:
    """Raise ConfigError if the checkpoint of ``--load`` has a different tokenizer, or different sizes or weights."""
    if not args.load:
        return
    checkpoint, manifest = open_checkpoint(Path(args.load))
    state = _state(checkpoint)
    name = f"--load {args.load}: {checkpoint.name}"
    saved_tokenizer = state.get("tokenizer")
    tokenizer = (read_meta(args.data_path) or {}).get("tokenizer_fingerprint")
    if None not in (saved_tokenizer, tokenizer) and saved_tokenizer != tokenizer:
        raise ConfigError(
            f"{name} has a different tokenizer (got fingerprint {saved_tokenizer}; that of the data is {tokenizer}). "
            f"Use the --data-path of that run, or a different checkpoint."
        )
    if model.transformer_impl == "transformers":
        return  # their weights have names that only a cut model shows
    saved = {f"{p['layer']}.{p['key']}": tuple(p["shape"]) for p in manifest["parameters"].values()}
    shapes = {weight.name: weight.shape for weight in counterparts(model)}
    sizes = _different_sizes(manifest["job"]["layers"], saved, shapes, state.get("model") or {}, model)
    if sizes:
        fix = "Set the sizes of that run"
        if "vocab_size" in sizes:
            fix += ", and --data-path to data prepared with its tokenizer, or --vocab-size"
        got = ", ".join(f"{key} {size}, here {own_size}" for key, (size, own_size) in sizes.items())
        raise ConfigError(f"{name} has a different model (got {got}). {fix}.")
    # Layers of Transformer Engine are skipped, because their weights have other names.
    skipped = range(2, 2 + model.num_layers) if model.transformer_impl != "local" else ()
    weights = [
        f"{weight} {shape_text(saved.get(weight))}, here {shape_text(shapes.get(weight))}"
        for weight in dict.fromkeys([*shapes, *saved])
        if saved.get(weight) != shapes.get(weight) and int(weight.partition(".")[0]) not in skipped
    ]
    if weights:
        more = f"; {len(weights) - _SHOWN} more" if len(weights) > _SHOWN else ""
        raise ConfigError(
            f"{name} has different weights (got {'; '.join(weights[:_SHOWN])}{more}). Set the sizes and layer type of "
            f"that run."
        )


def position(folder: str | None) -> tuple[int, int]:
    """Return the step and the consumed samples of a folder's current checkpoint; 0 and 0 without a folder.

    They are also 0 for a checkpoint of another script, which the load refuses.
    """
    state = _state(open_checkpoint(Path(folder))[0]) if folder else {}
    return int(state.get("step", 0)), int(state.get("consumed_samples", 0))


def _state(checkpoint: Path) -> Mapping[str, Any]:
    """Return the saved state of the script; empty if the file is damaged, which the load reports."""
    try:
        return read_plain(checkpoint / STATE_FILE)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError):
        return {}


def _different_sizes(
    saved_layers: int,
    saved: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    saved_model: Mapping[str, Any],
    model: TransformerConfig,
) -> dict[str, tuple[Any, Any]]:
    """Return field -> (saved value, value here) where they differ; empty if the checkpoint lacks an embedding.

    ``saved_model`` has the saved fields that shapes do not determine. Fields that follow from a differing one are
    omitted.
    """
    if any(name in shapes and name not in saved for name in _EMBEDDINGS):
        return {}  # a different kind of model
    end_layers = num_pipeline_layers(model) - model.num_layers
    sizes = {"num_layers": (saved_layers - end_layers, model.num_layers)}
    for name, keys in _SIZES.items():
        if name in saved and name in shapes:
            sizes |= dict(zip(keys, zip(saved[name], shapes[name], strict=False), strict=False))
    fields = unseen_in_weights(model)
    sizes |= {key: (saved_model[key], fields[key]) for key in COMPUTED if key in saved_model}
    return _without_derived({key: pair for key, pair in sizes.items() if pair[0] != pair[1]})


def _without_derived(differences: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    derived = {field for field, origins in _DERIVED.items() if differences.keys() & origins}
    return {field: pair for field, pair in differences.items() if field not in derived}
