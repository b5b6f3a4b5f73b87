"""Conversion of a Hugging Face model to a checkpoint at step 0, for any schedule and any parallel sizes."""

from __future__ import annotations

import math
import secrets
import shutil
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...engine.checkpoint.file import layer_file, write_plain
from ...engine.checkpoint.folder import has_checkpoint, publish, start_writing
from ...engine.checkpoint.lock import FolderLock
from ...engine.checkpoint.save import STATE_FILE
from ...engine.rank_state import COUNTERS
from ...errors import ConfigError
from ...model.config import TransformerConfig
from ..data.prepare import command_lines
from ..data.tokenizer_base import Tokenizer
from ..models.bert import BertConfig
from ..models.hf import Counterpart, num_pipeline_layers
from ..models.hf_config import is_gpt2, unseen_in_weights
from .hf_model import HuggingFaceModel
from .tokenizer_files import find_hf_tokenizer, origin_of

TAG = "step_0"
_SEQ_LENGTH = 4096  # proposed for models with longer samples
# State of an engine before its first step.
_ENGINE_STATE: Mapping[str, Any] = {
    **dict.fromkeys(COUNTERS, 0),
    **{"module": None, "optimizer": None, "lr_scheduler": None, "lr_scheduler_class": None, "loss_scale": {}},
    **{"dp_world_size": 1, "mp_world_size": 1},
}


def write_checkpoint(source: Path, output: Path) -> str:
    """Write the weights of a Hugging Face model as a checkpoint in fp32.

    ``output`` must not contain checkpoints. Returns a summary for the user, with the command that trains from the
    checkpoint.
    """
    model = HuggingFaceModel(source)
    config = model.config
    if has_checkpoint(output):
        raise ConfigError(f"OUTPUT: the folder contains checkpoints (got {output}). Use a new folder.")
    tokenizer = find_hf_tokenizer(source)
    state = {
        "step": 0,
        "consumed_samples": 0,
        "sizes": f"transformers, from {source.absolute().name}",
        "tokenizer": tokenizer and tokenizer[1].fingerprint,
        "model": unseen_in_weights(config),
        **origin_of(source, source),
    }
    try:
        with FolderLock(output, f"convert {secrets.token_hex(4)}"):
            checkpoint = _write(output, model, state)
    except OSError as error:
        raise ConfigError(f"OUTPUT: cannot be written (got {output}): {error.strerror or error}.") from None
    elements = sum(math.prod(weight.shape) for weight in model.weights.values())
    summary = f"wrote {checkpoint}: {model.folder.config['model_type']}, {elements:,} parameters in fp32\n"
    if tokenizer and tokenizer[1].vocab_size != config.vocab_size and isinstance(config, BertConfig):
        summary += (
            f"note: the model has {config.vocab_size} word embeddings, its tokenizer {tokenizer[1].vocab_size} tokens. "
            "train_bert.py uses the tokenizer's number. Adapt the model with transformers' resize_token_embeddings().\n"
        )
    return summary + _next_commands(config, source, output, tokenizer)


def _write(output: Path, model: HuggingFaceModel, state: Mapping[str, Any]) -> Path:
    """Write the checkpoint of one rank before its first step, without optimizer states, and return its folder.

    ``state`` is the state of the training script.
    """
    folder = start_writing(output, TAG)
    try:
        files = {STATE_FILE: write_plain(folder / STATE_FILE, {**_ENGINE_STATE, **state})}
        for layer, weights in groupby(model.weights.values(), key=lambda weight: weight.layer):
            name = layer_file(layer, 0, 1)
            tensors = {weight.key: _read_fp32(model, weight) for weight in weights}
            files[name] = write_plain(folder / name, tensors)
        return publish(folder, TAG, _manifest(model, files))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read_fp32(model: HuggingFaceModel, weight: Counterpart) -> Tensor:
    # Copy the weight: a view would be saved with its whole storage.
    return model.read(weight).to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _manifest(model: HuggingFaceModel, files: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of a checkpoint of one rank; ``files`` are the entries of its files."""
    is_tied = not model.config.untie_embeddings_and_output_weights
    return {
        "job": {
            "schedule": None,
            "pipeline_parallel_size": 1,
            "tensor_parallel_size": 1,
            "data_parallel_size": 1,
            "zero_stage": 0,
            "precision": "fp32",
            "optimizer": None,
            "layers": num_pipeline_layers(model.config),
        },
        "files": files,
        "parameters": {_engine_name(weight, is_tied): _record(weight) for weight in model.weights.values()},
    }


def _engine_name(weight: Counterpart, tied: bool) -> str:
    return f"tied_modules.embed.{weight.key}" if tied and weight.layer == 0 else weight.name


def _record(weight: Counterpart) -> dict[str, Any]:
    shape = list(weight.shape)
    return {
        "shape": shape,
        "shard": shape,
        "dim": None,
        "layer": weight.layer,
        "key": weight.key,
        "group": None,
        "states": [],
        "values": {},
        "fragments": {"0": []},
    }


def _next_commands(
    config: TransformerConfig, source: Path, output: Path, tokenizer: tuple[Path, Tokenizer] | None
) -> str:
    is_bert = isinstance(config, BertConfig)
    flags: dict[str, Any] = {"--load": output}
    if is_bert or is_gpt2(config):
        flags |= {
            "--num-layers": config.num_layers,
            "--hidden-size": config.hidden_size,
            "--num-attention-heads": config.num_attention_heads,
            "--ffn-hidden-size": config.ffn_size,
            "--seq-length": config.seq_length,
            "--max-position-embeddings": config.positions,
            "--hidden-dropout": config.hidden_dropout,
            "--attention-dropout": config.attention_dropout,
        }
        if not is_bert and tokenizer and tokenizer[1].vocab_size != config.vocab_size:
            flags["--vocab-size"] = config.vocab_size
    else:
        flags |= {"--hf-model": source, "--seq-length": min(config.seq_length, _SEQ_LENGTH)}
    script = "train_bert.py" if is_bert else "train_gpt.py"
    command = ["deepspeed", "--num_gpus", "RANKS", script, "--deepspeed_config", "JSON"]
    command += [str(word) for flag in flags.items() for word in flag]
    if isinstance(config, BertConfig) and config.order_classes is None:
        command.append("--bert-no-binary-head")
    path = tokenizer[0] if tokenizer else "TOKENIZER"
    verb = ["python", "-m", "ds_ext", "prepare"]
    prepare = [*verb, "--tokenizer", str(path), "--source", "TEXT", "--output", "DATA"]
    return f"next: {command_lines(prepare)}\nthen: {command_lines([*command, '--data-path', 'DATA'])}"
