"""Files of a checkpoint: tensors in the safetensors format, and torch files that contain only plain values.

A safetensors file (https://huggingface.co/docs/safetensors) starts with the length of its header, 8 bytes,
little-endian. The header is JSON with dtype, shape and offsets of each tensor. The tensors follow. Tensors are
written one after the other, and parts of a tensor can be read individually.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from ...errors import CheckpointError, ConfigError
from ..types import Record, Saved
from .folder import CheckedFile

_DTYPE_NAMES = {
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
_TYPE = "ds_ext_type"
_LEVELS = 100  # of lists and dictionaries; at most 4 calls each, of the 1,000 that Python allows
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


class MemoryFile:
    """New anonymous file that is written like a :class:`.folder.CheckedFile`. Its record is its descriptor."""

    def __init__(self, path: Path) -> None:
        self.record = {"descriptor": os.memfd_create(path.name)}

    def __enter__(self) -> MemoryFile:
        return self

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self.record["descriptor"], view) :]

    def flush(self) -> None:
        """Do nothing; ``torch.save`` calls this."""

    def __exit__(
        self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            os.close(self.record["descriptor"])


NewFile = type[CheckedFile] | type[MemoryFile]


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], new_file: NewFile = CheckedFile
) -> dict[str, int]:
    """Write a safetensors file. Returns the file's record."""
    header = header_of(tensors)
    with new_file(path) as file:
        file.write(header)
        for tensor in tensors.values():
            file.write(_bytes(tensor.detach().cpu().contiguous()))
    return file.record


def header_of(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the start of a safetensors file, whose length is a multiple of 8; the tensors follow in this order."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPE_NAMES:
            raise CheckpointError(
                f"{name}: the safetensors format does not support this dtype (got {tensor.dtype}). Use one of "
                f"{', '.join(str(dtype).removeprefix('torch.') for dtype in _DTYPE_NAMES)}."
            )
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # align the tensors
    return len(text).to_bytes(8, "little") + text


class TensorFile:
    """Safetensors file, opened to read parts of tensors with ordinary reads, so that no page stays in memory."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raises OSError, or ValueError if the header is invalid or the file is incomplete."""
        self.path = path
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if length > size - 8:
                raise ValueError(f"a header of {length} bytes in a file of {size} bytes")
            header = file.read(length)
        self._data_start = 8 + length
        try:
            self._header: Record = json.loads(header)
            self._header.pop("__metadata__", None)
            self._check(size)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"invalid header: {error!r}") from error

    def _check(self, size: int) -> None:
        """Raise ValueError if tensors overlap, leave gaps or do not fill the file of ``size`` bytes."""
        end = 0
        for name, record in sorted(self._header.items(), key=lambda item: item[1]["data_offsets"]):
            (start, stop), dtype = record["data_offsets"], _DTYPES.get(record["dtype"])
            tensor_bytes = stop - start if dtype is None else math.prod(record["shape"]) * dtype.itemsize
            if start != end or stop - start != tensor_bytes:
                raise ValueError(
                    f"bytes {start} to {stop} for {name}, {tensor_bytes} bytes from {end} expected"
                )
            end = stop
        if self._data_start + end != size:
            raise ValueError(f"{self._data_start + end} bytes expected, {size} bytes found")

    @property
    def names(self) -> list[str]:
        return list(self._header)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._header[name]["shape"])

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor in the format's spelling: F32, BF16, ..."""
        return self._header[name]["dtype"]

    def read_all(self, name: str) -> Tensor:
        shape = self.shape(name)
        return self.read(name, 0, math.prod(shape)).view(shape)

    def read(self, name: str, start: int, numel: int) -> Tensor:
        """Return ``numel`` elements of a flattened tensor from index ``start``, on the CPU."""
        record = self._header[name]
        elements = torch.empty(numel, dtype=_DTYPES[record["dtype"]])
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._data_start + record["data_offsets"][0] + start * elements.element_size())
            _read_into(_bytes(elements), file, self.path)
        return elements


def write_plain(path: Path, value: Mapping[str, object], new_file: NewFile = CheckedFile) -> dict[str, int]:
    """Write a file for ``torch.load(weights_only=True)``. Returns the file's record."""
    plain = _as_plain(value)
    # torch's writer crashes on a full disk.
    data = None if new_file is MemoryFile else _saved(plain)
    with new_file(path) as file:
        if data is None:
            torch.save(plain, file)  # pyright: ignore[reportArgumentType]
        else:
            file.write(data)
    return file.record


def read_plain(path: Path) -> Record:
    """Read a file written by :func:`write_plain`. Its tensors are memory-mapped."""
    return from_plain(torch.load(path, weights_only=True, map_location="cpu", mmap=True))


def pickle_plain(value: Mapping[str, object]) -> bytes:
    return _saved(_as_plain(value))


def _as_plain(value: Mapping[str, object]) -> object:
    """Return the result of :func:`to_plain` after checking that ``torch.load`` can read it."""
    try:
        plain = to_plain(value)
        _check_loads(plain)
        return plain
    except Exception:
        for key, entry in value.items():
            _require_plain(f"{key}", entry, (value,))
        raise


def to_plain(value: Saved, level: int = 0) -> Saved:
    """Return a value with types that ``torch.load(weights_only=True)`` can read; other types are unchanged.

    NumPy scalars become numbers. NumPy arrays and Namespaces become dictionaries for :func:`from_plain`. Views of
    larger tensors become copies, because torch would save all elements of those.
    """
    if level > _LEVELS:
        raise RecursionError
    if (
        type(value) is Tensor
        and value.layout == torch.strided
        and value.untyped_storage().nbytes() > value.nbytes
    ):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is np.ndarray and value.dtype.kind in "biufc":  # a subclass may have more than its numbers
        with contextlib.suppress(TypeError):  # torch has no such type
            return {_TYPE: "ndarray", "value": torch.from_numpy(value.astype(value.dtype.newbyteorder("=")))}
    if isinstance(value, Mapping) and _TYPE in value:
        raise ConfigError(f"{_TYPE}: checkpoints use this key (got {value[_TYPE]!r}). Rename it.")
    if isinstance(value, Namespace):
        return {_TYPE: "Namespace", "value": to_plain(vars(value), level)}
    return _map_entries(functools.partial(to_plain, level=level + 1), value)


def from_plain(value: Saved) -> Saved:
    """Invert :func:`to_plain`."""
    kind = value.get(_TYPE) if isinstance(value, dict) else None
    if kind == "ndarray":
        return value["value"].numpy().copy()
    if kind == "Namespace":
        return Namespace(**from_plain(value["value"]))
    return _map_entries(from_plain, value)


def _map_entries(function: Callable[[Saved], Saved], value: Saved) -> Saved:
    """Return a dictionary, list or tuple with the results of a function for its entries; other values unchanged.

    Keys that are NumPy scalars become numbers.
    """
    if isinstance(value, Mapping):
        container = OrderedDict if isinstance(value, OrderedDict) else dict
        return container(
            (key.item() if isinstance(key, np.generic) else key, function(entry))
            for key, entry in value.items()
        )
    return type(value)(map(function, value)) if type(value) in (list, tuple) else value


def layer_file(layer: int, shard: int, tensor_ranks: int) -> str:
    """Return DeepSpeed's name for a layer's file."""
    return f"layer_{layer:02d}{f'-model_{shard:02d}' if tensor_ranks > 1 else ''}-model_states.pt"


def is_plain(value: object) -> bool:
    """Return whether a value consists of numbers, strings, tensors, and lists and dictionaries of them."""
    try:
        _check_loads(value)
    except Exception:
        return False
    return True


def _require_plain(path: str, value: object, containers: tuple[object, ...]) -> None:
    """Raise ConfigError with the path of the first part of a value that cannot be saved; ``containers`` contain it."""
    kind = type(value).__name__
    shown = path if len(path) <= 100 else f"{path[:60]}...{path[-30:]}"
    if any(value is container for container in containers):
        raise ConfigError(
            f"{shown}: contains itself (got a {kind}). Remove this reference, or save numbers instead."
        )
    if len(containers) > _LEVELS:
        raise ConfigError(
            f"{shown}: a checkpoint contains at most {_LEVELS} levels of lists and dictionaries (got "
            f"{len(containers)}). Save a flat list instead."
        )
    try:
        _check_loads(to_plain(value, len(containers)))
        return
    except Exception as error:
        failure = error
    for key, entry in _entries(value):
        _require_plain(f"{path}[{key!r}]", entry, (*containers, value))
    if isinstance(failure, ConfigError):
        raise ConfigError(f"{shown}: {failure}")
    dtype = f" of {value.dtype}" if isinstance(value, np.ndarray | np.generic | Tensor) else ""
    raise ConfigError(
        f"{shown}: a checkpoint contains only numbers, strings, tensors, NumPy arrays of numbers, Namespaces, and "
        f"lists and dictionaries of them (got {kind}{dtype}). Save its state_dict() or its numbers."
    )


def _entries(value: object) -> Iterable[tuple[object, object]]:
    if isinstance(value, Namespace):
        return vars(value).items()
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else ()


def _check_loads(value: object) -> None:
    """Save a value without the data of its tensors, and load it. Raises an exception of torch if it is not plain."""
    torch.load(io.BytesIO(_saved(_without_data(value))), weights_only=True, map_location="meta")


def _without_data(value: object) -> object:
    if type(value) is Tensor and value.layout == torch.strided and not value.is_quantized:
        return torch.empty(0, dtype=value.dtype)
    return _map_entries(_without_data, value)


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    # Not getbuffer(): in Python 3.12, a view may outlive the buffer if both are collected after an exception.
    return buffer.getvalue()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _read_into(memory: memoryview, file: io.RawIOBase | io.FileIO, path: Path) -> None:
    while memory:
        count = file.readinto(memory)
        if not count:
            raise CheckpointError(f"{path}: incomplete file. Load another checkpoint.")
        memory = memory[count:]
