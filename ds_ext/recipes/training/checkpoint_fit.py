"""Check that the checkpoint of ``--load`` fits the model, from its manifest and saved state, before launch.

The load itself compares every parameter of every rank again.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...engine.checkpoint.file import read_plain
from ...engine.checkpoint.folder import open_checkpoint
from ...engine.checkpoint.save import STATE_FILE
from ...errors import ConfigError
from ...model.config import TransformerConfig
from ..data.meta import read_meta
from ..models.hf import counterparts, num_pipeline_layers
from ..models.hf_config import COMPUTED, unseen_in_weights

# Name of a weight -> flag of each of its sizes.
_SIZES = {
    "0.word_embeddings.weight": ("vocab_size", "hidden_size"),
    "1.weight": ("max_position_embeddings",),
    "1.position_embeddings": ("max_position_embeddings",),
    "2.mlp.linear_fc1.weight": ("ffn_hidden_size",),
}
# Field -> fields that decide its default.
_DERIVED = {
    "kv_channels": {"hidden_size", "num_attention_heads"},
    "num_query_groups": {"num_attention_heads"},
}
_SHOWN = 4


def check_load(args: argparse.Namespace, model: TransformerConfig) -> None:
    if not args.load:
        return
    checkpoint, manifest = open_checkpoint(Path(args.load))
    state = _state(checkpoint)
    name = f"--load {args.load}: {checkpoint.name}"
    _check_tokenizer(name, state.get("tokenizer"), args.data_path)
    if model.transformer_impl == "transformers":
        return  # their weights have names that only a cut model shows
    shapes = {f"{p['layer']}.{p['key']}": tuple(p["shape"]) for p in manifest["parameters"].values()}
    different_sizes = list(_different_sizes(manifest["job"], shapes, state.get("model") or {}, model))
    if different_sizes:
        fix = "Set the sizes of that run"
        if any("vocab" in size for size in different_sizes):
            fix += ", and --data-path to data prepared with its tokenizer, or --vocab-size"
        raise ConfigError(f"{name} has a different model (got {', '.join(different_sizes)}). {fix}.")
    different_weights = list(_different_weights(shapes, model))
    if different_weights:
        hidden = len(different_weights) - _SHOWN
        more = f"; {hidden} more" if hidden > 0 else ""
        raise ConfigError(
            f"{name} has different weights (got {'; '.join(different_weights[:_SHOWN])}{more}). Set the sizes and "
            f"layer type of that run."
        )


def _check_tokenizer(name: str, fingerprint: str | None, data_path: str | Sequence[str]) -> None:
    data_fingerprint = (read_meta(data_path) or {}).get("tokenizer_fingerprint")
    if None not in (fingerprint, data_fingerprint) and fingerprint != data_fingerprint:
        raise ConfigError(
            f"{name} has a different tokenizer (got fingerprint {fingerprint}; that of the data is "
            f"{data_fingerprint}). Use the --data-path of that run, or a different checkpoint."
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
    job: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    saved_model: Mapping[str, Any],
    model: TransformerConfig,
) -> Iterator[str]:
    """Yield ``"num_layers 6, here 8"`` for every flag that differs; nothing for a different kind of model.

    ``saved_model`` has fields that the weights do not show, as far as they were saved.
    """
    model_shapes = {weight.name: weight.shape for weight in counterparts(model)}
    if any(name in model_shapes and name not in shapes for name in _SIZES if name.startswith(("0.", "1."))):
        return
    other_layers = num_pipeline_layers(model) - model.num_layers
    pairs = {"num_layers": (job["layers"] - other_layers, model.num_layers)}  # (checkpoint, model)
    for name, keys in _SIZES.items():
        if name in shapes and name in model_shapes:
            pairs |= dict(zip(keys, zip(shapes[name], model_shapes[name], strict=False), strict=False))
    fields = unseen_in_weights(model)
    pairs |= {key: (saved_model[key], fields[key]) for key in COMPUTED if key in saved_model}
    differences = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    for derived, origins in _DERIVED.items():
        if differences.keys() & origins:
            differences.pop(derived, None)
    for key, (saved_size, size) in differences.items():
        yield f"{key} {saved_size}, here {size}"


def _different_weights(shapes: Mapping[str, tuple[int, ...]], model: TransformerConfig) -> Iterator[str]:
    """Yield every weight that is missing on one side or has a different shape.

    Layers of Transformer Engine are skipped, because their weights have other names.
    """
    model_shapes = {weight.name: weight.shape for weight in counterparts(model)}
    ignored_layers = range(2, 2 + model.num_layers) if model.transformer_impl != "local" else range(0)
    for name in dict.fromkeys([*model_shapes, *shapes]):
        shape, model_shape = shapes.get(name), model_shapes.get(name)
        if shape != model_shape and int(name.partition(".")[0]) not in ignored_layers:
            yield f"{name} {_text(shape)}, here {_text(model_shape)}"


def _text(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else " x ".join(map(str, shape))
