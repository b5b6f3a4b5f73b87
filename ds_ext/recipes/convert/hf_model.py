"""Hugging Face model in a folder: its config and its weights in the layout of ds_ext."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...errors import ConfigError
from ...hf.folder import CONFIG, ModelFolder, read_config, shape_text
from ..models.config import TransformerConfig
from ..models.hf import Counterpart, counterparts, hf_name, tied_copies
from ..models.hf_config import from_json

_FLOATS = ("F64", "F32", "F16", "BF16")
_COMPARED_ROWS = 4096


def config_of_folder(folder: Path, weights: Sequence[str] = ()) -> TransformerConfig:
    """Return the config for the ``config.json`` of a folder.

    Args:
        folder: local folder of the model.
        weights: names of the model's weights, which show the heads of a BERT.

    Raises:
        ConfigError: if the file is missing, or the architecture is not supported.
    """
    values = read_config(folder)
    try:
        return from_json(values, weights)
    except ConfigError as error:
        raise ConfigError(f"{folder / CONFIG}: {error}") from None


class HuggingFaceModel:
    """Model of a folder, whose weights are read in parts.

    Args:
        path: local folder with config.json and safetensors.

    Raises:
        ConfigError: if the architecture is not supported, a file is missing or damaged, or the weights do not fit
            config.json.
    """

    def __init__(self, path: Path) -> None:
        self.folder = ModelFolder(path)
        self.config = config_of_folder(path, self.folder.names)
        self.weights: Mapping[str, Counterpart] = {
            weight.name: weight for weight in counterparts(self.config)
        }
        self._names = self._check_names()
        self._check_tied_copies()

    def read(self, weight: Counterpart) -> Tensor:
        """Return a full weight in the dtype of the file."""
        return self._from_hf(weight, [self.folder.read(self._names[name]) for name in weight.hf_names])

    def read_rows(self, weight: Counterpart, start: int, stop: int) -> Tensor:
        """Return rows ``start`` to ``stop - 1`` of a weight; see :meth:`row_unit`."""
        count = len(weight.hf_names)
        names = (self._names[name] for name in weight.hf_names)
        return self._from_hf(
            weight, [self.folder.read_rows(name, start // count, stop // count) for name in names]
        )

    def row_unit(self, weight: Counterpart) -> int | None:
        """Return the number of rows of which a part read by :meth:`read_rows` is a multiple.

        None: only the full weight can be read, because the file has a different layout.
        """
        if not weight.conversion.by_rows:
            return None
        return len(weight.hf_names) * self.config.head_size if len(weight.hf_names) > 1 else 1

    def describe(self) -> str:
        """Return the architecture, and the number and dtype of the weights."""
        names = [name for weight in self.weights.values() for name in weight.hf_names]
        total = sum(torch.Size(self.folder.shape(self._names[name])).numel() for name in names)
        dtypes = ", ".join(sorted({self.folder.dtype(self._names[name]) for name in names}))
        return f"{self.folder.config['model_type']}, {total:,} parameters in {dtypes}"

    def _from_hf(self, weight: Counterpart, hf_weights: Sequence[Tensor]) -> Tensor:
        return weight.conversion.from_hf(hf_weights, self.config)

    def _check_names(self) -> dict[str, str]:
        """Map current names to names in the files. Raises ConfigError for missing, unknown or misshapen weights."""
        folder = self.folder
        files = {now: name for name in folder.names if (now := hf_name(name, self.config)) is not None}
        expected = {
            name: shape
            for weight in self.weights.values()
            for name, shape in weight.hf_shapes(self.config).items()
        }
        for name in [*expected, *files]:
            shape = folder.shape(files[name]) if name in files else None
            if shape != expected.get(name):
                raise ConfigError(
                    f"{name}: does not fit {folder.path / CONFIG}, which implies {shape_text(expected.get(name))} (got "
                    f"{shape_text(shape)}). Use a folder that save_pretrained() of the whole model wrote."
                )
            if folder.dtype(files[name]) not in _FLOATS:
                raise ConfigError(
                    f"{name}: quantized weights cannot be converted (got {folder.dtype(files[name])} in {folder.path})."
                )
        return files

    def _check_tied_copies(self) -> None:
        """Raise ConfigError if the weight of a tied output layer differs. transformers then does not tie the layer."""
        folder = self.folder
        for copy, name in tied_copies(self.config).items():
            if copy in folder.names and not self._equal(copy, self._names[name]):
                raise ConfigError(
                    f"{copy}: differs from {name}, but {folder.path / CONFIG} ties them (got "
                    f"{shape_text(folder.shape(copy))} and {shape_text(folder.shape(self._names[name]))}). Set "
                    f"tie_word_embeddings to false, or remove the weight that the model does not use."
                )

    def _equal(self, one: str, other: str) -> bool:
        """Return whether two weights of the files are equal. Reads them in blocks of rows."""
        folder = self.folder
        shape = folder.shape(one)
        if folder.dtype(one) not in _FLOATS or shape != folder.shape(other):
            return False
        blocks = (
            (start, min(start + _COMPARED_ROWS, shape[0])) for start in range(0, shape[0], _COMPARED_ROWS)
        )
        return all(
            torch.equal(folder.read_rows(one, *block).float(), folder.read_rows(other, *block).float())
            for block in blocks
        )
