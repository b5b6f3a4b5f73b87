"""Command ``python -m ds_ext export``: the weights of a checkpoint as safetensors, under the names of its module.

It runs in one process without a process group. It reads one weight at a time, so the model need not fit in memory.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...engine.checkpoint.file import read_plain, write_tensors
from ...engine.checkpoint.folder import check_contents
from ...engine.checkpoint.save import STATE_FILE
from ...engine.wrappers import plain_name
from ...errors import ConfigError
from . import SHARD_GB
from .checkpoint_weights import CheckpointWeights, new_folder, open_source, write_shards
from .to_hf import find_model

_LAYER_FILE = re.compile(r"layer_(\d+)(-model_00)?-model_states\.pt")  # the first shard


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = "folder of checkpoints, of which the latest is exported, or one checkpoint"
    parser.add_argument("source", type=Path, metavar="SOURCE", help=source)
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="new folder")


def run(args: argparse.Namespace) -> int:
    print(export(args.source, args.output))
    return 0


def export(source: Path, output: Path, shard_bytes: int = round(SHARD_GB * 1e9)) -> str:
    """Write the parameters and buffers of a checkpoint, in fp32 if it has fp32 master weights.

    Args:
        source: folder of checkpoints, of which the latest is exported, or one checkpoint.
        output: new folder.
        shard_bytes: maximum size of a file, unless a single weight is larger.

    Returns a summary for the user.
    """
    checkpoint, manifest = open_source(source)
    check_contents(checkpoint, manifest)
    weights = CheckpointWeights(checkpoint, manifest)
    layers = read_layers(checkpoint, manifest)
    tensors = {name: value for name, value in layers.items() if isinstance(value, Tensor)}
    places = {engine_name: name for name, engine_name in weights.engine_names.items()}
    # Name of a tensor -> name of the weight that it is; a shared parameter has several names.
    aliases = {alias: places[engine_name] for alias, engine_name in manifest.get("aliases", {}).items()}
    owners = {name: name for name in weights.shapes} | aliases
    prefixes: dict[str, str] = {}  # index of a layer -> prefix of its names in the module
    for name, engine_name in weights.engine_names.items():
        layer, _, key = name.partition(".")
        prefixes[layer] = engine_name.removesuffix(key)
    for alias, name in aliases.items():
        (layer, *_), prefix = alias.split("."), prefixes[name.partition(".")[0]]
        if prefix.startswith("tied_modules."):  # a layer of another class or with other arguments
            prefixes[layer] = f"{prefix.removesuffix('.')}@{layer}."

    def read(name: str) -> dict[str, Tensor]:
        layer, _, key = name.partition(".")
        module_name = prefixes.get(layer, f"{layer}.") + key
        return {module_name: weights.read(owners[name]) if name in owners else tensors[name]}

    shapes = {
        name: weights.shapes[owners[name]] if name in owners else t.shape for name, t in tensors.items()
    }
    sizes = {name: 4 * math.prod(shape) for name, shape in shapes.items()}
    with new_folder(output) as folder:
        files = write_shards(folder, sizes, read, shard_bytes, write_tensors)
    elements = sum(map(math.prod, weights.shapes.values()))
    lines = [
        f"wrote {output} from {checkpoint}: {elements:,} parameters, {files} file{'s' if files > 1 else ''} of weights"
    ]
    if len(tensors) < len(layers):
        lines.append(f"not exported: extra states of {', '.join(sorted(layers.keys() - tensors.keys()))}")
    if not manifest["job"].get("with_frozen", True):
        lines.append(
            "not exported: frozen parameters, which exclude_frozen_parameters left out of the checkpoint"
        )
    if _is_known(checkpoint, weights):
        lines.append(f"for transformers: python -m ds_ext convert {source} --to hf FOLDER")
    return "\n".join(lines)


def read_layers(checkpoint: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``LAYER.KEY`` -> value of the state of every layer, in order. Of shards, only the first is read."""
    matches = [match for name in manifest["files"] if (match := _LAYER_FILE.fullmatch(name))]
    return {
        f"{int(match[1])}.{plain_name(key)}": value
        for match in sorted(matches, key=lambda match: int(match[1]))
        for key, value in read_plain(checkpoint / match[0]).items()
    }


def _is_known(checkpoint: Path, weights: CheckpointWeights) -> bool:
    try:
        find_model(checkpoint, weights.shapes, read_plain(checkpoint / STATE_FILE), None)
    except ConfigError:
        return False
    return True
