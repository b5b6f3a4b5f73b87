"""Tcp connections between ranks: each rank connects to higher ranks and accepts lower ranks (handshake.py)."""

from __future__ import annotations

import secrets
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...errors import TransportError
from .address import listening
from .handshake import Handshake, initiate, respond

TOKEN_BYTES = 16
_HANDSHAKE_S = 5.0  # limit on the handshake with an unauthenticated process
_MAX_UNAUTHENTICATED = 256


@dataclass(frozen=True)
class TcpOffer:
    address: str
    port: int
    token: bytes


@dataclass
class PeerConnection:
    """Authenticated connection to a peer, and the note from the peer."""

    socket: socket.socket
    note: bytes


class TcpListener:
    def __init__(self, address: str) -> None:
        self.socket = listening(address)
        self.socket.setblocking(False)
        self.token = secrets.token_bytes(TOKEN_BYTES)

    def offer(self) -> TcpOffer:
        address, port = self.socket.getsockname()[:2]
        return TcpOffer(address, port, self.token)

    def close(self) -> None:
        self.socket.close()


@dataclass(eq=False)
class _Pending:
    """Connection in a handshake, which waits for a message of ``needed`` bytes."""

    socket: socket.socket
    handshake: Handshake
    peer: int | None  # None: unauthenticated
    deadline: float
    needed: int = 0
    received: bytearray = field(default_factory=bytearray)


def connect_peers(
    listener: TcpListener,
    rank: int,
    offers: Mapping[int, TcpOffer],
    notes: Mapping[int, bytes],
    timeout_s: float,
) -> dict[int, PeerConnection]:
    """Return an authenticated connection to every peer, by rank.

    Args:
        listener: listener of this rank.
        offers: rank -> its address and token; other ranks than peers are ignored.
        notes: the peers, each with the note for it, up to 4096 bytes.
        timeout_s: time limit for all peers together, in seconds.

    Raises:
        TransportError: if a peer does not connect in time.
    """
    attempt = _ConnectionAttempt(listener, rank, offers, notes, timeout_s)
    try:
        attempt.run()
    except BaseException:
        for connection in attempt.connected.values():
            connection.socket.close()
        raise
    finally:
        attempt.close()
    return attempt.connected


@dataclass
class _ConnectionAttempt:
    """Steps of :func:`connect_peers`, with the same arguments.

    Attributes:
        connected: peer -> its connection, which the caller owns, also after an error.
    """

    listener: TcpListener
    rank: int
    offers: Mapping[int, TcpOffer]
    notes: Mapping[int, bytes]
    timeout_s: float
    connected: dict[int, PeerConnection] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.timeout_s
        self._selector = selectors.DefaultSelector()
        self._pending: set[_Pending] = set()
        self._missing = set(self.notes)
        self._rejections: list[str] = []

    def run(self) -> None:
        for peer in sorted(peer for peer in self._missing if peer > self.rank):
            connection = self._connect(peer)
            self._start(connection, self._initiate(connection, peer), peer, self._deadline)
        self._selector.register(self.listener.socket, selectors.EVENT_READ)
        while self._missing and (remaining_s := self._deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(min(remaining_s, 0.5)):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            for pending in [pending for pending in self._pending if pending.deadline < time.monotonic()]:
                self._drop(pending, "no data within the time limit")
        if self._missing:
            raise self._missing_error(min(self._missing))

    def _missing_error(self, peer: int) -> TransportError:
        rejected = f"; rejected: {', '.join(self._rejections[-3:])}" if self._rejections else ""
        return TransportError(
            f"rank {self.rank} (listening on {self.listener.offer().address}): rank {peer} "
            f"({self.offers[peer].address}) did not connect within {self.timeout_s:g} s{rejected}. Each must be able "
            "to reach the other's address. Select other addresses with transport_options.node_ips.",
            peer,
        )

    def close(self) -> None:
        for pending in list(self._pending):
            self._forget(pending).close()
        self._selector.close()

    # --- connections ---

    def _connect(self, peer: int) -> socket.socket:
        offer = self.offers[peer]
        try:
            return socket.create_connection(
                (offer.address, offer.port), max(0.001, self._deadline - time.monotonic())
            )
        except OSError as error:
            raise TransportError(
                f"rank {self.rank} (listening on {self.listener.offer().address}): cannot reach rank {peer} at "
                f"{offer.address} port {offer.port} (got {error.strerror or error}). Check the firewall, or select "
                "other addresses with transport_options.node_ips.",
                peer,
            ) from None

    def _accept(self) -> None:
        """Accept a connection and start its handshake. Above the limit of unauthenticated ones, close it."""
        try:
            connection, address = self.listener.socket.accept()
        except OSError:
            return
        if len(self._pending) >= _MAX_UNAUTHENTICATED + len(self.notes):
            connection.close()
            return
        handshake = self._respond(connection, str(address[0]))
        self._start(connection, handshake, None, time.monotonic() + _HANDSHAKE_S)

    def _start(
        self, connection: socket.socket, handshake: Handshake, peer: int | None, deadline: float
    ) -> None:
        """Run a handshake up to its first wait; ``peer`` is None for an unauthenticated process."""
        pending = _Pending(connection, handshake, peer, deadline)
        connection.setblocking(True)
        self._pending.add(pending)
        self._selector.register(connection, selectors.EVENT_READ, pending)
        self._advance(pending, None)

    def _read(self, pending: _Pending) -> None:
        try:
            data = pending.socket.recv(pending.needed - len(pending.received), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            return self._drop(pending, error.strerror or str(error))
        if not data:
            return self._drop(pending, "the process closed the connection")
        pending.received += data
        if len(pending.received) == pending.needed:
            self._advance(pending, bytes(pending.received))

    def _advance(self, pending: _Pending, data: bytes | None) -> None:
        """Pass a message to the handshake (None: start it), and keep the connection if the handshake ends."""
        pending.received.clear()
        try:
            pending.needed = next(pending.handshake) if data is None else pending.handshake.send(data)
        except StopIteration as end:
            peer, note = end.value
            self._missing.discard(peer)
            self.connected[peer] = PeerConnection(self._forget(pending), note)
        except (TransportError, OSError) as error:
            self._drop(pending, str(error))

    def _drop(self, pending: _Pending, reason: str) -> None:
        """Close a connection. Raises TransportError for a peer; an unknown process is only recorded."""
        self._forget(pending).close()
        if pending.peer is None:
            self._rejections.append(f"an unknown process ({reason})")
            return
        raise TransportError(
            f"rank {self.rank}: handshake with rank {pending.peer} failed: {reason}.", pending.peer
        )

    def _forget(self, pending: _Pending) -> socket.socket:
        """Stop watching a connection, and return its socket, which the caller now owns."""
        self._pending.discard(pending)
        self._selector.unregister(pending.socket)
        return pending.socket

    # --- handshakes ---

    def _initiate(self, connection: socket.socket, peer: int) -> Handshake:
        return initiate(connection, self.rank, peer, self._key(peer), self.notes[peer])

    def _respond(self, connection: socket.socket, address: str) -> Handshake:
        return respond(
            connection,
            self.rank,
            address,
            lambda peer: peer < self.rank and peer in self._missing,
            lambda peer: (self._key(peer), self.notes[peer]),
        )

    def _key(self, peer: int) -> bytes:
        """Return the HMAC key for this rank and a peer: their tokens, the lower rank's first."""
        tokens = {peer: self.offers[peer].token, self.rank: self.listener.token}
        return tokens[min(tokens)] + tokens[max(tokens)]
