"""Conversion of a checkpoint with the layers of ``from_transformers`` to a folder of transformers."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ...engine.checkpoint.file import read_plain
from ...engine.checkpoint.folder import check_contents
from ...engine.checkpoint.save import STATE_FILE
from ...errors import ConfigError
from ...hf.find import find_split
from ...hf.folder import has_weights, shape_text
from ...hf.lora import lora_config
from ...hf.weights import config_of, make_source
from .checkpoint_weights import CheckpointWeights, new_folder, open_source
from .export import read_layers
from .tokenizer_files import find_tokenizer, save_tokenizer

_WEIGHTS = (".safetensors", ".safetensors.index.json")


def write_decoder_folder(
    source: Path, output: Path, model: Path, shard_bytes: int, dtype: Literal["float32", "bfloat16"]
) -> str:
    """Write a copy of the model folder with the weights of a checkpoint.

    Weights that the checkpoint lacks, such as unsaved frozen ones, are those of the folder. Adapters of
    ``train_gpt.py`` are merged. The whole model is in memory.

    Args:
        source: folder of checkpoints, of which the latest is converted, or one checkpoint.
        output: new folder.
        model: folder that was trained.
        shard_bytes: maximum size of a file.
        dtype: dtype of the weights that are written.

    Returns a summary for the user.
    """
    checkpoint, manifest = open_source(source)
    weights, state = CheckpointWeights(checkpoint, manifest), read_plain(checkpoint / STATE_FILE)
    cut = find_split(make_source(model if has_weights(model) else config_of(model), None))
    names: dict[str, str] = {}  # in the checkpoint -> in the model
    for name in weights.shapes:
        layer, _, key = name.partition(".")
        names[name] = cut.name_of(int(layer), key)
    rank: Any = state.get("lora_rank")
    adapters = [name for name in names if "lora_" in name]
    if adapters and rank is None:
        raise ConfigError(
            f"{checkpoint}: has {len(adapters)} weights of adapters (got {adapters[0]}). Load the folder of "
            "save_adapter with peft, and use merge_and_unload() and save_pretrained()."
        )
    check_contents(checkpoint, manifest)
    trained, peft_model = _load_model(model, dtype, rank if adapters else None)
    parameters = dict(trained.named_parameters())
    unknown = [] if has_weights(model) else sorted(parameters.keys() - names.values())
    if unknown:
        raise ConfigError(
            f"--hf-model: {model} has no weights, and the checkpoint lacks {len(unknown)} (got none of {unknown[0]}). "
            f"Use the folder that was trained."
        )
    _check_shapes(weights, names, parameters, model)
    with torch.no_grad():
        for name, target in names.items():
            parameters[target].copy_(weights.read(name))
        buffers = dict(trained.named_buffers())  # such as biases of routers
        for name, value in read_layers(checkpoint, manifest).items():
            layer, _, key = name.partition(".")
            if (buffer := buffers.get(cut.name_of(int(layer), key))) is not None:
                buffer.copy_(value)
    if peft_model is not None:
        trained = peft_model.merge_and_unload()
    with new_folder(output) as folder:
        found = None if has_weights(model) else find_tokenizer(None, state)
        if found is not None:
            trained.config.eos_token_id = found[0].eod_id
        trained.save_pretrained(folder, max_shard_size=shard_bytes)
        _copy_other_files(model, folder)
        if found is not None:
            save_tokenizer(found, folder)
    elements = sum(parameter.numel() for parameter in trained.parameters())
    if adapters:
        origin = f"with the adapters of {len(adapters) // 2} layers merged"
    else:
        origin = f"{len(names)} weights of {len(parameters)} from the checkpoint"
    return f"wrote {output} from {checkpoint}: {type(trained).__name__}, {elements:,} parameters in {dtype}, {origin}"


def _load_model(folder: Path, dtype: str, lora_rank: int | None) -> tuple[Any, Any]:
    """Return the model of a folder, and the peft model that gives it adapters; None without ``lora_rank``."""
    import transformers

    factory, precision = transformers.AutoModelForCausalLM, getattr(torch, dtype)
    if has_weights(folder):
        model = factory.from_pretrained(folder, dtype=precision)
    else:
        model = factory.from_config(config_of(folder), dtype=precision)
    if lora_rank is None:
        return model, None
    import peft

    return model, peft.get_peft_model(model, lora_config(lora_rank))  # replaces layers of the model


def _check_shapes(
    weights: CheckpointWeights, names: Mapping[str, str], parameters: Mapping[str, Tensor], model: Path
) -> None:
    """Raise ConfigError if a weight of the checkpoint has no parameter of its shape. ``names`` maps the names."""
    for name, target in names.items():
        shape, parameter = weights.shapes[name], parameters.get(target)
        if parameter is None or tuple(parameter.shape) != shape:
            raise ConfigError(
                f"--hf-model: {model} has no {target} of {shape_text(shape)} (got "
                f"{shape_text(None if parameter is None else parameter.shape)}). Use the folder that was trained."
            )


def _copy_other_files(model: Path, folder: Path) -> None:
    """Copy the files of the model that the new folder lacks, such as those of the tokenizer, without its weights."""
    written = {path.name for path in folder.iterdir()}
    for path in sorted(model.iterdir()):
        if path.is_file() and path.name not in written and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, folder / path.name)
