"""Tensors as the native code sends them, and the frames of the transport "torch" between CPUs.

Links do not use these frames. Transports between GPUs use only their descriptors and bodies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import TransportError
from . import _native

SEAL_BYTES = _native.DESCRIPTOR_BYTES
Descriptor = _native.Descriptor
DescriptorError = _native.DescriptorError
Pieces = list[tuple[int, Sequence[int], int]]  # tensors to send: (dtype code, shape, address)

_DTYPES = tuple(getattr(torch, name, None) for name, _ in _native.ELEMENT_TYPES)
CODES = {dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None}


def dtype_of(code: int) -> torch.dtype:
    """Return the dtype of a code that the native code has checked."""
    dtype = _DTYPES[code]
    if dtype is None:
        name = _native.ELEMENT_TYPES[code][0]
        raise DescriptorError(f"dtype: torch {torch.__version__} does not have it (got {name} from the peer)")
    return dtype


def check_sendable(tensor: Tensor) -> None:
    if tensor.dtype not in CODES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in CODES)
        raise TransportError(f"tensor: this dtype cannot be sent (got {tensor.dtype}). Use one of {names}.")
    if tensor.layout is not torch.strided:
        raise TransportError(
            f"tensor: only dense tensors can be sent (got {tensor.layout}). Call to_dense() first."
        )


# --- tensors and the native code ---


def pieces_of(tensors: Sequence[Tensor]) -> tuple[Pieces, list[Tensor]]:
    """Return CPU tensors in the form that the native code takes, and the tensors whose memory it reads.

    The latter are copies if a tensor is strided, conjugated or negated.
    """
    pieces: Pieces = []
    sources: list[Tensor] = []
    for tensor in tensors:
        code = CODES.get(tensor.dtype)
        if code is None or not tensor.is_cpu or tensor.layout is not torch.strided:
            check_sendable(tensor)
            raise TransportError(
                f"tensor: this transport sends CPU tensors (got a tensor on {tensor.device}). "
                'Use "transport": "torch".'
            )
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        pieces.append((code, tensor.shape, tensor.data_ptr()))
        sources.append(tensor)
    return pieces, sources


def views(message: _native.Message) -> tuple[Tensor, ...]:
    """Return the tensors of a message in its memory, which they keep alive.

    They are not views to autograd: each has a separate storage and version counter.
    """
    return tuple(
        torch.frombuffer(message, dtype=dtype_of(code), count=count, offset=offset).resize_(shape)
        if count
        else torch.empty(shape, dtype=dtype_of(code))
        for code, shape, count, offset in message.layout
    )


def copies(message: _native.Message) -> tuple[Tensor, ...]:
    """Return copies of the tensors of a message, and release its memory."""
    tensors = tuple(torch.empty(shape, dtype=dtype_of(code)) for code, shape, _, _ in message.layout)
    message.copy_out([tensor.data_ptr() for tensor in tensors])
    return tensors


# --- frames ---
#
# A frame has the tensors' contents, aligned, and a 256-byte descriptor for each (kernels/README.md):
#
#     | tensor 0 | pad | tensor 1 | ... | descriptor 1 | ... | descriptor n-1 |  unused  | descriptor 0 |
#     |<------------ body_bytes ------->|                                                |<-- seal ---->|
#
# Descriptor 0 ends every frame and is its seal. Bytes arrive in order, so a valid seal proves that the whole frame has
# arrived.


def describe(
    tensors: Sequence[Tensor], *, tag: int, seq: int, link_seq: int, acknowledged: int
) -> list[Descriptor]:
    """Return one descriptor per tensor, with its offset in the body of the message."""
    for tensor in tensors:
        check_sendable(tensor)
    try:
        descriptors = _native.describe(tag, [(CODES[tensor.dtype], tensor.shape, 0) for tensor in tensors])
    except DescriptorError as error:
        raise TransportError(f"{error}.") from None
    for descriptor in descriptors:
        descriptor.seq, descriptor.link_seq, descriptor.acknowledged = seq, link_seq, acknowledged
    return descriptors


def frame_bytes(first: Descriptor) -> int:
    """Return the size of the smallest frame for a message, from its first descriptor."""
    return first.body_bytes + first.count * SEAL_BYTES


def write(tensors: Sequence[Tensor], descriptors: Sequence[Descriptor], frame: Tensor) -> None:
    """Write a message into ``frame``: uint8 [at least frame_bytes] on the CPU."""
    fill(tensors, descriptors, frame)
    table = frame.data_ptr() + descriptors[0].body_bytes
    for descriptor in descriptors[1:]:
        _native.pack_at(descriptor, table + (descriptor.index - 1) * SEAL_BYTES)
    seal(descriptors[0], frame)


def fill(tensors: Sequence[Tensor], descriptors: Sequence[Descriptor], body: Tensor) -> None:
    """Copy the contents of the tensors to ``body``: uint8 [at least body_bytes], on any device."""
    for tensor, descriptor in zip(tensors, descriptors, strict=True):
        _alias(body, descriptor).copy_(tensor.detach())


def seal(first: Descriptor, frame: Tensor) -> None:
    _native.pack_at(first, _seal_address(frame))


def blank_frame(num_bytes: int) -> Tensor:
    """Return an unsealed frame to receive into: uint8 [num_bytes]."""
    frame = torch.empty(num_bytes, dtype=torch.uint8)
    frame[-SEAL_BYTES:].zero_()
    return frame


def is_sealed(frame: Tensor) -> bool:
    return _native.sealed_at(_seal_address(frame))


def read_seal(frame: Tensor) -> Descriptor:
    """Return the first descriptor of the message in ``frame``; DescriptorError if it is damaged."""
    return _native.unpack_at(_seal_address(frame))


def read(first: Descriptor, frame: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors of the message in ``frame``, in its memory; DescriptorError if a descriptor is damaged."""
    table = frame.data_ptr() + first.body_bytes
    rest = [_native.unpack_at(table + position * SEAL_BYTES) for position in range(first.count - 1)]
    return view((first, *rest), frame)


def pack_all(descriptors: Sequence[Descriptor]) -> Tensor:
    """Return the descriptors as bytes, for a transport that sends the contents separately; uint8 [count * 256]."""
    packed = torch.empty(len(descriptors) * SEAL_BYTES, dtype=torch.uint8)
    for position, descriptor in enumerate(descriptors):
        _native.pack_at(descriptor, packed.data_ptr() + position * SEAL_BYTES)
    return packed


def unpack_all(packed: Tensor) -> tuple[Descriptor, ...]:
    return tuple(
        _native.unpack_at(packed.data_ptr() + offset) for offset in range(0, len(packed), SEAL_BYTES)
    )


def view(descriptors: Sequence[Descriptor], body: Tensor) -> tuple[Tensor, ...]:
    """Return the described tensors in the memory of ``body``: uint8 [at least body_bytes], on any device."""
    first = descriptors[0]
    for index, descriptor in enumerate(descriptors):
        same = (descriptor.tag, descriptor.seq, descriptor.count, descriptor.body_bytes)
        if descriptor.index != index or same != (first.tag, first.seq, first.count, first.body_bytes):
            raise DescriptorError(f"descriptor {index} belongs to another message")
    if first.count != len(descriptors) or first.body_bytes > len(body):
        raise DescriptorError(
            f"message: {first.count} tensors in {first.body_bytes} bytes were announced (got {len(descriptors)} "
            f"tensors in {len(body)} bytes)"
        )
    return tuple(_alias(body, descriptor) for descriptor in descriptors)


def _seal_address(frame: Tensor) -> int:
    return frame.data_ptr() + len(frame) - SEAL_BYTES


def _alias(body: Tensor, descriptor: Descriptor) -> Tensor:
    """Return a tensor in the memory of ``body`` that is not a view to autograd: it has a separate version counter."""
    dtype = dtype_of(descriptor.dtype)
    start = (body.storage_offset() + descriptor.offset) // dtype.itemsize
    shape = descriptor.shape
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return torch.empty(0, dtype=dtype, device=body.device).set_(body.untyped_storage(), start, shape, strides)
