"""A message as bytes: the tensors' contents, aligned, and a 256-byte descriptor for each (kernels/README.md).

    | tensor 0 | pad | tensor 1 | ... | descriptor 1 | ... | descriptor n-1 |  unused  | descriptor 0 |
    |<------------ body_bytes ------->|                                                |<-- seal ---->|

Descriptor 0 ends every frame and is called its seal: bytes arrive in order, so a valid seal proves that all
is there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_ext.errors import TransportError

try:
    from ds_ext.comm import _native
except ImportError as error:
    raise TransportError(
        f"the compiled part of ds_ext is missing or does not load ({error}). "
        "Build it with `pip install -e .` in the checkout (this needs g++ and the headers of Python)."
    ) from error

SEAL_BYTES = _native.DESCRIPTOR_BYTES
Descriptor = _native.Descriptor
DescriptorError = _native.DescriptorError

_DTYPES = tuple(getattr(torch, name, None) for name, _ in _native.ELEMENT_TYPES)
CODES = {dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None}


def dtype_of(code: int) -> torch.dtype:
    """Return the dtype of a code that the native code has checked.

    Raises:
        DescriptorError: this torch does not have it.
    """
    dtype = _DTYPES[code]
    if dtype is None:
        name = _native.ELEMENT_TYPES[code][0]
        raise DescriptorError(f"the peer sends {name}, which torch {torch.__version__} does not have")
    return dtype


def check_sendable(tensor: Tensor) -> None:
    """Raise TransportError for a dtype or a layout that cannot be sent."""
    if tensor.dtype not in CODES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in CODES)
        raise TransportError(f"tensors of {tensor.dtype} cannot be sent; known: {names}")
    if tensor.layout is not torch.strided:
        raise TransportError(f"a {tensor.layout} tensor cannot be sent: make it dense with to_dense()")


def describe(
    tensors: Sequence[Tensor], *, tag: int, seq: int, link_seq: int, acknowledged: int
) -> list[Descriptor]:
    """Return one descriptor per tensor, with its place in the message's body.

    Raises:
        TransportError: the tensors cannot be sent as one message.
    """
    descriptors: list[Descriptor] = []
    end = 0
    for index, tensor in enumerate(tensors):
        check_sendable(tensor)
        descriptor = Descriptor()
        descriptor.dtype = CODES[tensor.dtype]
        try:
            descriptor.shape = tuple(tensor.shape)
        except DescriptorError as error:
            raise TransportError(f"a tensor of shape {tuple(tensor.shape)} cannot be sent: {error}") from None
        descriptor.tag, descriptor.index, descriptor.count = tag, index, len(tensors)
        descriptor.seq, descriptor.link_seq, descriptor.acknowledged = seq, link_seq, acknowledged
        descriptor.offset, descriptor.nbytes = end, tensor.nbytes
        end = _aligned(end + tensor.nbytes)
        descriptors.append(descriptor)
    if not descriptors:
        raise TransportError("a message needs at least one tensor; send an empty one as a mere signal")
    for descriptor in descriptors:
        descriptor.body_bytes = end
    return descriptors


def frame_bytes(first: Descriptor) -> int:
    """The size of the smallest frame that holds the message which `first` describes."""
    return first.body_bytes + first.count * SEAL_BYTES


def write(tensors: Sequence[Tensor], descriptors: Sequence[Descriptor], frame: Tensor) -> None:
    """Put a whole message into `frame`: uint8 [at least frame_bytes] on the CPU."""
    fill(tensors, descriptors, frame)
    table = frame.data_ptr() + descriptors[0].body_bytes
    for descriptor in descriptors[1:]:
        _native.pack_at(descriptor, table + (descriptor.index - 1) * SEAL_BYTES)
    seal(descriptors[0], frame)


def fill(tensors: Sequence[Tensor], descriptors: Sequence[Descriptor], body: Tensor) -> None:
    """Copy the tensors' contents to their places in `body`: uint8 [at least body_bytes], on any device."""
    for tensor, descriptor in zip(tensors, descriptors, strict=True):
        _alias(body, descriptor).copy_(tensor.detach())


def seal(first: Descriptor, frame: Tensor) -> None:
    """Put the first descriptor at the end of `frame`."""
    _native.pack_at(first, frame.data_ptr() + len(frame) - SEAL_BYTES)


def blank_frame(num_bytes: int) -> Tensor:
    """A frame to receive into, uint8 [num_bytes], that is not sealed whatever its memory held before."""
    frame = torch.empty(num_bytes, dtype=torch.uint8)
    frame[-SEAL_BYTES:].zero_()
    return frame


def is_sealed(frame: Tensor) -> bool:
    """True once all of the frame has arrived."""
    return _native.sealed_at(frame.data_ptr() + len(frame) - SEAL_BYTES)


def read_seal(frame: Tensor) -> Descriptor:
    """The first descriptor of the message in `frame`; DescriptorError if it is damaged."""
    return _native.unpack_at(frame.data_ptr() + len(frame) - SEAL_BYTES)


def read(first: Descriptor, frame: Tensor) -> tuple[Tensor, ...]:
    """The tensors of the message in `frame`, in its memory; DescriptorError if a descriptor is damaged."""
    table = frame.data_ptr() + first.body_bytes
    rest = [_native.unpack_at(table + position * SEAL_BYTES) for position in range(first.count - 1)]
    return view((first, *rest), frame)


def pack_all(descriptors: Sequence[Descriptor]) -> Tensor:
    """The descriptors alone, for a transport that sends the contents another way; uint8 [count * 256]."""
    packed = torch.empty(len(descriptors) * SEAL_BYTES, dtype=torch.uint8)
    for position, descriptor in enumerate(descriptors):
        _native.pack_at(descriptor, packed.data_ptr() + position * SEAL_BYTES)
    return packed


def unpack_all(packed: Tensor) -> tuple[Descriptor, ...]:
    """Return the descriptors that pack_all() has packed."""
    return tuple(
        _native.unpack_at(packed.data_ptr() + offset) for offset in range(0, len(packed), SEAL_BYTES)
    )


def view(descriptors: Sequence[Descriptor], body: Tensor) -> tuple[Tensor, ...]:
    """The described tensors in the memory of `body`: uint8 [at least body_bytes], on any device.

    Raises:
        DescriptorError: the descriptors are not those of one message, or `body` is too short.
    """
    first = descriptors[0]
    for index, descriptor in enumerate(descriptors):
        same = (descriptor.tag, descriptor.seq, descriptor.count, descriptor.body_bytes)
        if descriptor.index != index or same != (first.tag, first.seq, first.count, first.body_bytes):
            raise DescriptorError(f"descriptor {index} is not of the same message as the first")
    if first.count != len(descriptors) or first.body_bytes > len(body):
        raise DescriptorError(
            f"{first.count} tensors of {first.body_bytes} bytes announced, {len(body)} came"
        )
    return tuple(_alias(body, descriptor) for descriptor in descriptors)


def _alias(body: Tensor, descriptor: Descriptor) -> Tensor:
    """Return a tensor over `body`'s memory that is no view to autograd: it has a separate version counter."""
    dtype = dtype_of(descriptor.dtype)
    start = (body.storage_offset() + descriptor.offset) // dtype.itemsize
    shape = descriptor.shape
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return torch.empty(0, dtype=dtype, device=body.device).set_(body.untyped_storage(), start, shape, strides)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _native.ALIGNMENT) * _native.ALIGNMENT
