"""Files of tensors: what is written is read again, by us and by the library of the format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ds_ext.engine.checkpoint.file import _DTYPE_NAMES, TensorFile, write_tensors
from ds_ext.errors import CheckpointError


@pytest.mark.parametrize("dtype", _DTYPE_NAMES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_type_is_read_as_it_was_written(tmp_path: Path, dtype: torch.dtype) -> None:
    numbers = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 6.0]])
    tensors = {"one": numbers.to(dtype), "other": torch.ones(5)}
    if dtype.is_complex:
        tensors["one"] = torch.complex(numbers, -numbers).to(dtype)
    write_tensors(tmp_path / "file", tensors)
    found = TensorFile(tmp_path / "file").read("one", 1, 4)
    assert found.dtype == dtype and found.tolist() == tensors["one"].view(-1)[1:5].tolist()
    library = pytest.importorskip("safetensors.torch").load_file(tmp_path / "file")
    assert library["one"].dtype == dtype and library["one"].tolist() == tensors["one"].tolist()
    assert torch.equal(library["other"], tensors["other"])


def test_a_type_that_the_format_lacks_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    tensors = {"fine": torch.ones(3), "0.weight/m": torch.ones(3, dtype=torch.complex128)}
    with pytest.raises(CheckpointError, match=r"^0\.weight/m: .*torch\.complex128"):
        write_tensors(tmp_path / "file", tensors)
    assert not (tmp_path / "file").exists()
