"""A folder of transformers as a checkpoint at step 0, from which training goes on under any schedule and sizes."""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..engine.checkpoint.file import layer_file, write_plain
from ..engine.checkpoint.folder import good_checkpoints, has_checkpoint, publish, start_writing
from ..engine.checkpoint.save import COUNTERS, STATE_FILE
from ..errors import ConfigError
from ..models.bert import BertConfig
from ..models.config import TransformerConfig
from ..models.hf import Counterpart, counterparts, num_pipeline_layers, their_name
from ..models.hf_config import from_json, unseen_in_weights
from .hf_folder import CONFIG, ModelFolder
from .library import shape_text
from .tokenizer_files import tokenizer_beside

TAG = "step_0"
_FLOATS = ("F64", "F32", "F16", "BF16")


def from_hf(source: Path, output: Path) -> str:
    """Write a checkpoint of the weights in ``source``, in fp32, into the folder ``output``.

    Args:
        source: a local folder with config.json and safetensors, of a GPT-2 or BERT.
        output: has no checkpoints yet.

    Returns:
        What was written and how training goes on from it, for the user.

    Raises:
        ConfigError: the model is of another kind, weights are missing or in another shape, or something
            cannot be read or written.
    """
    model = ModelFolder(source)
    try:
        config = from_json(model.config, model.names)
    except ConfigError as error:
        raise ConfigError(f"{source / CONFIG}: {error}") from None
    wanted = counterparts(config)
    files = _checked_names(model, wanted, config)
    if has_checkpoint(output) or good_checkpoints(output):
        raise ConfigError(f"{output} has checkpoints already: give the name of a new folder.")
    found = tokenizer_beside(source)
    state = {
        "step": 0,
        "consumed_samples": 0,
        "sizes": f"transformers, from {source.absolute().name}",
        "tokenizer": found and found[1].fingerprint,
        "model": unseen_in_weights(config),
    }

    def ours(one: Counterpart) -> Tensor:
        theirs = [model.read(files[name]).float() for name in one.theirs]
        # A view would bring the whole of their weight into the file.
        return one.form.to_ours(theirs, config).clone(memory_format=torch.contiguous_format)

    try:
        checkpoint = _write(output, wanted, ours, state, num_pipeline_layers(config))
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror or error}.") from None
    numbers = sum(math.prod(one.shape) for one in wanted)
    said = f"wrote {checkpoint}: {model.config['model_type']}, {numbers:,} parameters in fp32\n"
    if found and found[1].vocab_size != config.vocab_size:
        said += (
            f"note: the model has {config.vocab_size} rows of words and its tokenizer {found[1].vocab_size} tokens, as "
            f"many as a model has that train_*.py makes; resize_token_embeddings() of transformers changes the rows\n"
        )
    return said + f"next: {_next_command(config, output, found and found[0])}"


def _checked_names(
    model: ModelFolder, wanted: Sequence[Counterpart], config: TransformerConfig
) -> dict[str, str]:
    """The names in the files by the current names. Raises ConfigError unless all weights fit."""
    files = {known: name for name in model.names if (known := their_name(name, config)) is not None}
    expected = {name: shape for one in wanted for name, shape in one.their_shapes(config).items()}
    for name in [*expected, *files]:
        there = model.shape(files[name]) if name in files else None
        if there != expected.get(name):
            kind = "BERT" if isinstance(config, BertConfig) else "GPT-2"
            wanted_shape = shape_text(expected.get(name))
            raise ConfigError(
                f"{name} is {shape_text(there)} in {model.path} and {wanted_shape} in a {kind} of its {CONFIG}. What "
                f"is converted are GPT2LMHeadModel, BertForPreTraining and BertForMaskedLM."
            )
        if model.dtype(files[name]) not in _FLOATS:
            raise ConfigError(
                f"{name} in {model.path} is of type {model.dtype(files[name])}: quantized weights cannot be converted."
            )
    return files


def _write(
    output: Path, wanted: Sequence[Counterpart], read: Any, state: Mapping[str, Any], layers: int
) -> Path:
    """A checkpoint of one rank that has taken no step: weights without states of an optimizer. Returns its folder."""
    written = start_writing(output, TAG)
    try:
        counted = dict.fromkeys(COUNTERS, 0)
        scheduler = {"lr_scheduler": None, "lr_scheduler_class": None, "loss_scale": {}}
        sizes = {"dp_world_size": 1, "mp_world_size": 1}
        plain = {**counted, "module": None, "optimizer": None, **scheduler, **sizes, **state}
        files = {STATE_FILE: write_plain(written / STATE_FILE, plain)}
        for layer, members in groupby(wanted, key=lambda one: one.layer):
            name = layer_file(layer, 0, 1)
            files[name] = write_plain(written / name, {one.key: read(one) for one in members})
        manifest = {
            "job": {
                "schedule": None,
                "pipeline_parallel_size": 1,
                "tensor_parallel_size": 1,
                "data_parallel_size": 1,
                "zero_stage": 0,
                "precision": "fp32",
                "optimizer": None,
                "layers": layers,
            },
            "files": files,
            "parameters": {_engine_name(one): _record(one) for one in wanted},
        }
        return publish(written, TAG, manifest)
    finally:
        shutil.rmtree(written, ignore_errors=True)


def _engine_name(one: Counterpart) -> str:
    """The word embeddings are a tied layer, which has the name of its tie."""
    return f"tied_modules.embed.{one.key}" if one.layer == 0 else one.name


def _record(one: Counterpart) -> dict[str, Any]:
    shape = list(one.shape)
    return {
        "shape": shape,
        "shard": shape,
        "dim": None,
        "layer": one.layer,
        "key": one.key,
        "group": None,
        "states": [],
        "values": {},
        "fragments": {"0": []},
    }


def _next_command(config: TransformerConfig, output: Path, tokenizer: Path | None) -> str:
    """How to train on."""
    bert = isinstance(config, BertConfig)
    flags = {
        "--load": output,
        "--num-layers": config.num_layers,
        "--hidden-size": config.hidden_size,
        "--num-attention-heads": config.num_attention_heads,
        "--ffn-hidden-size": config.ffn_size,
        "--seq-length": config.seq_length,
        "--max-position-embeddings": config.positions,
        "--hidden-dropout": config.hidden_dropout,
        "--attention-dropout": config.attention_dropout,
    }
    words = [
        "deepspeed",
        "--num_gpus",
        "RANKS",
        "train_bert.py" if bert else "train_gpt.py",
        "--deepspeed_config",
        "JSON",
    ]
    words += [str(word) for flag in flags.items() for word in flag]
    if isinstance(config, BertConfig) and config.order_classes is None:
        words.append("--bert-no-binary-head")
    prepare = shlex.join(
        ["python", "-m", "ds_ext", "prepare", "--tokenizer", str(tokenizer or "ITS_TOKENIZER")]
    )
    return (
        f"{shlex.join(words)} --data-path DATA\n      with the DATA of {prepare} --source TEXT --output DATA"
    )
