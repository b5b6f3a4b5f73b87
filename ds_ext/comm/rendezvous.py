"""How ranks of one host meet: each has every other's card, and the pairs hand each other their shared memory.

A rank listens on a unix socket with a random name that no file has. Only a process of the same user that knows the
listener's token, which travels through the process group alone, is let in; jobs on one host cannot meet.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_ext.errors import TransportError

TOKEN_BYTES = 16
_HELLO = struct.Struct(
    f"<{TOKEN_BYTES}sI"
)  # the listener's or the connecting rank's token, the sender's rank
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_MOST_FILES = 2


@dataclass(frozen=True)
class UnixCard:
    """How to reach a rank on its host."""

    name: bytes
    token: bytes


@dataclass
class Meeting:
    """What a peer has handed over, and a descriptor that becomes readable when its process ends."""

    files: list[int]
    watch: int

    def take_files(self) -> list[int]:
        """Take the files over."""
        taken, self.files = self.files, []
        return taken

    def take_watch(self) -> int:
        """Take the watch over."""
        taken, self.watch = self.watch, -1
        return taken

    def close(self) -> None:
        """Close what nobody has taken over."""
        for file in (*self.take_files(), self.take_watch()):
            if file >= 0:
                os.close(file)


def host_id() -> str:
    """The same for two processes that can reach each other's unix sockets."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts = [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/net"),
        ]
    return " ".join(parts)


class Listener:
    """The unix socket of one rank, and its card."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.name = b"\0ds_ext-" + secrets.token_hex(16).encode()
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.socket.bind(self.name)
        self.socket.listen(512)

    def card(self) -> UnixCard:
        """This rank's card."""
        return UnixCard(self.name, self.token)

    def close(self) -> None:
        """Nobody can connect any more."""
        self.socket.close()


def meet(
    listener: Listener,
    rank: int,
    cards: Mapping[int, UnixCard],
    files: Mapping[int, Sequence[int]],
    expected: Mapping[int, int],
    timeout_s: float,
) -> dict[int, Meeting]:
    """Hand every peer its files, and take what it hands over.

    Args:
        files: by peer, the file descriptors to pass; they stay open here.
        expected: by peer, how many come from it.
        timeout_s: for all of them together.

    Raises:
        TransportError: a peer did not come, or is not who it should be. All connections are closed then.
    """
    deadline = time.monotonic() + timeout_s
    met: dict[int, Meeting] = {}
    open_sockets: dict[int, socket.socket] = {}
    try:
        for peer in sorted(peer for peer in files if peer > rank):
            open_sockets[peer] = _connect(cards[peer], rank, peer, files[peer], deadline)
        for peer in _accept(listener, rank, cards, files, expected, met, deadline):
            raise TransportError(
                f"rank {rank}: rank {peer} of this host did not connect within {timeout_s:g} s", peer
            )
        for peer, connection in open_sockets.items():
            token, _, received = _receive(connection, deadline, f"rank {rank}: rank {peer}", peer)
            meeting = met[peer] = Meeting(received, -1)
            meeting.watch = _watch(connection)
            if token != listener.token or len(received) != expected[peer]:
                raise TransportError(
                    f"rank {rank}: the process at rank {peer}'s address is not rank {peer}", peer
                )
    except (OSError, TransportError) as error:
        for meeting in met.values():
            meeting.close()
        if isinstance(error, TransportError):
            raise
        raise TransportError(
            f"rank {rank}: the ranks of this host cannot be connected: {error.strerror or error}"
        ) from error
    finally:
        for connection in open_sockets.values():
            connection.close()
    return met


def _connect(card: UnixCard, rank: int, peer: int, files: Sequence[int], deadline: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        connection.connect(card.name)
        if _credentials(connection)[1] != os.getuid():
            raise TransportError(f"rank {rank}: rank {peer} belongs to another user", peer)
        socket.send_fds(connection, [_HELLO.pack(card.token, rank)], list(files))
    except BaseException:
        connection.close()
        raise
    return connection


def _accept(
    listener: Listener,
    rank: int,
    cards: Mapping[int, UnixCard],
    files: Mapping[int, Sequence[int]],
    expected: Mapping[int, int],
    met: dict[int, Meeting],
    deadline: float,
) -> Iterable[int]:
    """Let in the peers of lower rank, and nobody else. Returns those that have not come."""
    missing = {peer for peer in files if peer < rank}
    guests: dict[int, socket.socket] = {}
    poll = select.poll()
    poll.register(listener.socket, select.POLLIN)
    try:
        while missing and time.monotonic() < deadline:
            for number, _ in poll.poll(max(1, int(1000 * (deadline - time.monotonic())))):
                if number == listener.socket.fileno():
                    guest, _ = listener.socket.accept()
                    guests[guest.fileno()] = guest
                    poll.register(guest, select.POLLIN)
                    continue
                guest = guests.pop(number)
                poll.unregister(number)
                with guest:
                    peer = _admit(guest, listener, missing, expected, met, deadline)
                    if peer is not None:
                        missing.remove(peer)
                        reply = _HELLO.pack(cards[peer].token, rank)
                        socket.send_fds(guest, [reply], list(files[peer]))
    finally:
        for guest in guests.values():
            guest.close()
    return sorted(missing)


def _admit(
    guest: socket.socket,
    listener: Listener,
    missing: set[int],
    expected: Mapping[int, int],
    met: dict[int, Meeting],
    deadline: float,
) -> int | None:
    """The rank of a guest that knows the token and that is waited for; None turns it away."""
    try:
        token, peer, received = _receive(guest, deadline, "a guest", None)
    except (OSError, TransportError):
        return None
    known = secrets.compare_digest(token, listener.token) and _credentials(guest)[1] == os.getuid()
    if not known or peer not in missing or len(received) != expected[peer]:
        for file in received:
            os.close(file)
        return None
    met[peer] = Meeting(received, _watch(guest))
    return peer


def _receive(
    connection: socket.socket, deadline: float, who: str, peer: int | None
) -> tuple[bytes, int, list[int]]:
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    data, files, _, _ = socket.recv_fds(connection, _HELLO.size + 1, _MOST_FILES, socket.MSG_CMSG_CLOEXEC)
    if len(data) != _HELLO.size:
        for file in files:
            os.close(file)
        raise TransportError(f"{who} closed the connection while the ranks of this host met", peer)
    token, rank = _HELLO.unpack(data)
    return token, rank, files


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    return _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )


def _watch(connection: socket.socket) -> int:
    """A descriptor that becomes readable when the peer ends.

    A process descriptor tells it at once. Where the peer's process cannot be seen (another pid namespace, an old
    kernel) it is the connection, which a forked child of the peer keeps open.
    """
    process = _credentials(connection)[0]
    if process > 0 and hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            return os.pidfd_open(process)
    return os.dup(connection.fileno())
