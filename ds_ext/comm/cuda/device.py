"""Memory, streams and events of a GPU, over torch.cuda without the CUDA runtime.

A stream executes its work in order, and an event marks a point in it. Nothing here makes the host wait. As in CUDA,
waiting for an event means waiting for its most recent record at the time of the call. An event is therefore recorded
before another process is notified of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ...errors import TransportError
from .. import wire

DeviceIdentity = Mapping[str, Any]  # of a GPU, for other ranks; JSON
Stream = Any  # torch.cuda.Stream
Event = Any  # torch.cuda.Event


class Device:
    """GPU of one rank. Memory is uint8 [bytes]. tests/late_device.py overrides every method.

    torch has no public functions to share memory between processes. _share_cuda_ and _new_shared_cuda are those that
    torch.multiprocessing uses (see torch/multiprocessing/reductions.py).

    Attributes:
        outward: stream of copies that leave the GPU.
        inward: stream of receives.
        releases: stream that records when received memory was used for the last time.
    """

    outward: Stream
    inward: Stream
    releases: Stream

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self.outward, self.inward, self.releases = (torch.cuda.Stream(self.device) for _ in range(3))

    def owns(self, tensor: Tensor) -> bool:
        return tensor.device == self.device

    def current(self) -> Stream:
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def pack(self, tensors: Sequence[Tensor], descriptors: Sequence[wire.Descriptor]) -> Tensor:
        """Copy tensors into a new message body, on the current stream."""
        num_bytes = descriptors[0].body_bytes if descriptors else 0
        body = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        wire.fill(tensors, descriptors, body)
        return body

    def empty(self, num_bytes: int, stream: Stream) -> Tensor:
        """Return memory for use on a stream. Later work of that stream may reuse it after it is dropped."""
        with torch.cuda.stream(stream):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def pinned(self, num_bytes: int) -> Tensor:
        """Return page-locked host memory. It stays allocated until its copies are finished, even if it is dropped."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def follow(self, later: Stream, earlier: Stream) -> None:
        """Make future work on ``later`` wait for the work queued on ``earlier`` so far."""
        later.wait_stream(earlier)

    def keep(self, memory: Tensor, stream: Stream) -> None:
        """Keep dropped memory of another stream until the work queued on ``stream`` at that time is finished."""
        memory.record_stream(stream)

    def new_event(self, shared: bool) -> Event:
        """Return an event. Other processes may open a ``shared`` one."""
        return torch.cuda.Event(interprocess=shared)

    def record(self, event: Event, stream: Stream) -> None:
        """Record an event after the work queued on a stream so far."""
        event.record(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        """Make future work on a stream wait for an event, also one of another process."""
        stream.wait_event(event)

    def done(self, event: Event) -> bool:
        return event.query()

    def identity(self) -> DeviceIdentity:
        """Return the ID that other ranks use to open memory and events of this GPU."""
        return {"uuid": str(torch.cuda.get_device_properties(self.device).uuid)}

    def incompatibility(self, other: DeviceIdentity) -> str | None:
        """Return why this rank and a rank on another GPU cannot use each other's memory; None if they can."""
        index = self._index(other)
        if index is None:
            return f"GPU {other.get('uuid')} is not visible. Set the same CUDA_VISIBLE_DEVICES for all ranks on a host"
        if index != self.device.index and not torch.cuda.can_device_access_peer(self.device, index):
            return f"no peer access between GPU {self.device.index} and GPU {index}"
        return None

    def share_event(self, event: Event) -> str:
        """Return a handle for :meth:`open_event` in another process."""
        with torch.cuda.device(self.device):
            return event.ipc_handle().hex()

    def open_event(self, owner: DeviceIdentity, shared: str) -> Event:
        return torch.cuda.Event.from_ipc_handle(self._known(owner), bytes.fromhex(shared))

    def new_slab(self, num_bytes: int) -> tuple[Tensor, Any]:
        """Return memory that another process writes to, and a JSON handle that can be opened once."""
        slab = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        try:
            _, *values = slab.untyped_storage()._share_cuda_()
        except RuntimeError as error:
            raise TransportError(
                f"GPU memory cannot be shared ({error}). Try without "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
            ) from error
        return slab, [{"hex": v.hex()} if isinstance(v, bytes) else v for v in values]

    def open_slab(self, owner: DeviceIdentity, shared: Any) -> Tensor:
        """Open memory of another process. Keep it until that process no longer uses it."""
        device = self._known(owner)
        values = [bytes.fromhex(v["hex"]) if isinstance(v, dict) else v for v in shared]
        storage = torch.UntypedStorage._new_shared_cuda(device.index, *values)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

    def part_of(self, slab: Tensor, place: int, num_bytes: int, returned: Callable[[], None]) -> Tensor:
        """Return part of a slab as separate memory. Any thread calls ``returned`` after its last use."""
        memory = _SlabPart(slab, place, num_bytes)
        weakref.finalize(memory, returned).atexit = False
        return torch.as_tensor(memory, device=self.device)  # keeps the object alive as long as the storage

    def _index(self, owner: DeviceIdentity) -> int | None:
        for index in range(torch.cuda.device_count()):
            if str(torch.cuda.get_device_properties(index).uuid) == owner.get("uuid"):
                return index
        return None

    def _known(self, owner: DeviceIdentity) -> torch.device:
        index = self._index(owner)
        if index is None:
            raise TransportError(f"GPU {owner.get('uuid')}: not visible to this rank.")
        return torch.device("cuda", index)


class _SlabPart:
    """Part of a slab with the CUDA array interface, from which torch makes a separate storage."""

    def __init__(self, slab: Tensor, place: int, num_bytes: int) -> None:
        self._slab = slab
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (slab.data_ptr() + place, False),
            "strides": None,
            "version": 3,
        }


def findings() -> Iterator[tuple[str, str, str]]:
    """Yield (subject, finding, fix or "") for each GPU of this host and for pairs without peer access."""
    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        yield f"GPU {index}", f"{properties.name}, {properties.total_memory >> 30} GiB", ""
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    without = [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if without:
        yield (
            "GPU peer access",
            f"not between {', '.join(without)}",
            "shm messages between these are staged in host memory; nccl may be faster",
        )
