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

from ..environment import has_proc, interface_addresses, open_files, proc_text
from ..errors import PeerGone, TransportError

BEAT_S = 0.5
SILENCE_S = 2.0
_SILENCE_MS = 1000 * SILENCE_S
# The kernel's limit for an idle connection, in case the thread is delayed: 1 + 4 s.
_KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4}
_LOST_RETRANSMISSIONS = 5  # of the same data: 0.2 + 0.4 + 0.8 + 1.6 + 3.2 s
_TCP_INFO = struct.Struct(
    "=2xBB20xI16xI8xI60xQ"
)  # start of struct tcp_info (linux/tcp.h), the fields of _TcpInfo
_SAME_MS = 50.0  # two readings of the same time may differ by kernel clock ticks
_LOCAL_ADDRESS = re.compile(r"\|-- (\S+)\s+/32 host LOCAL")


@dataclass(frozen=True)
class Host:
    """One host of the job. ``addresses`` are those of its network interfaces, without loopback."""

    name: str
    addresses: frozenset[str]
    ranks: tuple[int, ...] = ()

    def silence(self) -> str:
        many = len(self.ranks) > 1
        ranks = f"rank{'s' * many} {', '.join(map(str, self.ranks))} on " if self.ranks else ""
        return f"{ranks}host {self.name} {'have' if many else 'has'} not answered for {SILENCE_S:g} s"


@dataclass(frozen=True)
class _TcpInfo:
    """State of a connection in the kernel, at ``now_ms``. Times of events are in milliseconds before that."""

    retransmissions: int  # of the oldest data
    probes: int
    unacknowledged: int  # packets
    last_sent_ms: int
    last_answer_ms: int
    delivered_bytes: int
    now_ms: float


@dataclass
class _Connection:
    """Socket of this process and its progress. ``address`` is None if the watch ignores it."""

    inode: int
    address: str | None = None
    to_store: bool = False
    sent_at_ms: float = 0.0
    answered_at_ms: float = 0.0
    unanswered: int = 0  # packets and probes since the last answer
    late_looks: int = 0  # consecutive looks with at least two unanswered packets
    delivered_bytes: int = 0
    delivered_at_ms: float = -math.inf

    def update(self, info: _TcpInfo) -> None:
        sent_at_ms, answered_at_ms = info.now_ms - info.last_sent_ms, info.now_ms - info.last_answer_ms
        if abs(answered_at_ms - self.answered_at_ms) > _SAME_MS:
            self.unanswered = 0
            self.answered_at_ms = answered_at_ms
        is_waiting = info.unacknowledged > 0 and info.last_sent_ms < info.last_answer_ms
        if is_waiting and abs(sent_at_ms - self.sent_at_ms) > _SAME_MS:
            self.unanswered += 1
            self.sent_at_ms = sent_at_ms
        is_late = max(self.unanswered, info.probes) > 1
        self.late_looks = self.late_looks + 1 if is_late else 0
        if info.delivered_bytes != self.delivered_bytes:
            self.delivered_bytes = info.delivered_bytes
            self.delivered_at_ms = info.now_ms

    def is_unanswered(self, info: _TcpInfo) -> bool:
        """Return whether the peer's kernel is silent: no answer for 2 s, two packets or probes, and two looks.

        The kernel probes a peer with a full receive window at growing intervals. So neither a single lost packet nor a
        long time since the last answer is enough.
        """
        return self.late_looks > 1 and info.last_answer_ms >= _SILENCE_MS

    def delivers(self, info: _TcpInfo) -> bool:
        """Return whether the peer's kernel has acknowledged new data in the last 2 s."""
        return info.now_ms - self.delivered_at_ms < _SILENCE_MS


class HostWatch(threading.Thread):
    """Thread that shuts down the connections to hosts that do not answer.

    Args:
        others: the other hosts of the job; None: not yet known, so connections to all addresses are watched.
        store_port: port of the rendezvous store, which may be on a host without ranks.
    """

    def __init__(self, here: Host, others: Sequence[Host] | None, store_port: int | None) -> None:
        super().__init__(name="ds_ext-hosts", daemon=True)
        self._here = here
        self._store_port = store_port
        self.knows_hosts = others is not None
        others = others or ()
        # An address that several hosts have (a container bridge) is not routed between hosts.
        uses = Counter(address for host in (here, *others) for address in host.addresses)
        self._hosts = {a: host for host in others for a in host.addresses if uses[a] == 1}
        self._connections: dict[int, _Connection] = {}
        self._ignored_inodes: set[int] = set()
        self.silent: dict[str, Host] = {}  # by address
        self.store_is_silent = False
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(BEAT_S):
            with contextlib.suppress(OSError):  # too many open files
                self.look()

    def stop(self) -> None:
        self._stopped.set()
        self.join()

    def leave_out(self, connection: socket.socket) -> None:
        """Ignore a connection that has its own heartbeat."""
        self._ignored_inodes.add(os.fstat(connection.fileno()).st_ino)

    def leave_out_current(self) -> None:
        """Ignore the connections at the last look, which the script has opened before the job."""
        self._ignored_inodes |= {connection.inode for connection in self._connections.values()}

    def addresses(self) -> set[str]:
        """Return the peers' addresses of the watched connections at the last look."""
        return {
            connection.address for connection in self._connections.values() if connection.address is not None
        }

    def look(self) -> None:
        """Find new connections, and shut down all connections to addresses that have not answered for 2 s.

        An answer on any connection shows that a host is alive: a lossy link may lose several probes of one connection.
        Likewise, data that arrives on any connection shows that the link to the host works.
        """
        self._connections = dict(self._find_connections())
        for address in self._silent_addresses():
            self.silent[address] = self._hosts.get(address, Host(address, frozenset({address})))
        for descriptor, connection in self._connections.items():
            if connection.address in self.silent:
                self._shut_down(descriptor, connection)

    def _silent_addresses(self) -> set[str]:
        """Update the connections that are not yet silent, and return the addresses that are silent now."""
        unanswered, answering = set[str](), set[str]()
        undelivered, delivering = set[str](), set[str]()
        for descriptor, connection in self._connections.items():
            if connection.address is None or connection.address in self.silent:
                continue
            with contextlib.suppress(OSError), _socket_view(descriptor) as view:
                info = _read_tcp_info(view)
                connection.update(info)
                if connection.is_unanswered(info):
                    unanswered.add(connection.address)
                elif info.last_answer_ms < _SILENCE_MS:
                    answering.add(connection.address)
                if connection.delivers(info):
                    delivering.add(connection.address)
                elif info.retransmissions >= _LOST_RETRANSMISSIONS:
                    undelivered.add(connection.address)
        return (unanswered - answering) | (undelivered - delivering)

    def _shut_down(self, descriptor: int, connection: _Connection) -> None:
        """Shut down a connection, unless the file descriptor belongs to another file by now."""
        with contextlib.suppress(OSError), _socket_view(descriptor) as view:
            self.store_is_silent |= connection.to_store
            if os.fstat(descriptor).st_ino == connection.inode:
                view.shutdown(socket.SHUT_RDWR)

    def _find_connections(self) -> Iterator[tuple[int, _Connection]]:
        """Yield (file descriptor, connection) of all sockets. Known ones keep their state, ignored ones no address."""
        for descriptor in open_files():
            with contextlib.suppress(OSError):  # already closed, or not yet connected
                status = os.fstat(descriptor)
                if not stat.S_ISSOCK(status.st_mode):
                    continue
                connection = self._connections.get(descriptor)
                if connection is None or connection.inode != status.st_ino:
                    connection = self._examine(descriptor, status.st_ino)
                if connection.inode in self._ignored_inodes:
                    connection.address = None
                yield descriptor, connection

    def _examine(self, descriptor: int, inode: int) -> _Connection:
        """Return a new connection, with keepalive enabled if it is watched. Raises OSError if it is not connected."""
        with _socket_view(descriptor) as view:
            domain = view.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN)
            protocol = view.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL)
            if domain not in (socket.AF_INET, socket.AF_INET6) or protocol != socket.IPPROTO_TCP:
                return _Connection(inode)
            peer, port = view.getpeername()[:2]
            address = plain_address(peer)
            to_store = port == self._store_port
            if not self._is_watched(address, to_store):
                return _Connection(inode)
            view.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                view.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            return _Connection(inode, address, to_store)

    def _is_watched(self, address: str, to_store: bool) -> bool:
        if address in self._here.addresses or ipaddress.ip_address(address).is_loopback:
            return False
        return address in self._hosts or to_store or not self.knows_hosts


def running() -> HostWatch | None:
    return next((thread for thread in threading.enumerate() if isinstance(thread, HostWatch)), None)


def silent_hosts() -> list[Host]:
    watch = running()
    return list(dict.fromkeys(list(watch.silent.values()))) if watch is not None else []


def store_is_silent() -> bool:
    watch = running()
    return watch is not None and watch.store_is_silent


def require_hosts() -> None:
    """Raise PeerGone for a host that does not answer; TransportError if its ranks are unknown or it has none."""
    for host in silent_hosts():
        if host.ranks:
            raise PeerGone(host.silence(), host.ranks[0])
        raise TransportError(f"{'rendezvous store' if store_is_silent() else 'start'}: {host.silence()}")


def leave_out(connection: socket.socket) -> None:
    watch = running()
    if watch is not None:
        watch.leave_out(connection)


def end_connections(store_port: int | None) -> None:
    """Shut down this process's TCP connections except those of the rendezvous store, so that peers notice."""
    if not can_watch():
        return
    for descriptor in open_files():
        with contextlib.suppress(OSError, ValueError), _socket_view(descriptor) as view:
            if view.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL) == socket.IPPROTO_TCP:
                ports = view.getpeername()[1], view.getsockname()[1]
                if store_port not in ports:
                    view.shutdown(socket.SHUT_RDWR)


def start(rank: int, hosts: Sequence[Host] | None, store_port: int | None) -> None:
    """Start the watch of this process, if there are connections to other hosts and they can be watched.

    Args:
        hosts: all hosts of the job. None before they are known; call the function again then.
        store_port: port of the rendezvous store.
    """
    previous = running()
    if not can_watch() or (previous is not None and (previous.knows_hosts or hosts is None)):
        return
    if hosts is None:
        here = Host(socket.gethostname(), frozenset(own_addresses()))
        others = None
    else:
        here = next(host for host in hosts if rank in host.ranks)
        others = [host for host in hosts if host is not here]
    if previous is not None:
        previous.stop()
    watch = HostWatch(here, others, store_port)
    watch.look()
    if others is None:
        watch.leave_out_current()
    if others is None or others or watch.addresses():
        watch.start()


def can_watch() -> bool:
    options = ("TCP_INFO", "SO_DOMAIN", "SO_PROTOCOL", *_KEEPALIVE)
    return sys.platform == "linux" and has_proc() and all(hasattr(socket, option) for option in options)


def own_addresses() -> list[str]:
    addresses = set(_LOCAL_ADDRESS.findall(proc_text("thread-self/net/fib_trie")))
    addresses |= {str(address) for _, address in interface_addresses()}
    return sorted(address for address in addresses if not ipaddress.ip_address(address).is_loopback)


def plain_address(address: str) -> str:
    """Return an address in the form that :func:`own_addresses` uses: without scope, IPv4 not mapped into IPv6."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


@contextlib.contextmanager
def _socket_view(descriptor: int) -> Iterator[socket.socket]:
    """Context with a socket object for a file descriptor, whose owner stays the same.

    AF_INET6 has the longest addresses. SOCK_NONBLOCK keeps Python from applying ``socket.setdefaulttimeout``.
    """
    view = socket.socket(socket.AF_INET6, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, 0, fileno=descriptor)
    try:
        yield view
    finally:
        view.detach()


def _read_tcp_info(connection: socket.socket) -> _TcpInfo:
    """Return the kernel's state of a connection. Fields that a kernel before 4.1 lacks are 0. Raises OSError."""
    fields = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    return _TcpInfo(*_TCP_INFO.unpack(fields.ljust(_TCP_INFO.size, b"\0")), now_ms=1000 * time.monotonic())
