"""Endpoints of a rank's links, and the interface for their set-up. Needs no torch."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from . import _native

# send() waits above this number of unreceived bytes per link, far more than a pipeline keeps in flight.
SEND_WINDOW_BYTES = 256 << 20
HANDSHAKE_S = 20.0  # all ranks enter a handshake right after a collective

# How a peer has ended, as the native endpoints report it.
FAILED, CLOSED = "failed: ", "has closed its transport"

Pairs = Mapping[tuple[int, int], int]  # (source, destination) -> messages that the receiver may hold


@dataclass
class Endpoints:
    """Native endpoints of one rank, by peer.

    Attributes:
        watches: file descriptors that become readable when the peer's process exits; closed by close().
    """

    incoming: dict[int, _native.Incoming] = field(default_factory=dict)
    outgoing: dict[int, _native.Outgoing] = field(default_factory=dict)
    watches: dict[int, int] = field(default_factory=dict)

    def add(self, other: Endpoints) -> None:
        self.incoming |= other.incoming
        self.outgoing |= other.outgoing
        self.watches |= other.watches

    def ended_peer(self, peers: Iterable[int]) -> tuple[int, str] | None:
        """Return a peer that will send no more messages, and how it ended; None if all peers are connected.

        A peer that closed its transport counts only if all ``peers`` have, because the others may still send.
        """
        closed: list[tuple[int, str]] = []
        peers = list(peers)
        for peer in peers:
            endpoints = [links[peer] for links in (self.incoming, self.outgoing) if peer in links]
            reasons = filter(None, (endpoint.end_reason() for endpoint in endpoints))
            ranked = sorted(reasons, key=lambda reason: not reason.startswith(FAILED))
            if CLOSED in ranked[:1]:
                closed.append((peer, CLOSED))
            elif ranked:
                return peer, ranked[0]
            elif peer in self.watches and _is_readable(self.watches[peer]):
                return peer, "has ended"
        return closed[0] if closed and len(closed) == len(peers) else None

    def abort(self, cause: str) -> None:
        for endpoint in (*self.incoming.values(), *self.outgoing.values()):
            endpoint.abort(cause)

    def close(self) -> None:
        """Close all endpoints and watches. Memory in use by tensors stays valid."""
        for endpoint in (*self.incoming.values(), *self.outgoing.values()):
            endpoint.close()
        for watch in self.watches.values():
            with contextlib.suppress(OSError):
                os.close(watch)
        self.watches = {}


class LinkSetup(Protocol):
    """Set-up of one rank's links of one kind: offer, prepare, connect.

    All ranks do each step except close() together, and continue only if all have succeeded.
    A failed step raises TransportError or OSError.
    """

    def offer(self) -> Any:
        """Return the data that the peers need to connect."""
        ...

    @staticmethod
    def incompatibility(mine: Any, theirs: Any, same_host: bool) -> str | None:
        """Return why two ranks cannot be linked, as the end of a sentence "the ranks ..."; None if they can."""
        ...

    def prepare(self, pairs: Pairs) -> None:
        """Allocate the resources of the links."""
        ...

    def connect(self, offers: Mapping[int, Any], pairs: Pairs, timeout_s: float) -> Endpoints:
        """Run the handshake with every peer of this rank. It may also raise LinkError."""
        ...

    def close(self) -> None:
        """Close everything that connect() has not returned."""
        ...


def both_ways(pairs: Pairs) -> dict[tuple[int, int], int]:
    return {(b, a): 1 for a, b in pairs} | dict(pairs)


def peers_of(rank: int, pairs: Pairs) -> list[int]:
    return sorted({a + b - rank for a, b in pairs if rank in (a, b)})


def _is_readable(file: int) -> bool:
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(0))
