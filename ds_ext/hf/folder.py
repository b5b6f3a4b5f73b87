"""Folder of a Hugging Face model: config.json and safetensors."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..engine.checkpoint.file import TensorFile
from ..errors import ConfigError
from ..model.data_layout import files_checksum
from ..model.json_values import read_json

GENERATION = "generation_config.json"
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_ROWS = 4096  # that are read at once to compare two weights
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError:
        raise ConfigError(
            "safetensors: the package is not installed. Run pip install 'ds_ext[hf]', or pip install safetensors."
        ) from None
    return safetensors


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    library = safetensors()
    try:
        library.torch.save_file(dict(tensors), str(path), metadata={"format": "pt"})
    except library.SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from None
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)  # the library creates files that only their owner can read


def shape_text(shape: Sequence[int] | None) -> str:
    return "missing" if shape is None else " x ".join(map(str, shape))


def shard_name(number: int, shards: int) -> str:
    """Return the name of file ``number``, from 1, of all files of weights."""
    return WEIGHTS if shards == 1 else f"model-{number:05d}-of-{shards:05d}.safetensors"


class ModelFolder:
    """Folder of a model. With ``new_weights``, its files of weights are not read and may be missing."""

    def __init__(self, folder: Path, new_weights: bool = False) -> None:
        self.path = folder
        self.config = read_config(folder)
        self._files = {} if new_weights else self._find_files()

    @property
    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].shape(name)

    def dtype(self, name: str) -> str:
        """Return the safetensors dtype of a weight: F32, BF16, ..."""
        return self._files[name].dtype(name)

    def read(self, name: str) -> Tensor:
        return self._files[name].read_all(name)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows ``start`` to ``stop - 1`` of a weight: elements of its first dimension."""
        columns = self.shape(name)[1:]
        row = math.prod(columns)
        return self._files[name].read(name, start * row, (stop - start) * row).view(stop - start, *columns)

    def describe(self, names: Sequence[str] = ()) -> str:
        names = names or self.names
        total = sum(math.prod(self.shape(name)) for name in names)
        dtypes = ", ".join(sorted({self.dtype(name) for name in names}))
        return f"{self.config['model_type']}, {total:,} parameters, stored in {dtypes}"

    def are_equal(self, name_a: str, name_b: str) -> bool:
        shape = self.shape(name_a)
        if shape != self.shape(name_b):
            return False
        blocks = ((start, min(start + _ROWS, shape[0])) for start in range(0, shape[0], _ROWS))
        return all(
            torch.equal(self.read_rows(name_a, *block).double(), self.read_rows(name_b, *block).double())
            for block in blocks
        )

    def fingerprint(self) -> str:
        """Return a checksum of config.json, and of the sizes and samples of the files of weights.

        It does not depend on the path. It takes milliseconds for files of any size.
        """
        files = sorted({file.path for file in self._files.values()})
        config_checksum = zlib.crc32((self.path / CONFIG).read_bytes())
        names_checksum = zlib.crc32(" ".join(path.name for path in files).encode(), config_checksum)
        return f"{files_checksum(files, names_checksum):08x}"

    def _find_files(self) -> dict[str, TensorFile]:
        if (self.path / WEIGHTS).is_file():  # transformers reads it even if there is an index
            file = _open(self.path / WEIGHTS)
            return dict.fromkeys(file.names, file)
        if not (self.path / INDEX).is_file():
            if any((self.path / name).exists() for name in _PICKLED):
                raise ConfigError(
                    f"{self.path}: pytorch_model.bin is not read, because loading it can run code. Load the model with "
                    f"transformers and save it with save_pretrained(), which writes {WEIGHTS}."
                )
            raise ConfigError(f"{self.path}: {WEIGHTS} is missing.")
        weight_map = _read_weight_map(self.path / INDEX)
        files = {name: _open(self.path / name) for name in sorted(set(weight_map.values()))}
        contents = {name: set(file.names) for name, file in files.items()}
        for weight, name in weight_map.items():
            if weight not in contents[name]:
                raise ConfigError(
                    f"{self.path / INDEX}: {weight} is not in {name}. Download or save the model again."
                )
        return {weight: files[name] for weight, name in weight_map.items()}


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = {str(weight): str(name) for weight, name in read_json(index)["weight_map"].items()}
    except (KeyError, AttributeError):
        raise ConfigError(f"{index}: 'weight_map' is missing or not an object.") from None
    for name in weight_map.values():
        if Path(name).name != name:
            raise ConfigError(
                f"{index}: 'weight_map' must name files of this folder (got {name!r}). Download or "
                f"save the model again."
            )
    return weight_map


def has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (WEIGHTS, INDEX))


def read_config(folder: Path) -> dict[str, Any]:
    return read_json(folder / CONFIG)


def stored_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype in config.json, such as ``bfloat16``; "" if it has none."""
    return str(config.get("dtype") or config.get("torch_dtype") or "")


def read_generation(folder: Path) -> dict[str, Any]:
    """Return a folder's settings for the generation of text: keys of config.json, and generation_config.json."""
    keys = {
        k: v for k, v in read_config(folder).items() if k.endswith("_token_id") or k == "task_specific_params"
    }
    path = folder / GENERATION
    return {CONFIG: keys, GENERATION: read_json(path) if path.is_file() else None}


def _open(path: Path) -> TensorFile:
    try:
        return TensorFile(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: missing or not a complete safetensors file (got {error}). Download or save the model again."
        ) from None
