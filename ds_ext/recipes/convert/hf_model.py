"""Hugging Face model in a folder: its config and its weights in the layout of ds_ext."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ...errors import ConfigError
from ...hf.folder import CONFIG, ModelFolder, read_config, shape_text
from ...model.config import TransformerConfig
from ..models.hf import Counterpart, counterparts, hf_name, tied_copies
from ..models.hf_config import from_json

_FLOATS = ("F64", "F32", "F16", "BF16")


def config_of_folder(folder: Path, weights: Sequence[str] = ()) -> TransformerConfig:
    """Return the config of a model. The names of the ``weights`` show the heads of a BERT."""
    values = read_config(folder)
    try:
        return from_json(values, weights)
    except ConfigError as error:
        raise ConfigError(f"{folder / CONFIG}: {error}") from None


def has_own_layers(folder: Path) -> bool:
    values = read_config(folder)
    try:
        from_json(values, ())
    except ConfigError:
        return False
    return True


class HuggingFaceModel:
    """Model of a local folder with config.json and safetensors. Its weights are read in parts.

    ``weights`` is name in ds_ext -> weight.
    """

    def __init__(self, path: Path) -> None:
        self.folder = ModelFolder(path)
        self.config = config_of_folder(path, self.folder.names)
        self.weights: Mapping[str, Counterpart] = {w.name: w for w in counterparts(self.config)}
        self._file_names = self._map_names()  # current name of a weight in transformers -> name in the files
        self._check_weights()
        self._check_tied_copies()

    def read(self, weight: Counterpart) -> Tensor:
        """Return a full weight in the dtype of the file."""
        return self._from_hf(weight, [self.folder.read(self._file_names[name]) for name in weight.hf_names])

    def read_rows(self, weight: Counterpart, start: int, stop: int) -> Tensor:
        """Return rows ``start`` to ``stop - 1`` of a weight; see :meth:`row_multiple`."""
        count = len(weight.hf_names)
        names = (self._file_names[name] for name in weight.hf_names)
        return self._from_hf(
            weight, [self.folder.read_rows(name, start // count, stop // count) for name in names]
        )

    def row_multiple(self, weight: Counterpart) -> int | None:
        """Return the number of rows of which a part read by :meth:`read_rows` is a multiple.

        None: only the full weight can be read, because the file has a different layout.
        """
        if not weight.conversion.by_rows:
            return None
        if len(weight.hf_names) == 1:
            return 1
        return len(weight.hf_names) * self.config.head_size  # the heads of the parts alternate

    def describe(self) -> str:
        names = (name for weight in self.weights.values() for name in weight.hf_names)
        return self.folder.describe([self._file_names[name] for name in names])

    def _from_hf(self, weight: Counterpart, hf_weights: Sequence[Tensor]) -> Tensor:
        return weight.conversion.from_hf(hf_weights, self.config)

    def _map_names(self) -> dict[str, str]:
        """Return current name in transformers -> name in the files, without unused weights."""
        current_names = {name: hf_name(name, self.config) for name in self.folder.names}
        return {current: name for name, current in current_names.items() if current is not None}

    def _check_weights(self) -> None:
        folder, files = self.folder, self._file_names
        model_shapes: dict[str, tuple[int, ...]] = {}
        for weight in self.weights.values():
            model_shapes |= weight.hf_shapes(self.config)
        for name in [*model_shapes, *files]:
            shape = folder.shape(files[name]) if name in files else None
            model_shape = model_shapes.get(name)
            if shape != model_shape:
                raise ConfigError(
                    f"{name}: does not fit {folder.path / CONFIG}, which implies {shape_text(model_shape)} (got "
                    f"{shape_text(shape)}). Use a folder that save_pretrained() of the whole model wrote."
                )
            if folder.dtype(files[name]) not in _FLOATS:
                raise ConfigError(
                    f"{name}: quantized weights cannot be converted (got {folder.dtype(files[name])} in {folder.path})."
                )

    def _check_tied_copies(self) -> None:
        """Raise ConfigError if the weight of a tied output layer differs. transformers then does not tie the layer."""
        folder = self.folder
        for copy, current_name in tied_copies(self.config).items():
            name = self._file_names[current_name]
            if copy not in folder.names:
                continue
            if folder.dtype(copy) not in _FLOATS or not folder.are_equal(copy, name):
                raise ConfigError(
                    f"{copy}: differs from {current_name}, but {folder.path / CONFIG} ties them (got "
                    f"{shape_text(folder.shape(copy))} and {shape_text(folder.shape(name))}). Set "
                    f"tie_word_embeddings to false, or remove the weight that the model does not use."
                )
