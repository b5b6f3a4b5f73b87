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


def listen(address: str, port: int, token: str) -> int:
    """Answer probes that start with the token, until this process ends. Return the port.

    ``port`` 0 is a free port; ``token`` is from :func:`new_token`.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=64)
    threading.Thread(target=_accept, args=(listener, token.encode()), daemon=True).start()
    return listener.getsockname()[1]


def _accept(listener: socket.socket, token: bytes) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection, token), daemon=True).start()


def _answer(connection: socket.socket, token: bytes) -> None:
    """Answer one probe: the token, and in a measurement every ping and the number of received bytes."""
    with contextlib.suppress(OSError), connection:
        connection.settimeout(_IO_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer_token = _read(connection, len(token))
        mode = _read(connection, len(_MEASURE))
        if not hmac.compare_digest(peer_token, token):
            return
        connection.sendall(token)
        if mode == _MEASURE:
            for _ in range(_PINGS):
                connection.sendall(_read(connection, _PING_BYTES))
            room = bytearray(len(_BLOCK))
            total_bytes = 0
            while num_bytes := connection.recv_into(room):
                total_bytes += num_bytes
            connection.sendall(total_bytes.to_bytes(8, "big"))


def new_token() -> str:
    return secrets.token_hex(16)


def reach(address: str, port: int, token: str) -> None:
    """Connect to the port of :func:`listen` on another host. Raises Unreachable."""
    _connect(address, port, token, _REACH).close()


def measure(address: str, port: int, token: str) -> dict[str, float]:
    """Return round trip and bandwidth of one connection to the port of :func:`listen`. Raises Unreachable."""
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
    return {"round_trip_us": 1e6 * statistics.median(trips), "gbit_s": 8e-9 * sent / seconds}


def _connect(address: str, port: int, token: str, mode: bytes) -> socket.socket:
    try:
        connection = socket.create_connection((address, port), timeout=CONNECT_S)
    except TimeoutError:
        raise Unreachable(f"no answer within {CONNECT_S:g} s") from None
    except OSError as error:
        raise Unreachable(_REFUSALS.get(error.errno or 0, error.strerror or str(error))) from None
    try:
        connection.settimeout(_IO_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(token.encode() + mode)
        if _read(connection, len(token)) != token.encode():
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
