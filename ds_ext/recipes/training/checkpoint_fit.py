"""Check that the checkpoint of ``--load`` fits the model, from its manifest and saved state, before launch.

The load itself compares every parameter of every rank again.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...engine.checkpoint.file import read_plain
from ...engine.checkpoint.folder import open_checkpoint
from ...engine.checkpoint.save import STATE_FILE
from ...errors import ConfigError
from ..data.meta import read_meta
from ..models.config import TransformerConfig
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
    """Raise ConfigError if the checkpoint of ``--load`` has a different model or tokenizer.

    Args:
        args: flags of a training script; nothing is checked without ``load``.
        model: sizes of the model; a BertConfig is a BERT, any other a GPT.
    """
    if not args.load:
        return
    checkpoint, manifest = open_checkpoint(Path(args.load))
    state, source = _state(checkpoint), f"--load {args.load}: {checkpoint.name}"
    shapes = {f"{one['layer']}.{one['key']}": tuple(one["shape"]) for one in manifest["parameters"].values()}
    other = list(_other_sizes(manifest["job"], shapes, state.get("model") or {}, model))
    if other:
        data = (
            ", and --data-path to data prepared with its tokenizer, or --vocab-size"
            if any("vocab" in size for size in other)
            else ""
        )
        raise ConfigError(
            f"{source} has a different model (got {', '.join(other)}). Set the sizes of that run{data}."
        )
    wrong = list(_other_weights(shapes, model))
    if wrong:
        more = f"; {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ConfigError(
            f"{source} has different weights (got {'; '.join(wrong[:_SHOWN])}{more}). Set the sizes and layer type of "
            f"that run."
        )
    saved, expected = state.get("tokenizer"), (read_meta(args.data_path) or {}).get("tokenizer_fingerprint")
    if None not in (saved, expected) and saved != expected:
        raise ConfigError(
            f"{source} has a different tokenizer (got fingerprint {saved}; that of the data is {expected}). Use the "
            f"--data-path of that run, or a different checkpoint."
        )


def position(folder: str | None) -> tuple[int, int]:
    """Return the step and the consumed samples of a folder's current checkpoint; 0 and 0 without a folder.

    They are also 0 for a checkpoint of another script, which the load refuses.
    Raises the errors of :func:`..engine.checkpoint.folder.open_checkpoint`.
    """
    state = _state(open_checkpoint(Path(folder))[0]) if folder else {}
    return int(state.get("step", 0)), int(state.get("consumed_samples", 0))


def _state(checkpoint: Path) -> Mapping[str, Any]:
    """Return the saved state of the script; empty if the file is damaged, which the load reports."""
    try:
        return read_plain(checkpoint / STATE_FILE)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError):
        return {}


def _other_sizes(
    job: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    saved: Mapping[str, Any],
    model: TransformerConfig,
) -> Iterator[str]:
    """Yield ``"num_layers 6, here 8"`` for every flag that differs; nothing for a different kind of model."""
    expected = {one.name: one.shape for one in counterparts(model)}
    if any(name in expected and name not in shapes for name in _SIZES if name.startswith(("0.", "1."))):
        return
    around = num_pipeline_layers(model) - model.num_layers
    pairs = {"num_layers": (job["layers"] - around, model.num_layers)}
    for name, keys in _SIZES.items():
        if name in shapes and name in expected:
            sizes = zip(keys, shapes[name], expected[name], strict=False)
            pairs |= {key: (saved_size, size) for key, saved_size, size in sizes}
    here = unseen_in_weights(model)
    pairs |= {key: (saved[key], here[key]) for key in COMPUTED if key in saved}
    other = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    for derived, origins in _DERIVED.items():
        if other.keys() & origins:
            other.pop(derived, None)
    yield from (f"{key} {there}, here {size}" for key, (there, size) in other.items())


def _other_weights(shapes: Mapping[str, tuple[int, ...]], model: TransformerConfig) -> Iterator[str]:
    """Yield every weight that is missing on one side or has a different shape."""
    # Transformer Engine names the weights inside its layers.
    inside = range(2, 2 + model.num_layers) if model.transformer_impl != "local" else range(0)

    def known(weights: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in weights.items() if int(name.partition(".")[0]) not in inside}

    saved, expected = known(shapes), known({one.name: one.shape for one in counterparts(model)})
    for name in dict.fromkeys([*expected, *saved]):
        if saved.get(name) != expected.get(name):
            yield f"{name} {_text(saved.get(name))}, here {_text(expected.get(name))}"


def _text(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else " x ".join(map(str, shape))
