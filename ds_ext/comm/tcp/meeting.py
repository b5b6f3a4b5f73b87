"""How ranks of any hosts meet over tcp: each connects to the higher ones, and listens for the lower ones.

What they say to each other, and how they prove that they know the job, is in tcp_talk.py.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ds_ext.comm.tcp.address import listening
from ds_ext.comm.tcp.talk import Talk, answer, call
from ds_ext.errors import TransportError

TOKEN_BYTES = 16
_GUEST_S = 5.0  # how long a guest may take
_MOST_GUESTS = 256


@dataclass(frozen=True)
class TcpCard:
    """How to reach a rank from any host."""

    address: str
    port: int
    token: bytes


@dataclass
class Met:
    """A connection to a peer that has proven who it is, and the note it gave."""

    socket: socket.socket
    note: bytes


class TcpListener:
    """The listening socket of one rank, and its card."""

    def __init__(self, address: str) -> None:
        self.socket = listening(address)
        self.socket.setblocking(False)
        self.token = secrets.token_bytes(TOKEN_BYTES)

    def card(self) -> TcpCard:
        """This rank's card."""
        address, port = self.socket.getsockname()[:2]
        return TcpCard(address, port, self.token)

    def close(self) -> None:
        """Nobody can connect any more."""
        self.socket.close()


@dataclass(eq=False)
class _Line:
    """A connection under way: what was received of it, and the talk that reads it."""

    socket: socket.socket
    talk: Talk
    peer: int | None  # None: a guest that has not said who it is
    deadline: float
    wanted: int = 0
    received: bytearray = field(default_factory=bytearray)


def meet(
    listener: TcpListener,
    rank: int,
    cards: Mapping[int, TcpCard],
    notes: Mapping[int, bytes],
    timeout_s: float,
) -> dict[int, Met]:
    """Connect to every peer.

    Args:
        cards: of all peers.
        notes: by peer, up to 4096 bytes for it.
        timeout_s: for all of them together.

    Raises:
        TransportError: a peer cannot be reached, did not come, or refuses. All connections are closed then.
    """
    meeting = _Meeting(listener, rank, cards, notes, time.monotonic() + timeout_s)
    try:
        meeting.run()
    except BaseException:
        for met in meeting.met.values():
            met.socket.close()
        raise
    finally:
        meeting.close()
    if missing := sorted(meeting.missing):
        for met in meeting.met.values():
            met.socket.close()
        turned = f"; turned away: {', '.join(meeting.turned_away[-3:])}" if meeting.turned_away else ""
        card = cards[missing[0]]
        raise TransportError(
            f"rank {rank} (listening at {listener.card().address}): rank {missing[0]} ({card.address}) did not connect "
            f"within {timeout_s:g} s{turned}. Both must reach each other's address; transport_options.node_ips "
            "chooses others",
            missing[0],
        )
    return meeting.met


class _Meeting:
    def __init__(
        self,
        listener: TcpListener,
        rank: int,
        cards: Mapping[int, TcpCard],
        notes: Mapping[int, bytes],
        deadline: float,
    ) -> None:
        self._listener, self._rank, self._cards, self._notes = listener, rank, cards, notes
        self._deadline = deadline
        self._selector = selectors.DefaultSelector()
        self._lines: set[_Line] = set()
        self.missing = set(notes)
        self.met: dict[int, Met] = {}
        self.turned_away: list[str] = []

    def run(self) -> None:
        for peer in sorted(peer for peer in self.missing if peer > self._rank):
            connection = self._connect(peer)
            self._open(connection, self._call(connection, peer), peer, self._deadline)
        self._selector.register(self._listener.socket, selectors.EVENT_READ)
        while self.missing and (left := self._deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(min(left, 0.5)):
                if key.data is None:
                    self._welcome()
                else:
                    self._read(key.data)
            for line in [line for line in self._lines if line.deadline < time.monotonic()]:
                self._drop(line, "silent for too long")

    def close(self) -> None:
        for line in list(self._lines):
            self._forget(line).close()
        self._selector.close()

    # --- connections ---

    def _connect(self, peer: int) -> socket.socket:
        card = self._cards[peer]
        try:
            return socket.create_connection(
                (card.address, card.port), max(0.001, self._deadline - time.monotonic())
            )
        except OSError as error:
            raise TransportError(
                f"rank {self._rank} (listening at {self._listener.card().address}) cannot reach rank {peer} at "
                f"{card.address} port {card.port}: {error.strerror or error}. Is there a firewall between them? "
                "transport_options.node_ips chooses other addresses",
                peer,
            ) from None

    def _welcome(self) -> None:
        try:
            guest, address = self._listener.socket.accept()
        except OSError:
            return
        if len(self._lines) >= _MOST_GUESTS + len(self._notes):
            guest.close()
            return
        self._open(guest, self._answer(guest, str(address[0])), None, time.monotonic() + _GUEST_S)

    def _open(self, connection: socket.socket, talk: Talk, peer: int | None, deadline: float) -> None:
        line = _Line(connection, talk, peer, deadline)
        connection.setblocking(True)
        self._lines.add(line)
        self._selector.register(connection, selectors.EVENT_READ, line)
        self._go_on(line, None)

    def _read(self, line: _Line) -> None:
        try:
            data = line.socket.recv(line.wanted - len(line.received), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            return self._drop(line, error.strerror or str(error))
        if not data:
            return self._drop(line, "it closed the connection")
        line.received += data
        if len(line.received) == line.wanted:
            self._go_on(line, bytes(line.received))

    def _go_on(self, line: _Line, data: bytes | None) -> None:
        line.received.clear()
        try:
            line.wanted = next(line.talk) if data is None else line.talk.send(data)
        except StopIteration as end:
            peer, note = end.value
            self.missing.discard(peer)
            self.met[peer] = Met(self._forget(line), note)
        except (TransportError, OSError) as error:
            self._drop(line, str(error))

    def _drop(self, line: _Line, reason: str) -> None:
        """End a connection: a stranger's is no failure, a peer's is."""
        self._forget(line).close()
        if line.peer is None:
            self.turned_away.append(f"a guest ({reason})")
            return
        raise TransportError(f"rank {self._rank}: rank {line.peer} is not met: {reason}", line.peer)

    def _forget(self, line: _Line) -> socket.socket:
        self._lines.discard(line)
        self._selector.unregister(line.socket)
        return line.socket

    # --- what is said ---

    def _call(self, connection: socket.socket, peer: int) -> Talk:
        return call(connection, self._rank, peer, self._key(peer), self._notes[peer])

    def _answer(self, connection: socket.socket, where: str) -> Talk:
        return answer(
            connection,
            self._rank,
            where,
            lambda peer: peer < self._rank and peer in self.missing,
            lambda peer: (self._key(peer), self._notes[peer]),
        )

    def _key(self, peer: int) -> bytes:
        """What only the two ranks' job knows."""
        tokens = {peer: self._cards[peer].token, self._rank: self._listener.token}
        return tokens[min(tokens)] + tokens[max(tokens)]
