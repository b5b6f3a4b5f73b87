"""The direct way between two GPUs of a host: the sender writes into memory of the receiver's GPU.

    sender                                               receiver
    message does not fit: want(bytes), events   ->       make a slab, or say why there can be none
    map the slab                                <-       slab, events
    copy to a free slot, record event e
    message: slab, place, e                     ->       current stream waits for e; tensors lie in the slot
                                                         ... the last of them is dropped: record release r
    a copy to that slot waits for r             <-       freed: places, r

Only streams wait. No cycle can come of it, because every event that one waits for was recorded before. An event is used
again after _RING messages; a wait for it then covers a later message as well, which is more than needed and right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ds_ext.comm import _native
from ds_ext.comm.cuda.device import Device, Event, Stream
from ds_ext.comm.cuda.room import Room, slot_bytes
from ds_ext.errors import TransportError

_RING = 32
_SPARE = 2  # slots beside those that the receiver holds: one is filled while another's release is under way
# torch shares the block of memory that a tensor lies in: up to here with other tensors.
_LEAST_SLAB_BYTES = 2 << 20
_MOST_SLAB_BYTES = 1 << 30
_MOST_SLABS = 8

Told = Mapping[str, Any]  # what one rank tells the other beside the messages, as JSON


class DirectSender:
    """The sending end of a directed pair. It has slabs when the receiver has given them.

    Args:
        device: of this rank.
        slots: how many messages the receiver holds at a time.
    """

    def __init__(self, device: Device, slots: int) -> None:
        self._device, self._slots = device, slots + _SPARE
        self._filled = [device.new_event(shared=True) for _ in range(_RING)]
        self._released: list[Event] = []
        self._slabs: list[tuple[Tensor, Room]] = []
        self._sent = self._passed = 0
        self._asking = False
        self.refused: str | None = None

    def send(self, body: Tensor) -> tuple[int, int, int] | None:
        """Copy a body, which the current stream makes, to the receiver: (slab, place, event); None without room."""
        for index, (slab, room) in enumerate(self._slabs):
            slot = room.lend(len(body))
            if slot is not None:
                place, fence = slot
                return index, place, self._copy(body, slab[place : place + len(body)], fence)
        return None

    def _copy(self, body: Tensor, target: Tensor, fence: int) -> int:
        device, event = self._device, self._sent % _RING
        device.follow(device.outward, device.current())
        if fence > self._passed:
            # Releases are recorded in order: what waits for one has waited for all before.
            device.wait(device.outward, self._released[fence % _RING])
            self._passed = fence
        device.copy(target, body, device.outward)
        device.keep(body, device.outward)
        device.record(self._filled[event], device.outward)
        self._sent += 1
        return event

    def want(self, num_bytes: int) -> Told | None:
        """What to ask the receiver for when there was no room; None when that would not help, or was asked already."""
        known = sum(room.slots(num_bytes) for _, room in self._slabs)
        if self._asking or self.refused or known >= self._slots or len(self._slabs) == _MOST_SLABS:
            return None
        size = slot_bytes(num_bytes)
        if size > _MOST_SLAB_BYTES:
            return None
        self._asking = True
        wanted = max(_LEAST_SLAB_BYTES, min(size * self._slots, _MOST_SLAB_BYTES // size * size))
        return {
            "want": wanted,
            "card": self._device.card(),
            "events": [] if self._slabs else [self._device.share_event(event) for event in self._filled],
        }

    def granted(self, told: Told) -> None:
        """Take the receiver's answer; afterwards ``refused`` may say why this way is closed."""
        self._asking = False
        self.refused = told.get("refused")
        if self.refused:
            return
        try:
            slab = self._device.open_slab(told["card"], told["slab"])
            self._released = self._released or [
                self._device.open_event(told["card"], event) for event in told["events"]
            ]
        except (RuntimeError, TransportError) as error:
            self.refused = f"its memory cannot be opened: {error}"
            return
        self._slabs.append((slab, Room(told["bytes"], told["fence"])))

    def freed(self, told: Told) -> None:
        """Take slots back. LinkError: they are not lent."""
        for slab, place in told["freed"]:
            if not 0 <= slab < len(self._slabs):
                raise _native.LinkError(f"a slot of slab {slab} came back, which there is not")
            self._slabs[slab][1].take_back(place, told["fence"])


class DirectReceiver:
    """The receiving end of a directed pair."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._filled: list[Event] = []
        self._released = [device.new_event(shared=True) for _ in range(_RING)]
        self._slabs: list[Tensor] = []
        self._lent: set[tuple[int, int]] = set()
        self._returned: deque[tuple[int, int, Stream]] = deque()
        self._releases = 0

    def grant(self, told: Told) -> Told:
        """The answer to a sender that wants a slab."""
        device = self._device
        reason = device.why_not(told["card"])
        if reason is not None:
            return {"refused": reason}
        try:
            slab, shared = device.new_slab(told["want"])
            self._filled = self._filled or [
                device.open_event(told["card"], event) for event in told["events"]
            ]
            events = [] if self._slabs else [device.share_event(event) for event in self._released]
        except (RuntimeError, TransportError) as error:
            return {"refused": str(error)}
        self._slabs.append(slab)
        # The memory may have been this rank's until now: what is queued for it comes first.
        fence = self._release([device.current()])
        return {
            "slab": shared,
            "bytes": told["want"],
            "card": device.card(),
            "events": events,
            "fence": fence,
        }

    def take(self, slab: int, place: int, event: int, num_bytes: int) -> Tensor:
        """The body of a message, for the work of the current stream. LinkError: there can be none at that place."""
        fits = slab < len(self._slabs) and 0 <= place <= len(self._slabs[slab]) - num_bytes
        if not fits or event >= len(self._filled) or (slab, place) in self._lent:
            raise _native.LinkError(f"a message says that it is at {place} of slab {slab}, where none can be")
        stream = self._device.current()
        self._device.wait(stream, self._filled[event])
        self._lent.add((slab, place))
        # By whichever thread drops the last tensor; so it is only noted.
        back = self._returned
        return self._device.lend(
            self._slabs[slab], place, num_bytes, lambda: back.append((slab, place, stream))
        )

    def freed(self) -> Told | None:
        """What to tell the sender of slots that nothing lies in any more; None when there are none.

        As torch's allocator has it: memory is free for others behind what the stream that got it has queued by now.
        """
        places: list[tuple[int, int]] = []
        streams: list[Stream] = []
        while self._returned:
            slab, place, stream = self._returned.popleft()
            self._lent.discard((slab, place))
            places.append((slab, place))
            if stream not in streams:
                streams.append(stream)
        return {"freed": places, "fence": self._release(streams)} if places else None

    def _release(self, streams: list[Stream]) -> int:
        """Record that these streams are done with what they used until now; the number of the release."""
        self._releases += 1
        for stream in streams:
            self._device.follow(self._device.releases, stream)
        self._device.record(self._released[self._releases % _RING], self._device.releases)
        return self._releases
