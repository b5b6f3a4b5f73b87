"""End of a peer, time limits and refused messages, over links within one process."""

from __future__ import annotations

import os
import resource
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ds_ext.comm import _native
from ds_ext.comm.endpoints import Endpoints
from ds_ext.comm.native_transport import NativeTransport
from ds_ext.errors import PeerGone, TransportError, TransportTimeout
from tests.links import in_child
from tests.unit.comm import test_shm as shm
from tests.unit.comm import test_tcp as tcp


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[shm.Pair | tcp.Pair]:
    ranks = shm.Pair() if request.param == "shm" else tcp.Pair()
    yield ranks
    ranks.close()


def watch_of(process: int) -> int:
    try:
        return os.pidfd_open(process)
    except OSError as error:
        pytest.skip(f"pidfd_open needs Linux 5.3: {error.strerror}")


def star(process: int) -> list[NativeTransport]:
    """Return rank 0 with peers 1 and 2, all in this process. Rank 0 watches `process` as peer 1."""
    ports = [_native.Port() for _ in range(3)]
    pairs = [(0, 1), (1, 0), (0, 2), (2, 0)]
    incoming = {pair: _native.ShmIncoming(*pair, shm.JOB) for pair in pairs}
    ends = [Endpoints(), Endpoints(), Endpoints()]
    for (source, target), link in incoming.items():
        files = os.dup(link.fileno()), os.dup(ports[target].fileno())
        ends[source].outgoing[target] = _native.ShmOutgoing(*files, source, target, shm.JOB, 1 << 20)
        ends[target].incoming[source] = link
        ends[target].watches[source] = watch_of(process) if source == 1 else os.eventfd(0)
        link.connect(os.dup(ports[source].fileno()))
        ports[target].add(link)
    return [
        NativeTransport(ports[rank], ends[rank], dict.fromkeys(range(3), 4), "shm", rank, 3, 30.0)
        for rank in range(3)
    ]


def test_dead_peer_is_detected_among_messages_of_another() -> None:
    """The messages arrive faster than the interval after which a sleeping rank checks its peers."""
    process = subprocess.Popen(["sleep", "60"])
    zero, one, two = star(process.pid)
    over = threading.Event()

    def chatter() -> None:
        for item in range(1 << 16):
            if over.wait(0.004):
                return
            two.send([torch.tensor(item)], 0, item)

    talking = threading.Thread(target=chatter)
    talking.start()
    try:
        process.kill()
        process.wait()
        start = time.monotonic()
        with pytest.raises(PeerGone) as caught:
            zero.recv(1, 0).wait()
        assert time.monotonic() - start < 10
        error = caught.value
        assert (error.rank, error.peer, error.op, error.tag) == (0, 1, "recv from", 0)
    finally:
        over.set()
        talking.join()
        for transport in (zero, one, two):
            transport._state.reason = "the test is over"
            transport.close()


def test_closed_peer_does_not_end_a_wait_for_others() -> None:
    zero, one, two = star(os.getpid())
    one.close()
    tickets = [zero.recv(1, 0), zero.recv(2, 0)]
    later = threading.Timer(0.2, two.send, ([torch.tensor(7)], 0, 0))
    later.start()
    assert zero.wait_any(tickets) == 1 and tickets[1].wait()[0].item() == 7
    with pytest.raises(PeerGone) as caught:
        zero.wait_any(tickets[:1])
    assert caught.value.peer == 1
    later.join()
    two.close()
    zero.close()


def test_explicit_time_limit_is_not_a_failure(pair: shm.Pair | tcp.Pair) -> None:
    ticket = pair.right.recv(0, 4)
    for wait in (lambda: pair.right.wait_any([ticket], timeout_s=0.02), lambda: ticket.wait(timeout_s=0.0)):
        with pytest.raises(TransportTimeout) as caught:
            wait()
        assert (caught.value.rank, caught.value.peer, caught.value.tag) == (1, 0, 4)
    pair.right.send([torch.tensor(1)], 0, 4)
    assert pair.left.recv(1, 4).wait()[0].item() == 1  # no abort was sent to the peer
    pair.left.send([torch.tensor(2)], 1, 4)
    assert pair.right.wait_any([ticket]) == 0 and ticket.wait()[0].item() == 2


def test_unsupported_message_is_refused_and_not_counted(pair: shm.Pair | tcp.Pair) -> None:
    with pytest.raises(TransportError):
        pair.left.send([torch.zeros((1,) * 9)], 1, 3)
    with pytest.raises(_native.DescriptorError, match="got 65537"):
        pair.left._links.outgoing[1].send(3, [(8, (0,), 0)] * 65537)
    huge = [(8, (1 << 60,), 0)] * 4  # fp32: the sum of the sizes overflows 64 bits
    with pytest.raises(_native.DescriptorError, match=r"2\^62"):
        pair.left._links.outgoing[1].send(3, huge)
    pair.left.send([torch.tensor(5)], 1, 3)
    assert pair.right.recv(0, 3).wait()[0].item() == 5


def test_memory_runs_out_under_tcp() -> None:
    """The peer does not read, and there is no memory for data that the socket does not accept."""

    def send() -> str:
        body = torch.empty(1 << 30, dtype=torch.uint8)  # more than freed memory of this worker can hold
        peer, end = tcp.connected()
        rank = tcp.over(end, 0)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), -1))
        with pytest.raises(TransportError, match=r"tag 2 .* memory"):
            rank.send([body], 1, 2)
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
        peer.settimeout(10)
        while peer.recv(1 << 20):
            pass
        return "the connection has ended"

    assert in_child(send) == "the connection has ended"
