"""A checkpoint as a folder that transformers' ``from_pretrained`` takes."""

from __future__ import annotations

import json
import math
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.checkpoint.file import read_plain
from ..engine.checkpoint.folder import LATEST, MANIFEST, check_contents, open_checkpoint
from ..engine.checkpoint.reader import CheckpointReader
from ..engine.checkpoint.save import STATE_FILE
from ..engine.checkpoint.states import Held, Shape
from ..errors import ConfigError
from ..models.bert import BertConfig
from ..models.config import TransformerConfig
from ..models.gpt import GPTConfig
from ..models.hf import Counterpart, counterparts
from ..models.hf_config import UNSEEN, to_json
from .hf_folder import CONFIG, INDEX, shard_name
from .library import safetensors, shape_text, write_weights
from .tokenizer_files import save_tokenizer, tokenizer_of


def to_hf(source: Path, output: Path, tokenizer: Path | None, heads: int | None, shard_bytes: int) -> str:
    """Write the folder ``output``: config.json, the weights in fp32, and the tokenizer where it is known.

    Args:
        source: a folder of checkpoints, of which the current one is meant, or one of them.
        tokenizer: a file or a folder that holds the one which the model was trained with.
        heads: attention heads, for a checkpoint that does not say it.
        shard_bytes: the largest file, unless one weight is larger.

    Returns:
        What was written, for the user.

    Raises:
        ConfigError: the checkpoint is not of one of our models, or something is missing or in the way.
        CheckpointError: it is damaged.
    """
    safetensors()  # what is missing is said first
    checkpoint, manifest = _open(source)
    state = read_plain(checkpoint / STATE_FILE)
    parameters = {f"{one['layer']}.{one['key']}": (name, one) for name, one in manifest["parameters"].items()}
    shapes = {name: tuple(record["shape"]) for name, (_, record) in parameters.items()}
    config = _config_of(checkpoint, shapes, state, heads)
    wanted = counterparts(config)
    _check_same(checkpoint, wanted, shapes)
    words = tokenizer_of(tokenizer, state)
    check_contents(checkpoint, manifest)
    reader = CheckpointReader(checkpoint, manifest, tensor_rank=0)

    def read(one: Counterpart) -> Tensor:
        name, record = parameters[one.name]
        # Cut nowhere: the reader gives all shards as one, without padding.
        held = Held(name, nn.Parameter(torch.empty(0)), one.layer, one.key, Shape(one.shape, one.shape, None))
        return reader.weight(held, 0, math.prod(record["shape"])).view(one.shape)

    with _new_folder(output) as folder:
        index: dict[str, str] = {}
        shards = _shards(wanted, shard_bytes)
        for number, shard in enumerate(shards, start=1):
            tensors = dict(pair for one in shard for pair in _theirs(one, read(one), config))
            name = shard_name(number, len(shards))
            write_weights(folder / name, tensors)
            index |= dict.fromkeys(tensors, name)
        total = 4 * sum(math.prod(one.shape) for one in wanted)
        if len(shards) > 1:
            _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": index})
        described = to_json(config, None if words is None else words.eod_id)
        said = save_tokenizer(words, folder)
        _write_json(folder / CONFIG, described)
    return (
        f"wrote {output} from {checkpoint}: {described['architectures'][0]}, {total // 4:,} parameters in fp32, "
        f"{len(shards)} file{'s' if len(shards) > 1 else ''} of weights\n{said}"
    )


def _open(source: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint that is meant, and its manifest."""
    if (source / MANIFEST).is_file():
        return open_checkpoint(source.absolute().parent, source.absolute().name)
    if not (source / LATEST).is_file():
        raise ConfigError(
            f"{source} is neither a folder of checkpoints (with a file {LATEST!r}) nor one of them (with a file "
            f"{MANIFEST!r})."
        )
    return open_checkpoint(source)


def _config_of(
    checkpoint: Path, shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, Any], heads: int | None
) -> TransformerConfig:
    """The sizes of the model, from the shapes of its weights and what the script has saved about it."""
    bert = "1.position_embeddings" in shapes
    try:
        vocab_size, hidden_size = shapes["0.word_embeddings.weight"]
        ffn_size, _ = shapes["2.mlp.linear_fc1.weight"]
        positions, _ = shapes["1.position_embeddings" if bert else "1.weight"]
    except (KeyError, ValueError):
        raise ConfigError(
            f"{checkpoint} is not of a GPT or BERT of ds_ext.models: it lacks their embeddings or first layer (those "
            f"of Transformer Engine have other names and are not converted). It has "
            f"{', '.join(sorted(shapes)[:4])}, ..."
        ) from None
    saved_model = state.get("model")
    known = (
        {key: saved_model[key] for key in UNSEEN if key in saved_model}
        if isinstance(saved_model, dict)
        else {}
    )
    saved = known.get("num_attention_heads")
    if saved is None and heads is None:
        raise ConfigError(
            f"{checkpoint} does not say how many attention heads the model has: give --num-attention-heads."
        )
    if None not in (saved, heads) and saved != heads:
        raise ConfigError(
            f"--num-attention-heads {heads} contradicts {checkpoint}, which says {saved}: leave it out."
        )
    sizes: dict[str, Any] = {
        **known,
        "num_attention_heads": saved or heads,
        "num_layers": len([name for name in shapes if name.endswith(".mlp.linear_fc1.weight")]),
        "hidden_size": hidden_size,
        "seq_length": positions,
        "vocab_size": vocab_size,
        "ffn_hidden_size": ffn_size,
    }
    if not bert:
        return GPTConfig(**sizes)
    classifiers = [shape[0] for name, shape in shapes.items() if name.endswith(".classifier.weight")]
    return BertConfig(**sizes, order_classes=classifiers[0] if classifiers else None)


def _check_same(
    checkpoint: Path, wanted: Sequence[Counterpart], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """The checkpoint has the weights of the model, all of them and no others."""
    expected = {one.name: one.shape for one in wanted}
    for name in [*expected, *shapes]:
        if shapes.get(name) != expected.get(name):
            there, model = (shape_text(found.get(name)) for found in (shapes, expected))
            raise ConfigError(
                f"{checkpoint} is not of a GPT or BERT of ds_ext.models: {name} is {there} there and {model} in such a "
                f"model."
            )


def _theirs(one: Counterpart, ours: Tensor, config: TransformerConfig) -> Iterator[tuple[str, Tensor]]:
    """Their names and tensors, in fp32 and each in memory of its own."""
    for name, tensor in zip(one.theirs, one.form.to_theirs(ours, config), strict=True):
        yield name, tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _shards(wanted: Sequence[Counterpart], limit_bytes: int) -> list[list[Counterpart]]:
    """Consecutive weights, as many to a file as fit."""
    shards: list[list[Counterpart]] = [[]]
    filled = 0
    for one in wanted:
        size = 4 * math.prod(one.shape)
        if shards[-1] and filled + size > limit_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(one)
        filled += size
    return shards


@contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name when all is written. Raises ConfigError."""
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ConfigError(f"{output} exists already: give the name of a new folder.")
    written = output.absolute().parent / f".{output.absolute().name}.tmp-{secrets.token_hex(4)}"
    try:
        written.mkdir(parents=True)
        yield written
        written.replace(output)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror or error}.") from None
    finally:
        shutil.rmtree(written, ignore_errors=True)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
