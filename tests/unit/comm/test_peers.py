"""What a rank may believe of its peers, and what it may ask them, over the links that one process makes with itself."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ds_ext.comm import _native
from ds_ext.comm.endpoints import Endpoints
from ds_ext.comm.links import Links
from ds_ext.comm.native_transport import NativeTransport
from ds_ext.errors import PeerGone, TransportError, TransportTimeout
from tests.unit.comm import test_shm as shm
from tests.unit.comm import test_tcp as tcp

RETURNED, RETURNS = shm.COUNTERS + 256, shm.RING + 4096 * 256
ROOT = Path(__file__).parents[3]


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[shm.Pair | tcp.Pair]:
    made = shm.Pair() if request.param == "shm" else tcp.Pair()
    yield made
    made.close()


def watch_of(process: int) -> int:
    try:
        return os.pidfd_open(process)
    except OSError as error:
        pytest.skip(f"pidfd_open needs Linux 5.3: {error.strerror}")


def star(process: int) -> list[NativeTransport]:
    """Rank 0 with the peers 1 and 2, all in this process; but rank 0 takes `process` for peer 1."""
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
        NativeTransport(Links(ports[rank], ends[rank], {peer: 4 for peer in range(3)}), "shm", rank, 3, 30.0)
        for rank in range(3)
    ]


def test_a_dead_peer_is_noticed_among_the_messages_of_another() -> None:
    """They come faster than the rank would ever sleep long enough to ask."""
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
        with pytest.raises(PeerGone, match=r"rank 0: recv from rank 1 of tag 0 .* rank 1 has ended"):
            zero.recv(1, 0).wait()
        assert time.monotonic() - start < 10
    finally:
        over.set()
        talking.join()
        for transport in (zero, one, two):
            transport._state.reason = "the test is over"
            transport.close()


def test_a_peer_that_has_closed_in_order_does_not_end_a_wait_for_others() -> None:
    zero, one, two = star(os.getpid())
    one.close()
    tickets = [zero.recv(1, 0), zero.recv(2, 0)]
    later = threading.Timer(0.2, two.send, ([torch.tensor(7)], 0, 0))
    later.start()
    assert zero.wait_any(tickets) == 1 and tickets[1].wait()[0].item() == 7
    with pytest.raises(PeerGone, match="rank 1 has closed its transport"):
        zero.wait_any(tickets[:1])
    later.join()
    two.close()
    zero.close()


def test_a_look_of_limited_length_is_no_failure(pair: shm.Pair | tcp.Pair) -> None:
    """Only the transport's own limit is: an answer that comes later is received."""
    ticket = pair.right.recv(0, 4)
    for look in (lambda: pair.right.wait_any([ticket], timeout_s=0.02), lambda: ticket.wait(timeout_s=0.0)):
        with pytest.raises(TransportTimeout, match=r"recv from rank 0 of tag 4 .* nothing moved") as caught:
            look()
        assert (caught.value.rank, caught.value.peer, caught.value.tag) == (1, 0, 4)
    pair.right.send([torch.tensor(1)], 0, 4)
    assert pair.left.recv(1, 4).wait()[0].item() == 1  # the peer was told nothing
    pair.left.send([torch.tensor(2)], 1, 4)
    assert pair.right.wait_any([ticket]) == 0 and ticket.wait()[0].item() == 2


def test_a_message_that_cannot_be_described_is_refused_and_counts_for_nothing(
    pair: shm.Pair | tcp.Pair,
) -> None:
    many = [torch.zeros(0)] * 65537
    with pytest.raises(TransportError, match="more than 65536 tensors in one message"):
        pair.left.send(many, 1, 3)
    huge = [(8, (1 << 60,), 0)] * 4  # fp32, whose sizes add up to nothing in 64 bits
    with pytest.raises(_native.DescriptorError, match=r"2\^62 bytes"):
        pair.left._links.outgoing[1].send(3, huge)
    pair.left.send([torch.tensor(5)], 1, 3)
    assert pair.right.recv(0, 3).wait()[0].item() == 5


LIMITED = """
import resource, torch
from pathlib import Path
from ds_ext.errors import TransportError
from tests.unit.comm import test_tcp as tcp
body = torch.ones(96 << 20, dtype=torch.uint8)
peer, end = tcp.connected()
rank = tcp.over(end, 0)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), -1))
try:
    rank.send([body], 1, 2)
except TransportError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))  # the link's thread may have had the rest
peer.settimeout(10)
while peer.recv(1 << 20):
    pass
print("the connection has ended")
"""


def test_memory_that_runs_out_under_tcp_is_an_error_at_both_ends() -> None:
    """The peer reads nothing, and there is no memory to keep what the socket does not take."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "rank 0: send to rank 1 of tag 2 (channel 0, item 2): there is no memory for it. Give the host or the "
        'container more memory, or use "transport": "torch"',
        "the connection has ended",
    ]
