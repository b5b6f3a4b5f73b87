"""The 256-byte descriptor and the layout of a message: round trips, and no damage that goes unseen."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ds_ext.comm import _native, wire
from ds_ext.errors import TransportError
from tests.crc32c import crc32c

DTYPES = [getattr(torch, name) for name, _ in _native.ELEMENT_TYPES]
SHAPES = st.lists(st.integers(0, 5), max_size=8).map(tuple)


def descriptor(**fields: object) -> _native.Descriptor:
    made = _native.Descriptor()
    values: dict[str, object] = {"dtype": 8, "shape": (2, 3), "nbytes": 24, "body_bytes": 64}
    for name, value in (values | fields).items():
        setattr(made, name, value)
    return made


@st.composite
def descriptors(draw: st.DrawFn) -> _native.Descriptor:
    dtype = draw(st.integers(0, len(DTYPES) - 1))
    shape = draw(SHAPES)
    nbytes = math.prod(shape) * _native.ELEMENT_TYPES[dtype][1]
    offset = draw(st.integers(0, 2**40)) * _native.ALIGNMENT
    count = draw(st.integers(1, 2**16))
    return descriptor(
        dtype=dtype,
        shape=shape,
        nbytes=nbytes,
        offset=offset,
        body_bytes=offset + nbytes + draw(st.integers(0, 2**40)),
        count=count,
        index=draw(st.integers(0, count - 1)),
        tag=draw(st.integers(0, 2**31 - 1)),
        seq=draw(st.integers(0, 2**64 - 1)),
        link_seq=draw(st.integers(0, 2**64 - 1)),
        acknowledged=draw(st.integers(0, 2**64 - 1)),
    )


FIELDS = ["dtype", "shape", "tag", "index", "count", "seq", "link_seq", "acknowledged", "offset", "nbytes"]


@given(descriptors())
def test_every_field_survives(made: _native.Descriptor) -> None:
    back = _native.unpack(_native.pack(made))
    for name in [*FIELDS, "body_bytes"]:
        assert getattr(back, name) == getattr(made, name), name


@given(descriptors(), st.integers(0, 255), st.integers(1, 255))
def test_one_changed_byte_is_refused(made: _native.Descriptor, position: int, flip: int) -> None:
    data = bytearray(_native.pack(made))
    data[position] ^= flip
    with pytest.raises(_native.DescriptorError):
        _native.unpack(bytes(data))


@given(st.binary(min_size=256, max_size=256))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(_native.DescriptorError):
        _native.unpack(data)


def resealed(data: bytes) -> bytes:
    return data[:252] + struct.pack("<I", crc32c(data[:252]))


@given(st.binary(min_size=252, max_size=252), st.integers(0, 251), st.integers(0, 252))
def test_bytes_with_a_right_checksum_are_refused_or_consistent(noise: bytes, start: int, stop: int) -> None:
    valid = _native.pack(descriptor())
    data = resealed(valid[:start] + noise[start : max(start, stop)] + valid[max(start, stop) :])
    try:
        back = _native.unpack(data)
    except _native.DescriptorError:
        return
    assert back.nbytes == math.prod(back.shape) * _native.ELEMENT_TYPES[back.dtype][1]
    assert back.offset + back.nbytes <= back.body_bytes and back.index < back.count


def test_checksum_is_crc32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value published with the polynomial
    data = _native.pack(descriptor())
    assert resealed(data) == data


@pytest.mark.parametrize(
    ("offset", "layout", "value", "message"),
    [
        (0, "<I", 0, "magic number"),
        (4, "<H", 2, "another version"),
        (6, "<H", 128, "another version"),
        (8, "<H", 17, "unknown dtype code 17"),
        (10, "<H", 9, "9 dimensions"),
        (12, "<I", 2**31, "not below 2\\^31"),
        (16, "<I", 1, "index"),
        (20, "<I", 0, "index"),
        (20, "<I", 2**16 + 1, "more than 65536"),
        (48, "<Q", 32, "not aligned"),
        (48, "<Q", 2**64 - 64, "ends behind"),
        (56, "<Q", 25, "do not give the number of bytes"),
        (64, "<Q", 23, "ends behind"),
        (64, "<Q", 2**63, "more than 2\\^62"),
        (72, "<q", -2, "dimension 0 is -2"),
        (72, "<q", 2**61, "more than 2\\^62"),
        (88, "<q", 1, "dimension 2 is 1"),
        (200, "<B", 1, "reserved"),
    ],
)
def test_a_wrong_field_is_named(offset: int, layout: str, value: int, message: str) -> None:
    data = bytearray(_native.pack(descriptor()))
    struct.pack_into(layout, data, offset, value)
    with pytest.raises(_native.DescriptorError, match=message):
        _native.unpack(resealed(bytes(data)))


def test_wrong_length_and_inconsistent_descriptor_are_refused() -> None:
    with pytest.raises(_native.DescriptorError, match="256 bytes"):
        _native.unpack(b"x" * 255)
    with pytest.raises(_native.DescriptorError, match="number of bytes"):
        _native.pack(descriptor(nbytes=20))
    with pytest.raises(_native.DescriptorError, match="9 dimensions"):
        descriptor(shape=(1,) * 9)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bit pattern, NaNs included, except that a bool is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)


def bits(tensor: Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


@given(
    st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=5),
    st.integers(0, 99),
)
def test_message_round_trip(specs: list[tuple[tuple[int, ...], torch.dtype, bool]], spare_cells: int) -> None:
    tensors = [random_bits(shape, dtype, seed) for seed, (shape, dtype, _) in enumerate(specs)]
    tensors = [
        t.transpose(0, -1) if flip and t.ndim > 1 else t
        for t, (_, _, flip) in zip(tensors, specs, strict=True)
    ]
    made = wire.describe(tensors, tag=7, seq=1, link_seq=2, acknowledged=3)
    frame = wire.blank_frame(wire.frame_bytes(made[0]) + spare_cells)
    assert not wire.is_sealed(frame)
    wire.write(tensors, made, frame)
    assert wire.is_sealed(frame)
    received = wire.read(wire.read_seal(frame), frame)
    for sent, got in zip(tensors, received, strict=True):
        assert (got.shape, got.dtype, bits(got)) == (sent.shape, sent.dtype, bits(sent))
        assert got.is_contiguous() and got.data_ptr() % 16 == 0 and not got._is_view()


def test_tensors_of_a_message_do_not_share_a_version_counter() -> None:
    tensors = [torch.ones(3), torch.ones(3)]
    made = wire.describe(tensors, tag=0, seq=0, link_seq=0, acknowledged=0)
    frame = wire.blank_frame(wire.frame_bytes(made[0]))
    wire.write(tensors, made, frame)
    first, second = wire.read(made[0], frame)
    second.requires_grad_()
    product = second.square().sum()
    first.add_(1)  # as autograd sees it, this must not touch what it saved of `second`
    product.backward()
    assert second.grad is not None and second.grad.tolist() == [2.0] * 3 and first.tolist() == [2.0] * 3


def test_descriptors_of_two_messages_are_not_mixed() -> None:
    tensors = [torch.ones(3), torch.ones(3)]
    one = wire.describe(tensors, tag=1, seq=0, link_seq=0, acknowledged=0)
    two = wire.describe(tensors, tag=2, seq=0, link_seq=0, acknowledged=0)
    with pytest.raises(wire.DescriptorError, match="not of the same message"):
        wire.view([one[0], two[1]], torch.empty(256, dtype=torch.uint8))
    with pytest.raises(wire.DescriptorError, match="128 bytes announced, 64 came"):
        wire.view(one, torch.empty(64, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [], "at least one tensor"),
        (lambda: [torch.zeros((1,) * 9)], "9 dimensions"),
        (lambda: [torch.zeros(3).to_sparse()], "to_dense"),
        (lambda: [torch.empty(2, dtype=torch.float8_e4m3fnuz)], "float8_e4m3fnuz cannot be sent"),
    ],
)
def test_what_cannot_be_sent_is_refused(make: Callable[[], list[Tensor]], message: str) -> None:
    with pytest.raises(TransportError, match=message):
        wire.describe(make(), tag=0, seq=0, link_seq=0, acknowledged=0)
