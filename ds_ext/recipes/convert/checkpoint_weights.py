"""Weights of a checkpoint, read one at a time, and the new folder of safetensors that they are written to."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from ...engine.checkpoint.folder import LATEST, MANIFEST, has_checkpoint, open_checkpoint
from ...engine.checkpoint.reader import CheckpointReader
from ...errors import ConfigError
from ...hf.folder import INDEX, shard_name


class CheckpointWeights:
    """Weights of a checkpoint, read one at a time.

    Attributes:
        shapes: name in ds_ext, ``LAYER.KEY`` -> shape of the full weight.
        engine_names: name in ds_ext -> name in the module of the engine, where a tied layer is named after its tie.
    """

    def __init__(self, checkpoint: Path, manifest: dict[str, Any]) -> None:
        self._checkpoint = checkpoint
        self._manifest = manifest
        self.engine_names: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for engine_name, record in manifest["parameters"].items():
            name = f"{record['layer']}.{record['key']}"
            self.engine_names[name] = engine_name
            self.shapes[name] = tuple(record["shape"])

    @cached_property
    def _reader(self) -> CheckpointReader:
        # Opened after the checks: manifests of other models may lack what it needs.
        return CheckpointReader(self._checkpoint, self._manifest, tensor_rank=0)

    def read(self, name: str) -> Tensor:
        """Return a full weight by its name in ds_ext."""
        return self._reader.full_weight(self.engine_names[name])


def open_source(source: Path) -> tuple[Path, dict[str, Any]]:
    if (source / MANIFEST).is_file():
        named = source if source.name else source.absolute()
        return open_checkpoint(named.parent, named.name)
    if not has_checkpoint(source):
        raise ConfigError(
            f"SOURCE: must be a folder of checkpoints, with a file {LATEST}, or a checkpoint, with a file {MANIFEST} "
            f"(got {source})."
        )
    return open_checkpoint(source)


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Create a temporary folder, renamed to ``output`` on success."""
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


def write_shards(
    folder: Path,
    sizes: Mapping[str, int],
    read: Callable[[str], Mapping[str, Tensor]],
    limit_bytes: int,
    write: Callable[[Path, Mapping[str, Tensor]], object],
) -> int:
    """Write weights to files of at most ``limit_bytes``, or of one larger weight, and an index of several files.

    Args:
        sizes: bytes of the weights by name, in order.
        read: function of a name; returns its tensors by their names in the file.

    Returns the number of files.
    """
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name, weight_bytes in sizes.items():
        if shards[-1] and shard_bytes + weight_bytes > limit_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += weight_bytes
    index: dict[str, str] = {}  # name of a tensor -> its file
    for number, shard in enumerate(shards, start=1):
        tensors = {key: tensor for name in shard for key, tensor in read(name).items()}
        file = shard_name(number, len(shards))
        write(folder / file, tensors)
        index |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        total = {"total_size": sum(sizes.values())}
        write_json(folder / INDEX, {"metadata": total, "weight_map": index})
    return len(shards)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
