"""Handshake between ranks on the same host: each pair exchanges the file descriptors of its shared memory.

A rank listens on a unix socket with a random abstract name. It accepts only processes of the same user that send the
listener's token, which the job's process group distributes. So two jobs on the same host cannot mix.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..environment import namespace, proc_text
from ..errors import TransportError

TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<{TOKEN_BYTES}sI")  # token of the receiving rank, sender's rank
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_MAX_FILES = 2


@dataclass(frozen=True)
class ShmOffer:
    """Address of a rank on its host. ``name`` is that of its abstract unix socket."""

    name: bytes
    token: bytes


@dataclass
class PeerFiles:
    """File descriptors from a peer, and ``watch``, which becomes readable when its process exits."""

    files: list[int]
    watch: int

    def take_files(self) -> list[int]:
        """Return the files and give up ownership of them."""
        files, self.files = self.files, []
        return files

    def take_watch(self) -> int:
        watch, self.watch = self.watch, -1
        return watch

    def close(self) -> None:
        """Close the files that were not taken."""
        for file in (*self.take_files(), self.take_watch()):
            if file >= 0:
                os.close(file)


def host_id() -> str:
    """Return the identity of this host. Processes that can reach each other's unix sockets have the same one."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts = [proc_text("sys/kernel/random/boot_id").strip(), namespace("net")]
    return " ".join(parts)


class UnixListener:
    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.name = b"\0ds_ext-" + secrets.token_hex(16).encode()
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.socket.bind(self.name)
        self.socket.listen(512)

    def offer(self) -> ShmOffer:
        return ShmOffer(self.name, self.token)

    def close(self) -> None:
        self.socket.close()


def exchange_files(
    listener: UnixListener,
    rank: int,
    offers: Mapping[int, ShmOffer],
    files: Mapping[int, Sequence[int]],
    expected: Mapping[int, int],
    timeout_s: float,
) -> dict[int, PeerFiles]:
    """Exchange files with every peer.

    Args:
        files: peer -> file descriptors to send; they stay open.
        expected: peer -> number of files that it sends.
        timeout_s: time limit for all peers together, in seconds.
    """
    exchange = _Exchange(listener, rank, offers, files, expected, timeout_s)
    try:
        exchange.connect_higher_ranks()
        exchange.accept_lower_ranks()
        exchange.receive_replies()
    except (OSError, TransportError) as error:
        for peer_files in exchange.received.values():
            peer_files.close()
        if isinstance(error, TransportError):
            raise
        raise TransportError(
            f"rank {rank}: no connection to a rank on this host (got {error.strerror or error})."
        ) from error
    finally:
        exchange.close_connections()
    return exchange.received


@dataclass(frozen=True)
class _Hello:
    """Message of a peer: token, sender's rank, and files, which the receiver must close."""

    token: bytes
    rank: int
    files: list[int]


@dataclass
class _Exchange:
    """Steps of :func:`exchange_files`, with the same arguments. All raise OSError and TransportError.

    Attributes:
        received: peer -> its files, which the caller owns, also after an error.
    """

    listener: UnixListener
    rank: int
    offers: Mapping[int, ShmOffer]
    files: Mapping[int, Sequence[int]]
    expected: Mapping[int, int]
    timeout_s: float
    received: dict[int, PeerFiles] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.timeout_s
        self._connections: dict[int, socket.socket] = {}  # to the higher ranks

    def connect_higher_ranks(self) -> None:
        """Connect to the peers of higher rank, and send them their files. A listening peer need not accept yet."""
        for peer in sorted(peer for peer in self.files if peer > self.rank):
            connection = self._connections[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(self._remaining_s())
            connection.connect(self.offers[peer].name)
            if not _is_same_user(connection):
                raise TransportError(f"rank {self.rank}: rank {peer} runs as a different user.", peer)
            self._send_files(connection, peer)

    def accept_lower_ranks(self) -> None:
        """Exchange files with all peers of lower rank. Connections of other processes are closed."""
        listening = self.listener.socket
        unidentified: dict[int, socket.socket] = {}  # by file descriptor
        poll = select.poll()
        poll.register(listening, select.POLLIN)
        try:
            while self._missing() and time.monotonic() < self._deadline:
                for descriptor, _ in poll.poll(max(1, int(1000 * self._remaining_s()))):
                    if descriptor == listening.fileno():
                        connection, _ = listening.accept()
                        unidentified[connection.fileno()] = connection
                        poll.register(connection, select.POLLIN)
                    else:
                        poll.unregister(descriptor)
                        with unidentified.pop(descriptor) as connection:
                            self._answer(connection)
        finally:
            for connection in unidentified.values():
                connection.close()
        if missing := self._missing():
            peer = missing[0]
            raise TransportError(
                f"rank {self.rank}: rank {peer} on this host did not connect within {self.timeout_s:g} s. "
                f"Look for the first error in the output of rank {peer}.",
                peer,
            )

    def receive_replies(self) -> None:
        for peer, connection in self._connections.items():
            hello = self._receive(connection, f"rank {self.rank}: rank {peer}", peer)
            self._keep(peer, hello.files, connection)
            if hello.token != self.listener.token or len(hello.files) != self.expected[peer]:
                raise TransportError(
                    f"rank {self.rank}: wrong token from the process at rank {peer}'s address.", peer
                )

    def close_connections(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def _missing(self) -> list[int]:
        """Return the peers of lower rank that have not connected."""
        return sorted(peer for peer in self.files if peer < self.rank and peer not in self.received)

    def _answer(self, connection: socket.socket) -> None:
        """Exchange files with the process that connected, if it is a missing peer that sends the listener's token."""
        try:
            hello = self._receive(connection, "an unknown process", None)
        except (OSError, TransportError):
            return
        is_trusted = secrets.compare_digest(hello.token, self.listener.token) and _is_same_user(connection)
        peer = hello.rank
        if is_trusted and peer in self._missing() and len(hello.files) == self.expected[peer]:
            self._keep(peer, hello.files, connection)
            self._send_files(connection, peer)
        else:
            for file in hello.files:
                os.close(file)

    def _send_files(self, connection: socket.socket, peer: int) -> None:
        hello = _HELLO.pack(self.offers[peer].token, self.rank)
        socket.send_fds(connection, [hello], list(self.files[peer]))

    def _receive(self, connection: socket.socket, sender: str, peer: int | None) -> _Hello:
        """Return the message on a connection. ``sender`` and ``peer`` (None: unknown) are for the error."""
        connection.settimeout(self._remaining_s())
        data, files, _, _ = socket.recv_fds(connection, _HELLO.size + 1, _MAX_FILES, socket.MSG_CMSG_CLOEXEC)
        if len(data) != _HELLO.size:
            for file in files:
                os.close(file)
            raise TransportError(f"{sender} closed the connection during the shm handshake.", peer)
        return _Hello(*_HELLO.unpack(data), files=files)

    def _keep(self, peer: int, files: list[int], connection: socket.socket) -> None:
        self.received[peer] = PeerFiles(files, -1)
        self.received[peer].watch = _open_exit_watch(connection)

    def _remaining_s(self) -> float:
        """Return the seconds until the deadline; at least 1 ms, because a time limit of 0 means non-blocking."""
        return max(0.001, self._deadline - time.monotonic())


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    return _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )


def _is_same_user(connection: socket.socket) -> bool:
    return _credentials(connection)[1] == os.getuid()


def _open_exit_watch(connection: socket.socket) -> int:
    """Return a new file descriptor that becomes readable when the peer's process exits.

    This is a pidfd. If the process is not visible (another pid namespace, an old kernel), it is a duplicate of the
    connection, which a forked child of the peer keeps open.
    """
    process = _credentials(connection)[0]
    if process > 0 and hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            return os.pidfd_open(process)
    return os.dup(connection.fileno())
