"""What two ranks say when they meet over tcp, as generators that yield how many bytes they need next.

    lower rank                                        higher rank, which listens
    hello: both ranks, a random number        ->
                                              <-      a random number, a note, the proof of both
    a note, the proof of both                 ->
                                              <-      welcome

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
MOST_NOTE_BYTES = 4096
VERSION = 1
_MAGIC = b"DSX-TCP\0"
_HEAD = struct.Struct("<8sHHI")  # magic, version, kind, bytes that follow
_HELLO = struct.Struct(f"<II{NONCE_BYTES}s")
_MOST_BYTES = NONCE_BYTES + PROOF_BYTES + MOST_NOTE_BYTES
_KIND_HELLO, _KIND_ANSWER, _KIND_PROOF, _KIND_WELCOME, _KIND_REFUSED = range(1, 6)

Talk = Generator[int, bytes, tuple[int, bytes]]  # yields how many bytes it needs; returns (peer, its note)


def call(connection: socket.socket, rank: int, peer: int, key: bytes, note: bytes) -> Talk:
    """The lower rank's side.

    Args:
        key: the tokens of both ranks, the lower one's first.
        note: up to 4096 bytes for the peer.

    Raises:
        ProtocolError: the peer refuses, or is not who it should be.
    """
    hello = _HELLO.pack(rank, peer, secrets.token_bytes(NONCE_BYTES))
    _say(connection, _KIND_HELLO, hello)
    answer = yield from _hear(_KIND_ANSWER)
    nonce, proof, theirs = _parts(answer)
    if not hmac.compare_digest(proof, _proof(key, b"answer", hello, nonce, theirs)):
        raise ProtocolError("what answers at its address does not know this job's token")
    _say(connection, _KIND_PROOF, nonce + _proof(key, b"proof", hello, nonce, note) + note)
    yield from _hear(_KIND_WELCOME)
    return peer, theirs


def answer(
    connection: socket.socket,
    rank: int,
    where: str,
    waits_for: Callable[[int], bool],
    secret: Callable[[int], tuple[bytes, bytes]],
) -> Talk:
    """The higher rank's side.

    Args:
        where: the guest's address, for errors.
        waits_for: whether a rank may come.
        secret: (key, note) for a rank that may; as in call().

    Raises:
        ProtocolError: the guest is no such rank; it was told so.
    """
    try:
        hello = yield from _hear(_KIND_HELLO)
        peer, me, _ = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (-1, -1, b"")
        if me != rank or not waits_for(peer):
            raise ProtocolError(f"rank {rank} does not wait for rank {peer}")
        (key, mine), nonce = secret(peer), secrets.token_bytes(NONCE_BYTES)
        _say(connection, _KIND_ANSWER, nonce + _proof(key, b"answer", hello, nonce, mine) + mine)
        said = yield from _hear(_KIND_PROOF)
        again, proof, note = _parts(said)
        if again != nonce or not hmac.compare_digest(proof, _proof(key, b"proof", hello, nonce, note)):
            raise ProtocolError("it does not know this job's token")
        if not waits_for(peer):
            raise ProtocolError(f"rank {peer} is connected already")
    except ProtocolError as error:
        with contextlib.suppress(OSError):
            _say(connection, _KIND_REFUSED, str(error).encode())
        raise ProtocolError(f"{where}: {error}") from None
    _say(connection, _KIND_WELCOME, b"")
    return peer, note


def _say(connection: socket.socket, kind: int, body: bytes) -> None:
    # A few kilobytes always fit into a socket that was just made.
    connection.send(_HEAD.pack(_MAGIC, VERSION, kind, len(body)) + body, socket.MSG_DONTWAIT)


def _hear(kind: int) -> Generator[int, bytes, bytes]:
    """The body of the next message, which must be of the kind."""
    found, size = read_head((yield _HEAD.size))
    body = (yield size) if size else b""
    if found == _KIND_REFUSED:
        raise ProtocolError(f"it refuses: {body.decode(errors='replace')[:500]}")
    if found != kind:
        raise ProtocolError(f"it says {found} where {kind} is due")
    return body


def read_head(data: bytes) -> tuple[int, int]:
    """(kind, bytes that follow) of a message of the meeting; ProtocolError when it is none."""
    magic, version, kind, size = _HEAD.unpack(data)
    if magic != _MAGIC:
        raise ProtocolError("it does not speak ds_ext's protocol")
    if version != VERSION:
        raise ProtocolError(
            f"it speaks version {version} of the protocol, and this rank {VERSION}: install the same ds_ext"
        )
    if not _KIND_HELLO <= kind <= _KIND_REFUSED or size > _MOST_BYTES:
        raise ProtocolError(f"a message of kind {kind} and {size} bytes")
    return kind, size


def _parts(body: bytes) -> tuple[bytes, bytes, bytes]:
    """(random number, proof, note)."""
    if len(body) < NONCE_BYTES + PROOF_BYTES:
        raise ProtocolError(f"a proof of {len(body)} bytes")
    return (
        body[:NONCE_BYTES],
        body[NONCE_BYTES : NONCE_BYTES + PROOF_BYTES],
        body[NONCE_BYTES + PROOF_BYTES :],
    )


def _proof(key: bytes, role: bytes, hello: bytes, nonce: bytes, note: bytes) -> bytes:
    return hmac.new(key, role + hello + nonce + note, hashlib.sha256).digest()
