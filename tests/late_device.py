"""Emulated GPU for the tests of ds_ext/comm/cuda/: streams with random delays, and reuse of dropped memory.

Each stream is a thread that does its work in order, with random delays. Dropped memory is overwritten on its stream, as
if the next owner wrote to it. Slabs and shared events are files, so ranks are real processes. A missing wait in the
transport causes wrong bytes.

    device = LateDevice(folder, seed=1)          # the same folder on both ranks
    tensor = device.tensor(torch.arange(5))      # its contents are written later
    result = device.read(tensor)                 # queued on the current stream; result() waits for the contents
"""

from __future__ import annotations

import os
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_ext.comm import wire
from ds_ext.comm.cuda.device import Device, DeviceIdentity

WAIT_LIMIT_S = 20.0
GARBAGE = 0xEE


class _Array(np.ndarray):
    """Memory with a finalizer."""


class LateStream:
    """Thread that does its work in order, with random delays."""

    def __init__(self, name: str, seed: int, late_s: float) -> None:
        self.name = name
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._draw, self._late_s = random.Random(f"{seed} {name}"), late_s
        threading.Thread(target=self._run, name=f"late {name}", daemon=True).start()

    def put(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            if self._draw.random() < 0.3:
                time.sleep(self._draw.random() * self._late_s)
            work()


class InlineStream:
    """Stream without delay: put() does the work."""

    def __init__(self, name: str) -> None:
        self.name = name

    def put(self, work: Callable[[], None]) -> None:
        work()


class LateEvent:
    """Event: number of records, and the last record that was reached."""

    def __init__(self, counts: np.ndarray, theirs: bool) -> None:
        self.counts, self.theirs = counts, theirs

    def reached(self, record: int) -> bool:
        return int(self.counts[1]) >= record

    def await_record(self, record: int) -> None:
        deadline = time.monotonic() + WAIT_LIMIT_S
        while not self.reached(record):
            if time.monotonic() > deadline:
                os._exit(3)  # deadlock; the test reports that the rank died
            time.sleep(5e-5)


class LateDevice(Device):
    """Emulated Device.

    Args:
        folder: folder of the shared files, the same on all ranks.
        seed: seed of the delays.
        late_s: maximum delay of a piece of work, in seconds.
        slow: name of a stream with four times the delay.
        skip: name of a step to skip, as in left_out().
        reachable: whether other ranks can use its memory.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        late_s: float = 0.002,
        slow: str = "",
        skip: str = "",
        reachable: bool = True,
    ) -> None:
        self._folder, self._skip, self._reachable = folder, skip, reachable
        self._blocks: list[np.ndarray] = []
        self._kept: dict[int, set[Any]] = {}
        self.dropped = threading.Event()  # memory was dropped, and the work of its next owner is queued
        self._files = 0
        self.main, self.outward, self.inward, self.releases = (
            self._stream(name, seed, 4 * late_s if name == slow else late_s)
            for name in ("main", "outward", "inward", "releases")
        )
        self._current = self.main

    def _stream(self, name: str, seed: int, late_s: float) -> Any:
        return LateStream(name, seed, late_s)

    def left_out(self, what: str) -> bool:
        return what == self._skip

    # --- for tests ---

    def tensor(self, contents: Tensor) -> Tensor:
        """Return a tensor on this device, which the current stream fills."""
        memory, source = self.empty(contents.nbytes, self.current()), contents.contiguous()
        data = source.view(-1).view(torch.uint8).numpy()
        raw = self._raw(memory)
        self.current().put(lambda: np.copyto(raw, data))
        return memory.view(contents.dtype).view(contents.shape)

    def fill(self, tensor: Tensor, value: int) -> None:
        """Overwrite a tensor on the current stream."""
        raw = self._raw(tensor.view(-1).view(torch.uint8))
        self.current().put(lambda: raw.fill(value))

    def read(self, tensor: Tensor) -> Callable[[], bytes]:
        """Read a tensor on the current stream, without keeping it."""
        raw, found, over = self._raw(tensor.view(-1).view(torch.uint8)), [], threading.Event()

        def work() -> None:
            found.append(raw.tobytes())
            over.set()

        self.current().put(work)

        def result() -> bytes:
            assert over.wait(WAIT_LIMIT_S), "the current stream is stuck"
            return found[0]

        return result

    # --- Device ---

    def owns(self, tensor: Tensor) -> bool:
        return any(_within(block, tensor) for block in self._blocks)

    def current(self) -> Any:
        return self._current

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before = self._current
        if not self.left_out(f"current is {stream.name}"):
            self._current = stream
        try:
            yield
        finally:
            self._current = before

    def pack(self, tensors: Sequence[Tensor], descriptors: Sequence[wire.Descriptor]) -> Tensor:
        body = self.empty(descriptors[0].body_bytes if descriptors else 0, self.current())
        raw = torch.from_numpy(self._raw(body)) if len(body) else body
        self.current().put(lambda: wire.fill(tensors, descriptors, raw))
        return body

    def empty(self, num_bytes: int, stream: Any) -> Tensor:
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        block = np.full(num_bytes + 64, GARBAGE, dtype=np.uint8)
        begin = -block.ctypes.data % 64
        block = block[begin : begin + num_bytes]
        self._blocks.append(block)
        return self._owned(block, lambda: self._use_again(block, stream))

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), GARBAGE, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        to, what = self._raw(target), self._raw(source)
        stream.put(lambda: np.copyto(to, what))

    def follow(self, later: Any, earlier: Any) -> None:
        if self.left_out(f"{later.name} follows {earlier.name}"):
            return
        event = self.new_event(shared=False)
        self._record(event, earlier)
        self._wait(later, event)

    def keep(self, memory: Tensor, stream: Any) -> None:
        if not self.left_out(f"keep for {stream.name}"):
            self._kept.setdefault(memory.data_ptr(), set()).add(stream)

    def new_event(self, shared: bool) -> LateEvent:
        event = LateEvent(np.zeros(2, dtype=np.int64), theirs=False)
        if shared:
            path = self._new_file(16)
            event.counts = np.memmap(path, dtype=np.int64, mode="r+")
            event.path = path  # pyright: ignore[reportAttributeAccessIssue]
        return event

    def record(self, event: LateEvent, stream: Any) -> None:
        self._record(event, stream)

    def wait(self, stream: Any, event: LateEvent) -> None:
        if not self.left_out(f"{stream.name} waits for {'their' if event.theirs else 'own'} event"):
            self._wait(stream, event)

    def done(self, event: LateEvent) -> bool:
        return self.left_out("done") or event.reached(int(event.counts[0]))

    def identity(self) -> DeviceIdentity:
        return {"folder": str(self._folder)}

    def incompatibility(self, other: DeviceIdentity) -> str | None:
        return None if self._reachable else "there is no peer access"

    def share_event(self, event: LateEvent) -> str:
        return str(event.path)  # pyright: ignore[reportAttributeAccessIssue]

    def open_event(self, owner: DeviceIdentity, shared: str) -> LateEvent:
        return LateEvent(np.memmap(shared, dtype=np.int64, mode="r+"), theirs=True)

    def new_slab(self, num_bytes: int) -> tuple[Tensor, Any]:
        path = self._new_file(num_bytes)
        memory = self.open_slab({}, str(path))
        raw = self._raw(memory)
        self.current().put(lambda: raw.fill(GARBAGE))  # pending work of the last owner
        return memory, str(path)

    def open_slab(self, owner: DeviceIdentity, shared: Any) -> Tensor:
        memory = np.memmap(shared, dtype=np.uint8, mode="r+")
        self._blocks.append(memory)
        return torch.from_numpy(memory)

    def part_of(self, slab: Tensor, place: int, num_bytes: int, returned: Callable[[], None]) -> Tensor:
        return self._owned(self._raw(slab[place : place + num_bytes]), returned)

    # --- implementation ---

    def _owned(self, memory: np.ndarray, dropped: Callable[[], None]) -> Tensor:
        array = memory.view(_Array)
        weakref.finalize(array, dropped).atexit = False
        return torch.from_numpy(array)

    def _use_again(self, block: np.ndarray, stream: Any) -> None:
        for other in self._kept.pop(block.ctypes.data, ()):
            event = self.new_event(shared=False)
            self._record(event, other)
            self._wait(stream, event)
        stream.put(lambda: block.fill(GARBAGE))
        self.dropped.set()

    def _raw(self, tensor: Tensor) -> np.ndarray:
        """Return the memory of a flat tensor, without keeping memory of this device."""
        for block in self._blocks:
            if _within(block, tensor):
                begin = tensor.data_ptr() - block.ctypes.data
                return np.asarray(block)[begin : begin + tensor.nbytes]
        return tensor.numpy()

    def _record(self, event: LateEvent, stream: Any) -> None:
        event.counts[0] += 1
        number = int(event.counts[0])

        def reach() -> None:
            event.counts[1] = number

        stream.put(reach)

    def _wait(self, stream: Any, event: LateEvent) -> None:
        number = int(event.counts[0])
        stream.put(lambda: event.await_record(number))

    def _new_file(self, num_bytes: int) -> Path:
        self._files += 1
        path = self._folder / f"{os.getpid()}-{id(self)}-{self._files}"
        path.write_bytes(bytes(num_bytes))
        return path


class InlineDevice(LateDevice):
    """Emulated GPU without delays. Floating-point tensors are on the GPU, all others on the host."""

    def _stream(self, name: str, seed: int, late_s: float) -> Any:
        return InlineStream(name)

    def owns(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point()

    def pack(self, tensors: Sequence[Tensor], descriptors: Sequence[wire.Descriptor]) -> Tensor:
        body = torch.empty(descriptors[0].body_bytes if descriptors else 0, dtype=torch.uint8)
        wire.fill(tensors, descriptors, body)
        return body

    def empty(self, num_bytes: int, stream: Any) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        target.copy_(source)


def _within(block: np.ndarray, tensor: Tensor) -> bool:
    begin = block.ctypes.data
    return tensor.nbytes > 0 and begin <= tensor.data_ptr() < begin + block.nbytes
