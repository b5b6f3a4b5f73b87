"""TCP probe between two hosts: whether a port can be reached, round-trip time and bandwidth."""

from __future__ import annotations

import contextlib
import errno
import hmac
import secrets
import socket
import statistics
import threading
import time
from dataclasses import dataclass

TOKEN_BYTES = 16
CONNECT_S = 3.0
_IO_S = 10.0
_PINGS, _PING_BYTES = 50, 64
_BLOCK, _SENDING_S = bytes(1 << 20), 0.3
_REACH, _MEASURE = b"r", b"m"
_REFUSALS = {
    errno.ECONNREFUSED: "refused",
    errno.EHOSTUNREACH: "no route to the host, or a firewall rejects the connection",
    errno.ENETUNREACH: "no route to the network",
}


class Unreachable(OSError):
    """Reason why a host did not accept a connection."""


@dataclass(frozen=True)
class Speed:
    """Measured speed of one TCP connection: round trip in microseconds, bandwidth in Gbit/s."""

    round_trip_us: float
    gbit_s: float


class Listener:
    """Listening socket that answers probes with the right token until it is closed.

    Args:
        address: address to listen on.
        port: port number; 0: a free port.
        token: bytes that every probe starts with.
    """

    def __init__(self, address: str, port: int, token: bytes) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket, self._token = socket.socket(family, socket.SOCK_STREAM), token
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((address, port))
            self._socket.listen(64)
        except OSError:
            self._socket.close()
            raise
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        """Port on which the socket listens."""
        return self._socket.getsockname()[1]

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.settimeout(_IO_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            words = _read(connection, TOKEN_BYTES + 1)
            if not hmac.compare_digest(words[:TOKEN_BYTES], self._token):
                return
            connection.sendall(self._token)
            if words[TOKEN_BYTES:] == _MEASURE:
                for _ in range(_PINGS):
                    connection.sendall(_read(connection, _PING_BYTES))
                room, count = bytearray(len(_BLOCK)), 0
                while received := connection.recv_into(room):
                    count += received
                connection.sendall(count.to_bytes(8, "big"))


def new_token() -> bytes:
    """Return a random token for a :class:`Listener`."""
    return secrets.token_bytes(TOKEN_BYTES)


def reach(address: str, port: int, token: bytes) -> None:
    """Connect to a :class:`Listener`. Raises Unreachable."""
    _connect(address, port, token, _REACH).close()


def measure(address: str, port: int, token: bytes) -> Speed:
    """Return the speed of one connection to a :class:`Listener`. Raises Unreachable."""
    with _connect(address, port, token, _MEASURE) as connection:
        try:
            trips = []
            for _ in range(_PINGS):
                started = time.perf_counter()
                connection.sendall(bytes(_PING_BYTES))
                _read(connection, _PING_BYTES)
                trips.append(time.perf_counter() - started)
            started = time.perf_counter()
            while time.perf_counter() - started < _SENDING_S:
                connection.sendall(_BLOCK)
            connection.shutdown(socket.SHUT_WR)
            sent = int.from_bytes(_read(connection, 8), "big")
            seconds = time.perf_counter() - started
        except OSError as error:
            raise Unreachable(f"connection lost during the measurement ({error})") from None
    return Speed(1e6 * statistics.median(trips), 8e-9 * sent / seconds)


def _connect(address: str, port: int, token: bytes, mode: bytes) -> socket.socket:
    try:
        connection = socket.create_connection((address, port), timeout=CONNECT_S)
    except TimeoutError:
        raise Unreachable(f"no answer within {CONNECT_S:g} s") from None
    except OSError as error:
        raise Unreachable(_REFUSALS.get(error.errno or 0, error.strerror or str(error))) from None
    try:
        connection.settimeout(_IO_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(token + mode)
        if _read(connection, TOKEN_BYTES) != token:
            raise OSError("another program answered")
    except OSError as error:
        connection.close()
        raise Unreachable(f"connected, but {error}") from None
    return connection


def _read(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            raise OSError("the connection was closed")
        received += part
    return received
