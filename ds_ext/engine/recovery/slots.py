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
from ..checkpoint.file import TensorFile, converted, header_of, restored
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
_STATE_UNIT = 4096  # bytes; the state may grow within the unit


class _Slot(NamedTuple):
    """Mapped file of a slot: layout of the tensors, bytes of the file, and a view for every tensor."""

    layout: tuple[Any, ...]
    content: memoryview
    views: dict[str, Tensor]


class Slots:
    """Snapshots of one rank.

    Args:
        keeper: keeper of this host, running.
        rank: global rank that writes the snapshots.

    Raises:
        KeeperError: the keeper does not answer or has no memory.
    """

    def __init__(self, keeper: Keeper, rank: int) -> None:
        self._keeper, self._rank = keeper, rank
        self._records = np.frombuffer(self._map(f"rank{rank}.records", RECORDS_BYTES), dtype=np.int64)
        self._slots: dict[int, _Slot] = {}

    @property
    def copied(self) -> int:
        """Last step whose copy to another host has ended."""
        return int(self._records[COPIED])

    @property
    def copy_failed(self) -> int:
        """Last step whose copy to another host failed."""
        return int(self._records[COPY_FAILED])

    def completed(self, step: int) -> None:
        """Record that a step is complete on all ranks."""
        self._records[PROGRESS_NS] = time.time_ns()
        self._records[PROGRESS] = step

    def steps(self) -> list[int]:
        """Return the steps of the complete snapshots."""
        return [step for step in (int(self._record(slot)[STEP]) for slot in (0, 1)) if step != NONE]

    def write(self, step: int, tensors: Mapping[str, Tensor], state: bytes) -> None:
        """Write a snapshot over the older one.

        Args:
            step: number of completed steps.
            tensors: weights and optimizer states by name, on any device.
            state: other values, from :func:`packed`.

        Raises:
            KeeperError: there is not enough memory.
        """
        older = min((0, 1), key=lambda slot: int(self._record(slot)[STEP]))
        record = self._record(older)
        record[STEP] = NONE
        slot = self._reserve(older, tensors, len(state))
        for name, tensor in tensors.items():
            slot.views[name].copy_(tensor.detach(), non_blocking=True)
        slot.views[STATE][: len(state)] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        if any(tensor.device.type == "cuda" for tensor in tensors.values()):
            torch.cuda.current_stream().synchronize()
        record[CHECKSUM], record[SIZE] = zlib.crc32(slot.content), len(slot.content)
        record[STATE_BYTES] = len(state)
        record[STEP] = step

    def read(self, step: int) -> tuple[dict[str, Tensor], bytes]:
        """Return copies of the tensors and the state of a snapshot.

        Raises:
            CheckpointError: there is no snapshot of this step, or its checksum is wrong.
        """
        slot = next((slot for slot in (0, 1) if self._record(slot)[STEP] == step), None)
        if slot is None:
            raise CheckpointError(f"rank {self._rank}: no snapshot of step {step} (got {self.steps()}).")
        record, name = self._record(slot), f"rank{self._rank}.{slot}"
        descriptor = self._keeper.open(name)
        try:
            with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as content:
                checksum = zlib.crc32(memoryview(content)[: int(record[SIZE])])
            if checksum != record[CHECKSUM]:
                raise CheckpointError(
                    f"rank {self._rank}: the snapshot of step {step} is damaged (got checksum {checksum:08x} instead "
                    f"of {int(record[CHECKSUM]):08x})."
                )
            file = TensorFile(path_of(descriptor))
            tensors = {name: file.whole(name) for name in file.names}
        finally:
            os.close(descriptor)
        return tensors, tensors.pop(STATE)[: int(record[STATE_BYTES])].numpy().tobytes()

    def _record(self, slot: int) -> Any:
        first = FIRST_SLOT + slot * PER_SLOT
        return self._records[first : first + PER_SLOT]

    def _reserve(self, number: int, tensors: Mapping[str, Tensor], state_bytes: int) -> _Slot:
        """Return the memory of a slot for these tensors; the same as last time if they have the same layout."""
        layout = tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
        slot = self._slots.get(number)
        if slot is not None and slot.layout == layout and state_bytes <= slot.views[STATE].numel():
            return slot
        # Large elements first: all tensors are then aligned.
        ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
        capacity = (state_bytes // _STATE_UNIT + 2) * _STATE_UNIT
        header = header_of({**ordered, STATE: torch.empty(capacity, dtype=torch.uint8, device="meta")})
        size = len(header) + sum(t.numel() * t.element_size() for t in ordered.values()) + capacity
        if f"rank{self._rank}.{1 - number}" not in self._keeper.files():
            self._map(f"rank{self._rank}.{1 - number}", size)  # so that a lack of memory appears now
        mapping = self._map(f"rank{self._rank}.{number}", size)
        content = torch.frombuffer(mapping, dtype=torch.uint8)
        if any(tensor.device.type == "cuda" for tensor in tensors.values()):
            _page_lock(content, None if slot is None else slot.content)
        content[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        slot = _Slot(layout, memoryview(mapping), _views(content[len(header) :], ordered, capacity))
        self._slots[number] = slot
        return slot

    def _map(self, name: str, size: int) -> mmap.mmap:
        descriptor = self._keeper.open(name, size)
        try:
            return mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)


def _page_lock(content: Tensor, replaced: memoryview | None) -> None:
    """Page-lock memory, so that GPUs copy into it at full speed, and release what it replaces."""
    cudart: Any = torch.cuda.cudart()
    if replaced is not None:
        cudart.cudaHostUnregister(torch.frombuffer(replaced, dtype=torch.uint8).data_ptr())
    error = cudart.cudaHostRegister(content.data_ptr(), content.numel(), 0)
    if error != cudart.cudaError.success:
        logger.warning(
            "recovery: %d bytes of host memory cannot be page-locked (got %s). Snapshots take longer.",
            *(content.numel(), error),
        )


def _views(content: Tensor, tensors: Mapping[str, Tensor], capacity: int) -> dict[str, Tensor]:
    """Return views of ``content``, uint8 [bytes], in the shapes of ``tensors``, one after the other.

    They are followed by ``capacity`` bytes for the other values, under the name ``STATE``.
    """
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors.values()]
    *parts, state = content.split([*sizes, capacity])
    named = zip(tensors.items(), parts, strict=True)
    views = {name: part.view(tensor.dtype).view(tensor.shape) for (name, tensor), part in named}
    return {**views, STATE: state}


def packed(state: Mapping[str, Any]) -> bytes:
    """Return plain values as bytes."""
    buffer = io.BytesIO()
    torch.save(converted(state), buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> dict[str, Any]:
    """Return the values of :func:`packed`."""
    return restored(torch.load(io.BytesIO(data), weights_only=True))


__all__ = ["NONE", "KeeperError", "Slots", "packed", "unpacked"]
