"""Set-up of one rank's tcp links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ... import environment
from .. import _native, host_watch
from ..endpoints import SEND_WINDOW_BYTES, Endpoints, Pairs, peers_of
from .address import is_loopback, own_address
from .connect import PeerConnection, TcpListener, TcpOffer, connect_peers


class TcpSetup:
    """LinkSetup for ranks on any hosts: a listener, and one connection per peer for both directions."""

    def __init__(self, rank: int, port: _native.Port, node_ips: Sequence[str] | None = None) -> None:
        self._rank, self._port = rank, port
        self._node_ips = node_ips
        self._listener: TcpListener | None = None
        self._connected: dict[int, PeerConnection] = {}

    def offer(self) -> TcpOffer:
        world_size = environment.world_size()
        self._listener = TcpListener(own_address(self._rank, world_size, self._node_ips))
        return self._listener.offer()

    @staticmethod
    def incompatibility(mine: TcpOffer, theirs: TcpOffer, same_host: bool) -> str | None:
        for address in (mine.address, theirs.address):
            if is_loopback(address) and not same_host:
                return (
                    f"are on different hosts, and one listens on {address}. Set transport_options.node_ips to the "
                    "hosts' addresses"
                )
        if (":" in mine.address) != (":" in theirs.address):
            return f"have an IPv4 and an IPv6 address ({mine.address}, {theirs.address})"
        return None

    def prepare(self, pairs: Pairs) -> None:
        """Do nothing: connections need no preparation."""

    def connect(self, offers: Mapping[int, TcpOffer], pairs: Pairs, timeout_s: float) -> Endpoints:
        assert self._listener is not None
        notes = dict.fromkeys(peers_of(self._rank, pairs), b"")
        self._connected = connect_peers(self._listener, self._rank, offers, notes, timeout_s)
        endpoints = Endpoints()
        for peer in list(self._connected):
            receives = (peer, self._rank) in pairs
            peer_socket = self._connected.pop(peer).socket
            host_watch.leave_out(peer_socket)
            connection = _native.TcpConnection(peer_socket.detach(), self._port, SEND_WINDOW_BYTES, receives)
            if receives:
                endpoints.incoming[peer] = _native.TcpIncoming(connection, peer)
            if (self._rank, peer) in pairs:
                endpoints.outgoing[peer] = _native.TcpOutgoing(connection)
        return endpoints

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for connection in self._connected.values():
            connection.socket.close()
