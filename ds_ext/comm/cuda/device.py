"""Memory, streams and events of a GPU as the transport uses them; over torch.cuda, without the CUDA runtime.

A stream does its work in order, at some later time; an event marks a place in it. Nothing in here makes the host wait,
but for finish(). Waiting for an event means, as in CUDA, for its last record at the time of the call: whoever tells
another process of an event has recorded it before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_ext.comm import wire
from ds_ext.errors import TransportError

DeviceIdentity = Mapping[str, Any]  # of a GPU, for other ranks; JSON
Stream = Any  # torch.cuda.Stream
Event = Any  # torch.cuda.Event


class Device(Protocol):
    """One rank's GPU. Memory is uint8 [bytes].

    Attributes:
        outward: the stream of copies that leave the GPU.
        inward: the stream of copies from the host.
        releases: the stream that says when received memory was used for the last time.
    """

    outward: Stream
    inward: Stream
    releases: Stream

    def owns(self, tensor: Tensor) -> bool:
        """Return whether the tensor lies on this GPU."""
        ...

    def current(self) -> Stream:
        """Return the stream of the caller's work."""
        ...

    def pack(self, tensors: Sequence[Tensor], descriptors: Sequence[wire.Descriptor]) -> Tensor:
        """Return the body of a message in new memory, on the current stream."""
        ...

    def empty(self, num_bytes: int, stream: Stream) -> Tensor:
        """Return memory for the work of a stream; once dropped, later work of that stream may get it."""
        ...

    def pinned(self, num_bytes: int) -> Tensor:
        """Return page-locked memory of the host; when dropped, it is kept until its copies are over."""
        ...

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """Copy memory of equal size, on a stream."""
        ...

    def follow(self, later: Stream, earlier: Stream) -> None:
        """Make later work of ``later`` wait for all present work of ``earlier``."""
        ...

    def keep(self, memory: Tensor, stream: Stream) -> None:
        """Keep memory of another stream from reuse until the work that this stream has when it is dropped is over."""
        ...

    def new_event(self, shared: bool) -> Event:
        """Return an event of this GPU's streams; other processes may open a shared one."""
        ...

    def record(self, event: Event, stream: Stream) -> None:
        """Mark the present work of a stream."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Make later work of a stream wait for an event, of this process or another."""
        ...

    def done(self, event: Event) -> bool:
        """Return whether the work that the event marks is over."""
        ...

    def finish(self, event: Event) -> None:
        """Make the host wait for that work."""
        ...

    def identity(self) -> DeviceIdentity:
        """Return what other ranks need to open memory and events of this GPU."""
        ...

    def incompatibility(self, other: DeviceIdentity) -> str | None:
        """Return why this rank and that of the other GPU cannot use each other's memory; None if they can."""
        ...

    def share_event(self, event: Event) -> str:
        """Return a handle with which another process opens the event."""
        ...

    def open_event(self, owner: DeviceIdentity, shared: str) -> Event:
        """An event of another process."""
        ...

    def new_slab(self, num_bytes: int) -> tuple[Tensor, Any]:
        """Memory that another process writes to, and how it opens that, as JSON; once."""
        ...

    def open_slab(self, owner: DeviceIdentity, shared: Any) -> Tensor:
        """The memory of another process; it must not be dropped before that process is done with it."""
        ...

    def part_of(self, slab: Tensor, place: int, num_bytes: int, returned: Callable[[], None]) -> Tensor:
        """Return part of a slab as separate memory; any thread calls ``returned`` after its last tensor is dropped."""
        ...


class TorchCuda:
    """Device over torch.cuda.

    torch has no public calls to share memory between processes; these are the two that torch.multiprocessing makes
    (torch/multiprocessing/reductions.py says what each value is).
    """

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self.outward, self.inward, self.releases = (torch.cuda.Stream(self.device) for _ in range(3))

    def owns(self, tensor: Tensor) -> bool:
        return tensor.device == self.device

    def current(self) -> Stream:
        return torch.cuda.current_stream(self.device)

    def pack(self, tensors: Sequence[Tensor], descriptors: Sequence[wire.Descriptor]) -> Tensor:
        num_bytes = descriptors[0].body_bytes if descriptors else 0
        body = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        wire.fill(tensors, descriptors, body)
        return body

    def empty(self, num_bytes: int, stream: Stream) -> Tensor:
        with torch.cuda.stream(stream):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def follow(self, later: Stream, earlier: Stream) -> None:
        later.wait_stream(earlier)

    def keep(self, memory: Tensor, stream: Stream) -> None:
        memory.record_stream(stream)

    def new_event(self, shared: bool) -> Event:
        # A thread that waits for one of this process sleeps.
        return torch.cuda.Event(interprocess=shared, blocking=not shared)

    def record(self, event: Event, stream: Stream) -> None:
        event.record(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def done(self, event: Event) -> bool:
        return event.query()

    def finish(self, event: Event) -> None:
        event.synchronize()

    def identity(self) -> DeviceIdentity:
        return {"uuid": str(torch.cuda.get_device_properties(self.device).uuid)}

    def incompatibility(self, other: DeviceIdentity) -> str | None:
        index = self._index(other)
        if index is None:
            return "one does not see the other's GPU; give all ranks of a host the same CUDA_VISIBLE_DEVICES"
        if index != self.device.index and not torch.cuda.can_device_access_peer(self.device, index):
            return f"there is no peer access between GPU {self.device.index} and GPU {index}"
        return None

    def share_event(self, event: Event) -> str:
        with torch.cuda.device(self.device):
            return event.ipc_handle().hex()

    def open_event(self, owner: DeviceIdentity, shared: str) -> Event:
        return torch.cuda.Event.from_ipc_handle(self._known(owner), bytes.fromhex(shared))

    def new_slab(self, num_bytes: int) -> tuple[Tensor, Any]:
        slab = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        try:
            _, *values = slab.untyped_storage()._share_cuda_()
        except RuntimeError as error:
            raise TransportError(
                f"GPU memory cannot be shared ({error}); with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True that "
                "may be the reason"
            ) from error
        return slab, [{"hex": v.hex()} if isinstance(v, bytes) else v for v in values]

    def open_slab(self, owner: DeviceIdentity, shared: Any) -> Tensor:
        device = self._known(owner)
        values = [bytes.fromhex(v["hex"]) if isinstance(v, dict) else v for v in shared]
        storage = torch.UntypedStorage._new_shared_cuda(device.index, *values)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

    def part_of(self, slab: Tensor, place: int, num_bytes: int, returned: Callable[[], None]) -> Tensor:
        memory = _SlabPart(slab, place, num_bytes)
        weakref.finalize(memory, returned).atexit = False
        return torch.as_tensor(memory, device=self.device)  # keeps the object until the storage is gone

    def _index(self, owner: DeviceIdentity) -> int | None:
        """The number that this process has for a GPU."""
        for index in range(torch.cuda.device_count()):
            if str(torch.cuda.get_device_properties(index).uuid) == owner.get("uuid"):
                return index
        return None

    def _known(self, owner: DeviceIdentity) -> torch.device:
        index = self._index(owner)
        if index is None:
            raise TransportError(f"this rank does not see the GPU {owner.get('uuid')}")
        return torch.device("cuda", index)


class _SlabPart:
    """Memory as other libraries offer it to torch, which then makes a storage of it."""

    def __init__(self, slab: Tensor, place: int, num_bytes: int) -> None:
        self._slab = slab
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (slab.data_ptr() + place, False),
            "strides": None,
            "version": 3,
        }
