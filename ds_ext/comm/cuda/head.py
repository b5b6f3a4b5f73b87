"""What a message between GPUs says in front of the tensors that come by themselves.

Its first tensor is a head: how the contents of the tensors on the GPU travel, and which of the message's tensors these
are. The second has their descriptors. Tensors that are on the CPU follow as they are.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from ds_ext.comm import _native, wire
from ds_ext.comm.cuda.staging import packed

_HEAD = struct.Struct("<Bqqq")


class Way(IntEnum):
    """How contents travel."""

    NONE = 0  # there are none
    DIRECT = 1  # place: slab, place in it, event
    STAGED = 2  # place: number of the body


@dataclass(frozen=True)
class Head:
    """Of one message.

    Args:
        way: of the contents.
        place: where they are; three numbers.
        on_gpu: of every tensor of the message, whether it is on the GPU.
        descriptors: of those that are.
    """

    way: Way
    place: tuple[int, int, int]
    on_gpu: Sequence[bool]
    descriptors: Sequence[wire.Descriptor]

    def pack(self) -> tuple[Tensor, ...]:
        """As tensors of the host."""
        head = packed(_HEAD.pack(self.way, *self.place) + bytes(self.on_gpu))
        return (head, wire.pack_all(self.descriptors)) if self.descriptors else (head,)

    @property
    def body_bytes(self) -> int:
        """Of the contents."""
        return self.descriptors[0].body_bytes if self.descriptors else 0

    def join(self, body: Tensor, host: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The message's tensors, in order. LinkError, DescriptorError: they are not those of the head."""
        count = sum(self.on_gpu)
        if count != len(self.descriptors) or len(self.on_gpu) - count != len(host):
            raise _native.LinkError("the head of a message does not fit its tensors")
        mine = iter(wire.view(self.descriptors, body) if self.descriptors else ())
        others = iter(host)
        return tuple(next(mine if on_gpu else others) for on_gpu in self.on_gpu)


def unpack(tensors: Sequence[Tensor]) -> tuple[Head, Sequence[Tensor]]:
    """The head of a message, and its tensors of the host. LinkError, DescriptorError: there is none."""
    data = tensors[0].numpy().tobytes()
    if len(data) < _HEAD.size or data[0] > max(Way) or any(flag > 1 for flag in data[_HEAD.size :]):
        raise _native.LinkError("a message has no head")
    way, *place = _HEAD.unpack_from(data)
    on_gpu = [bool(flag) for flag in data[_HEAD.size :]]
    descriptors = wire.unpack_all(tensors[1]) if any(on_gpu) and len(tensors) > 1 else ()
    return Head(Way(way), (place[0], place[1], place[2]), on_gpu, descriptors), tensors[
        2 if descriptors else 1 :
    ]
