"""Message descriptor and layout of a message: round trips, and detection of damage."""

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
from tests.links import pack, unpack

DTYPES = [getattr(torch, name) for name, _ in _native.ELEMENT_TYPES]
SHAPES = st.lists(st.integers(0, 5), max_size=8).map(tuple)


def descriptor(**fields: object) -> _native.Descriptor:
    result = _native.Descriptor()
    values: dict[str, object] = {"dtype": 8, "shape": (2, 3), "nbytes": 24, "body_bytes": 64}
    for name, value in (values | fields).items():
        setattr(result, name, value)
    return result


@st.composite
def descriptors(draw: st.DrawFn) -> _native.Descriptor:
    dtype = draw(st.integers(0, len(DTYPES) - 1))
    shape = draw(SHAPES)
    nbytes = math.prod(shape) * _native.ELEMENT_TYPES[dtype][1]
    offset = draw(st.integers(0, 2**40)) * 64
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
def test_round_trip_of_all_fields(original: _native.Descriptor) -> None:
    result = unpack(pack(original))
    for name in [*FIELDS, "body_bytes"]:
        assert getattr(result, name) == getattr(original, name), name


@given(descriptors(), st.integers(0, 255), st.integers(1, 255))
def test_changed_byte_is_refused(original: _native.Descriptor, position: int, flip: int) -> None:
    data = bytearray(pack(original))
    data[position] ^= flip
    with pytest.raises(_native.DescriptorError):
        unpack(bytes(data))


@given(st.binary(min_size=256, max_size=256))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(_native.DescriptorError):
        unpack(data)


def resealed(data: bytes) -> bytes:
    return data[:252] + struct.pack("<I", crc32c(data[:252]))


@given(st.binary(min_size=252, max_size=252), st.integers(0, 251), st.integers(0, 252))
def test_bytes_with_a_valid_checksum_are_refused_or_consistent(noise: bytes, start: int, stop: int) -> None:
    valid = pack(descriptor())
    data = resealed(valid[:start] + noise[start : max(start, stop)] + valid[max(start, stop) :])
    try:
        result = unpack(data)
    except _native.DescriptorError:
        return
    assert result.nbytes == math.prod(result.shape) * _native.ELEMENT_TYPES[result.dtype][1]
    assert result.offset + result.nbytes <= result.body_bytes and result.index < result.count


def test_checksum_is_crc32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the published check value of the polynomial
    data = pack(descriptor())
    assert resealed(data) == data


@pytest.mark.parametrize(
    ("offset", "layout", "value", "found"),
    [
        (0, "<I", 0, "magic"),
        (4, "<H", 2, "version"),
        (6, "<H", 128, "version"),
        (8, "<H", 17, "17"),
        (10, "<H", 9, "9"),
        (12, "<I", 2**31, r"2\^31"),
        (16, "<I", 1, "index"),
        (20, "<I", 0, "index"),
        (20, "<I", 2**16 + 1, "65536"),
        (48, "<Q", 32, "64"),
        (48, "<Q", 2**64 - 64, "exceeds"),
        (56, "<Q", 25, "shape"),
        (64, "<Q", 23, "exceeds"),
        (64, "<Q", 2**63, r"2\^62"),
        (72, "<q", -2, "0 .*-2"),
        (72, "<q", 2**61, r"2\^62"),
        (88, "<q", 1, "2 .*1"),
        (200, "<B", 1, "reserved"),
    ],
)
def test_wrong_field_is_refused(offset: int, layout: str, value: int, found: str) -> None:
    data = bytearray(pack(descriptor()))
    struct.pack_into(layout, data, offset, value)
    with pytest.raises(_native.DescriptorError, match=found):
        unpack(resealed(bytes(data)))


def test_inconsistent_descriptor_is_refused() -> None:
    with pytest.raises(_native.DescriptorError):
        pack(descriptor(nbytes=20))
    with pytest.raises(_native.DescriptorError, match="got 9"):
        descriptor(shape=(1,) * 9)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return random bit patterns, including NaN; bools are 0 or 1."""
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
def test_message_round_trip(specs: list[tuple[tuple[int, ...], torch.dtype, bool]], padding: int) -> None:
    tensors = [random_bits(shape, dtype, seed) for seed, (shape, dtype, _) in enumerate(specs)]
    tensors = [
        t.transpose(0, -1) if flip and t.ndim > 1 else t
        for t, (_, _, flip) in zip(tensors, specs, strict=True)
    ]
    described = wire.describe(tensors, tag=7, seq=1, link_seq=2, acknowledged=3)
    frame = wire.blank_frame(wire.frame_bytes(described[0]) + padding)
    assert not wire.is_sealed(frame)
    wire.write(tensors, described, frame)
    assert wire.is_sealed(frame)
    received = wire.read(wire.read_seal(frame), frame)
    for sent, got in zip(tensors, received, strict=True):
        assert (got.shape, got.dtype, bits(got)) == (sent.shape, sent.dtype, bits(sent))
        assert got.is_contiguous() and got.data_ptr() % 16 == 0 and not got._is_view()


def test_tensors_of_a_message_have_separate_version_counters() -> None:
    tensors = [torch.ones(3), torch.ones(3)]
    described = wire.describe(tensors, tag=0, seq=0, link_seq=0, acknowledged=0)
    frame = wire.blank_frame(wire.frame_bytes(described[0]))
    wire.write(tensors, described, frame)
    first, second = wire.read(described[0], frame)
    second.requires_grad_()
    product = second.square().sum()
    first.add_(1)  # must not invalidate what autograd saved of `second`
    product.backward()
    assert second.grad is not None and second.grad.tolist() == [2.0] * 3 and first.tolist() == [2.0] * 3


def test_descriptors_of_two_messages_are_not_mixed() -> None:
    tensors = [torch.ones(3), torch.ones(3)]
    one = wire.describe(tensors, tag=1, seq=0, link_seq=0, acknowledged=0)
    two = wire.describe(tensors, tag=2, seq=0, link_seq=0, acknowledged=0)
    with pytest.raises(wire.DescriptorError, match="descriptor 1"):
        wire.view([one[0], two[1]], torch.empty(256, dtype=torch.uint8))
    with pytest.raises(wire.DescriptorError, match=r"128 bytes .* 64 bytes"):
        wire.view(one, torch.empty(64, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [], "no tensors"),
        (lambda: [torch.zeros((1,) * 9)], "got 9"),
        (lambda: [torch.zeros(3).to_sparse()], "to_dense"),
        (lambda: [torch.empty(2, dtype=torch.float8_e4m3fnuz)], "float8_e4m3fnuz"),
    ],
)
def test_unsupported_tensors_are_refused(make: Callable[[], list[Tensor]], message: str) -> None:
    with pytest.raises(TransportError, match=message):
        wire.describe(make(), tag=0, seq=0, link_seq=0, acknowledged=0)
