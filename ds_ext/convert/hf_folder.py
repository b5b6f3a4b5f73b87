"""Folder of a Hugging Face model: config.json and safetensors. Needs the package safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import ConfigError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def safetensors() -> Any:
    """Import the package safetensors. Raises ConfigError if it is missing."""
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError:
        raise ConfigError(
            "safetensors: the package is not installed. Run pip install 'ds_ext[hf]', or pip install safetensors."
        ) from None
    return safetensors


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file for transformers. Raises OSError."""
    library = safetensors()
    try:
        library.torch.save_file(dict(tensors), str(path), metadata={"format": "pt"})
    except library.SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from None
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)  # the library creates files that only their owner can read


def shape_text(shape: Sequence[int] | None) -> str:
    """Return a shape as ``84 x 32``; "missing" for None."""
    return "missing" if shape is None else " x ".join(map(str, shape))


def shard_name(number: int, shards: int) -> str:
    """Return the name of file ``number``, from 1, of all files of weights."""
    return WEIGHTS if shards == 1 else f"model-{number:05d}-of-{shards:05d}.safetensors"


class ModelFolder:
    """Local folder with config.json and safetensors, whose weights are read one at a time.

    Raises:
        ConfigError: if a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._library = safetensors()
        self.path = folder
        self.config = _read_json(folder / CONFIG)
        self._files = self._find_files()

        @cache
        def opened(path: Path) -> Any:
            try:
                return self._library.safe_open(str(path), framework="pt")
            except (OSError, self._library.SafetensorError) as error:
                raise ConfigError(f"{path}: missing or not a safetensors file (got {error}).") from None

        self._opened = opened
        contents = {path: set(self._opened(path).keys()) for path in set(self._files.values())}
        for name, path in self._files.items():
            if name not in contents[path]:
                raise ConfigError(
                    f"{folder / INDEX}: {name} is not in {path.name}. Download or save the model again."
                )

    @property
    def names(self) -> list[str]:
        """Names of all weights in the files."""
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight without reading the weight."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the safetensors dtype of a weight: F32, BF16, ..."""
        return self._slice(name).get_dtype()

    def read(self, name: str) -> Tensor:
        """Read a weight in the layout and dtype of the file."""
        return self._opened(self._files[name]).get_tensor(name)

    def _slice(self, name: str) -> Any:
        return self._opened(self._files[name]).get_slice(name)

    def _find_files(self) -> dict[str, Path]:
        """Return a dict of weight name -> file. Raises ConfigError."""
        if (self.path / INDEX).is_file():
            try:
                table = _read_json(self.path / INDEX)["weight_map"].items()
                return {name: self.path / file for name, file in table}
            except (KeyError, AttributeError, TypeError):
                raise ConfigError(f"{self.path / INDEX}: 'weight_map' is missing or not an object.") from None
        if (self.path / WEIGHTS).is_file():
            try:
                with self._library.safe_open(str(self.path / WEIGHTS), framework="pt") as file:
                    return dict.fromkeys(file.keys(), self.path / WEIGHTS)
            except self._library.SafetensorError as error:
                raise ConfigError(f"{self.path / WEIGHTS}: not a safetensors file (got {error}).") from None
        if any((self.path / name).exists() for name in _PICKLED):
            raise ConfigError(
                f"{self.path}: pytorch_model.bin is not read, because loading it can run code. Load the model with "
                f"transformers and save it with save_pretrained(), which writes {WEIGHTS}."
            )
        raise ConfigError(f"{self.path}: {WEIGHTS} is missing.")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}. Use a model folder that transformers' save_pretrained() wrote."
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path}: invalid JSON (got {error}).") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must contain a JSON object (got {type(value).__name__}).")
    return value
