"""Handshake of two ranks over a tcp connection, as generators that yield how many bytes they need next.

    lower rank                                        higher rank, which listens
    hello: both ranks, a random number        ->
                                              <-      a random number, a note, the proof of both
    a note, the proof of both                 ->
                                              <-      accepted

A proof is an HMAC-SHA256 under the two ranks' tokens, which travel through the process group alone. The contents of
later messages are not encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Callable, Generator

from ds_ext.errors import ProtocolError

NONCE_BYTES, PROOF_BYTES = 16, 32
MAX_NOTE_BYTES = 4096
VERSION = 1
_MAGIC = b"DSX-TCP\0"
_HEADER = struct.Struct("<8sHHI")  # magic, version, kind, bytes that follow
_HELLO = struct.Struct(f"<II{NONCE_BYTES}s")
_MAX_BYTES = NONCE_BYTES + PROOF_BYTES + MAX_NOTE_BYTES
_KIND_HELLO, _KIND_ANSWER, _KIND_PROOF, _KIND_ACCEPTED, _KIND_REFUSED = range(1, 6)

Handshake = Generator[
    int, bytes, tuple[int, bytes]
]  # yields how many bytes it needs; returns (peer, its note)


def initiate(connection: socket.socket, rank: int, peer: int, key: bytes, note: bytes) -> Handshake:
    """Do the lower rank's side.

    Args:
        connection: to the peer.
        rank, peer: this rank and the other one.
        key: the tokens of both ranks, the lower one's first.
        note: up to 4096 bytes for the peer.

    Raises:
        ProtocolError: the peer refuses, or fails the check.
    """
    hello = _HELLO.pack(rank, peer, secrets.token_bytes(NONCE_BYTES))
    _send(connection, _KIND_HELLO, hello)
    answer = yield from _receive(_KIND_ANSWER)
    nonce, proof, theirs = _parts(answer)
    if not hmac.compare_digest(proof, _proof(key, b"answer", hello, nonce, theirs)):
        raise ProtocolError("what answers at its address does not know this job's token")
    _send(connection, _KIND_PROOF, nonce + _proof(key, b"proof", hello, nonce, note) + note)
    yield from _receive(_KIND_ACCEPTED)
    return peer, theirs


def respond(
    connection: socket.socket,
    rank: int,
    where: str,
    expects: Callable[[int], bool],
    secret: Callable[[int], tuple[bytes, bytes]],
) -> Handshake:
    """Do the higher rank's side.

    Args:
        connection: from a process that is not yet known.
        rank: this rank.
        where: the address of that process, for errors.
        expects: whether a rank may connect.
        secret: (key, note) for an expected rank; as in initiate().

    Raises:
        ProtocolError: the process is no expected rank; the refusal was sent to it.
    """
    try:
        hello = yield from _receive(_KIND_HELLO)
        peer, me, _ = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (-1, -1, b"")
        if me != rank or not expects(peer):
            raise ProtocolError(f"rank {rank} does not wait for rank {peer}")
        (key, mine), nonce = secret(peer), secrets.token_bytes(NONCE_BYTES)
        _send(connection, _KIND_ANSWER, nonce + _proof(key, b"answer", hello, nonce, mine) + mine)
        body = yield from _receive(_KIND_PROOF)
        again, proof, note = _parts(body)
        if again != nonce or not hmac.compare_digest(proof, _proof(key, b"proof", hello, nonce, note)):
            raise ProtocolError("it does not know this job's token")
        if not expects(peer):
            raise ProtocolError(f"rank {peer} is connected already")
    except ProtocolError as error:
        with contextlib.suppress(OSError):
            _send(connection, _KIND_REFUSED, str(error).encode())
        raise ProtocolError(f"{where}: {error}") from None
    _send(connection, _KIND_ACCEPTED, b"")
    return peer, note


def _send(connection: socket.socket, kind: int, body: bytes) -> None:
    # A few kilobytes always fit into a new socket.
    connection.send(_HEADER.pack(_MAGIC, VERSION, kind, len(body)) + body, socket.MSG_DONTWAIT)


def _receive(kind: int) -> Generator[int, bytes, bytes]:
    """Return the body of the next message, which must be of the kind."""
    found, size = read_header((yield _HEADER.size))
    body = (yield size) if size else b""
    if found == _KIND_REFUSED:
        raise ProtocolError(f"it refuses: {body.decode(errors='replace')[:500]}")
    if found != kind:
        raise ProtocolError(f"it sends a message of kind {found} where {kind} is due")
    return body


def read_header(data: bytes) -> tuple[int, int]:
    """Return (kind, bytes that follow) of a message of the handshake.

    Raises:
        ProtocolError: it is invalid, or of another version.
    """
    magic, version, kind, size = _HEADER.unpack(data)
    if magic != _MAGIC:
        raise ProtocolError("it does not speak ds_ext's protocol")
    if version != VERSION:
        raise ProtocolError(
            f"it speaks version {version} of the protocol, and this rank {VERSION}: install the same ds_ext"
        )
    if not _KIND_HELLO <= kind <= _KIND_REFUSED or size > _MAX_BYTES:
        raise ProtocolError(f"a message of kind {kind} and {size} bytes")
    return kind, size


def _parts(body: bytes) -> tuple[bytes, bytes, bytes]:
    """Return (random number, proof, note)."""
    if len(body) < NONCE_BYTES + PROOF_BYTES:
        raise ProtocolError(f"a proof of {len(body)} bytes")
    return (
        body[:NONCE_BYTES],
        body[NONCE_BYTES : NONCE_BYTES + PROOF_BYTES],
        body[NONCE_BYTES + PROOF_BYTES :],
    )


def _proof(key: bytes, role: bytes, hello: bytes, nonce: bytes, note: bytes) -> bytes:
    return hmac.new(key, role + hello + nonce + note, hashlib.sha256).digest()
