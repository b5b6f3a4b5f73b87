"""Files of a checkpoint: tensors in the safetensors format, and pickles of torch that hold plain values only.

A safetensors file is the length of a JSON header (8 bytes, little endian), the header, which says type, shape and place
of each tensor, and their bytes (https://huggingface.co/docs/safetensors). It is written tensor by tensor, and a part of
a tensor is read without the rest.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError, ConfigError
from .folder import CheckedFile

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Write a safetensors file. Returns its size and checksum.

    Raises:
        CheckpointError: the format has no name for a tensor's type; nothing is written.
        OSError: with the file's name.
    """
    header, end = {}, 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise CheckpointError(
                f"{name} is of type {tensor.dtype}, which a safetensors file cannot hold: a checkpoint takes the types "
                f"{', '.join(str(dtype).removeprefix('torch.') for dtype in _NAMES)}."
            )
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors' bytes are aligned
    with CheckedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(_bytes(tensor.detach().cpu().contiguous()))
    return file.record


class TensorFile:
    """Safetensors file from which parts of tensors are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self._header: dict[str, Any] = json.loads(file.read(length))
        self._data = 8 + length

    def read(self, name: str, start: int, numel: int) -> Tensor:
        """Return elements ``start`` to ``start + numel`` of a tensor, flat, on the CPU."""
        record = self._header[name]
        found = torch.empty(numel, dtype=_TYPES[record["dtype"]])
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._data + record["data_offsets"][0] + start * found.element_size())
            _fill(file, _bytes(found), self.path)
        return found


def write_plain(path: Path, value: Mapping[str, Any]) -> dict[str, int]:
    """Write a file for ``torch.load(weights_only=True)``. Returns its size and checksum.

    Raises:
        ConfigError: an entry holds something else than numbers, texts, tensors, and lists and dictionaries of them.
        OSError: with the file's name.
    """
    try:
        data = _pickled(value)
        torch.load(io.BytesIO(data), weights_only=True, map_location="meta")
    except Exception:
        for key, entry in value.items():
            _require_plain(key, entry)
        raise
    with CheckedFile(path) as file:
        file.write(data)
    return file.record


def read_plain(path: Path) -> dict[str, Any]:
    """Read a file of :func:`write_plain`; tensors stay in the file until they are used."""
    return torch.load(path, weights_only=True, map_location="cpu", mmap=True)


def layer_file(layer: int, shard: int, tensor_ranks: int) -> str:
    """Return DeepSpeed's name of a layer's file."""
    return f"layer_{layer:02d}{f'-model_{shard:02d}' if tensor_ranks > 1 else ''}-model_states.pt"


def is_plain(value: Any) -> bool:
    """Return whether read_plain() can read a value: numbers, texts, tensors, and lists and dictionaries of them."""
    try:
        torch.load(io.BytesIO(_pickled(value)), weights_only=True, map_location="meta")
    except Exception:
        return False
    return True


def _require_plain(key: str, entry: Any) -> None:
    if not is_plain(entry):
        raise ConfigError(
            f"a checkpoint keeps numbers, texts, tensors, and lists and dictionaries of them; {key!r} is or holds "
            f"something else ({type(entry).__name__}). Save its state_dict() or its numbers."
        )


def _pickled(value: Any) -> memoryview:
    # Into memory first: torch's writer does not survive a disk that is full.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getbuffer()


def _bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _fill(file: io.RawIOBase | io.FileIO, memory: memoryview, path: Path) -> None:
    while memory:
        count = file.readinto(memory)
        if not count:
            raise CheckpointError(f"{path} is damaged: it ends too early.")
        memory = memory[count:]
