"""Tcp links within one process: invalid data of a peer, and the end of a peer."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from ds_ext.comm import _native
from ds_ext.comm.endpoints import Endpoints
from ds_ext.comm.native_transport import COPIED_BYTES, NativeTransport
from ds_ext.errors import PeerGone, ProtocolError, TransportError, TransportTimeout
from tests.crc32c import crc32c
from tests.links import both_send_first, held, in_child, pack, unpack
from tests.selection import EVERYTHING

WINDOW = 64 << 20
LARGE = COPIED_BYTES // 4 + 1  # floats of the smallest message that is not copied out
CONTROL = struct.Struct("<4sHHIIQII")  # magic, version, kind, bytes, 0, taken, checksum of the text, checksum


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        return left, server.accept()[0]


def over(end: socket.socket, rank: int, window: int = WINDOW, timeout_s: float = 30.0) -> NativeTransport:
    """Return the transport of a rank over one side of a connection."""
    port, peer = _native.Port(), 1 - rank
    connection = _native.TcpConnection(end.detach(), port, window, True)
    links = Endpoints({peer: _native.TcpIncoming(connection, peer)}, {peer: _native.TcpOutgoing(connection)})
    port.add(links.incoming[peer])
    return NativeTransport(port, links, {peer: 4}, "tcp", rank, 2, timeout_s)


class Pair:
    """Ranks 0 and 1 in this process."""

    def __init__(self, window: int = WINDOW, timeout_s: float = 30.0) -> None:
        left, right = connected()
        self.left, self.right = over(left, 0, window, timeout_s), over(right, 1, window, timeout_s)

    def close(self) -> None:
        self.left.close()
        self.right.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    ranks = Pair()
    yield ranks
    ranks.close()


class Raw:
    """Rank 1, and a plain socket in place of rank 0."""

    def __init__(self) -> None:
        self.socket, other = connected()
        self.rank = over(other, 1)

    def send(self, data: bytes | bytearray) -> None:
        self.socket.sendall(data)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def frame(*tensors: torch.Tensor, tag: int = 5, **fields: int) -> bytes:
    """Return the bytes of a message, after setting fields of its first descriptor."""
    left, right = connected()
    with right:
        sender = over(left, 0)
        sender.send(tensors, 1, tag)
        size = sum(256 + -(-tensor.nbytes // 64) * 64 for tensor in tensors)
        data = bytearray()
        while len(data) < size:
            data += right.recv(size - len(data))
        del sender
    if fields:
        first = unpack(bytes(data[:256]))
        for name, value in fields.items():
            setattr(first, name, value)
        data[:256] = pack(first)
    return bytes(data)


# --- messages ---


def test_received_tensors_own_their_memory(pair: Pair) -> None:
    kept: list[torch.Tensor] = []
    for step in range(6):
        for source, target, peer in ((pair.left, pair.right, 1), (pair.right, pair.left, 0)):
            sent = [torch.full((LARGE + step,), float(step)), torch.tensor(True), torch.empty(0, 3)]
            source.send(sent, peer, step)
            sent[0].zero_()
            got = target.recv(1 - peer, step).wait()
            assert [tensor.shape for tensor in got] == [(LARGE + step,), (), (0, 3)]
            assert got[0].min() == got[0].max() == step and got[1].item()
            assert got[0].data_ptr() % 64 == 0 and not got[0]._is_view()
            if target is pair.right and step == 0:
                kept.append(got[0])
                assert held(pair.right) == {0: 1}
    assert kept[0].sum() == 0 and kept[0].numel() == LARGE
    many = [torch.tensor(number) for number in range(700)]
    pair.left.send(many, 1, 9)
    assert [int(tensor) for tensor in pair.right.recv(0, 9).wait()] == list(range(700))


@pytest.mark.parametrize("messages", [10, 2100])
def test_ranks_that_both_send_first_do_not_deadlock(messages: int) -> None:
    """Both send more bytes than fit into the window and the sockets."""
    pair = Pair(window=8 << 20 if messages < 100 else 8 << 10)
    sums = both_send_first(pair.left, pair.right, messages)
    assert sums == dict.fromkeys((0, 1), messages * (messages - 1) // 2)
    pair.close()


def test_a_full_window_waits_for_the_receiver() -> None:
    pair = Pair(window=1 << 20, timeout_s=0.3)
    pair.left.send([torch.zeros(4 << 20, dtype=torch.uint8)], 1, 0)  # a single message may be larger
    with pytest.raises(TransportTimeout) as caught:
        pair.left.send([torch.zeros(1)], 1, 1)
    error = caught.value
    found = (error.rank, error.peer, error.op, error.tag, error.seconds, error.credits)
    assert found == (0, 1, "send to", 1, 0.3, 1)


# --- invalid data ---


def test_changed_byte_of_a_descriptor_is_refused() -> None:
    valid = frame(torch.arange(6.0), torch.tensor([True, False]))
    for position in range(0, 512, 1 if EVERYTHING else 5):
        wrong = bytearray(valid)
        wrong[position] ^= 1 << position % 8
        with Raw() as raw:
            raw.send(wrong)
            with pytest.raises(ProtocolError):
                raw.rank.recv(0, 5).wait()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"link_seq": 1}, "missing"),
        ({"seq": 1}, "missing"),
        ({"place": 64}, "place"),
        ({"index": 1}, "order"),
        ({"count": 3}, "frame"),
        ({"body_bytes": 1 << 60}, "memory"),
    ],
)
def test_wrong_descriptor_with_a_valid_checksum_is_refused(fields: dict[str, int], problem: str) -> None:
    with Raw() as raw:
        tensors = [torch.ones(4)] if "body_bytes" in fields else [torch.ones(4), torch.zeros(3)]
        raw.send(frame(*tensors, **fields))
        with pytest.raises(ProtocolError, match=rf"{problem}.*\. .*\.$"):
            raw.rank.recv(0, 5).wait()


def test_errors_of_links_that_send() -> None:
    for error, kind in [
        (_native.LinkError("wrong slot count"), ProtocolError),
        (_native.DescriptorError("too many dimensions"), TransportError),
        (MemoryError(), TransportError),
    ]:
        with Raw() as raw:
            refusal = raw.rank._send_error(0, 5, error)
            assert type(refusal) is kind and str(refusal).endswith(".")
            assert (raw.rank._state.reason is None) == isinstance(error, _native.DescriptorError)


def control(kind: int, text: bytes = b"") -> bytes:
    """Return a control frame."""
    body = [b"DSXC", 1, kind, len(text), 0, 0, crc32c(text)]
    packed = CONTROL.pack(*body, 0)[:-4]
    return packed + struct.pack("<I", crc32c(packed)) + text


def test_control_frames() -> None:
    with Raw() as raw:  # in single bytes
        for byte in control(1) + frame(torch.arange(3.0)) + control(2, b"out of\nmemory"):
            raw.send(bytes([byte]))
        assert raw.rank.recv(0, 5).wait()[0].tolist() == [0, 1, 2]
        with pytest.raises(PeerGone) as caught:
            raw.rank.recv(0, 6).wait()
        assert caught.value.cause == "out of memory"
    good = control(2, b"text")
    for position in range(len(good)):
        wrong = bytearray(good)
        wrong[position] ^= 0x10
        with Raw() as raw:
            raw.send(wrong + bytes(600))
            with pytest.raises(ProtocolError):
                raw.rank.recv(0, 5).wait()
    with Raw() as raw:
        raw.send(control(9))
        with pytest.raises(ProtocolError):
            raw.rank.recv(0, 5).wait()


# --- the end of a peer ---


def test_messages_before_the_end_of_a_peer_are_received() -> None:
    with Raw() as raw:
        raw.send(frame(torch.ones(2)) + frame(torch.ones(2))[:100])
        time.sleep(0.05)
        ticket = raw.rank.recv(0, 5)
        raw.socket.close()
        assert ticket.wait()[0].tolist() == [1, 1]
        start = time.monotonic()
        with pytest.raises(PeerGone) as caught:
            raw.rank.recv(0, 6).wait()
        assert time.monotonic() - start < 10
        assert (caught.value.rank, caught.value.peer, caught.value.tag) == (1, 0, 6)
    pair = Pair()
    pair.left.send([torch.ones(LARGE)], 1, 0)
    waiting = threading.Thread(target=pair.left.close)
    waiting.start()
    assert pair.right.recv(0, 0).wait()[0].sum() == LARGE
    waiting.join(60)
    with pytest.raises(PeerGone):
        pair.right.recv(0, 1).wait()


def test_the_end_of_a_closed_stream_is_announced() -> None:
    """Also while the I/O thread is awake because of other connections: without it, a peer's messages seem lost."""
    port, (busy, flood) = _native.Port(), connected()
    _busy = _native.TcpConnection(busy.detach(), port, WINDOW, True)
    if (child := os.fork()) == 0:
        with contextlib.suppress(OSError):
            while True:
                flood.send(control(1))
        os._exit(0)
    flood.close()
    for _ in range(20000 if EVERYTHING else 1000):
        ours, theirs = connected()
        _native.TcpOutgoing(_native.TcpConnection(ours.detach(), port, WINDOW, True)).close()
        with theirs, theirs.makefile("rb") as stream:
            assert stream.read()[-CONTROL.size :] == control(3)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_the_first_cause_reaches_the_peer(pair: Pair) -> None:
    pair.left.abort("ValueError: the loss is not a number")
    with pytest.raises(PeerGone) as caught:
        pair.right.recv(0, 0).wait()
    assert caught.value.cause == "rank 0: ValueError: the loss is not a number"
    with pytest.raises(TransportError):
        pair.left.send([torch.ones(1)], 1, 0)


def open_sockets() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


def test_forked_child_keeps_no_connection_open(pair: Pair) -> None:
    pair.left.send([torch.arange(float(LARGE))], 1, 0)
    received = list(pair.right.recv(0, 0).wait())
    before = open_sockets()

    def worker() -> tuple[bool, float]:
        closed = open_sockets() <= before - 2
        value = received.pop()[5].item()
        with pytest.raises(RuntimeError):
            pair.left.send([torch.ones(1)], 1, 1)
        return closed, value

    assert in_child(worker) == (True, 5.0)
    pair.left.send([torch.full((LARGE,), -1.0)], 1, 1)
    assert pair.right.recv(0, 1).wait()[0][0].item() == -1 and received[0][5].item() == 5.0
