"""Set-up of one rank's links over shared memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from . import _native
from .endpoints import SEND_WINDOW_BYTES, Endpoints, Pairs, peers_of
from .shm_handshake import PeerFiles, ShmOffer, UnixListener, exchange_files


class ShmSetup:
    """LinkSetup for ranks on the same host: segments that this rank receives from, and the handshake."""

    def __init__(self, rank: int, port: _native.Port, node_ips: Sequence[str] | None = None) -> None:
        self._rank, self._port = rank, port
        self._listener = UnixListener()
        self._incoming: dict[int, _native.ShmIncoming] = {}
        self._received: dict[int, PeerFiles] = {}

    def offer(self) -> ShmOffer:
        return self._listener.offer()

    @staticmethod
    def incompatibility(mine: ShmOffer, theirs: ShmOffer, same_host: bool) -> str | None:
        return None if same_host else "are on different hosts"

    def prepare(self, pairs: Pairs) -> None:
        for source, destination in pairs:
            if destination == self._rank:
                link = _native.ShmIncoming(source, destination, self._listener.token)
                self._incoming[source] = link

    def connect(self, offers: Mapping[int, ShmOffer], pairs: Pairs, timeout_s: float) -> Endpoints:
        peers = peers_of(self._rank, pairs)
        files = {peer: [self._port.fileno()] for peer in peers}
        for peer, link in self._incoming.items():
            files[peer].append(link.fileno())
        expected = {peer: 1 + ((self._rank, peer) in pairs) for peer in peers}
        self._received = exchange_files(self._listener, self._rank, offers, files, expected, timeout_s)
        endpoints = Endpoints(incoming=dict(self._incoming))
        for peer, received in self._received.items():
            outgoing = self._attach(peer, received, offers[peer])
            if outgoing is not None:
                endpoints.outgoing[peer] = outgoing
        endpoints.watches = {peer: received.take_watch() for peer, received in self._received.items()}
        return endpoints

    def close(self) -> None:
        self._listener.close()
        for received in self._received.values():
            received.close()

    def _attach(self, peer: int, received: PeerFiles, offer: ShmOffer) -> _native.ShmOutgoing | None:
        doorbell, *segments = received.take_files()
        try:
            if peer in self._incoming:
                self._incoming[peer].connect(os.dup(doorbell))
            if not segments:
                return None
            return _native.ShmOutgoing(
                segments[0], os.dup(doorbell), self._rank, peer, offer.token, SEND_WINDOW_BYTES
            )
        finally:
            os.close(doorbell)
