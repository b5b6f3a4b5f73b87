"""The shared memory of one rank on its way to its peers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ds_ext.comm import _native
from ds_ext.comm.rendezvous import Card, Listener, Meeting, meet
from ds_ext.comm.shm_links import Links
from ds_ext.errors import TransportError

# Unreceived bytes per link from which on send() waits: far above what a pipeline keeps under way.
SEND_WINDOW_BYTES = 256 << 20
MEETING_S = 20.0  # ranks that come here have just come out of a collective
MOST_SPIN_US = 100.0
SPIN_VARIABLE = "DS_EXT_SPIN_US"

Pairs = Mapping[tuple[int, int], int]


class Setup:
    """A rank's bell and the segments that it will receive from, and the meeting with the peers.

    Args:
        rank: this rank.
        pairs: (source, destination) of all links, with the messages that the receiver may hold at a time.
    """

    def __init__(self, rank: int, pairs: Pairs) -> None:
        self._rank, self._pairs = rank, pairs
        self._listener = Listener()
        self._port: _native.Port | None = None
        self._incoming: dict[int, _native.Incoming] = {}
        self._outgoing: dict[int, _native.Outgoing] = {}
        self._met: dict[int, Meeting] = {}

    def card(self) -> Card:
        """Make what this rank brings, and say how to reach it, or why not."""
        try:
            self._port = _native.Port()
            for source, destination in self._pairs:
                if destination == self._rank:
                    self._incoming[source] = _native.Incoming(source, destination, self._listener.token)
        except OSError as error:
            return self._listener.card(refusal=error.strerror or str(error))
        return self._listener.card()

    def connect(self, cards: Sequence[Card], timeout_s: float) -> str | None:
        """Exchange bells and segments with all peers. Returns why that failed, if so."""
        assert self._port is not None
        pairs = self._pairs
        peers = sorted({a + b - self._rank for a, b in pairs if self._rank in (a, b)})
        files = {peer: [self._port.fileno()] for peer in peers}
        for peer, link in self._incoming.items():
            files[peer].append(link.fileno())
        expected = {peer: 1 + ((self._rank, peer) in pairs) for peer in peers}
        try:
            limit_s = min(timeout_s, MEETING_S)
            self._met = meet(self._listener, self._rank, cards, files, expected, limit_s)
            for peer, meeting in self._met.items():
                self._take(peer, meeting, cards[peer])
        except (TransportError, OSError, _native.SegmentError) as error:
            return str(error)
        self._port.close_fileno()
        return None

    def links(self, cards: Sequence[Card]) -> Links:
        """What the transport works with, after connect()."""
        assert self._port is not None
        for link in self._incoming.values():
            self._port.add(link)
        here = sum(card.host == cards[self._rank].host for card in cards)
        self._port.spin(spin_us(here))
        slots = {source: most for (source, target), most in self._pairs.items() if target == self._rank}
        watches = {peer: meeting.take_watch() for peer, meeting in self._met.items()}
        return Links(self._port, self._incoming, self._outgoing, slots, watches)

    def close(self) -> None:
        """Close what links() has not taken over."""
        self._listener.close()
        for meeting in self._met.values():
            meeting.close()

    def _take(self, peer: int, meeting: Meeting, card: Card) -> None:
        bell, *segments = meeting.take_files()
        if peer in self._incoming:
            self._incoming[peer].connect(os.dup(bell))
        if segments:
            link = _native.Outgoing(
                segments[0], os.dup(bell), self._rank, peer, card.token, SEND_WINDOW_BYTES
            )
            self._outgoing[peer] = link
        os.close(bell)


def spin_us(ranks_here: int) -> float:
    """Microseconds to look before a sleep, at most: none where ranks wait for a core."""
    given = os.environ.get(SPIN_VARIABLE)
    if given is not None:
        try:
            return max(0.0, float(given))
        except ValueError:
            raise TransportError(f"{SPIN_VARIABLE} must be a number of microseconds; got {given!r}") from None
    return MOST_SPIN_US if ranks_here <= usable_cores() else 0.0


def usable_cores() -> float:
    """Cores that this process may use, by its affinity and its control group's quota."""
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        return cores
