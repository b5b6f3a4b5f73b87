"""Handshake between two ranks over a tcp connection, as generators that yield the number of bytes they need next.

    lower rank                                        higher rank, which listens
    hello: both ranks, a nonce                ->
                                              <-      a nonce, a note, their HMAC
    a note, its HMAC                          ->
                                              <-      accepted

The HMAC-SHA256 also covers the hello and the nonce. Its key is derived from the two ranks' tokens, which the job's
process group distributes. Later messages are not encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Callable, Generator

from ...errors import ProtocolError

NONCE_BYTES, PROOF_BYTES = 16, 32
MAX_NOTE_BYTES = 4096
VERSION = 1
_MAGIC = b"DSX-TCP\0"
_HEADER = struct.Struct("<8sHHI")  # magic, version, kind, bytes of the body
_HELLO = struct.Struct(f"<II{NONCE_BYTES}s")
_MAX_BYTES = NONCE_BYTES + PROOF_BYTES + MAX_NOTE_BYTES
_KIND_HELLO, _KIND_ANSWER, _KIND_PROOF, _KIND_ACCEPTED, _KIND_REFUSED = range(1, 6)

Handshake = Generator[int, bytes, tuple[int, bytes]]  # yields the bytes needed; returns (peer, its note)


def initiate(connection: socket.socket, rank: int, peer: int, key: bytes, note: bytes) -> Handshake:
    """Run the lower rank's side of the handshake.

    Args:
        key: tokens of both ranks, the lower rank's first.
        note: up to 4096 bytes for the peer.
    """
    hello = _HELLO.pack(rank, peer, secrets.token_bytes(NONCE_BYTES))
    _send(connection, _KIND_HELLO, hello)
    answer = yield from _receive(_KIND_ANSWER)
    nonce, proof, peer_note = _split_body(answer)
    if not hmac.compare_digest(proof, _proof(key, b"answer", hello, nonce, peer_note)):
        raise ProtocolError("wrong job token from the process at its address")
    _send(connection, _KIND_PROOF, nonce + _proof(key, b"proof", hello, nonce, note) + note)
    yield from _receive(_KIND_ACCEPTED)
    return peer, peer_note


def respond(
    connection: socket.socket,
    rank: int,
    where: str,
    expects: Callable[[int], bool],
    secret: Callable[[int], tuple[bytes, bytes]],
) -> Handshake:
    """Run the higher rank's side of the handshake.

    Args:
        connection: connection from an unauthenticated process.
        where: address of that process, for errors.
        expects: function that returns whether a rank may connect.
        secret: function that returns (key, note) for a rank, as in initiate().
    """
    try:
        hello = yield from _receive(_KIND_HELLO)
        peer, addressee, _ = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (-1, -1, b"")
        if addressee != rank or not expects(peer):
            raise ProtocolError(f"rank {rank} does not expect rank {peer}")
        key, note = secret(peer)
        nonce = secrets.token_bytes(NONCE_BYTES)
        _send(connection, _KIND_ANSWER, nonce + _proof(key, b"answer", hello, nonce, note) + note)
        body = yield from _receive(_KIND_PROOF)
        peer_nonce, proof, peer_note = _split_body(body)
        expected = _proof(key, b"proof", hello, nonce, peer_note)
        if peer_nonce != nonce or not hmac.compare_digest(proof, expected):
            raise ProtocolError("wrong job token")
        if not expects(peer):
            raise ProtocolError(f"rank {peer} is already connected")
    except ProtocolError as error:
        with contextlib.suppress(OSError):
            _send(connection, _KIND_REFUSED, str(error).encode())
        raise ProtocolError(f"{where}: {error}") from None
    _send(connection, _KIND_ACCEPTED, b"")
    return peer, peer_note


def _send(connection: socket.socket, kind: int, body: bytes) -> None:
    # The send buffer of a new socket always has room for a few kilobytes.
    connection.send(_HEADER.pack(_MAGIC, VERSION, kind, len(body)) + body, socket.MSG_DONTWAIT)


def _receive(kind: int) -> Generator[int, bytes, bytes]:
    """Return the body of the next message. Raises ProtocolError for another kind of message or a refusal."""
    received_kind, size = read_header((yield _HEADER.size))
    body = (yield size) if size else b""
    if received_kind == _KIND_REFUSED:
        raise ProtocolError(f"refused by the peer: {body.decode(errors='replace')[:500]}")
    if received_kind != kind:
        raise ProtocolError(f"expected a message of kind {kind} (got {received_kind})")
    return body


def read_header(data: bytes) -> tuple[int, int]:
    """Return (kind, bytes of the body) of a handshake message."""
    magic, version, kind, size = _HEADER.unpack(data)
    if magic != _MAGIC:
        raise ProtocolError("wrong magic number: not a ds_ext rank")
    if version != VERSION:
        raise ProtocolError(
            f"protocol version: must be {VERSION} (got {version}). Install the same ds_ext on all hosts"
        )
    if not _KIND_HELLO <= kind <= _KIND_REFUSED or size > _MAX_BYTES:
        raise ProtocolError(f"invalid header (got kind {kind}, {size} bytes)")
    return kind, size


def _split_body(body: bytes) -> tuple[bytes, bytes, bytes]:
    """Return (nonce, HMAC, note) of an answer or a proof."""
    if len(body) < NONCE_BYTES + PROOF_BYTES:
        raise ProtocolError(f"message too short (got {len(body)} bytes)")
    return (
        body[:NONCE_BYTES],
        body[NONCE_BYTES : NONCE_BYTES + PROOF_BYTES],
        body[NONCE_BYTES + PROOF_BYTES :],
    )


def _proof(key: bytes, role: bytes, hello: bytes, nonce: bytes, note: bytes) -> bytes:
    """Return the HMAC of one side of the handshake; ``role`` keeps a side from repeating the other's HMAC."""
    return hmac.new(key, role + hello + nonce + note, hashlib.sha256).digest()
