"""Two snapshots of a rank in its host's memory, of which a kill at any instruction leaves one complete.

A rank has three files of the keeper:

    rank3.records   for each slot: step, checksum and size; and the last complete step
    rank3.0         safetensors file with the tensors of a snapshot and, as tensor "state", its other values
    rank3.1         the same, of another step

Snapshots alternate between the slots. Writing sets the slot's step to NONE, writes the tensors, and then sets checksum,
size and, last, the step. A step number in the records therefore belongs to a complete snapshot.
"""

from __future__ import annotations

import io
import logging
import mmap
import os
import time
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...environment import path_of
from ...errors import CheckpointError
from ..checkpoint.file import TensorFile, from_plain, header_of, to_plain
from ..types import Record
from .keeper import Keeper, KeeperError
from .keeper_process import (
    CHECKSUM,
    COPIED,
    COPY_FAILED,
    FIRST_SLOT,
    NONE,
    PER_SLOT,
    PROGRESS,
    PROGRESS_NS,
    RECORDS_BYTES,
    SIZE,
    STATE_BYTES,
    STEP,
)

logger = logging.getLogger(__name__)

STATE = "state"
_STATE_UNIT = 4096  # bytes; a state that grows by at most one unit fits into the file of the last one


class _Slot(NamedTuple):
    """Mapped file of a slot: layout of the tensors, all bytes, and views of every tensor and of the state."""

    layout: tuple[object, ...]
    content: memoryview
    views: dict[str, Tensor]

    def fits(self, tensors: Mapping[str, Tensor], state_bytes: int) -> bool:
        return self.layout == _layout(tensors) and state_bytes <= self.views[STATE].numel()


class Slots:
    """Snapshots of one rank. ``keeper`` must be running."""

    def __init__(self, keeper: Keeper, rank: int) -> None:
        self._keeper, self._rank = keeper, rank
        self._records = np.frombuffer(self._map(f"rank{rank}.records", RECORDS_BYTES), dtype=np.int64)
        self._slots: dict[int, _Slot] = {}  # by number of the slot, 0 or 1

    @property
    def last_ended_copy(self) -> int:
        return int(self._records[COPIED])

    @property
    def last_failed_copy(self) -> int:
        return int(self._records[COPY_FAILED])

    def mark_complete(self, step: int) -> None:
        self._records[PROGRESS_NS] = time.time_ns()
        self._records[PROGRESS] = step

    def steps(self) -> list[int]:
        return [step for step in (int(self._record(slot)[STEP]) for slot in (0, 1)) if step != NONE]

    def write(self, step: int, tensors: Mapping[str, Tensor], state: bytes) -> None:
        """Write a snapshot over the older one. The tensors may be on any device."""
        older = min((0, 1), key=lambda number: int(self._record(number)[STEP]))
        record = self._record(older)
        record[STEP] = NONE
        on_gpu = any(tensor.device.type == "cuda" for tensor in tensors.values())
        slot = self._slots.get(older)
        if slot is None or not slot.fits(tensors, len(state)):
            replaced, slot = slot, self._make_slot(older, tensors, len(state))
            if on_gpu:
                if replaced is not None:
                    _unlock_pages(replaced.content)
                _lock_pages(slot.content)
            self._slots[older] = slot
            self._reserve(1 - older, len(slot.content))
        for name, tensor in tensors.items():
            slot.views[name].copy_(tensor.detach(), non_blocking=True)
        slot.views[STATE][: len(state)] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        record[CHECKSUM], record[SIZE] = zlib.crc32(slot.content), len(slot.content)
        record[STATE_BYTES] = len(state)
        record[STEP] = step

    def read(self, step: int) -> tuple[dict[str, Tensor], bytes]:
        number = next((number for number in (0, 1) if self._record(number)[STEP] == step), None)
        if number is None:
            raise CheckpointError(f"rank {self._rank}: no snapshot of step {step} (got {self.steps()}).")
        record = self._record(number)
        descriptor = self._keeper.open(self._file_name(number))
        try:
            with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as content:
                checksum = zlib.crc32(memoryview(content)[: int(record[SIZE])])
            if checksum != record[CHECKSUM]:
                raise CheckpointError(
                    f"rank {self._rank}: the snapshot of step {step} is damaged (got checksum {checksum:08x} instead "
                    f"of {int(record[CHECKSUM]):08x})."
                )
            file = TensorFile(path_of(descriptor))
            tensors = {name: file.read_all(name) for name in file.names}
        finally:
            os.close(descriptor)
        return tensors, tensors.pop(STATE)[: int(record[STATE_BYTES])].numpy().tobytes()

    def _record(self, number: int) -> np.ndarray:
        """Return the numbers of a slot, as a writable view of the records."""
        first = FIRST_SLOT + number * PER_SLOT
        return self._records[first : first + PER_SLOT]

    def _file_name(self, number: int) -> str:
        return f"rank{self._rank}.{number}"

    def _reserve(self, number: int, size: int) -> None:
        """Create the file of a slot if it does not exist, so that a lack of memory appears in the first step."""
        if self._file_name(number) not in self._keeper.files():
            self._map(self._file_name(number), size)

    def _make_slot(self, number: int, tensors: Mapping[str, Tensor], state_bytes: int) -> _Slot:
        """Return a slot for these tensors and a state of this size. Its file has only the header so far."""
        # Large elements first: all tensors are then aligned.
        ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
        capacity = (state_bytes // _STATE_UNIT + 2) * _STATE_UNIT  # at least one unit is free
        header = header_of({**ordered, STATE: torch.empty(capacity, dtype=torch.uint8, device="meta")})
        size = len(header) + sum(tensor.nbytes for tensor in ordered.values()) + capacity
        mapping = self._map(self._file_name(number), size)
        content = torch.frombuffer(mapping, dtype=torch.uint8)
        content[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        views = _views(content[len(header) :], ordered, capacity)
        return _Slot(_layout(tensors), memoryview(mapping), views)

    def _map(self, name: str, size: int) -> mmap.mmap:
        """Return a file in memory; one of another size is replaced."""
        descriptor = self._keeper.open(name, size)
        try:
            return mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)


def _layout(tensors: Mapping[str, Tensor]) -> tuple[object, ...]:
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())


def _lock_pages(content: memoryview) -> None:
    """Page-lock memory, so that GPUs copy into it at full speed. Logs a warning if that fails."""
    cudart: Any = torch.cuda.cudart()
    pointer = torch.frombuffer(content, dtype=torch.uint8).data_ptr()
    error = cudart.cudaHostRegister(pointer, len(content), 0)
    if error != cudart.cudaError.success:
        logger.warning(
            "recovery: %d bytes of host memory cannot be page-locked (got %s). Snapshots take longer.",
            *(len(content), error),
        )


def _unlock_pages(content: memoryview) -> None:
    cudart: Any = torch.cuda.cudart()
    cudart.cudaHostUnregister(torch.frombuffer(content, dtype=torch.uint8).data_ptr())


def _views(content: Tensor, tensors: Mapping[str, Tensor], capacity: int) -> dict[str, Tensor]:
    """Return views of ``content``, uint8 [bytes], in the shapes of ``tensors``, one after the other.

    They are followed by ``capacity`` bytes for the other values, under the name ``STATE``. ``tensors`` are in order of
    decreasing element size, so that all views are aligned.
    """
    *parts, state = content.split([*(tensor.nbytes for tensor in tensors.values()), capacity])
    views = {}
    for (name, tensor), part in zip(tensors.items(), parts, strict=True):
        views[name] = part.view(tensor.dtype).view(tensor.shape)
    return {**views, STATE: state}


def pack_state(state: Mapping[str, object]) -> bytes:
    buffer = io.BytesIO()
    torch.save(to_plain(state), buffer)
    return buffer.getvalue()


def unpack_state(data: bytes) -> Record:
    return from_plain(torch.load(io.BytesIO(data), weights_only=True))


__all__ = ["NONE", "KeeperError", "Slots", "pack_state", "unpack_state"]
