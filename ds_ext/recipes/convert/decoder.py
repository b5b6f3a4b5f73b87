"""Conversion of a checkpoint with the layers of ``from_transformers`` to a folder of transformers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

import torch

from ...engine.checkpoint.file import read_plain
from ...engine.checkpoint.folder import check_contents
from ...engine.checkpoint.save import STATE_FILE
from ...errors import ConfigError
from ...hf.find import find_split
from ...hf.folder import shape_text
from ...hf.lora import lora_config
from ...hf.weights import make_source
from .checkpoint_weights import CheckpointWeights, new_folder, open_source

_WEIGHTS = (".safetensors", ".safetensors.index.json")


def write_decoder_folder(
    source: Path, output: Path, model: Path, shard_bytes: int, dtype: Literal["float32", "bfloat16"]
) -> str:
    """Write the model of a folder with the weights of a checkpoint, and all other files of the folder.

    Weights that the checkpoint lacks, such as unsaved frozen ones, are those of the folder. Adapters of
    ``train_gpt.py`` are merged. The whole model is in memory.

    Args:
        source: folder of checkpoints, of which the latest is converted, or one checkpoint.
        output: new folder.
        model: folder that was trained.
        shard_bytes: maximum size of a file.

    Returns a summary for the user.
    """
    checkpoint, manifest = open_source(source)
    weights, state = CheckpointWeights(checkpoint, manifest), read_plain(checkpoint / STATE_FILE)
    cut = find_split(make_source(model, None))
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

    import transformers

    trained = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    tuner: Any = None
    if adapters:
        import peft

        tuner = peft.get_peft_model(trained, lora_config(rank))  # replaces layers of the model
    parameters = dict(trained.named_parameters())
    for name, target in names.items():
        shape, expected = weights.shapes[name], parameters.get(target)
        if expected is None or tuple(expected.shape) != shape:
            raise ConfigError(
                f"--hf-model: {model} has no {target} of {shape_text(shape)} (got "
                f"{shape_text(None if expected is None else expected.shape)}). Use the folder that was trained."
            )
    with torch.no_grad():
        for name, target in names.items():
            parameters[target].copy_(weights.read(name))
    if tuner is not None:
        trained = tuner.merge_and_unload()
    with new_folder(output) as folder:
        trained.save_pretrained(folder, max_shard_size=shard_bytes)
        written = {path.name for path in folder.iterdir()}
        for path in sorted(model.iterdir()):
            if path.is_file() and path.name not in written and not path.name.endswith(_WEIGHTS):
                shutil.copyfile(path, folder / path.name)
    elements = sum(parameter.numel() for parameter in trained.parameters())
    origin = f"{len(names)} weights of {len(parameters)} from the checkpoint"
    if adapters:
        origin = f"with {len(adapters)} merged weights of adapters"
    return f"wrote {output} from {checkpoint}: {type(trained).__name__}, {elements:,} parameters in {dtype}, {origin}"
