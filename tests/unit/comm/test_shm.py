"""Shm links within one process: damaged memory, and the lifetime of slots."""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref

import pytest
import torch
from torch import Tensor

from ds_ext.comm import _native
from ds_ext.comm.endpoints import Endpoints
from ds_ext.comm.native_transport import COPIED_BYTES, NativeTransport
from ds_ext.comm.transport import make_tag
from ds_ext.errors import ProtocolError, TransportError, TransportTimeout
from tests.links import both_send_first, held, in_child, pack, unpack

JOB = bytes(range(16))
WINDOW = 64 << 20
SUPERBLOCK_BYTES, RING, COUNTERS, SLOTS = 64, 8192, 4096, 2 << 20
LARGE = COPIED_BYTES // 4 + 1  # floats of the smallest message that is not copied out


class Pair:
    """Ranks 0 and 1 in this process, and the memory of the segment from rank 0 to rank 1."""

    def __init__(self, slots: int = 4, window: int = WINDOW, timeout_s: float = 30.0) -> None:
        ports = [_native.Port(), _native.Port()]
        ends = [_native.ShmIncoming(1 - rank, rank, JOB) for rank in (0, 1)]
        self.memory = mmap.mmap(ends[1].fileno(), SLOTS + (1 << 20))
        transports = []
        for rank, peer in ((0, 1), (1, 0)):
            files = os.dup(ends[peer].fileno()), os.dup(ports[peer].fileno())
            sender = _native.ShmOutgoing(*files, rank, peer, JOB, window)
            ports[rank].add(ends[rank])
            watches = {peer: os.eventfd(0)}
            links = Endpoints({peer: ends[rank]}, {peer: sender}, watches)
            transports.append(NativeTransport(ports[rank], links, {peer: slots}, "shm", rank, 2, timeout_s))
        for rank in (0, 1):
            ends[rank].connect(os.dup(ports[1 - rank].fileno()))
        for port in ports:
            port.close_fileno()
        self.left, self.right = transports
        self.port = ports[1]

    def close(self) -> None:
        self.left.close()
        self.right.close()


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_each_changed_byte_of_the_superblock_is_refused() -> None:
    link, port = _native.ShmIncoming(0, 1, JOB), _native.Port()

    def attach() -> _native.ShmOutgoing:
        return _native.ShmOutgoing(os.dup(link.fileno()), os.dup(port.fileno()), 0, 1, JOB, WINDOW)

    with mmap.mmap(link.fileno(), 4096) as memory:
        for position in range(SUPERBLOCK_BYTES):
            memory[position] ^= 0x40
            with pytest.raises(_native.LinkError):
                attach()
            memory[position] ^= 0x40
    attach()
    with pytest.raises(_native.LinkError):
        _native.ShmOutgoing(os.dup(link.fileno()), os.dup(port.fileno()), 0, 1, bytes(16), WINDOW)


def test_each_changed_byte_of_a_descriptor_is_refused(pair: Pair) -> None:
    first, second = torch.arange(6.0).reshape(2, 3), torch.tensor([True, False])
    pair.left.send([first, second], 1, 5)
    in_slot = SLOTS + 2 * 64  # after the contents of both tensors
    for place in (RING, in_slot):
        for position in range(place, place + _native.DESCRIPTOR_BYTES):
            pair.memory[position] ^= 0x01
            with pytest.raises(_native.DescriptorError):
                pair.port.take()
            pair.memory[position] ^= 0x01
    got = pair.right.recv(0, 5).wait()
    assert torch.equal(got[0], first) and torch.equal(got[1], second)
    pair.left.send([first], 1, 6)
    pair.memory[RING + 256 + 100] ^= 0x80
    ticket = pair.right.recv(0, 6)
    with pytest.raises(ProtocolError, match="checksum"):
        ticket.wait()
    with pytest.raises(TransportError):
        pair.right.ready()


def test_wrong_descriptor_with_a_valid_checksum_is_refused(pair: Pair) -> None:
    pair.left.send([torch.ones(4)], 1, 5)
    valid = bytes(pair.memory[RING : RING + 256])
    for field, value in [
        ("place", 1 << 40),
        ("place", 8),
        ("link_seq", 1),
        ("seq", 1),
        ("body_bytes", 1 << 50),
    ]:
        wrong = unpack(valid)
        setattr(wrong, field, value)
        pair.memory[RING : RING + 256] = pack(wrong)
        with pytest.raises(_native.DescriptorError):
            pair.port.take()


def test_wrong_counters_are_refused(pair: Pair) -> None:
    pair.left.send([torch.ones(4)], 1, 5)
    pair.right.recv(0, 5).wait()
    pair.memory[SLOTS - 8 : SLOTS] = bytes(8)
    returned = COUNTERS + 256
    pair.memory[returned : returned + 8] = (2).to_bytes(8, "little")
    with pytest.raises(ProtocolError, match="slot count"):
        pair.left.send([torch.ones(4)], 1, 6)
    other = Pair()
    other.memory[COUNTERS : COUNTERS + 8] = (1 << 40).to_bytes(8, "little")
    with pytest.raises(ProtocolError, match="message count"):
        other.right.ready()


def test_slot_is_released_with_the_last_alias(pair: Pair) -> None:
    for step in range(3):
        pair.left.send([torch.full((LARGE,), float(step)), torch.ones(2)], 1, step)
        received, other = pair.right.recv(0, step).wait()
        assert held(pair.right) == {0: 1}
        received.requires_grad_()
        part = (received * received)[1:3].sum()
        version = received._version
        received.data.add_(0)
        assert received._version == version and received.is_leaf
        row = received.detach()[3:4]
        del received, other
        assert held(pair.right) == {0: 1}
        part.backward()
        del part
        assert held(pair.right) == {0: 1} and row.item() == step
        del row
        assert held(pair.right) == {0: 0}
    pair.close()


def test_messages_beyond_max_held_are_copied_out() -> None:
    pair = Pair(slots=2)
    kept: list[Tensor] = []
    for step in range(40):
        pair.left.send([torch.full((LARGE,), float(step))], 1, step)
        kept += pair.right.recv(0, step).wait()
        assert held(pair.right)[0] == min(len(kept), 2)
    assert [tensor[-1].item() for tensor in kept] == list(range(40))
    kept[0] = kept[5]
    pair.left.send([torch.full((LARGE,), 40.0)], 1, 40)
    kept += pair.right.recv(0, 40).wait()
    assert held(pair.right)[0] == 2 and [t[0].item() for t in kept[1:]] == list(range(1, 41))


def test_tensors_outlive_the_transport(pair: Pair) -> None:
    pair.left.send([torch.arange(float(LARGE))], 1, 0)
    (received,) = pair.right.recv(0, 0).wait()
    pair.close()
    gone = weakref.ref(pair.right), weakref.ref(pair.left)
    pair.left = pair.right = None  # pyright: ignore[reportAttributeAccessIssue]
    assert [ref() for ref in gone] == [None, None]
    assert torch.equal(received, torch.arange(float(LARGE)))


def test_ready_and_wait_any(pair: Pair) -> None:
    first, second = make_tag(1, 0), make_tag(2, 0)
    pair.left.send([torch.tensor(1)], 1, first)
    assert pair.right.ready() == [(0, first)]
    assert pair.right.recv(0, first).wait()[0].item() == 1 and pair.right.ready() == []
    tickets = [pair.right.recv(0, tag) for tag in (first, second)]
    pair.left.send([torch.tensor(2)], 1, second)
    assert pair.right.wait_any(tickets) == 1
    assert tickets[1].wait()[0].item() == 2
    with pytest.raises(TransportTimeout) as caught:
        pair.right.wait_any(tickets[:1], timeout_s=0.05)
    assert (caught.value.tag, caught.value.seconds) == (first, 0.05)


@pytest.mark.parametrize("messages", [12, 2100])
def test_ranks_that_both_send_first_do_not_deadlock(messages: int) -> None:
    """Both send more bytes than the window."""
    pair = Pair(window=8 << 20 if messages < 100 else 8 << 10)
    sums = both_send_first(pair.left, pair.right, messages)
    assert sums == dict.fromkeys((0, 1), messages * (messages - 1) // 2)


def test_a_full_window_waits_for_the_receiver() -> None:
    pair = Pair(window=1 << 20, timeout_s=0.2)
    pair.left.send([torch.zeros(4 << 20, dtype=torch.uint8)], 1, 0)  # a single message may be larger
    with pytest.raises(TransportTimeout, match=r"1 messages .* 1 slots"):
        pair.left.send([torch.zeros(1)], 1, 1)


def test_forked_child_returns_no_slot_and_cannot_send(pair: Pair) -> None:
    pair.left.send([torch.arange(float(LARGE))], 1, 0)
    received = list(pair.right.recv(0, 0).wait())

    def worker() -> float:
        """Drop the inherited tensor and try to send, like a data loader's worker."""
        value = received.pop()[5].item()
        with pytest.raises(RuntimeError):
            pair.left.send([torch.ones(1)], 1, 1)
        return value

    assert in_child(worker) == 5.0
    assert held(pair.right) == {0: 1}
    pair.left.send([torch.full((LARGE,), -1.0)], 1, 1)
    assert pair.right.recv(0, 1).wait()[0][0].item() == -1 and received[0][5].item() == 5.0


def test_waiting_rank_is_idle() -> None:
    pair = Pair(timeout_s=1.0)
    threads = len(os.listdir("/proc/self/task"))
    start = time.process_time()
    with pytest.raises(TransportTimeout):
        pair.right.recv(0, 0).wait()
    assert time.process_time() - start < 0.1
    assert len(os.listdir("/proc/self/task")) == threads


@pytest.mark.parametrize("extra", [0, 1, 31, 127, 128, 4096 + 5])
def test_large_message_of_any_size_and_alignment(pair: Pair, extra: int) -> None:
    """Large messages bypass the caches."""
    source = torch.randint(256, ((5 << 20) + extra + 3,), dtype=torch.uint8)[3:]
    pair.left.send([source, source[:7]], 1, 0)
    large, small = pair.right.recv(0, 0).wait()
    assert torch.equal(large, source) and torch.equal(small, source[:7])


def test_close_waits_until_messages_are_taken(pair: Pair) -> None:
    pair.left.send([torch.ones(8 << 20, dtype=torch.uint8)], 1, make_tag(1, 0))
    ended = threading.Thread(target=pair.left.close)
    ended.start()
    (got,) = pair.right.recv(0, make_tag(1, 0)).wait()
    ended.join(60)
    assert not ended.is_alive() and int(got.sum(dtype=torch.int64)) == 8 << 20
