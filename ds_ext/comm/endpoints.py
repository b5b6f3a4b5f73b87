"""Endpoints of a rank's links, and the interface by which each kind of link makes them. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ds_ext.comm import _native

# Unreceived bytes per link from which on send() waits: far above what a pipeline keeps in flight.
SEND_WINDOW_BYTES = 256 << 20
HANDSHAKE_S = 20.0  # all ranks enter a handshake right after a collective

Pairs = Mapping[tuple[int, int], int]  # (source, destination) -> messages that the receiver may hold


@dataclass
class Endpoints:
    """Native endpoints of one rank, by peer.

    ``watches`` are descriptors that become readable when the peer's process ends. The owner of this object closes them.
    """

    incoming: dict[int, _native.Incoming] = field(default_factory=dict)
    outgoing: dict[int, _native.Outgoing] = field(default_factory=dict)
    watches: dict[int, int] = field(default_factory=dict)

    def add(self, other: Endpoints) -> None:
        """Take over the endpoints of another kind of link."""
        self.incoming |= other.incoming
        self.outgoing |= other.outgoing
        self.watches |= other.watches

    def close(self) -> None:
        """Close all endpoints and watches."""
        for endpoint in (*self.incoming.values(), *self.outgoing.values()):
            endpoint.close()
        for watch in self.watches.values():
            os.close(watch)
        self.incoming, self.outgoing, self.watches = {}, {}, {}


class LinkSetup(Protocol):
    """Set-up of one rank's links of one kind: offer, prepare, connect.

    All ranks do every step but close() together, and the next one only when all have succeeded.
    """

    def offer(self) -> Any:
        """Return what the peers need to connect; TransportError or OSError if this rank cannot have such links."""
        ...

    @staticmethod
    def incompatibility(mine: Any, theirs: Any, same_host: bool) -> str | None:
        """Return why ranks with these offers cannot be linked, as words that follow "the ranks"; None if they can."""
        ...

    def prepare(self, pairs: Pairs) -> None:
        """Make what the links need; errors as offer()."""
        ...

    def connect(self, offers: Mapping[int, Any], pairs: Pairs, timeout_s: float) -> Endpoints:
        """Do the handshake with every peer of this rank; errors as offer(), and LinkError."""
        ...

    def close(self) -> None:
        """Close what connect() has not handed over."""
        ...


def both_ways(pairs: Pairs) -> dict[tuple[int, int], int]:
    """Return the pairs and every missing reverse pair."""
    return {(b, a): 1 for a, b in pairs} | dict(pairs)


def peers_of(rank: int, pairs: Pairs) -> list[int]:
    """Return the ranks that exchange messages with a rank, in order."""
    return sorted({a + b - rank for a, b in pairs if rank in (a, b)})
