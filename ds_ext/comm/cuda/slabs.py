"""Direct route between two GPUs on the same host: the sender writes into memory of the receiver's GPU.

    sender                                               receiver
    no free slot: request(bytes), events        ->       allocate a slab, or refuse with the reason
    map the slab                                <-       slab, events
    copy to a free slot, record event e
    message: slab, place, e                     ->       current stream waits for e; tensors use the slot
                                                         ... after the last tensor is dropped: record release r
    a copy to that slot waits for r             <-       freed: places, r

Only streams wait, and every event is recorded before a stream waits for it, so that there is no deadlock. An event is
reused after _RING messages. A wait for it may then include a later message, which is safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ds_ext.comm import _native
from ds_ext.comm.cuda.device import Device, Event, Stream
from ds_ext.errors import TransportError

_MIN_SLOT_BYTES = 512
_RING = 32
_SPARE = 2  # extra slots: one being filled, one being released
_MIN_SLAB_BYTES = 2 << 20  # torch would share smaller blocks with other tensors
_MAX_SLAB_BYTES = 1 << 30
_MAX_SLABS = 8

Control = Mapping[str, Any]  # control message, as JSON


class SlabAllocator:
    """Allocator of a slab's slots, on the sender. A free slot may be written after its fence.

    A fence is the number of a release by the receiver, or 0. Among free slots of one size, the one released first is
    reused first, because its fence has most likely passed.

    Args:
        num_bytes: size of the slab.
        fence: initial fence of the whole slab.
    """

    def __init__(self, num_bytes: int, fence: int = 0) -> None:
        self.num_bytes = num_bytes
        self._uncut, self._fence, self._latest = 0, fence, fence
        self._free: dict[int, deque[tuple[int, int]]] = {}  # by size: (place, fence)
        self._allocated: dict[int, int] = {}  # place -> size

    def allocate(self, num_bytes: int) -> tuple[int, int] | None:
        """Return (place, fence) of a slot; None if none is free."""
        size = slot_bytes(num_bytes)
        if not self._allocated and self._uncut + size > self.num_bytes and not self._free.get(size):
            # The messages have a new size: divide the slab again.
            self._uncut, self._fence = 0, self._latest
            self._free.clear()
        if self._uncut + size <= self.num_bytes:
            place, fence = self._uncut, self._fence
            self._uncut += size
        elif self._free.get(size):
            place, fence = self._free[size].popleft()
        else:
            return None
        self._allocated[place] = size
        return place, fence

    def release(self, place: int, fence: int) -> None:
        """Free a slot that the receiver has released; LinkError if it is not allocated."""
        size = self._allocated.pop(place, None)
        if size is None or fence < self._latest:
            raise _native.LinkError(f"release of slot {place}, which is not allocated")
        self._latest = fence
        self._free.setdefault(size, deque()).append((place, fence))

    def capacity(self, num_bytes: int) -> int:
        """Return the number of messages of that size that fit if all slots are free."""
        size = slot_bytes(num_bytes)
        cut = len(self._free.get(size, ())) + sum(each == size for each in self._allocated.values())
        return cut + (self.num_bytes - self._uncut) // size


def slot_bytes(num_bytes: int) -> int:
    """Return the size of a message's slot: one of eight sizes per power of two, and a multiple of 64."""
    step = max(_MIN_SLOT_BYTES // 8, 1 << max(0, (num_bytes - 1).bit_length() - 4))
    return max(_MIN_SLOT_BYTES, -(-num_bytes // step) * step)


class DirectSender:
    """Sending endpoint of a directed pair.

    Args:
        device: GPU of this rank.
        max_held: number of messages that the receiver may hold at a time.

    Attributes:
        refused: why the receiver granted no slab; None if it has not refused.
    """

    def __init__(self, device: Device, max_held: int) -> None:
        self._device, self._slots = device, max_held + _SPARE
        self._filled = [device.new_event(shared=True) for _ in range(_RING)]
        self._released: list[Event] = []
        self._slabs: list[tuple[Tensor, SlabAllocator]] = []
        self._sent = self._passed = 0
        self._requested = False
        self.refused: str | None = None

    def send(self, body: Tensor) -> tuple[int, int, int] | None:
        """Copy a body on the current stream to the receiver. Returns (slab, place, event); None if no slot is free."""
        for index, (slab, allocator) in enumerate(self._slabs):
            slot = allocator.allocate(len(body))
            if slot is not None:
                place, fence = slot
                return index, place, self._copy(body, slab[place : place + len(body)], fence)
        return None

    def _copy(self, body: Tensor, target: Tensor, fence: int) -> int:
        device, event = self._device, self._sent % _RING
        device.follow(device.outward, device.current())
        if fence > self._passed:
            # Releases are recorded in order, so waiting for one includes all earlier ones.
            device.wait(device.outward, self._released[fence % _RING])
            self._passed = fence
        device.copy(target, body, device.outward)
        device.keep(body, device.outward)
        device.record(self._filled[event], device.outward)
        self._sent += 1
        return event

    def request_slab(self, num_bytes: int) -> Control | None:
        """Return a request for another slab; None if it would not help or was already sent."""
        known = sum(allocator.capacity(num_bytes) for _, allocator in self._slabs)
        if self._requested or self.refused or known >= self._slots or len(self._slabs) == _MAX_SLABS:
            return None
        size = slot_bytes(num_bytes)
        if size > _MAX_SLAB_BYTES:
            return None
        self._requested = True
        return {
            "request": max(_MIN_SLAB_BYTES, min(size * self._slots, _MAX_SLAB_BYTES // size * size)),
            "device": self._device.identity(),
            "events": [] if self._slabs else [self._device.share_event(event) for event in self._filled],
        }

    def on_answer(self, answer: Control) -> None:
        """Handle the receiver's answer."""
        self._requested = False
        self.refused = answer.get("refused")
        if self.refused:
            return
        try:
            slab = self._device.open_slab(answer["device"], answer["slab"])
            self._released = self._released or [
                self._device.open_event(answer["device"], event) for event in answer["events"]
            ]
        except (RuntimeError, TransportError) as error:
            self.refused = f"GPU memory of the receiver cannot be opened: {error}"
            return
        self._slabs.append((slab, SlabAllocator(answer["bytes"], answer["fence"])))

    def on_freed(self, control: Control) -> None:
        """Free slots that the receiver has released; LinkError if they are not allocated."""
        for slab, place in control["freed"]:
            if not 0 <= slab < len(self._slabs):
                raise _native.LinkError(f"release of a slot in slab {slab}, which does not exist")
            self._slabs[slab][1].release(place, control["fence"])


class DirectReceiver:
    """Receiving endpoint of a directed pair."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._filled: list[Event] = []
        self._released = [device.new_event(shared=True) for _ in range(_RING)]
        self._slabs: list[Tensor] = []
        self._in_use: set[tuple[int, int]] = set()
        self._returned: deque[tuple[int, int, Stream]] = deque()
        self._releases = 0

    def grant(self, request: Control) -> Control:
        """Return the answer to a request for a slab."""
        device = self._device
        reason = device.incompatibility(request["device"])
        if reason is not None:
            return {"refused": reason}
        try:
            slab, shared = device.new_slab(request["request"])
            self._filled = self._filled or [
                device.open_event(request["device"], event) for event in request["events"]
            ]
            events = [] if self._slabs else [device.share_event(event) for event in self._released]
        except (RuntimeError, TransportError) as error:
            return {"refused": str(error)}
        self._slabs.append(slab)
        # Work that this rank has queued may still use the memory.
        fence = self._release([device.current()])
        return {
            "slab": shared,
            "bytes": request["request"],
            "device": device.identity(),
            "events": events,
            "fence": fence,
        }

    def take(self, slab: int, place: int, event: int, num_bytes: int) -> Tensor:
        """Return the body of a message, for use on the current stream; LinkError for an invalid place."""
        fits = slab < len(self._slabs) and 0 <= place <= len(self._slabs[slab]) - num_bytes
        if not fits or event >= len(self._filled) or (slab, place) in self._in_use:
            raise _native.LinkError(f"invalid place {place} in slab {slab}")
        stream = self._device.current()
        self._device.wait(stream, self._filled[event])
        self._in_use.add((slab, place))
        # Any thread may drop the last tensor, so the callback only records the slot.
        returned = self._returned
        return self._device.part_of(
            self._slabs[slab], place, num_bytes, lambda: returned.append((slab, place, stream))
        )

    def freed(self) -> Control | None:
        """Return a report of the slots that no longer hold tensors, or None if all slots are in use.

        As with torch's allocator, the memory is free after the work queued on its stream so far.
        """
        places: list[tuple[int, int]] = []
        streams: list[Stream] = []
        while self._returned:
            slab, place, stream = self._returned.popleft()
            self._in_use.discard((slab, place))
            places.append((slab, place))
            if stream not in streams:
                streams.append(stream)
        return {"freed": places, "fence": self._release(streams)} if places else None

    def _release(self, streams: list[Stream]) -> int:
        """Record a release after the work queued on these streams so far. Returns its number."""
        self._releases += 1
        for stream in streams:
            self._device.follow(self._device.releases, stream)
        self._device.record(self._released[self._releases % _RING], self._device.releases)
        return self._releases
