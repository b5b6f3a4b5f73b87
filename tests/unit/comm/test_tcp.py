"""tcp links within one process: every byte that a peer could send wrong, and what the I/O thread takes and leaves."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from ds_ext.comm import _native
from ds_ext.comm.endpoints import Endpoints
from ds_ext.comm.links import Links
from ds_ext.comm.native_transport import COPIED_BYTES, NativeTransport
from ds_ext.errors import PeerGone, ProtocolError, TransportError, TransportTimeout
from tests.crc32c import crc32c
from tests.links import both_send_first, held

WINDOW = 64 << 20
LARGE = COPIED_BYTES // 4 + 1  # floats that are used where they arrive
CONTROL = struct.Struct("<4sHHIIQII")  # magic, version, kind, bytes, 0, taken, the text's checksum, checksum


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        return left, server.accept()[0]


def over(end: socket.socket, rank: int, window: int = WINDOW, timeout_s: float = 30.0) -> NativeTransport:
    """The transport of a rank whose only peer is at the other end of the connection."""
    port, peer = _native.Port(), 1 - rank
    connection = _native.TcpConnection(end.detach(), port, window, True)
    ends = Endpoints({peer: _native.TcpIncoming(connection, peer)}, {peer: _native.TcpOutgoing(connection)})
    port.add(ends.incoming[peer])
    return NativeTransport(Links(port, ends, {peer: 4}), "tcp", rank, 2, timeout_s)


class Pair:
    """Two endpoints in this process."""

    def __init__(self, window: int = WINDOW, timeout_s: float = 30.0) -> None:
        left, right = connected()
        self.left, self.right = over(left, 0, window, timeout_s), over(right, 1, window, timeout_s)

    def close(self) -> None:
        self.left.close()
        self.right.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


class Raw:
    """A rank, and a peer that is a plain socket: it sends whatever a test likes."""

    def __init__(self) -> None:
        self.socket, other = connected()
        self.rank = over(other, 1)

    def says(self, data: bytes | bytearray) -> None:
        self.socket.sendall(data)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def frame(*tensors: torch.Tensor, tag: int = 5, **fields: int) -> bytes:
    """A message as it travels, with other values in the fields of its first descriptor."""
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
        first = _native.unpack(bytes(data[:256]))
        for name, value in fields.items():
            setattr(first, name, value)
        data[:256] = _native.pack(first)
    return bytes(data)


# --- messages ---


def test_tensors_lie_in_memory_of_their_own(pair: Pair) -> None:
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


@pytest.mark.parametrize("messages", [20, 2000])
def test_two_ranks_that_both_send_first_do_not_block_each_other(messages: int) -> None:
    """More bytes than the window and than the sockets hold."""
    pair = Pair(window=8 << 20 if messages < 100 else 8 << 10)
    sums = both_send_first(pair.left, pair.right, messages)
    assert sums == dict.fromkeys((0, 1), messages * (messages - 1) // 2)
    pair.close()


def test_a_full_window_waits_for_the_receiver() -> None:
    pair = Pair(window=1 << 20, timeout_s=0.3)
    pair.left.send([torch.zeros(4 << 20, dtype=torch.uint8)], 1, 0)  # a single one may be larger
    with pytest.raises(TransportTimeout, match=r"send to rank 1 of tag 1 .* 0.3 s \(1 messages") as caught:
        pair.left.send([torch.zeros(1)], 1, 1)
    error = caught.value
    found = (error.rank, error.peer, error.op, error.tag, error.seconds, error.credits)
    assert found == (0, 1, "send to", 1, 0.3, 1)


# --- what a peer may say ---


def test_each_changed_byte_of_a_descriptor_is_refused() -> None:
    """Of the first and of the last; bytes of the body are the kernel's to check."""
    right = frame(torch.arange(6.0), torch.tensor([True, False]))
    for position in range(512):
        wrong = bytearray(right)
        wrong[position] ^= 1 << position % 8
        with Raw() as raw:
            raw.says(wrong)
            with pytest.raises(ProtocolError, match="rank 1: a message is damaged: "):
                raw.rank.recv(0, 5).wait()


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"link_seq": 1}, "missing or comes twice"),
        ({"seq": 1}, "missing or comes twice"),
        ({"place": 64}, "a place in a segment"),
        ({"index": 1}, "out of order"),
        ({"count": 3}, "these bytes are no frame"),
        ({"body_bytes": 1 << 60}, "no memory"),
    ],
)
def test_a_descriptor_with_a_right_checksum_must_still_fit(fields: dict[str, int], what: str) -> None:
    with Raw() as raw:
        tensors = [torch.ones(4)] if "body_bytes" in fields else [torch.ones(4), torch.zeros(3)]
        raw.says(frame(*tensors, **fields))
        with pytest.raises(ProtocolError, match=what):
            raw.rank.recv(0, 5).wait()


def control(kind: int, text: bytes = b"") -> bytes:
    """A control frame: the rank's own, with another kind and text."""
    body = [b"DSXC", 1, kind, len(text), 0, 0, crc32c(text)]
    packed = CONTROL.pack(*body, 0)[:-4]
    return packed + struct.pack("<I", crc32c(packed)) + text


def test_control_frames() -> None:
    with Raw() as raw:  # in single bytes
        for byte in control(1) + frame(torch.arange(3.0)) + control(2, b"out of\nmemory"):
            raw.says(bytes([byte]))
        assert raw.rank.recv(0, 5).wait()[0].tolist() == [0, 1, 2]
        with pytest.raises(PeerGone, match=r"because it failed\. What failed first: out of memory") as caught:
            raw.rank.recv(0, 6).wait()
        assert caught.value.cause == "out of memory"
    good = control(2, b"text")
    for position in range(len(good)):
        wrong = bytearray(good)
        wrong[position] ^= 0x10
        with Raw() as raw:
            raw.says(wrong + bytes(600))
            with pytest.raises(ProtocolError):
                raw.rank.recv(0, 5).wait()
    with Raw() as raw:
        raw.says(control(9))
        with pytest.raises(ProtocolError, match="unknown control frame"):
            raw.rank.recv(0, 5).wait()


# --- the end of a peer ---


def test_a_closed_connection_is_noticed_at_once_and_what_was_sent_counts() -> None:
    with Raw() as raw:
        raw.says(frame(torch.ones(2)) + frame(torch.ones(2))[:100])
        time.sleep(0.05)
        ticket = raw.rank.recv(0, 5)
        raw.socket.close()
        assert ticket.wait()[0].tolist() == [1, 1]
        start = time.monotonic()
        with pytest.raises(
            PeerGone, match=r"rank 1: recv from rank 0 of tag 6 .* rank 0 has ended"
        ) as caught:
            raw.rank.recv(0, 6).wait()
        assert time.monotonic() - start < 10 and caught.value.peer == 0
    pair = Pair()
    pair.left.send([torch.ones(LARGE)], 1, 0)
    waiting = threading.Thread(target=pair.left.close)
    waiting.start()
    assert pair.right.recv(0, 0).wait()[0].sum() == LARGE
    waiting.join(60)
    with pytest.raises(PeerGone, match="rank 0 has closed its transport"):
        pair.right.recv(0, 1).wait()


def test_the_first_cause_reaches_the_peer(pair: Pair) -> None:
    pair.left.abort("ValueError: the loss is not a number")
    with pytest.raises(PeerGone, match="What failed first: rank 0: ValueError: the loss is not") as caught:
        pair.right.recv(0, 0).wait()
    assert caught.value.cause == "rank 0: ValueError: the loss is not a number"
    with pytest.raises(TransportError, match="it was given up"):
        pair.left.send([torch.ones(1)], 1, 0)


def open_sockets() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


def test_a_forked_child_keeps_no_connection_open(pair: Pair) -> None:
    pair.left.send([torch.arange(float(LARGE))], 1, 0)
    (received,) = pair.right.recv(0, 0).wait()
    before = open_sockets()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            closed = open_sockets() <= before - 2
            right = received[5].item() == 5.0
            del received
            gc.collect()
            try:
                pair.left.send([torch.ones(1)], 1, 1)
            except RuntimeError as error:
                code = 0 if right and closed and "forked" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pair.left.send([torch.full((LARGE,), -1.0)], 1, 1)
    assert pair.right.recv(0, 1).wait()[0][0].item() == -1 and received[5].item() == 5.0
