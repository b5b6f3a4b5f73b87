"""Conversion of a checkpoint to a folder for transformers' ``from_pretrained``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ...engine.checkpoint.file import read_plain
from ...engine.checkpoint.folder import check_contents
from ...engine.checkpoint.save import STATE_FILE
from ...errors import ConfigError
from ...hf.folder import CONFIG, GENERATION, safetensors, shape_text, write_weights
from ...model.config import TransformerConfig
from ..models.bert import BertConfig
from ..models.gpt import GPTConfig
from ..models.hf import Counterpart, counterparts
from ..models.hf_config import saved_fields, to_json
from .checkpoint_weights import CheckpointWeights, new_folder, open_source, write_json, write_shards
from .tokenizer_files import find_generation, find_tokenizer, save_tokenizer


def write_hf_folder(
    source: Path,
    output: Path,
    tokenizer: Path | None,
    heads: int | None,
    shard_bytes: int,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> str:
    """Write config.json, generation_config.json, the weights and, if one is found, the tokenizer.

    Args:
        source: folder of checkpoints, of which the latest is converted, or one checkpoint.
        output: new folder.
        tokenizer: file or folder of the model's tokenizer; None: search the folder of the training data.
        heads: number of attention heads, for a checkpoint that does not contain it.
        shard_bytes: maximum size of a file, unless a single weight is larger.

    Returns a summary for the user.
    """
    safetensors()  # report a missing package first
    checkpoint, manifest = open_source(source)
    state = read_plain(checkpoint / STATE_FILE)
    weights = CheckpointWeights(checkpoint, manifest)
    config, model_weights = find_model(checkpoint, weights.shapes, state, heads)
    found = find_tokenizer(tokenizer, state)
    generation = find_generation(state, found)
    config_json = to_json(config, None if found is None else found[0].eod_id, dtype) | generation[CONFIG]
    check_contents(checkpoint, manifest)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    by_name = {weight.name: weight for weight in model_weights}
    elements = sum(math.prod(weight.shape) for weight in model_weights)

    def read(name: str) -> dict[str, Tensor]:
        return _hf_tensors(by_name[name], weights.read(name), config, torch_dtype)

    with new_folder(output) as folder:
        sizes = {name: torch_dtype.itemsize * math.prod(weight.shape) for name, weight in by_name.items()}
        files = write_shards(folder, sizes, read, shard_bytes, write_weights)
        tokenizer_line = save_tokenizer(found, folder)
        if generation[GENERATION] is not None:
            write_json(folder / GENERATION, generation[GENERATION])
        write_json(folder / CONFIG, config_json)
    precision = "fp32" if dtype == "float32" else "bf16"
    return (
        f"wrote {output} from {checkpoint}: {config_json['architectures'][0]}, {elements:,} parameters in {precision}, "
        f"{files} file{'s' if files > 1 else ''} of weights\n{tokenizer_line}"
    )


def find_model(
    checkpoint: Path, shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, Any], heads: int | None
) -> tuple[TransformerConfig, list[Counterpart]]:
    """Return the config and the weights of the GPT or BERT in a checkpoint.

    ``shapes`` is name in ds_ext -> shape of the full weight. ``heads`` is for a checkpoint without their number.
    """
    config = _make_config(checkpoint, shapes, state, heads)
    weights = counterparts(config)
    _check_shapes(checkpoint, weights, shapes)
    return config, weights


def _make_config(
    checkpoint: Path, shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, Any], heads: int | None
) -> TransformerConfig:
    is_bert = "1.position_embeddings" in shapes
    model = state.get("model")
    fields = saved_fields(model) if isinstance(model, dict) else {}
    try:
        vocab_size, hidden_size = shapes["0.word_embeddings.weight"]
        ffn_size, _ = shapes["2.mlp.linear_fc1.weight"]
    except (KeyError, ValueError):
        raise ConfigError(
            f"{checkpoint}: only ds_ext's GPT and BERT without Transformer Engine can be converted (got the weights "
            f"{', '.join(sorted(shapes)[:4])}, ...). For layers of from_transformers, add --hf-model with the "
            "trained folder; for others, use `export`."
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
