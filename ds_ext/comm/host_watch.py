"""Heartbeat between hosts for the connections of torch.distributed: gloo's, and those of the rendezvous store.

gloo and the store wait in silence for a host that is down or behind a cut cable, until their time limits. So a thread
of each rank watches the kernel's acknowledgements. It finds this process' TCP connections to other hosts of the job,
whoever made them and whenever. TCP keepalive makes the kernel probe an idle connection every second; the peer's kernel
answers, also for a process that is stopped. After 2 s without an answer the thread shuts the connections to that
address down, and the blocked or next operation on them raises in its own thread.

TCP_USER_TIMEOUT would break connections without a thread, but also those to a process that is stopped, or merely busy,
while its receive window is full (tcp(7)). The links of the transport "tcp" do the same check themselves
(kernels/transport/tcp_connection.hpp).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import stat
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_ext.errors import PeerGone, TransportError

BEAT_S, SILENCE_S = 0.5, 2.0
# The kernel's own limit for an idle connection, should the thread be held up: 1 + 4 seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4}
_PROBES_AT = 3  # of struct tcp_info (linux/tcp.h), as the offsets in the next line
_UNACKED_AT, _LAST_DATA_SENT_AT, _LAST_ACK_RECV_AT, _TCP_INFO_BYTES = 24, 44, 56, 104
_SAME_MS = 50.0  # two readings of one moment differ by the kernel's clock ticks
_LOCAL_ADDRESS = re.compile(r"\|-- (\S+)\s+/32 host LOCAL")


@dataclass(frozen=True)
class Host:
    """One host of the job.

    Args:
        name: as the host calls itself.
        addresses: of its network interfaces, without loopback.
        ranks: of the processes on it.
    """

    name: str
    addresses: frozenset[str]
    ranks: tuple[int, ...] = ()

    def silence(self) -> str:
        """Return the report of a host that does not answer."""
        many = len(self.ranks) > 1
        ranks = f"rank{'s' * many} {', '.join(map(str, self.ranks))} on " if self.ranks else ""
        return f"{ranks}host {self.name} {'have' if many else 'has'} not answered for {SILENCE_S:g} s"


@dataclass
class _Connection:
    """One file descriptor that is a socket; ``address`` is None unless the watch is responsible for it."""

    inode: int
    address: str | None = None
    to_store: bool = False
    sent_at_ms: float = 0.0
    answered_at_ms: float = 0.0
    questions: int = 0  # seen without an answer
    late_looks: int = 0


class HostWatch(threading.Thread):
    """Thread that shuts down the connections to hosts that do not answer.

    Args:
        here: this host.
        others: the other hosts of the job.
        store_port: of the rendezvous store, which may be on a host without ranks.
    """

    def __init__(self, here: Host, others: Sequence[Host], store_port: int | None) -> None:
        super().__init__(name="ds_ext-hosts", daemon=True)
        self._here, self._store_port = here, store_port
        # An address that several hosts have (of a container bridge) leads to none of the others.
        uses = Counter(address for host in (here, *others) for address in host.addresses)
        self._hosts = {a: host for host in others for a in host.addresses if uses[a] == 1}
        self._connections: dict[int, _Connection] = {}
        self._left_out: set[int] = set()
        self.silent: dict[str, Host] = {}  # by address
        self.store_is_silent = False

    def run(self) -> None:
        """Look every half second, for the life of the process."""
        pause = threading.Event()
        while not pause.wait(BEAT_S):
            with contextlib.suppress(OSError):  # too many open files, for the moment
                self.look()

    def leave_out(self, connection: socket.socket) -> None:
        """Leave out a connection that already has a heartbeat."""
        self._left_out.add(os.fstat(connection.fileno()).st_ino)

    def addresses(self) -> set[str]:
        """Peers' addresses of the watched connections, as of the last look."""
        return {found.address for found in self._connections.values() if found.address is not None}

    def look(self) -> None:
        """Find new connections and shut down those to addresses that have not answered for 2 s."""
        self._connections = dict(self._find())
        for number, connection in self._connections.items():
            if connection.address is None or connection.address in self.silent:
                continue
            with contextlib.suppress(OSError), _borrowed(number) as borrowed:
                info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                if _unanswered(connection, info, 1000 * time.monotonic()):
                    address = connection.address
                    self.silent[address] = self._hosts.get(address, Host(address, frozenset({address})))
        for number, connection in self._connections.items():
            if connection.address in self.silent:
                with contextlib.suppress(OSError), _borrowed(number) as borrowed:
                    self.store_is_silent |= connection.to_store
                    if os.fstat(number).st_ino == connection.inode:
                        borrowed.shutdown(socket.SHUT_RDWR)

    def _find(self) -> Iterator[tuple[int, _Connection]]:
        for name in os.listdir("/proc/self/fd"):
            number = int(name)
            with contextlib.suppress(OSError):  # closed since it was listed, or not connected yet
                status = os.fstat(number)
                if not stat.S_ISSOCK(status.st_mode):
                    continue
                known = self._connections.get(number)
                if known is None or known.inode != status.st_ino:
                    known = self._examine(number, status.st_ino)
                if known.inode in self._left_out:
                    known.address = None
                yield number, known

    def _examine(self, number: int, inode: int) -> _Connection:
        """A socket that is new, with keepalive switched on if it is to be watched.

        Raises OSError for one that is not connected.
        """
        with _borrowed(number) as borrowed:
            domain = borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN)
            protocol = borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL)
            if domain not in (socket.AF_INET, socket.AF_INET6) or protocol != socket.IPPROTO_TCP:
                return _Connection(inode)
            peer, port = borrowed.getpeername()[:2]
            address = plain_address(peer)
            foreign = address not in self._here.addresses and not ipaddress.ip_address(address).is_loopback
            to_store = port == self._store_port
            if not foreign or not (address in self._hosts or to_store):
                return _Connection(inode)
            borrowed.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                borrowed.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            return _Connection(inode, address, to_store)


def running() -> HostWatch | None:
    """The watch of this process."""
    return next((thread for thread in threading.enumerate() if isinstance(thread, HostWatch)), None)


def silent_hosts() -> list[Host]:
    """Return the hosts that stopped answering; empty without a watch."""
    watch = running()
    return list(dict.fromkeys(list(watch.silent.values()))) if watch is not None else []


def store_is_silent() -> bool:
    """Return whether the host of the rendezvous store stopped answering; False without a watch."""
    watch = running()
    return watch is not None and watch.store_is_silent


def require_hosts() -> None:
    """Raise PeerGone if a host does not answer; TransportError if it has no ranks but the rendezvous store."""
    for host in silent_hosts():
        if host.ranks:
            raise PeerGone(host.silence(), host.ranks[0])
        raise TransportError(f"rendezvous store: {host.silence()}")


def leave_out(connection: socket.socket) -> None:
    """Call :meth:`HostWatch.leave_out`, if there is a watch."""
    watch = running()
    if watch is not None:
        watch.leave_out(connection)


def end_connections(store_port: int) -> None:
    """Shut down this process' TCP connections, but those of the rendezvous store, so that peers notice at once."""
    if not can_watch():
        return
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError), _borrowed(int(name)) as borrowed:
            if borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL) == socket.IPPROTO_TCP:
                ports = borrowed.getpeername()[1], borrowed.getsockname()[1]
                if store_port not in ports:
                    borrowed.shutdown(socket.SHUT_RDWR)


def start(rank: int, hosts: Sequence[Host], store_port: int | None) -> None:
    """Start the watch of this process, if connections to other hosts can exist and be watched."""
    here = next(host for host in hosts if rank in host.ranks)
    if not can_watch() or running() is not None:
        return
    others = [host for host in hosts if host is not here]
    watch = HostWatch(here, others, store_port)
    watch.look()
    if others or watch.addresses():
        watch.start()


def can_watch() -> bool:
    """Return whether the system has what the watch needs: Linux with /proc."""
    options = ("TCP_INFO", "SO_DOMAIN", "SO_PROTOCOL", *_KEEPALIVE)
    return (
        sys.platform == "linux"
        and os.path.isdir("/proc/self/fd")
        and all(hasattr(socket, o) for o in options)
    )


def own_addresses() -> list[str]:
    """Addresses of this host's network interfaces, without loopback; empty when not known."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        found += _LOCAL_ADDRESS.findall(Path("/proc/thread-self/net/fib_trie").read_text())
    with contextlib.suppress(OSError):
        lines = Path("/proc/thread-self/net/if_inet6").read_text().splitlines()
        found += [str(ipaddress.IPv6Address(int(line.split()[0], 16))) for line in lines]
    return sorted({address for address in found if not ipaddress.ip_address(address).is_loopback})


def plain_address(address: str) -> str:
    """The address as in :func:`own_addresses`: without scope, IPv4 not mapped into IPv6."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


@contextlib.contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """The socket of a file descriptor that others own.

    The family is that with the longest addresses. The flag keeps Python from applying ``socket.setdefaulttimeout``.
    """
    borrowed = socket.socket(socket.AF_INET6, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, 0, fileno=number)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _unanswered(connection: _Connection, info: bytes, now_ms: float) -> bool:
    """Return whether the peer's kernel is silent: two questions, 2 s and two looks without an answer.

    A question is data or a probe. The kernel repeats both ever more rarely if a peer answers without progress, so one
    that is lost, or a long time since the last answer, proves nothing by itself.
    """
    unacked, sent_ms, answered_ms = (
        struct.unpack_from("=I", info, at)[0] for at in (_UNACKED_AT, _LAST_DATA_SENT_AT, _LAST_ACK_RECV_AT)
    )
    sent_at, answered_at = now_ms - sent_ms, now_ms - answered_ms
    if abs(answered_at - connection.answered_at_ms) > _SAME_MS:
        connection.questions, connection.answered_at_ms = 0, answered_at
    if unacked > 0 and sent_ms < answered_ms and abs(sent_at - connection.sent_at_ms) > _SAME_MS:
        connection.questions, connection.sent_at_ms = connection.questions + 1, sent_at
    late = max(connection.questions, info[_PROBES_AT]) > 1
    connection.late_looks = connection.late_looks + 1 if late else 0
    return connection.late_looks > 1 and answered_ms >= 1000 * SILENCE_S
