"""Whether the checkpoint of ``--load`` is of this job's model, found without ranks: by its manifest and saved state.

The load itself compares every parameter of every rank once more (``engine/checkpoint_load.py``).
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..data.meta import read_meta
from ..engine.checkpoint.file import read_plain
from ..engine.checkpoint.folder import open_checkpoint
from ..engine.checkpoint.save import STATE_FILE
from ..errors import ConfigError
from ..models.config import TransformerConfig
from ..models.hf import counterparts, num_pipeline_layers
from ..models.hf_config import unseen_in_weights

# What the weights of one name say: the flag that decides each of their sizes.
_SIZES = {
    "0.word_embeddings.weight": ("vocab_size", "hidden_size"),
    "1.weight": ("max_position_embeddings",),
    "1.position_embeddings": ("max_position_embeddings",),
    "2.mlp.linear_fc1.weight": ("ffn_hidden_size",),
}
_SAVED = ("num_attention_heads", "layernorm_epsilon")
_SHOWN = 4


def check_load(args: argparse.Namespace, model: TransformerConfig) -> None:
    """Raise ConfigError when ``--load`` names a checkpoint of another model, or of data of another tokenizer.

    Args:
        args: parsed flags of a training script, with ``load`` and ``data_path``; without ``load`` all is well.
        model: a BertConfig is a BERT, any other a GPT.
    """
    if not args.load:
        return
    checkpoint, manifest = open_checkpoint(Path(args.load))
    state, start = _state(checkpoint), f"--load {args.load}: {checkpoint.name} is of"
    shapes = {f"{one['layer']}.{one['key']}": tuple(one["shape"]) for one in manifest["parameters"].values()}
    other = list(_other_sizes(manifest["job"], shapes, state.get("model") or {}, model))
    if other:
        words = ", and the data of its tokenizer" if any("vocab" in size for size in other) else ""
        raise ConfigError(
            f"{start} a model with {', '.join(other)}. Give the model the sizes of that run{words}."
        )
    wrong = list(_other_weights(shapes, model))
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ConfigError(
            f"{start} another model: {'; '.join(wrong[:_SHOWN])}{more}. Give the model the sizes and the kind of "
            f"layers of that run."
        )
    theirs, ours = state.get("tokenizer"), (read_meta(args.data_path) or {}).get("tokenizer_fingerprint")
    if None not in (theirs, ours) and theirs != ours:
        raise ConfigError(
            f"{start} a run on data of another tokenizer (fingerprint {theirs}; the data's is {ours}). Give the "
            f"--data-path of that run, or another --load."
        )


def _state(checkpoint: Path) -> Mapping[str, Any]:
    """What the script has saved; nothing when the file is damaged, which the load says, by its checksum."""
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
    """``"num_layers 6 (here 8)"`` for every size that differs, as the flags call it; none of another kind of model."""
    expected = {one.name: one.shape for one in counterparts(model)}
    if any(name in expected and name not in shapes for name in _SIZES if name.startswith(("0.", "1."))):
        return
    around = num_pipeline_layers(model) - model.num_layers
    pairs = {"num_layers": (job["layers"] - around, model.num_layers)}
    for name, keys in _SIZES.items():
        if name in shapes and name in expected:
            sizes = zip(keys, shapes[name], expected[name], strict=False)
            pairs |= {key: (theirs, ours) for key, theirs, ours in sizes}
    here = unseen_in_weights(model)
    pairs |= {key: (saved[key], here[key]) for key in _SAVED if key in saved}
    yield from (f"{key} {theirs} (here {ours})" for key, (theirs, ours) in pairs.items() if theirs != ours)


def _other_weights(shapes: Mapping[str, tuple[int, ...]], model: TransformerConfig) -> Iterator[str]:
    """Every weight that only one of the two has, or in another shape."""
    # Names inside Transformer Engine's layers are its own.
    inside = range(2, 2 + model.num_layers) if model.transformer_impl != "local" else range(0)

    def known(found: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in found.items() if int(name.partition(".")[0]) not in inside}

    theirs, ours = known(shapes), known({one.name: one.shape for one in counterparts(model)})
    for name in dict.fromkeys([*ours, *theirs]):
        if theirs.get(name) != ours.get(name):
            yield f"{name} is {_text(theirs.get(name))} there and {_text(ours.get(name))} here"


def _text(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else " x ".join(map(str, shape))
