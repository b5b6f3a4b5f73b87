"""Heartbeat between hosts, on connections between network namespaces."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator

import pytest

from ds_ext.comm import host_watch
from ds_ext.comm.host_watch import BEAT_S, Host, HostWatch
from ds_ext.errors import PeerGone, TransportError
from tests.hosts.network import Network, NoHosts, inside, switched_hosts
from tests.selection import EVERYTHING

HERE = Host("a", frozenset({Network.address(0)}), (0, 1))
THERE = Host("b", frozenset({Network.address(1)}), (2, 3))


@pytest.fixture
def network() -> Iterator[Network]:
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(switched_hosts(2))
        except NoHosts as error:
            pytest.skip(f"no network namespaces: {error}")


@contextlib.contextmanager
def connection(network: Network) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Open a tcp connection between hosts 0 and 1, and return both sockets."""
    with inside(network.file(1)), socket.create_server((Network.address(1), 0)) as server:
        with inside(network.file(0)):
            ours = socket.create_connection(server.getsockname(), 5)
        theirs, _ = server.accept()
    with ours, theirs:
        ours.setblocking(True)
        yield ours, theirs


def look_for(watch: HostWatch, seconds: float) -> float:
    """Look like the thread until a host is silent, and return the time it took in seconds."""
    started = time.monotonic()
    while not watch.silent and time.monotonic() - started < seconds:
        time.sleep(BEAT_S)
        watch.look()
    return time.monotonic() - started


def fill(ours: socket.socket) -> None:
    """Send until the peer's receive window and the send buffer are full."""
    full_since = time.monotonic()
    while time.monotonic() - full_since < 0.5:
        with contextlib.suppress(BlockingIOError):
            ours.send(bytes(1 << 20), socket.MSG_DONTWAIT)
            full_since = time.monotonic()


def test_silent_kernel_is_detected(network: Network) -> None:
    watch = HostWatch(HERE, [THERE], None)
    with connection(network) as (ours, theirs), connection(network) as (busy, _):
        fill(busy)
        look_for(watch, 3 * BEAT_S)
        assert watch.addresses() == {Network.address(1)}
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert theirs.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
        network.drop(1)
        assert 1.5 < look_for(watch, 8) < 6
        assert watch.silent == {Network.address(1): THERE}
        ours.settimeout(1)
        assert ours.recv(1) == b""
        with pytest.raises(BrokenPipeError):
            busy.send(b"x")


def test_data_that_never_arrives_is_silence(network: Network) -> None:
    """Packets of the peer look like answers: its kernel retransmits for as long as this one does."""
    watch = HostWatch(HERE, [THERE], None)
    with connection(network) as (ours, theirs):
        look_for(watch, 3 * BEAT_S)
        network.drop_to(1)
        ours.send(b"x")
        theirs.send(b"x")
        ours.settimeout(1)
        assert ours.recv(1) == b"x"
        assert 4 < look_for(watch, 15) < 10
        assert watch.silent == {Network.address(1): THERE}
        assert ours.recv(1) == b""


def test_unread_data_is_not_silence(network: Network) -> None:
    watch = HostWatch(HERE, [THERE], None)
    with connection(network) as (ours, theirs):
        fill(ours)
        look_for(watch, 8 if EVERYTHING else 5)
        assert watch.silent == {}
        theirs.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                theirs.recv(1 << 20)
        time.sleep(0.5)
        assert ours.send(b"x", socket.MSG_DONTWAIT) == 1


def test_only_connections_of_the_job_are_watched(network: Network) -> None:
    elsewhere = Host("b", frozenset({"10.77.0.9"}), (2, 3))
    with connection(network) as (ours, _):
        for watch in (HostWatch(HERE, [elsewhere], None), HostWatch(HERE, [THERE], None)):
            if watch._hosts.get(Network.address(1)):
                watch.leave_out(ours)
            watch.look()
            assert watch.addresses() == set()
        store = HostWatch(HERE, [elsewhere], ours.getpeername()[1])
        store.look()
        assert store.addresses() == {Network.address(1)}
        network.drop(1)
        look_for(store, 8)
        assert store.store_is_silent
        assert [host.ranks for host in store.silent.values()] == [()]


def test_other_socket_options_are_unchanged(network: Network) -> None:
    watch = HostWatch(HERE, [THERE], None)
    socket.setdefaulttimeout(5)
    try:
        with connection(network) as (ours, _):
            watch.look()
            assert os.get_blocking(ours.fileno())
            assert watch.addresses() == {Network.address(1)}
        watch.look()
        assert watch.addresses() == set()
    finally:
        socket.setdefaulttimeout(None)


@pytest.mark.parametrize(
    ("host", "kind", "peer"), [(THERE, PeerGone, 2), (Host("c", frozenset()), TransportError, None)]
)
def test_silent_host_is_an_error(
    monkeypatch: pytest.MonkeyPatch, host: Host, kind: type[TransportError], peer: int | None
) -> None:
    host_watch.require_hosts()
    watch = HostWatch(HERE, [THERE], None)
    watch.silent["10.77.0.2"] = host
    monkeypatch.setattr(host_watch, "running", lambda: watch)
    with pytest.raises(TransportError) as raised:
        host_watch.require_hosts()
    assert (type(raised.value), raised.value.peer) == (kind, peer)


def test_addresses() -> None:
    assert host_watch.plain_address("::ffff:10.0.0.1") == "10.0.0.1"
    assert host_watch.plain_address("fe80::1%eth0") == "fe80::1"
    assert "127.0.0.1" not in host_watch.own_addresses()


def test_system_without_the_socket_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "TCP_KEEPIDLE")
    assert not host_watch.can_watch()
    host_watch.start(0, [HERE, THERE], None)
    assert host_watch.running() is None
