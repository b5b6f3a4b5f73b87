"""The package safetensors, and what is said when it is missing or cannot write."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import ConfigError


def safetensors() -> Any:
    """The package. Raises ConfigError when it is missing."""
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError:
        raise ConfigError(
            "the `safetensors` package is missing: pip install 'ds_ext[hf]', or pip install safetensors."
        ) from None
    return safetensors


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one file of weights, as transformers reads it. Raises OSError that says why it cannot be."""
    library = safetensors()
    try:
        library.torch.save_file(dict(tensors), str(path), metadata={"format": "pt"})
    except library.SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from None
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)  # as any other file; the library lets nobody else read it


def shape_text(shape: Sequence[int] | None) -> str:
    """``84 x 32``; "missing" for None."""
    return "missing" if shape is None else " x ".join(map(str, shape))
