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
    """Address and secret token of a rank."""

    address: str
    port: int
    token: bytes


@dataclass
class PeerConnection:
    """Authenticated connection to a peer, and the note from the peer."""

    socket: socket.socket
    note: bytes


class TcpListener:
    """Listening socket of one rank."""

    def __init__(self, address: str) -> None:
        self.socket = listening(address)
        self.socket.setblocking(False)
        self.token = secrets.token_bytes(TOKEN_BYTES)

    def offer(self) -> TcpOffer:
        """Return the address of this rank."""
        address, port = self.socket.getsockname()[:2]
        return TcpOffer(address, port, self.token)

    def close(self) -> None:
        """Stop listening."""
        self.socket.close()


@dataclass(eq=False)
class _Pending:
    """Connection during its handshake."""

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
    """Connect to every peer.

    Args:
        listener: listener of this rank.
        rank: this rank.
        offers: offers of all peers.
        notes: peer -> note for it, up to 4096 bytes.
        timeout_s: time limit for all peers together, in seconds.

    Raises:
        TransportError: a peer is unreachable, did not connect, or refused the connection. All connections are closed.
    """
    connecting = _Connecting(listener, rank, offers, notes, time.monotonic() + timeout_s)
    try:
        connecting.run()
    except BaseException:
        for connection in connecting.connected.values():
            connection.socket.close()
        raise
    finally:
        connecting.close()
    if missing := sorted(connecting.missing):
        for connection in connecting.connected.values():
            connection.socket.close()
        rejected = f"; rejected: {', '.join(connecting.rejected[-3:])}" if connecting.rejected else ""
        raise TransportError(
            f"rank {rank} (listening on {listener.offer().address}): rank {missing[0]} ({offers[missing[0]].address}) "
            f"did not connect within {timeout_s:g} s{rejected}. Each must be able to reach the other's address. Select "
            "other addresses with transport_options.node_ips.",
            missing[0],
        )
    return connecting.connected


class _Connecting:
    def __init__(
        self,
        listener: TcpListener,
        rank: int,
        offers: Mapping[int, TcpOffer],
        notes: Mapping[int, bytes],
        deadline: float,
    ) -> None:
        self._listener, self._rank, self._offers, self._notes = listener, rank, offers, notes
        self._deadline = deadline
        self._selector = selectors.DefaultSelector()
        self._pending: set[_Pending] = set()
        self.missing = set(notes)
        self.connected: dict[int, PeerConnection] = {}
        self.rejected: list[str] = []

    def run(self) -> None:
        for peer in sorted(peer for peer in self.missing if peer > self._rank):
            connection = self._connect(peer)
            self._start(connection, self._initiate(connection, peer), peer, self._deadline)
        self._selector.register(self._listener.socket, selectors.EVENT_READ)
        while self.missing and (remaining_s := self._deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(min(remaining_s, 0.5)):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            for pending in [pending for pending in self._pending if pending.deadline < time.monotonic()]:
                self._drop(pending, "no data within the time limit")

    def close(self) -> None:
        for pending in list(self._pending):
            self._forget(pending).close()
        self._selector.close()

    # --- connections ---

    def _connect(self, peer: int) -> socket.socket:
        offer = self._offers[peer]
        try:
            return socket.create_connection(
                (offer.address, offer.port), max(0.001, self._deadline - time.monotonic())
            )
        except OSError as error:
            raise TransportError(
                f"rank {self._rank} (listening on {self._listener.offer().address}): cannot reach rank {peer} at "
                f"{offer.address} port {offer.port} (got {error.strerror or error}). Check the firewall, or select "
                "other addresses with transport_options.node_ips.",
                peer,
            ) from None

    def _accept(self) -> None:
        try:
            connection, address = self._listener.socket.accept()
        except OSError:
            return
        if len(self._pending) >= _MAX_UNAUTHENTICATED + len(self._notes):
            connection.close()
            return
        handshake = self._respond(connection, str(address[0]))
        self._start(connection, handshake, None, time.monotonic() + _HANDSHAKE_S)

    def _start(
        self, connection: socket.socket, handshake: Handshake, peer: int | None, deadline: float
    ) -> None:
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
        pending.received.clear()
        try:
            pending.needed = next(pending.handshake) if data is None else pending.handshake.send(data)
        except StopIteration as end:
            peer, note = end.value
            self.missing.discard(peer)
            self.connected[peer] = PeerConnection(self._forget(pending), note)
        except (TransportError, OSError) as error:
            self._drop(pending, str(error))

    def _drop(self, pending: _Pending, reason: str) -> None:
        """Close a connection. Raises TransportError for a peer; an unknown process is only recorded."""
        self._forget(pending).close()
        if pending.peer is None:
            self.rejected.append(f"an unknown process ({reason})")
            return
        raise TransportError(
            f"rank {self._rank}: handshake with rank {pending.peer} failed: {reason}.", pending.peer
        )

    def _forget(self, pending: _Pending) -> socket.socket:
        self._pending.discard(pending)
        self._selector.unregister(pending.socket)
        return pending.socket

    # --- handshakes ---

    def _initiate(self, connection: socket.socket, peer: int) -> Handshake:
        return initiate(connection, self._rank, peer, self._key(peer), self._notes[peer])

    def _respond(self, connection: socket.socket, where: str) -> Handshake:
        return respond(
            connection,
            self._rank,
            where,
            lambda peer: peer < self._rank and peer in self.missing,
            lambda peer: (self._key(peer), self._notes[peer]),
        )

    def _key(self, peer: int) -> bytes:
        """Return the HMAC key for this rank and a peer: their tokens, the lower rank's first."""
        tokens = {peer: self._offers[peer].token, self._rank: self._listener.token}
        return tokens[min(tokens)] + tokens[max(tokens)]
