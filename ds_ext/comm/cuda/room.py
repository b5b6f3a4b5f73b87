"""The sender's book of a slab of the receiver's GPU."""

from __future__ import annotations

from collections import deque

from ds_ext.comm import _native

_LEAST_BYTES = 512


class Room:
    """Which slots of a slab are lent, and behind which fence each of the others may be written again.

    A fence is the number of a release of the receiver, or 0. Slots of one size are used in turn, the one that came back
    first at first: its fence is most likely passed.

    Args:
        num_bytes: of the slab.
        fence: of all its memory at first.
    """

    def __init__(self, num_bytes: int, fence: int = 0) -> None:
        self.num_bytes = num_bytes
        self._uncut, self._fence, self._latest = 0, fence, fence
        self._free: dict[int, deque[tuple[int, int]]] = {}  # by size: (place, fence)
        self._lent: dict[int, int] = {}  # place -> size

    def lend(self, num_bytes: int) -> tuple[int, int] | None:
        """(place, fence) of a slot; None while there is no room."""
        size = slot_bytes(num_bytes)
        if not self._lent and self._uncut + size > self.num_bytes and not self._free.get(size):
            # Messages have another size now: cut anew.
            self._uncut, self._fence = 0, self._latest
            self._free.clear()
        if self._uncut + size <= self.num_bytes:
            place, fence = self._uncut, self._fence
            self._uncut += size
        elif self._free.get(size):
            place, fence = self._free[size].popleft()
        else:
            return None
        self._lent[place] = size
        return place, fence

    def take_back(self, place: int, fence: int) -> None:
        """The receiver has released a slot. LinkError: it did not have it."""
        size = self._lent.pop(place, None)
        if size is None or fence < self._latest:
            raise _native.LinkError(f"slot {place} came back that is not lent")
        self._latest = fence
        self._free.setdefault(size, deque()).append((place, fence))

    def slots(self, num_bytes: int) -> int:
        """How many messages of that size it holds, were all back."""
        size = slot_bytes(num_bytes)
        cut = len(self._free.get(size, ())) + sum(lent == size for lent in self._lent.values())
        return cut + (self.num_bytes - self._uncut) // size


def slot_bytes(num_bytes: int) -> int:
    """The size of the slot of a message: eight sizes between a power of two and the next, multiples of 64."""
    step = max(_LEAST_BYTES // 8, 1 << max(0, (num_bytes - 1).bit_length() - 4))
    return max(_LEAST_BYTES, -(-num_bytes // step) * step)
