"""The tcp connections of one rank on their way to its peers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ds_ext.comm import _native, ends, host_watch
from ds_ext.comm.ends import Ends, Pairs, peers_of
from ds_ext.comm.tcp.address import is_loopback, own_address
from ds_ext.comm.tcp.meeting import Met, TcpCard, TcpListener, meet


class TcpSetup:
    """LinkSetup for ranks of any hosts: a listener, and a connection to each peer for both directions."""

    def __init__(self, rank: int, port: _native.Port, node_ips: Sequence[str] | None = None) -> None:
        self._rank, self._port = rank, port
        self._node_ips = node_ips
        self._listener: TcpListener | None = None
        self._met: dict[int, Met] = {}

    def card(self) -> TcpCard:
        """Where this rank listens."""
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._listener = TcpListener(own_address(self._rank, world_size, self._node_ips))
        return self._listener.card()

    @staticmethod
    def why_not(mine: TcpCard, theirs: TcpCard, same_host: bool) -> str | None:
        """A host's own address means nothing to others."""
        for address in (mine.address, theirs.address):
            if is_loopback(address) and not same_host:
                return (
                    f"are on different hosts, and one listens at {address}: give the hosts' addresses as "
                    "transport_options.node_ips"
                )
        if (":" in mine.address) != (":" in theirs.address):
            return f"have an IPv4 and an IPv6 address ({mine.address}, {theirs.address})"
        return None

    def prepare(self, pairs: Pairs) -> None:
        """Connections need nothing."""

    def connect(self, cards: Mapping[int, TcpCard], pairs: Pairs, timeout_s: float) -> Ends:
        """A connection to every peer."""
        assert self._listener is not None
        notes = dict.fromkeys(peers_of(self._rank, pairs), b"")
        self._met = meet(self._listener, self._rank, cards, notes, timeout_s)
        made = Ends()
        for peer in list(self._met):
            receives = (peer, self._rank) in pairs
            met = self._met.pop(peer)
            host_watch.leave_out(met.socket)
            file = met.socket.detach()
            connection = _native.TcpConnection(file, self._port, ends.SEND_WINDOW_BYTES, receives)
            if receives:
                made.incoming[peer] = _native.TcpIncoming(connection, peer)
            if (self._rank, peer) in pairs:
                made.outgoing[peer] = _native.TcpOutgoing(connection)
        return made

    def close(self) -> None:
        """Close what connect() has not handed over."""
        if self._listener is not None:
            self._listener.close()
        for met in self._met.values():
            met.socket.close()
