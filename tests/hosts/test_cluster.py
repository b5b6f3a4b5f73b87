"""The cluster of the tests is like one of machines: own names, processes and memory, ssh, cables that can be cut."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.cluster import Cluster, address
from tests.hosts.delay_line import Link
from tests.hosts.network import inside

Start = Callable[..., Cluster]


def echo_ms(hosts: Cluster) -> float:
    """Return the shortest of ten round trips of a byte from host 0 to host 1, in milliseconds."""
    with inside(hosts[1].network_file):
        server = socket.create_server((address(1), 0))
    with server, inside(hosts[0].network_file), socket.create_connection(server.getsockname(), 5) as ours:
        theirs, _ = server.accept()
        with theirs:
            times: list[float] = []
            for _ in range(10):
                started = time.monotonic()
                ours.send(b"x")
                theirs.send(theirs.recv(1))
                ours.recv(1)
                times.append(1000 * (time.monotonic() - started))
            return min(times)


def test_hosts_share_only_the_file_system(hosts: Start, tmp_path: Path) -> None:
    two = hosts(2, networks=2)
    (tmp_path / "shared").touch()
    (Path("/dev/shm") / tmp_path.name).touch()
    try:
        script = f"hostname; hostname -I; ls /dev/shm; ls {tmp_path}; echo $$ > /dev/shm/own; echo ~"
        done = two[0].run(["ssh", "node1", script])
    finally:
        (Path("/dev/shm") / tmp_path.name).unlink()
    assert done.stdout.split() == ["node1", address(1), address(1, 1), "shared", str(two[1].home)], done
    assert two[0].run(["ls", "/dev/shm"]).stdout == ""
    assert two[1].run(["ls", "/dev/shm"]).stdout == "own\n"
    names = two[1].run(["pdsh", "-R", "ssh", "-w", "node0,node1", "hostname"]).stdout.split("\n")
    assert sorted(names) == ["", "node0: node0", "node1: node1"]
    assert two[0].run(["ssh", "node1-net1", "hostname"]).stdout == "node1\n"


@pytest.mark.parametrize(("to", "of"), [(True, True), (True, False), (False, True)])
def test_cut_loses_packets_in_one_direction(hosts: Start, to: bool, of: bool) -> None:
    two = hosts(2)
    arrives: dict[tuple[int, int], bool] = {}
    sockets: list[socket.socket] = []
    for host in range(2):
        with inside(two[host].network_file):
            sockets.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            sockets[host].bind((address(host), 7000))
            sockets[host].settimeout(1)
    for source, target in ((0, 1), (1, 0)):
        sockets[source].sendto(b"before", (address(target), 7000))
        assert sockets[target].recv(10) == b"before"
    two.cut(1, to=to, of=of)
    for source, target in ((0, 1), (1, 0)):
        sockets[source].sendto(b"after", (address(target), 7000))
        try:
            arrives[source, target] = sockets[target].recv(10) == b"after"
        except TimeoutError:
            arrives[source, target] = False
    for each in sockets:
        each.close()
    assert arrives == {(0, 1): not to, (1, 0): not of}
    two.mend(1)
    assert two[0].run(["ssh", "node1", "hostname"]).stdout == "node1\n"


def test_powered_off_host_closes_no_connection(hosts: Start) -> None:
    two = hosts(2)
    listener = (
        "import socket; s = socket.create_server(('', 7000)); c, _ = s.accept(); c.send(b'x'); c.recv(1)"
    )
    process = two[1].start(["python3", "-c", listener])
    deadline = time.monotonic() + 20
    with inside(two[0].network_file):
        while True:
            try:
                ours = socket.create_connection((address(1), 7000), 5)
                break
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
    assert ours.recv(1) == b"x"
    assert len(two[1].processes()) == 1
    two.power_off(1)
    process.wait(5)
    assert two[1].processes() == {}
    ours.settimeout(1)
    with ours, pytest.raises(TimeoutError):
        ours.recv(1)


def test_delay_is_that_of_the_link(hosts: Start) -> None:
    two = hosts(2)
    two.slow(Link(delay_ms=20))
    slowed = echo_ms(two)
    assert 39.9 < slowed < 1000  # a busy machine is late


def test_command_that_does_not_end_is_killed(hosts: Start) -> None:
    one = hosts(1)
    with pytest.raises(subprocess.TimeoutExpired):
        one[0].run(["sleep", "100"], timeout_s=0.5)
    assert one[0].processes() == {}
