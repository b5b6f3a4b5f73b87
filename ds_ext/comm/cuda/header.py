"""Header of a message between GPUs, whose contents may travel separately.

The first tensor of a message is its header: the route of the contents of GPU tensors, and which of the message's
tensors these are. The second holds their descriptors. CPU tensors follow unchanged.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from ds_ext.comm import _native, wire
from ds_ext.comm.cuda.staging import packed

_HEADER = struct.Struct("<Bqqq")


class Route(IntEnum):
    """Route of the contents of GPU tensors."""

    NONE = 0  # there are no contents
    DIRECT = 1  # place: slab, place in it, event
    STAGED = 2  # place: number of the body


@dataclass(frozen=True)
class Header:
    """Header of one message.

    Args:
        route: of the contents.
        place: of the contents; three numbers.
        on_gpu: for every tensor of the message, whether it is on the GPU.
        descriptors: of the GPU tensors.
    """

    route: Route
    place: tuple[int, int, int]
    on_gpu: Sequence[bool]
    descriptors: Sequence[wire.Descriptor]

    def pack(self) -> tuple[Tensor, ...]:
        """Return the header as CPU tensors."""
        header = packed(_HEADER.pack(self.route, *self.place) + bytes(self.on_gpu))
        return (header, wire.pack_all(self.descriptors)) if self.descriptors else (header,)

    @property
    def body_bytes(self) -> int:
        """Bytes of the contents."""
        return self.descriptors[0].body_bytes if self.descriptors else 0

    def join(self, body: Tensor, host: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the message's tensors, in order; LinkError or DescriptorError if they do not fit the header."""
        count = sum(self.on_gpu)
        if count != len(self.descriptors) or len(self.on_gpu) - count != len(host):
            raise _native.LinkError("the header of a message does not fit its tensors")
        mine = iter(wire.view(self.descriptors, body) if self.descriptors else ())
        others = iter(host)
        return tuple(next(mine if on_gpu else others) for on_gpu in self.on_gpu)


def unpack(tensors: Sequence[Tensor]) -> tuple[Header, Sequence[Tensor]]:
    """Return the header of a message, and its CPU tensors; LinkError or DescriptorError if the header is invalid."""
    data = tensors[0].numpy().tobytes()
    if len(data) < _HEADER.size or data[0] > max(Route) or any(flag > 1 for flag in data[_HEADER.size :]):
        raise _native.LinkError("a message has no header")
    route, *place = _HEADER.unpack_from(data)
    on_gpu = [bool(flag) for flag in data[_HEADER.size :]]
    descriptors = wire.unpack_all(tensors[1]) if any(on_gpu) and len(tensors) > 1 else ()
    header = Header(Route(route), (place[0], place[1], place[2]), on_gpu, descriptors)
    return header, tensors[2 if descriptors else 1 :]
