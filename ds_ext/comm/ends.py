"""What a kind of link gives to the transport: the native ends, by peer. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ds_ext.comm import _native

# Unreceived bytes per link from which on send() waits: far above what a pipeline keeps under way.
SEND_WINDOW_BYTES = 256 << 20
MEETING_S = 20.0  # ranks that come here have just come out of a collective

Pairs = Mapping[
    tuple[int, int], int
]  # (source, destination) -> messages that the receiver may hold at a time


@dataclass
class Ends:
    """The ends of one rank.

    ``watches`` are descriptors that become readable when the peer's process ends; whoever has them closes them.
    """

    incoming: dict[int, _native.Incoming] = field(default_factory=dict)
    outgoing: dict[int, _native.Outgoing] = field(default_factory=dict)
    watches: dict[int, int] = field(default_factory=dict)

    def add(self, other: Ends) -> None:
        """Take over another kind's."""
        self.incoming |= other.incoming
        self.outgoing |= other.outgoing
        self.watches |= other.watches

    def close(self) -> None:
        """Give up what no transport has taken over."""
        for end in (*self.incoming.values(), *self.outgoing.values()):
            end.close()
        for watch in self.watches.values():
            os.close(watch)
        self.incoming, self.outgoing, self.watches = {}, {}, {}


class LinkSetup(Protocol):
    """The links of one kind and one rank on their way, from the card to the ends.

    Every step but close() is done by all ranks together, and the next one only when all have succeeded.
    """

    def card(self) -> Any:
        """What the others must know; TransportError or OSError says why this rank cannot have such links."""
        ...

    @staticmethod
    def why_not(mine: Any, theirs: Any, same_host: bool) -> str | None:
        """What speaks against links between two ranks with these cards, as words that follow "the ranks"."""
        ...

    def prepare(self, pairs: Pairs) -> None:
        """Make what the links need; errors as card()."""
        ...

    def connect(self, cards: Mapping[int, Any], pairs: Pairs, timeout_s: float) -> Ends:
        """Meet the peers of the pairs that this rank is in; errors as card(), and LinkError."""
        ...

    def close(self) -> None:
        """Close what connect() has not handed over."""
        ...


def both_ways(pairs: Pairs) -> dict[tuple[int, int], int]:
    """The pairs, and where one is missing its reverse."""
    return {(b, a): 1 for a, b in pairs} | dict(pairs)


def peers_of(rank: int, pairs: Pairs) -> list[int]:
    """Whom the rank exchanges messages with, in order."""
    return sorted({a + b - rank for a, b in pairs if rank in (a, b)})
