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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..environment import namespace, proc_text
from ..errors import TransportError

TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<{TOKEN_BYTES}sI")  # token of the receiving rank, sender's rank
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_MAX_FILES = 2


@dataclass(frozen=True)
class ShmOffer:
    """Address of a rank on its host."""

    name: bytes
    token: bytes


@dataclass
class PeerFiles:
    """File descriptors from a peer, and one that becomes readable when its process exits."""

    files: list[int]
    watch: int

    def take_files(self) -> list[int]:
        """Return the files and give up ownership of them."""
        taken, self.files = self.files, []
        return taken

    def take_watch(self) -> int:
        """Return the watch and give up ownership of it."""
        taken, self.watch = self.watch, -1
        return taken

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
    """Listening unix socket of one rank."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.name = b"\0ds_ext-" + secrets.token_hex(16).encode()
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.socket.bind(self.name)
        self.socket.listen(512)

    def offer(self) -> ShmOffer:
        """Return the address of this rank."""
        return ShmOffer(self.name, self.token)

    def close(self) -> None:
        """Stop listening."""
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
        listener: listener of this rank.
        rank: this rank.
        offers: offers of all peers.
        files: peer -> file descriptors to send; they stay open.
        expected: peer -> number of files that it sends.
        timeout_s: time limit for all peers together, in seconds.

    Raises:
        TransportError: a peer did not connect or failed the check. All received files are closed.
    """
    deadline = time.monotonic() + timeout_s
    received: dict[int, PeerFiles] = {}
    open_sockets: dict[int, socket.socket] = {}
    try:
        for peer in sorted(peer for peer in files if peer > rank):
            open_sockets[peer] = _connect(offers[peer], rank, peer, files[peer], deadline)
        for peer in _accept(listener, rank, offers, files, expected, received, deadline):
            raise TransportError(
                f"rank {rank}: rank {peer} on this host did not connect within {timeout_s:g} s. "
                f"Look for the first error in the output of rank {peer}.",
                peer,
            )
        for peer, connection in open_sockets.items():
            token, _, sent_files = _receive(connection, deadline, f"rank {rank}: rank {peer}", peer)
            received[peer] = PeerFiles(sent_files, -1)
            received[peer].watch = _watch(connection)
            if token != listener.token or len(sent_files) != expected[peer]:
                raise TransportError(
                    f"rank {rank}: wrong token from the process at rank {peer}'s address.", peer
                )
    except (OSError, TransportError) as error:
        for peer_files in received.values():
            peer_files.close()
        if isinstance(error, TransportError):
            raise
        raise TransportError(
            f"rank {rank}: no connection to a rank on this host (got {error.strerror or error})."
        ) from error
    finally:
        for connection in open_sockets.values():
            connection.close()
    return received


def _connect(offer: ShmOffer, rank: int, peer: int, files: Sequence[int], deadline: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        connection.connect(offer.name)
        if _credentials(connection)[1] != os.getuid():
            raise TransportError(f"rank {rank}: rank {peer} runs as a different user.", peer)
        socket.send_fds(connection, [_HELLO.pack(offer.token, rank)], list(files))
    except BaseException:
        connection.close()
        raise
    return connection


def _accept(
    listener: UnixListener,
    rank: int,
    offers: Mapping[int, ShmOffer],
    files: Mapping[int, Sequence[int]],
    expected: Mapping[int, int],
    received: dict[int, PeerFiles],
    deadline: float,
) -> Iterable[int]:
    """Accept the peers of lower rank and reject other processes. Returns the peers that did not connect."""
    missing = {peer for peer in files if peer < rank}
    accepted: dict[int, socket.socket] = {}
    poll = select.poll()
    poll.register(listener.socket, select.POLLIN)
    try:
        while missing and time.monotonic() < deadline:
            for number, _ in poll.poll(max(1, int(1000 * (deadline - time.monotonic())))):
                if number == listener.socket.fileno():
                    connection, _ = listener.socket.accept()
                    accepted[connection.fileno()] = connection
                    poll.register(connection, select.POLLIN)
                    continue
                connection = accepted.pop(number)
                poll.unregister(number)
                with connection:
                    peer = _identify(connection, listener, missing, expected, received, deadline)
                    if peer is not None:
                        missing.remove(peer)
                        reply = _HELLO.pack(offers[peer].token, rank)
                        socket.send_fds(connection, [reply], list(files[peer]))
    finally:
        for connection in accepted.values():
            connection.close()
    return sorted(missing)


def _identify(
    connection: socket.socket,
    listener: UnixListener,
    missing: set[int],
    expected: Mapping[int, int],
    received: dict[int, PeerFiles],
    deadline: float,
) -> int | None:
    """Return the rank of the peer if it sent the token and is expected, else None."""
    try:
        token, peer, files = _receive(connection, deadline, "an unknown process", None)
    except (OSError, TransportError):
        return None
    known = secrets.compare_digest(token, listener.token) and _credentials(connection)[1] == os.getuid()
    if not known or peer not in missing or len(files) != expected[peer]:
        for file in files:
            os.close(file)
        return None
    received[peer] = PeerFiles(files, _watch(connection))
    return peer


def _receive(
    connection: socket.socket, deadline: float, who: str, peer: int | None
) -> tuple[bytes, int, list[int]]:
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    data, files, _, _ = socket.recv_fds(connection, _HELLO.size + 1, _MAX_FILES, socket.MSG_CMSG_CLOEXEC)
    if len(data) != _HELLO.size:
        for file in files:
            os.close(file)
        raise TransportError(f"{who} closed the connection during the shm handshake.", peer)
    token, rank = _HELLO.unpack(data)
    return token, rank, files


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    return _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )


def _watch(connection: socket.socket) -> int:
    """Return a file descriptor that becomes readable when the peer's process exits.

    This is a pidfd. If the process is not visible (another pid namespace, an old kernel), it is the connection, which a
    forked child of the peer keeps open.
    """
    process = _credentials(connection)[0]
    if process > 0 and hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            return os.pidfd_open(process)
    return os.dup(connection.fileno())
