"""What the transport needs of a GPU: memory, streams and events; over torch.cuda, without a call of the runtime itself.

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

Card = Mapping[str, Any]  # what another rank must know of a GPU; JSON
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
        """Whether the tensor lies here."""
        ...

    def current(self) -> Stream:
        """The stream of the caller's work."""
        ...

    def pack(self, tensors: Sequence[Tensor], descriptors: Sequence[wire.Descriptor]) -> Tensor:
        """The body of a message in new memory, on the current stream."""
        ...

    def empty(self, num_bytes: int, stream: Stream) -> Tensor:
        """Memory for the work of a stream; once it is dropped, later work of that stream may get it."""
        ...

    def pinned(self, num_bytes: int) -> Tensor:
        """Memory of the host that copies are quick from and to; dropped, it is kept until they are over."""
        ...

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """Copy as many bytes, on a stream."""
        ...

    def follow(self, later: Stream, earlier: Stream) -> None:
        """What is queued on ``later`` from now on waits for what is queued on ``earlier`` by now."""
        ...

    def keep(self, memory: Tensor, stream: Stream) -> None:
        """Once dropped, memory of another stream is not used again before what this one has queued by then is over."""
        ...

    def new_event(self, shared: bool) -> Event:
        """An event of this GPU's streams; a shared one may be opened by other processes."""
        ...

    def record(self, event: Event, stream: Stream) -> None:
        """Mark what is queued on the stream by now."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """What is queued on the stream from now on waits for the event, of this process or another."""
        ...

    def done(self, event: Event) -> bool:
        """Whether what the event marks is over."""
        ...

    def finish(self, event: Event) -> None:
        """Make the host wait until it is."""
        ...

    def card(self) -> Card:
        """What ranks that open memory and events of this GPU must know."""
        ...

    def why_not(self, card: Card) -> str | None:
        """Why this rank cannot use memory of that GPU, or the other rank memory of this one."""
        ...

    def share_event(self, event: Event) -> str:
        """How another process opens it."""
        ...

    def open_event(self, card: Card, shared: str) -> Event:
        """An event of another process."""
        ...

    def new_slab(self, num_bytes: int) -> tuple[Tensor, Any]:
        """Memory that another process writes to, and how it opens that, as JSON; once."""
        ...

    def open_slab(self, card: Card, shared: Any) -> Tensor:
        """The memory of another process; it must not be dropped before that process is done with it."""
        ...

    def lend(self, slab: Tensor, place: int, num_bytes: int, returned: Callable[[], None]) -> Tensor:
        """Part of a slab as memory of its own; any thread calls ``returned`` when nothing lies in it any more."""
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

    def card(self) -> Card:
        return {"uuid": str(torch.cuda.get_device_properties(self.device).uuid)}

    def why_not(self, card: Card) -> str | None:
        index = self._index(card)
        if index is None:
            return "one does not see the other's GPU; give all ranks of a host the same CUDA_VISIBLE_DEVICES"
        if index != self.device.index and not torch.cuda.can_device_access_peer(self.device, index):
            return f"there is no peer access between GPU {self.device.index} and GPU {index}"
        return None

    def share_event(self, event: Event) -> str:
        with torch.cuda.device(self.device):
            return event.ipc_handle().hex()

    def open_event(self, card: Card, shared: str) -> Event:
        return torch.cuda.Event.from_ipc_handle(self._known(card), bytes.fromhex(shared))

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

    def open_slab(self, card: Card, shared: Any) -> Tensor:
        device = self._known(card)
        values = [bytes.fromhex(v["hex"]) if isinstance(v, dict) else v for v in shared]
        storage = torch.UntypedStorage._new_shared_cuda(device.index, *values)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

    def lend(self, slab: Tensor, place: int, num_bytes: int, returned: Callable[[], None]) -> Tensor:
        memory = _Lent(slab, place, num_bytes)
        weakref.finalize(memory, returned).atexit = False
        return torch.as_tensor(memory, device=self.device)  # keeps the object until the storage is gone

    def _index(self, card: Card) -> int | None:
        """The number that this process has for a GPU."""
        for index in range(torch.cuda.device_count()):
            if str(torch.cuda.get_device_properties(index).uuid) == card.get("uuid"):
                return index
        return None

    def _known(self, card: Card) -> torch.device:
        index = self._index(card)
        if index is None:
            raise TransportError(f"this rank does not see the GPU {card.get('uuid')}")
        return torch.device("cuda", index)


class _Lent:
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
