"""Header of a message between GPUs.

    | header | descriptors of the GPU tensors | staged contents | CPU tensors ... |

The header has the route of the contents, and which tensors of the message are on the GPU. A message without GPU tensors
has no descriptors. CPU tensors are sent unchanged.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from .. import _native, wire

_HEADER = struct.Struct("<Bq")


class Route(IntEnum):
    NONE = 0  # no contents
    DIRECT = 1  # in a slot of the receiver's slab
    STAGED = 2  # in the message


@dataclass(frozen=True)
class Header:
    """Header of one message. ``slot`` is 0 except on the direct route; ``descriptors`` are those of the GPU tensors."""

    route: Route
    slot: int
    on_gpu: Sequence[bool]
    descriptors: Sequence[wire.Descriptor]

    def pack(self) -> tuple[Tensor, ...]:
        header = packed(_HEADER.pack(self.route, self.slot) + bytes(self.on_gpu))
        return (header, wire.pack_all(self.descriptors)) if self.descriptors else (header,)

    @property
    def body_bytes(self) -> int:
        return self.descriptors[0].body_bytes if self.descriptors else 0

    def join(self, body: Tensor, host: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors of the message in order; LinkError or DescriptorError if they do not match the header."""
        count = sum(self.on_gpu)
        if count != len(self.descriptors) or len(self.on_gpu) - count != len(host):
            raise _native.LinkError("the header does not match the tensors of its message")
        gpu_tensors = iter(wire.view(self.descriptors, body) if self.descriptors else ())
        host_tensors = iter(host)
        return tuple(next(gpu_tensors if on_gpu else host_tensors) for on_gpu in self.on_gpu)


def packed(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpack(tensors: Sequence[Tensor]) -> tuple[Header, Sequence[Tensor]]:
    """Return the header of a message and its other tensors; LinkError or DescriptorError if it is invalid."""
    data = tensors[0].numpy().tobytes()
    if len(data) < _HEADER.size or data[0] > max(Route) or any(flag > 1 for flag in data[_HEADER.size :]):
        raise _native.LinkError("message without a valid header")
    route, slot = _HEADER.unpack_from(data)
    on_gpu = [bool(flag) for flag in data[_HEADER.size :]]
    descriptors = wire.unpack_all(tensors[1]) if any(on_gpu) and len(tensors) > 1 else ()
    return Header(Route(route), slot, on_gpu, descriptors), tensors[2 if descriptors else 1 :]
