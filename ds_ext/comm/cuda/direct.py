"""Direct route between two GPUs on the same host: the sender writes into memory of the receiver's GPU (CUDA IPC).

    sender                                               receiver
    request: size of a slot, events "filled"    ->       allocate a slab of slots, or refuse with the reason
    map the slab                                <-       slab, events "released"
    wait for released[slot], copy, record filled[slot]
    message: slot                               ->       current stream waits for filled[slot]; tensors use the slot
                                                         ... after the last tensor is dropped: record released[slot]
    the slot is free                            <-       freed: slots

Only streams wait. Every event is recorded before the other process learns of it, so no stream waits for work that is
not yet queued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...errors import TransportError
from .. import _native
from .device import Device, Event, Stream

_ALIGNMENT = 512
_SPARE = 2  # extra slots: one being filled, one being released
_MIN_SLAB_BYTES = 2 << 20  # torch would share smaller blocks with other tensors

Control = Mapping[str, Any]  # control message, as JSON


class DirectSender:
    """Sending endpoint of a directed pair. All slots have the size of the first message.

    Args:
        max_held: number of messages that the receiver may hold at a time.

    Attributes:
        refused: why the receiver's memory cannot be used; None if it was not refused.
    """

    def __init__(self, device: Device, max_held: int) -> None:
        self._device = device
        self._filled = [device.new_event(shared=True) for _ in range(max_held + _SPARE)]
        self._released: list[Event] = []
        self._slab: Tensor | None = None
        self._slot_bytes = 0
        self._free: deque[int] = deque()
        self.refused: str | None = None

    def request(self, num_bytes: int) -> Control | None:
        """Return the request for a slab; None after the first call."""
        if self._slot_bytes:
            return None
        self._slot_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return {
            "slot_bytes": self._slot_bytes,
            "device": self._device.identity(),
            "filled": [self._device.share_event(event) for event in self._filled],
        }

    def on_answer(self, answer: Control) -> None:
        self.refused = answer.get("refused")
        if self.refused:
            return
        try:
            slab = self._device.open_slab(answer["device"], answer["slab"])
            self._released = [
                self._device.open_event(answer["device"], event) for event in answer["released"]
            ]
        except (RuntimeError, TransportError) as error:
            self.refused = f"GPU memory of the receiver cannot be opened: {error}"
            return
        self._slab, self._free = slab, deque(range(len(self._filled)))

    def send(self, body: Tensor) -> int | None:
        """Copy a body on the current stream to a slot. Return the slot; None if none is free or large enough."""
        if self._slab is None or len(body) > self._slot_bytes or not self._free:
            return None
        device, slot = self._device, self._free.popleft()
        place = slot * self._slot_bytes
        device.follow(device.outward, device.current())
        device.wait(device.outward, self._released[slot])
        device.copy(self._slab[place : place + len(body)], body, device.outward)
        device.keep(body, device.outward)
        device.record(self._filled[slot], device.outward)
        return slot

    def on_freed(self, slots: list[int]) -> None:
        """Free slots that the receiver has released; LinkError if they are not in use."""
        for slot in slots:
            if not 0 <= slot < len(self._released) or slot in self._free:
                raise _native.LinkError(f"release of slot {slot}, which is not in use")
            self._free.append(slot)


class DirectReceiver:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._filled: list[Event] = []
        self._released: list[Event] = []
        self._slab: Tensor | None = None
        self._slot_bytes = 0
        self._in_use: set[int] = set()
        self._returned: deque[tuple[int, Stream]] = deque()

    def grant(self, request: Control) -> Control:
        device, events = self._device, request["filled"]
        reason = device.incompatibility(request["device"])
        if reason is not None:
            return {"refused": reason}
        try:
            num_bytes = request["slot_bytes"] * len(events)
            slab, shared = device.new_slab(max(_MIN_SLAB_BYTES, num_bytes))
            filled = [device.open_event(request["device"], event) for event in events]
            released = [device.new_event(shared=True) for _ in events]
            handles = [device.share_event(event) for event in released]
        except (RuntimeError, TransportError) as error:
            return {"refused": str(error)}
        self._slab, self._slot_bytes = slab, request["slot_bytes"]
        self._filled, self._released = filled, released
        # Work that this rank has queued may still use the memory.
        self._release([(slot, device.current()) for slot in range(len(events))])
        return {"device": device.identity(), "slab": shared, "released": handles}

    def take(self, slot: int, num_bytes: int) -> Tensor:
        """Return the body of a message, for use on the current stream; LinkError for an invalid slot."""
        if not 0 <= slot < len(self._filled) or num_bytes > self._slot_bytes or slot in self._in_use:
            raise _native.LinkError(f"invalid slot {slot}")
        assert self._slab is not None
        stream = self._device.current()
        self._device.wait(stream, self._filled[slot])
        self._in_use.add(slot)
        # Any thread may drop the last tensor, so the callback only records the slot.
        returned, place = self._returned, slot * self._slot_bytes
        return self._device.part_of(self._slab, place, num_bytes, lambda: returned.append((slot, stream)))

    def freed(self) -> Control | None:
        """Return a report of the slots that no longer hold tensors; None if there are none.

        Like memory of torch's allocator, a slot is free after the work queued on its stream so far.
        """
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        self._in_use.difference_update(slot for slot, _ in returned)
        self._release(returned)
        return {"freed": [slot for slot, _ in returned]} if returned else None

    def _release(self, slots: list[tuple[int, Stream]]) -> None:
        """Record the release of slots after the work queued on their streams so far."""
        for stream in {id(stream): stream for _, stream in slots}.values():
            self._device.follow(self._device.releases, stream)
        for slot, _ in slots:
            self._device.record(self._released[slot], self._device.releases)
