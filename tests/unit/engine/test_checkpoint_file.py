"""Tensor files: reading what was written, also with the safetensors package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ds_ext.engine.checkpoint.file import _DTYPE_NAMES, TensorFile, write_tensors
from ds_ext.errors import CheckpointError


@pytest.mark.parametrize("dtype", _DTYPE_NAMES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_dtype_survives_a_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    numbers = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 6.0]])
    tensors = {"one": numbers.to(dtype), "other": torch.ones(5)}
    if dtype.is_complex:
        tensors["one"] = torch.complex(numbers, -numbers).to(dtype)
    write_tensors(tmp_path / "file", tensors)
    elements = TensorFile(tmp_path / "file").read("one", 1, 4)
    assert elements.dtype == dtype and elements.tolist() == tensors["one"].view(-1)[1:5].tolist()
    library = pytest.importorskip("safetensors.torch").load_file(tmp_path / "file")
    assert library["one"].dtype == dtype and library["one"].tolist() == tensors["one"].tolist()
    assert torch.equal(library["other"], tensors["other"])


def test_an_unsupported_dtype_writes_nothing(tmp_path: Path) -> None:
    tensors = {"fine": torch.ones(3), "0.weight/m": torch.ones(3, dtype=torch.complex128)}
    with pytest.raises(CheckpointError, match=r"^0\.weight/m: .*torch\.complex128"):
        write_tensors(tmp_path / "file", tensors)
    assert not (tmp_path / "file").exists()
