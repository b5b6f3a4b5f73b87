"""Conversion of a checkpoint to a folder for transformers' ``from_pretrained``."""

from __future__ import annotations

import json
import math
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...engine.checkpoint.file import read_plain
from ...engine.checkpoint.folder import LATEST, MANIFEST, check_contents, has_checkpoint, open_checkpoint
from ...engine.checkpoint.reader import CheckpointReader
from ...engine.checkpoint.save import STATE_FILE
from ...engine.checkpoint.states import LocalParameter, Shape
from ...errors import ConfigError
from ...hf.folder import CONFIG, INDEX, safetensors, shape_text, shard_name, write_weights
from ..models.bert import BertConfig
from ..models.config import TransformerConfig
from ..models.gpt import GPTConfig
from ..models.hf import Counterpart, counterparts
from ..models.hf_config import saved_fields, to_json
from .tokenizer_files import save_tokenizer, tokenizer_of


def to_hf(
    source: Path,
    output: Path,
    tokenizer: Path | None,
    heads: int | None,
    shard_bytes: int,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> str:
    """Write config.json, the weights and, if found, the tokenizer.

    Args:
        source: folder of checkpoints, of which the latest is converted, or one checkpoint.
        output: new folder.
        tokenizer: file or folder of the model's tokenizer; None: search the folder of the training data.
        heads: number of attention heads, for a checkpoint that does not contain it.
        shard_bytes: maximum size of a file, unless a single weight is larger.
        dtype: dtype of the weights in the files.

    Returns:
        Summary for the user.

    Raises:
        ConfigError: if the model is not a GPT or BERT of ds_ext, a file or package is missing, or ``output`` exists.
        CheckpointError: if the checkpoint is damaged.
    """
    safetensors()  # report a missing package first
    checkpoint, manifest = _open(source)
    state = read_plain(checkpoint / STATE_FILE)
    parameters = {
        f"{record['layer']}.{record['key']}": (name, record)
        for name, record in manifest["parameters"].items()
    }
    shapes = {name: tuple(record["shape"]) for name, (_, record) in parameters.items()}
    config = _config_of(checkpoint, shapes, state, heads)
    weights = counterparts(config)
    _check_shapes(checkpoint, weights, shapes)
    model_tokenizer = tokenizer_of(tokenizer, state)
    config_json = to_json(config, None if model_tokenizer is None else model_tokenizer.eod_id, dtype)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    element_bytes = torch_dtype.itemsize
    check_contents(checkpoint, manifest)
    reader = CheckpointReader(checkpoint, manifest, tensor_rank=0)

    def read(weight: Counterpart) -> Tensor:
        name, record = parameters[weight.name]
        # A shape without shards makes the reader join all shards and omit padding.
        shape = Shape(weight.shape, weight.shape, None)
        full = LocalParameter(name, nn.Parameter(torch.empty(0)), weight.layer, weight.key, shape)
        return reader.weight(full, 0, math.prod(record["shape"])).view(weight.shape)

    with _new_folder(output) as folder:
        index: dict[str, str] = {}
        shards = _shards(weights, shard_bytes, element_bytes)
        for number, shard in enumerate(shards, start=1):
            tensors = dict(
                pair for weight in shard for pair in _to_hf(weight, read(weight), config, torch_dtype)
            )
            name = shard_name(number, len(shards))
            write_weights(folder / name, tensors)
            index |= dict.fromkeys(tensors, name)
        total = element_bytes * sum(math.prod(weight.shape) for weight in weights)
        if len(shards) > 1:
            _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": index})
        tokenizer_line = save_tokenizer(model_tokenizer, folder, tokenizer)
        _write_json(folder / CONFIG, config_json)
    precision = "fp32" if dtype == "float32" else "bf16"
    kind, count = config_json["architectures"][0], total // element_bytes
    return (
        f"wrote {output} from {checkpoint}: {kind}, {count:,} parameters in {precision}, {len(shards)} "
        f"file{'s' if len(shards) > 1 else ''} of weights\n{tokenizer_line}"
    )


def _open(source: Path) -> tuple[Path, dict[str, Any]]:
    """Return the checkpoint to convert and its manifest. Raises ConfigError without a checkpoint."""
    if (source / MANIFEST).is_file():
        return open_checkpoint(source.absolute().parent, source.absolute().name)
    if not has_checkpoint(source):
        raise ConfigError(
            f"SOURCE: must be a folder of checkpoints, with a file {LATEST}, or a checkpoint, with a file {MANIFEST} "
            f"(got {source})."
        )
    return open_checkpoint(source)


def _config_of(
    checkpoint: Path, shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, Any], heads: int | None
) -> TransformerConfig:
    """Return the config of the model, from the shapes of its weights and the state that the training script saved."""
    bert = "1.position_embeddings" in shapes
    saved_model = state.get("model")
    fields = saved_fields(saved_model) if isinstance(saved_model, dict) else {}
    try:
        vocab_size, hidden_size = shapes["0.word_embeddings.weight"]
        ffn_size, _ = shapes["2.mlp.linear_fc1.weight"]
        table = "1.position_embeddings" if bert else "1.weight"
        positions = shapes[table][0] if table in shapes else fields["max_position_embeddings"]
    except (KeyError, ValueError):
        raise ConfigError(
            f"{checkpoint}: only ds_ext's GPT and BERT without Transformer Engine can be converted (got the weights "
            f"{', '.join(sorted(shapes)[:4])}, ...)."
        ) from None
    saved = fields.get("num_attention_heads")
    if saved is None and heads is None:
        raise ConfigError(
            f"--num-attention-heads: {checkpoint} does not contain the number of attention heads. Set this flag."
        )
    if None not in (saved, heads) and saved != heads:
        raise ConfigError(
            f"--num-attention-heads: {checkpoint} has {saved} attention heads (got {heads}). Omit this flag."
        )
    sizes: dict[str, Any] = {
        **fields,
        "num_attention_heads": saved or heads,
        "num_layers": len([name for name in shapes if name.endswith(".mlp.linear_fc1.weight")]),
        "hidden_size": hidden_size,
        "seq_length": positions,
        "max_position_embeddings": positions,
        "vocab_size": vocab_size,
        "ffn_hidden_size": ffn_size,
    }
    if not bert:
        return GPTConfig(**sizes)
    classifiers = [shape[0] for name, shape in shapes.items() if name.endswith(".classifier.weight")]
    return BertConfig(**sizes, order_classes=classifiers[0] if classifiers else None)


def _check_shapes(
    checkpoint: Path, weights: Sequence[Counterpart], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise ConfigError unless the checkpoint has exactly the weights of the model."""
    expected = {weight.name: weight.shape for weight in weights}
    for name in [*expected, *shapes]:
        if shapes.get(name) != expected.get(name):
            raise ConfigError(
                f"{name}: a GPT or BERT of ds_ext has {shape_text(expected.get(name))} (got "
                f"{shape_text(shapes.get(name))} in {checkpoint}). No other model can be converted."
            )


def _to_hf(
    weight: Counterpart, tensor: Tensor, config: TransformerConfig, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and the tensors of a weight in transformers, with separate storage."""
    for name, hf_tensor in zip(weight.hf_names, weight.conversion.to_hf(tensor, config), strict=True):
        yield name, hf_tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _shards(weights: Sequence[Counterpart], limit_bytes: int, element_bytes: int) -> list[list[Counterpart]]:
    """Group the weights, in order, into files of at most ``limit_bytes``, or of one larger weight."""
    shards: list[list[Counterpart]] = [[]]
    shard_bytes = 0
    for weight in weights:
        weight_bytes = element_bytes * math.prod(weight.shape)
        if shards[-1] and shard_bytes + weight_bytes > limit_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(weight)
        shard_bytes += weight_bytes
    return shards


@contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """Create a temporary folder, renamed to ``output`` on success. Raises ConfigError."""
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ConfigError(f"OUTPUT: already exists (got {output}). Use a new folder.")
    written = output.absolute().parent / f".{output.absolute().name}.tmp-{secrets.token_hex(4)}"
    try:
        written.mkdir(parents=True)
        yield written
        written.replace(output)
    except OSError as error:
        raise ConfigError(f"OUTPUT: cannot be written (got {output}): {error.strerror or error}.") from None
    finally:
        shutil.rmtree(written, ignore_errors=True)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
