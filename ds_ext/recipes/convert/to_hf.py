"""Conversion of a checkpoint to a folder for transformers' ``from_pretrained``."""

from __future__ import annotations

import json
import math
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
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
from .tokenizer_files import find_tokenizer, save_tokenizer


def write_hf_folder(
    source: Path,
    output: Path,
    tokenizer: Path | None,
    heads: int | None,
    shard_bytes: int,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> str:
    """Write config.json, the weights and, if one is found, the tokenizer.

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
    weights = _CheckpointWeights(checkpoint, manifest)
    config = _make_config(checkpoint, weights.shapes, state, heads)
    model_weights = counterparts(config)
    _check_shapes(checkpoint, model_weights, weights.shapes)
    model_tokenizer = find_tokenizer(tokenizer, state)
    config_json = to_json(config, None if model_tokenizer is None else model_tokenizer.eod_id, dtype)
    check_contents(checkpoint, manifest)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    shards = _shards(model_weights, shard_bytes, torch_dtype.itemsize)
    with _new_folder(output) as folder:
        index: dict[str, str] = {}  # name of a weight -> its file
        for number, shard in enumerate(shards, start=1):
            tensors: dict[str, Tensor] = {}
            for weight in shard:
                tensors |= _hf_tensors(weight, weights.read(weight), config, torch_dtype)
            name = shard_name(number, len(shards))
            write_weights(folder / name, tensors)
            index |= dict.fromkeys(tensors, name)
        elements = sum(math.prod(weight.shape) for weight in model_weights)
        if len(shards) > 1:
            sizes = {"total_size": torch_dtype.itemsize * elements}
            _write_json(folder / INDEX, {"metadata": sizes, "weight_map": index})
        tokenizer_line = save_tokenizer(model_tokenizer, folder, tokenizer)
        _write_json(folder / CONFIG, config_json)
    precision = "fp32" if dtype == "float32" else "bf16"
    return (
        f"wrote {output} from {checkpoint}: {config_json['architectures'][0]}, {elements:,} parameters in {precision}, "
        f"{len(shards)} file{'s' if len(shards) > 1 else ''} of weights\n{tokenizer_line}"
    )


class _CheckpointWeights:
    """Weights of a checkpoint, read one at a time.

    Attributes:
        shapes: name in ds_ext -> shape of the full weight.
    """

    def __init__(self, checkpoint: Path, manifest: dict[str, Any]) -> None:
        self._checkpoint = checkpoint
        self._manifest = manifest
        self._engine_names: dict[str, str] = {}  # name in ds_ext -> name in the engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        for engine_name, record in manifest["parameters"].items():
            name = f"{record['layer']}.{record['key']}"
            self._engine_names[name] = engine_name
            self.shapes[name] = tuple(record["shape"])

    @cached_property
    def _reader(self) -> CheckpointReader:
        # Opened after the checks: manifests of other models may lack what it needs.
        return CheckpointReader(self._checkpoint, self._manifest, tensor_rank=0)

    def read(self, weight: Counterpart) -> Tensor:
        """Return a full weight, joined from the shards of all ranks. Raises CheckpointError."""
        # A shape without shards makes the reader join all shards and omit padding.
        shape = Shape(weight.shape, weight.shape, None)
        empty = nn.Parameter(torch.empty(0))
        parameter = LocalParameter(self._engine_names[weight.name], empty, weight.layer, weight.key, shape)
        elements = math.prod(self.shapes[weight.name])
        return self._reader.weight(parameter, 0, elements).view(weight.shape)


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


def _make_config(
    checkpoint: Path, shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, Any], heads: int | None
) -> TransformerConfig:
    """Return the config of the model, from the shapes of its weights and the state that the training script saved.

    Raises:
        ConfigError: it is not a GPT or BERT of ds_ext, or a field that the shapes do not show is missing or invalid.
    """
    is_bert = "1.position_embeddings" in shapes
    model = state.get("model")
    fields = saved_fields(model) if isinstance(model, dict) else {}
    try:
        vocab_size, hidden_size = shapes["0.word_embeddings.weight"]
        ffn_size, _ = shapes["2.mlp.linear_fc1.weight"]
    except (KeyError, ValueError):
        raise ConfigError(
            f"{checkpoint}: only ds_ext's GPT and BERT without Transformer Engine can be converted (got the weights "
            f"{', '.join(sorted(shapes)[:4])}, ...)."
        ) from None
    table = "1.position_embeddings" if is_bert else "1.weight"
    positions = shapes[table][0] if table in shapes else fields.get("max_position_embeddings")
    if positions is None:
        raise ConfigError(
            f'{checkpoint}: "model" in the client state must contain max_position_embeddings, because the model has no '
            f"position table (got {model!r:.100}). Save the checkpoint with "
            'client_state={"model": unseen_in_weights(config), ...}.'
        )
    sizes: dict[str, Any] = {
        **fields,
        "num_attention_heads": _num_heads(checkpoint, fields.get("num_attention_heads"), heads),
        "num_layers": len([name for name in shapes if name.endswith(".mlp.linear_fc1.weight")]),
        "hidden_size": hidden_size,
        "seq_length": positions,
        "max_position_embeddings": positions,
        "vocab_size": vocab_size,
        "ffn_hidden_size": ffn_size,
    }
    if not is_bert:
        return GPTConfig(**sizes)
    classifiers = [shape[0] for name, shape in shapes.items() if name.endswith(".classifier.weight")]
    return BertConfig(**sizes, order_classes=classifiers[0] if classifiers else None)


def _num_heads(checkpoint: Path, saved_heads: int | None, flag_heads: int | None) -> int:
    """Return the heads in the checkpoint, or else those of the flag. Raises ConfigError for none, or if they differ."""
    if saved_heads is None and flag_heads is None:
        raise ConfigError(
            f"--num-attention-heads: {checkpoint} does not contain the number of attention heads. Set this flag."
        )
    if None not in (saved_heads, flag_heads) and saved_heads != flag_heads:
        raise ConfigError(
            f"--num-attention-heads: {checkpoint} has {saved_heads} attention heads (got {flag_heads}). Omit this flag."
        )
    return saved_heads or flag_heads or 0


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


def _hf_tensors(
    weight: Counterpart, tensor: Tensor, config: TransformerConfig, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return name in transformers -> tensor for the counterparts of a weight, with separate storage."""
    hf_tensors = weight.conversion.to_hf(tensor, config)
    return {
        name: hf_tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)
        for name, hf_tensor in zip(weight.hf_names, hf_tensors, strict=True)
    }


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
    folder = output.absolute().parent / f".{output.absolute().name}.tmp-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True)
        yield folder
        folder.replace(output)
    except OSError as error:
        raise ConfigError(f"OUTPUT: cannot be written (got {output}): {error.strerror or error}.") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
