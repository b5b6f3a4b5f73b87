"""The shared memory of one rank on its way to its peers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ds_ext.comm import _native, ends
from ds_ext.comm.ends import Ends, Pairs, peers_of
from ds_ext.comm.rendezvous import Listener, Meeting, UnixCard, meet


class ShmSetup:
    """LinkSetup for ranks of one host: the segments that this rank will receive from, and the meeting."""

    def __init__(self, rank: int, port: _native.Port, node_ips: Sequence[str] | None = None) -> None:
        self._rank, self._port = rank, port
        self._listener = Listener()
        self._incoming: dict[int, _native.ShmIncoming] = {}
        self._met: dict[int, Meeting] = {}

    def card(self) -> UnixCard:
        """How to reach this rank on its host."""
        return self._listener.card()

    @staticmethod
    def why_not(mine: UnixCard, theirs: UnixCard, same_host: bool) -> str | None:
        """Only ranks of one host share memory."""
        return None if same_host else "are on different hosts"

    def prepare(self, pairs: Pairs) -> None:
        """Make a segment for every link to this rank."""
        for source, destination in pairs:
            if destination == self._rank:
                link = _native.ShmIncoming(source, destination, self._listener.token)
                self._incoming[source] = link

    def connect(self, cards: Mapping[int, UnixCard], pairs: Pairs, timeout_s: float) -> Ends:
        """Exchange bells and segments with all peers."""
        peers = peers_of(self._rank, pairs)
        files = {peer: [self._port.fileno()] for peer in peers}
        for peer, link in self._incoming.items():
            files[peer].append(link.fileno())
        expected = {peer: 1 + ((self._rank, peer) in pairs) for peer in peers}
        self._met = meet(self._listener, self._rank, cards, files, expected, timeout_s)
        made = Ends(incoming=dict(self._incoming))
        for peer, meeting in self._met.items():
            outgoing = self._take(peer, meeting, cards[peer])
            if outgoing is not None:
                made.outgoing[peer] = outgoing
        made.watches = {peer: meeting.take_watch() for peer, meeting in self._met.items()}
        return made

    def close(self) -> None:
        """Close what connect() has not handed over."""
        self._listener.close()
        for meeting in self._met.values():
            meeting.close()

    def _take(self, peer: int, meeting: Meeting, card: UnixCard) -> _native.ShmOutgoing | None:
        bell, *segments = meeting.take_files()
        try:
            if peer in self._incoming:
                self._incoming[peer].connect(os.dup(bell))
            if not segments:
                return None
            return _native.ShmOutgoing(
                segments[0], os.dup(bell), self._rank, peer, card.token, ends.SEND_WINDOW_BYTES
            )
        finally:
            os.close(bell)
