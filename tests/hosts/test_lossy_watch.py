"""The heartbeat between hosts tolerates a link that loses many packets."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable

from ds_ext.comm.host_watch import BEAT_S, Host, HostWatch
from tests.hosts.cluster import Cluster, address
from tests.hosts.delay_line import Link
from tests.hosts.network import inside

CONNECTIONS = 16


def test_host_behind_a_lossy_link_answers(hosts: Callable[..., Cluster]) -> None:
    two = hosts(2)
    with contextlib.ExitStack() as stack:
        with inside(two[1].network_file):
            server = stack.enter_context(socket.create_server((address(1), 0)))
        for _ in range(CONNECTIONS):
            with inside(two[0].network_file):
                stack.enter_context(socket.create_connection(server.getsockname(), 5))
            stack.enter_context(server.accept()[0])
        here, there = Host("node0", frozenset({address(0)})), Host("node1", frozenset({address(1)}), (1,))
        watch = HostWatch(here, [there], None)
        watch.look()
        two.slow(Link(loss=0.3))
        lossy_since = time.monotonic()
        while time.monotonic() - lossy_since < 10:
            time.sleep(BEAT_S)
            watch.look()
            assert not watch.silent, f"after {time.monotonic() - lossy_since:.1f} s"
        two.cut(1)
        deadline = time.monotonic() + 60
        while not watch.silent:
            assert time.monotonic() < deadline
            time.sleep(BEAT_S)
            watch.look()
        assert list(watch.silent) == [address(1)]
