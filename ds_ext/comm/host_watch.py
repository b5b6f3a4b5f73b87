"""Heartbeat between hosts for the connections of gloo and of the rendezvous store.

A dead host or a cut cable closes no connection, so gloo and the store wait until their time limits. A thread in each
rank therefore watches the kernel's acknowledgments on all TCP connections of this process to other hosts of the job.
TCP keepalive makes the kernel probe an idle connection every second. The peer's kernel answers, even for a stopped
process. After 2 s without an answer, the thread shuts down the connections to that address, and the blocked or next
operation on them raises. If packets are lost in one direction only, the peer's own packets look like answers. The
thread then notices that the kernel has retransmitted the same data five times, after about 6 s.

TCP_USER_TIMEOUT would need no thread, but it also ends connections to a stopped or busy process with a full receive
window (tcp(7)). The native tcp links do the same check in their I/O thread (kernels/transport/tcp_connection.hpp).
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
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

from ..environment import has_proc, ipv6_addresses, open_files, proc_text
from ..errors import PeerGone, TransportError

BEAT_S, SILENCE_S = 0.5, 2.0
# The kernel's limit for an idle connection, in case the thread is delayed: 1 + 4 s.
_KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4}
_LOST_RETRANSMISSIONS = 5  # of the same data: 0.2 + 0.4 + 0.8 + 1.6 + 3.2 s
# Offsets in struct tcp_info (linux/tcp.h).
_RETRANSMITS_AT, _PROBES_AT = 2, 3
_UNACKED_AT, _LAST_DATA_SENT_AT, _LAST_ACK_RECV_AT, _BYTES_ACKED_AT, _TCP_INFO_BYTES = 24, 44, 56, 120, 128
_SAME_MS = 50.0  # two readings of the same time may differ by kernel clock ticks
_LOCAL_ADDRESS = re.compile(r"\|-- (\S+)\s+/32 host LOCAL")


@dataclass(frozen=True)
class Host:
    """One host of the job.

    Args:
        name: host name.
        addresses: addresses of its network interfaces, without loopback.
        ranks: ranks on the host.
    """

    name: str
    addresses: frozenset[str]
    ranks: tuple[int, ...] = ()

    def silence(self) -> str:
        """Return a report that this host does not answer."""
        many = len(self.ranks) > 1
        ranks = f"rank{'s' * many} {', '.join(map(str, self.ranks))} on " if self.ranks else ""
        return f"{ranks}host {self.name} {'have' if many else 'has'} not answered for {SILENCE_S:g} s"


@dataclass
class _Connection:
    """Socket of this process; ``address`` is None if the watch ignores it."""

    inode: int
    address: str | None = None
    to_store: bool = False
    sent_at_ms: float = 0.0
    answered_at_ms: float = 0.0
    unanswered: int = 0  # packets and probes since the last answer
    late_looks: int = 0  # consecutive looks with at least two unanswered packets
    delivered_bytes: int = 0
    delivered_at_ms: float = -math.inf


class HostWatch(threading.Thread):
    """Thread that shuts down the connections to hosts that do not answer.

    Args:
        here: this host.
        others: the other hosts of the job; None: not yet known, so connections to all addresses are watched.
        store_port: port of the rendezvous store, which may be on a host without ranks.
    """

    def __init__(self, here: Host, others: Sequence[Host] | None, store_port: int | None) -> None:
        super().__init__(name="ds_ext-hosts", daemon=True)
        self._here, self._store_port, self.knows_hosts = here, store_port, others is not None
        others = others or ()
        # An address that several hosts have (a container bridge) is not routed between hosts.
        uses = Counter(address for host in (here, *others) for address in host.addresses)
        self._hosts = {a: host for host in others for a in host.addresses if uses[a] == 1}
        self._connections: dict[int, _Connection] = {}
        self._left_out: set[int] = set()
        self.silent: dict[str, Host] = {}  # by address
        self.store_is_silent = False
        self._stopped = threading.Event()

    def run(self) -> None:
        """Look at the connections every half second until :meth:`stop` or the exit of the process."""
        while not self._stopped.wait(BEAT_S):
            with contextlib.suppress(OSError):  # too many open files
                self.look()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        self.join()

    def leave_out(self, connection: socket.socket) -> None:
        """Ignore a connection that has its own heartbeat."""
        self._left_out.add(os.fstat(connection.fileno()).st_ino)

    def leave_out_current(self) -> None:
        """Ignore the connections at the last look, which the script has opened before the job."""
        self._left_out |= {connection.inode for connection in self._connections.values()}

    def addresses(self) -> set[str]:
        """Return the peers' addresses of the watched connections at the last look."""
        return {
            connection.address for connection in self._connections.values() if connection.address is not None
        }

    def look(self) -> None:
        """Find new connections, and shut down all connections to addresses that have not answered for 2 s.

        An answer on any connection shows that a host is alive: a lossy link may lose several probes of a connection.
        Likewise, data that arrives on any connection shows that the link to the host works.
        """
        self._connections = dict(self._find())
        unanswered, answering = set[str](), set[str]()
        undelivered, delivering = set[str](), set[str]()
        for number, connection in self._connections.items():
            if connection.address is None or connection.address in self.silent:
                continue
            with contextlib.suppress(OSError), _borrowed(number) as borrowed:
                # Kernels before 4.1 report fewer fields.
                info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                info, now_ms = info.ljust(_TCP_INFO_BYTES, b"\0"), 1000 * time.monotonic()
                if _unanswered(connection, info, now_ms):
                    unanswered.add(connection.address)
                elif struct.unpack_from("=I", info, _LAST_ACK_RECV_AT)[0] < 1000 * SILENCE_S:
                    answering.add(connection.address)
                if _delivers(connection, info, now_ms):
                    delivering.add(connection.address)
                elif info[_RETRANSMITS_AT] >= _LOST_RETRANSMISSIONS:
                    undelivered.add(connection.address)
        for address in (unanswered - answering) | (undelivered - delivering):
            self.silent[address] = self._hosts.get(address, Host(address, frozenset({address})))
        for number, connection in self._connections.items():
            if connection.address in self.silent:
                with contextlib.suppress(OSError), _borrowed(number) as borrowed:
                    self.store_is_silent |= connection.to_store
                    if os.fstat(number).st_ino == connection.inode:
                        borrowed.shutdown(socket.SHUT_RDWR)

    def _find(self) -> Iterator[tuple[int, _Connection]]:
        for number in open_files():
            with contextlib.suppress(OSError):  # already closed, or not yet connected
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
        """Return a new connection, with keepalive enabled if it is watched. Raises OSError if it is not connected."""
        with _borrowed(number) as borrowed:
            domain = borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN)
            protocol = borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL)
            if domain not in (socket.AF_INET, socket.AF_INET6) or protocol != socket.IPPROTO_TCP:
                return _Connection(inode)
            peer, port = borrowed.getpeername()[:2]
            address = plain_address(peer)
            foreign = address not in self._here.addresses and not ipaddress.ip_address(address).is_loopback
            to_store = port == self._store_port
            if not foreign or not (address in self._hosts or to_store or not self.knows_hosts):
                return _Connection(inode)
            borrowed.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                borrowed.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            return _Connection(inode, address, to_store)


def running() -> HostWatch | None:
    """Return the watch of this process, if it is running."""
    return next((thread for thread in threading.enumerate() if isinstance(thread, HostWatch)), None)


def silent_hosts() -> list[Host]:
    """Return the hosts that do not answer; empty without a watch."""
    watch = running()
    return list(dict.fromkeys(list(watch.silent.values()))) if watch is not None else []


def store_is_silent() -> bool:
    """Return whether the host of the rendezvous store does not answer; False without a watch."""
    watch = running()
    return watch is not None and watch.store_is_silent


def require_hosts() -> None:
    """Raise PeerGone for a host that does not answer, or TransportError if its ranks are unknown or none."""
    for host in silent_hosts():
        if host.ranks:
            raise PeerGone(host.silence(), host.ranks[0])
        raise TransportError(f"{'rendezvous store' if store_is_silent() else 'start'}: {host.silence()}")


def leave_out(connection: socket.socket) -> None:
    """Call :meth:`HostWatch.leave_out` if there is a watch."""
    watch = running()
    if watch is not None:
        watch.leave_out(connection)


def end_connections(store_port: int | None) -> None:
    """Shut down all TCP connections of this process except those of the rendezvous store, so that peers notice."""
    if not can_watch():
        return
    for number in open_files():
        with contextlib.suppress(OSError, ValueError), _borrowed(number) as borrowed:
            if borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL) == socket.IPPROTO_TCP:
                ports = borrowed.getpeername()[1], borrowed.getsockname()[1]
                if store_port not in ports:
                    borrowed.shutdown(socket.SHUT_RDWR)


def start(rank: int, hosts: Sequence[Host] | None, store_port: int | None) -> None:
    """Start the watch of this process, if there are connections to other hosts and they can be watched.

    Args:
        rank: rank of this process.
        hosts: all hosts of the job. None before they are known; call the function again then.
        store_port: port of the rendezvous store.
    """
    earlier = running()
    if not can_watch() or (earlier is not None and (earlier.knows_hosts or hosts is None)):
        return
    here, others = Host(socket.gethostname(), frozenset(own_addresses())), None
    if hosts is not None:
        here = next(host for host in hosts if rank in host.ranks)
        others = [host for host in hosts if host is not here]
    if earlier is not None:
        earlier.stop()
    watch = HostWatch(here, others, store_port)
    watch.look()
    if others is None:
        watch.leave_out_current()
    if others is None or others or watch.addresses():
        watch.start()


def can_watch() -> bool:
    """Return whether this is Linux with /proc and the socket options that the watch needs."""
    options = ("TCP_INFO", "SO_DOMAIN", "SO_PROTOCOL", *_KEEPALIVE)
    return sys.platform == "linux" and has_proc() and all(hasattr(socket, option) for option in options)


def own_addresses() -> list[str]:
    """Return the addresses of this host's network interfaces, without loopback; empty if unknown."""
    addresses = set(_LOCAL_ADDRESS.findall(proc_text("thread-self/net/fib_trie")))
    addresses |= {str(address) for _, address in ipv6_addresses()}
    return sorted(address for address in addresses if not ipaddress.ip_address(address).is_loopback)


def plain_address(address: str) -> str:
    """Return an address in the form that :func:`own_addresses` uses: without scope, IPv4 not mapped into IPv6."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


@contextlib.contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """Wrap a file descriptor in a socket object, without taking ownership.

    AF_INET6 has the longest addresses. SOCK_NONBLOCK keeps Python from applying ``socket.setdefaulttimeout``.
    """
    borrowed = socket.socket(socket.AF_INET6, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, 0, fileno=number)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _unanswered(connection: _Connection, info: bytes, now_ms: float) -> bool:
    """Return whether the peer's kernel is silent: no answer for 2 s, two packets or probes, and two looks.

    The kernel probes a peer with a full receive window at growing intervals. So neither a single lost packet nor a long
    time since the last answer is enough.
    """
    unacked, sent_ms, answered_ms = (
        struct.unpack_from("=I", info, at)[0] for at in (_UNACKED_AT, _LAST_DATA_SENT_AT, _LAST_ACK_RECV_AT)
    )
    sent_at, answered_at = now_ms - sent_ms, now_ms - answered_ms
    if abs(answered_at - connection.answered_at_ms) > _SAME_MS:
        connection.unanswered, connection.answered_at_ms = 0, answered_at
    if unacked > 0 and sent_ms < answered_ms and abs(sent_at - connection.sent_at_ms) > _SAME_MS:
        connection.unanswered, connection.sent_at_ms = connection.unanswered + 1, sent_at
    late = max(connection.unanswered, info[_PROBES_AT]) > 1
    connection.late_looks = connection.late_looks + 1 if late else 0
    return connection.late_looks > 1 and answered_ms >= 1000 * SILENCE_S


def _delivers(connection: _Connection, info: bytes, now_ms: float) -> bool:
    """Return whether the peer's kernel has acknowledged new data in the last 2 s."""
    delivered = struct.unpack_from("=Q", info, _BYTES_ACKED_AT)[0]
    if delivered != connection.delivered_bytes:
        connection.delivered_bytes, connection.delivered_at_ms = delivered, now_ms
    return now_ms - connection.delivered_at_ms < 1000 * SILENCE_S
