"""The folder of a model of transformers: its config.json and its weights, read one at a time."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import ConfigError
from .library import safetensors

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def shard_name(number: int, shards: int) -> str:
    """The file of shard ``number`` (from 1) of all weights."""
    return WEIGHTS if shards == 1 else f"model-{number:05d}-of-{shards:05d}.safetensors"


class ModelFolder:
    """A local folder with config.json and safetensors.

    Raises:
        ConfigError: something is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._library = safetensors()
        self.path = folder
        self.config = _read_json(folder / CONFIG)
        self._files = self._find()

        @cache
        def opened(path: Path) -> Any:
            try:
                return self._library.safe_open(str(path), framework="pt")
            except (OSError, self._library.SafetensorError) as error:
                raise ConfigError(f"{path} is missing or no safetensors file: {error}.") from None

        self._opened = opened
        there = {path: set(self._opened(path).keys()) for path in set(self._files.values())}
        for name, path in self._files.items():
            if name not in there[path]:
                raise ConfigError(f"{folder / INDEX} says that {path.name} holds {name}, which is not there.")

    @property
    def names(self) -> list[str]:
        """Of all weights in the files."""
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a weight, without reading it."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Of a weight, as safetensors calls it: F32, BF16, ..."""
        return self._slice(name).get_dtype()

    def read(self, name: str) -> Tensor:
        """A weight as it is in the file."""
        return self._opened(self._files[name]).get_tensor(name)

    def _slice(self, name: str) -> Any:
        return self._opened(self._files[name]).get_slice(name)

    def _find(self) -> dict[str, Path]:
        """Which file holds which weight."""
        if (self.path / INDEX).is_file():
            try:
                found = _read_json(self.path / INDEX)["weight_map"].items()
                return {name: self.path / file for name, file in found}
            except (KeyError, AttributeError, TypeError):
                raise ConfigError(f"{self.path / INDEX} has no table of files ('weight_map').") from None
        if (self.path / WEIGHTS).is_file():
            try:
                with self._library.safe_open(str(self.path / WEIGHTS), framework="pt") as file:
                    return dict.fromkeys(file.keys(), self.path / WEIGHTS)
            except self._library.SafetensorError as error:
                raise ConfigError(f"{self.path / WEIGHTS} is no safetensors file: {error}.") from None
        if any((self.path / name).exists() for name in _PICKLED):
            raise ConfigError(
                f"{self.path} has its weights in pytorch_model.bin, whose reading may run code that is in it. Load the "
                f"model with transformers and save it again: save_pretrained() writes {WEIGHTS}."
            )
        raise ConfigError(f"{self.path} has no {WEIGHTS}.")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}. A model's folder is wanted, as save_pretrained() of transformers writes it."
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object.")
    return found
