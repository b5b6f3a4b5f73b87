"""Set-up of one rank's RDMA links. Needs no torch.

Two ranks first connect over tcp and exchange greetings: queue pair, addresses, keys. The tcp connection stays open to
report failures, which a broken queue pair cannot do.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...environment import world_size
from ...errors import TransportError
from .. import _native, host_watch
from ..endpoints import SEND_WINDOW_BYTES, Endpoints, Pairs, peers_of
from ..tcp.address import own_address
from ..tcp.connect import PeerConnection, TcpListener, TcpOffer, connect_peers
from .devices import PortChoice, choose_port, device_ports, require_lockable

SLAB_BYTES = 8 << 20  # initial size at both endpoints of a link; it grows with the messages
CONTROL_WINDOW_BYTES = 1 << 20  # unused, because the control connection transfers no messages
_READY = b"\1"


@dataclass(frozen=True)
class RdmaOffer:
    tcp: TcpOffer
    link_layer: str
    slab_bytes: int


class RdmaSetup:
    """LinkSetup for ranks with RDMA devices.

    Args:
        port: doorbell and I/O thread of this rank.
        node_ips: one address per rank or host, which also selects the device; None: the local address on the route
            to MASTER_ADDR.
        slab_bytes: initial registered memory per link, the same on all ranks.
        window_bytes: limit on unreceived bytes per link.
    """

    def __init__(
        self,
        rank: int,
        port: _native.Port,
        node_ips: Sequence[str] | None,
        slab_bytes: int = SLAB_BYTES,
        window_bytes: int = SEND_WINDOW_BYTES,
    ) -> None:
        self._rank = rank
        self._port = port
        self._node_ips = node_ips
        self._slab_bytes = slab_bytes
        self._window_bytes = window_bytes
        self._listener: TcpListener | None = None
        self._device: _native.RdmaPort | None = None
        self._links: dict[int, _native.RdmaLink] = {}

    def offer(self) -> RdmaOffer:
        address = own_address(self._rank, world_size(), self._node_ips)
        choice = self._open_device(address)
        self._listener = TcpListener(address)
        return RdmaOffer(self._listener.offer(), choice.link_layer, self._slab_bytes)

    @staticmethod
    def incompatibility(mine: RdmaOffer, theirs: RdmaOffer, same_host: bool) -> str | None:
        if mine.link_layer != theirs.link_layer:
            return f"have RDMA devices of different network types ({mine.link_layer}, {theirs.link_layer})"
        return None

    def prepare(self, pairs: Pairs) -> None:
        assert self._device is not None and self._listener is not None
        peers, rank = peers_of(self._rank, pairs), self._rank
        endpoints = sum(rank in pair for pair in pairs)
        require_lockable(len(peers) * _native.RDMA_FIXED_BYTES + endpoints * self._slab_bytes)
        try:
            for peer in peers:
                sends, receives = (rank, peer) in pairs, (peer, rank) in pairs
                self._links[peer] = _native.RdmaLink(
                    self._device, rank, peer, sends, receives, self._window_bytes, self._slab_bytes
                )
        except _native.VerbsError as error:
            raise TransportError(str(error)) from None

    def connect(self, offers: Mapping[int, RdmaOffer], pairs: Pairs, timeout_s: float) -> Endpoints:
        assert self._device is not None and self._listener is not None
        deadline = time.monotonic() + timeout_s
        peers = {peer: offers[peer].tcp for peer in self._links}
        connections = connect_peers(self._listener, self._rank, peers, self._greetings(offers), timeout_s)
        try:
            for peer, link in self._links.items():
                self._connect_pair(peer, link, connections[peer].note, self._job_token(peer, offers))
            for connection in connections.values():
                connection.socket.sendall(_READY)
            for peer, connection in connections.items():
                self._await_ready(peer, connection, deadline)
            return self._make_endpoints(connections)
        except BaseException:
            for connection in connections.values():
                connection.socket.close()  # without effect if a link has taken it over
            raise

    def _make_endpoints(self, connections: Mapping[int, PeerConnection]) -> Endpoints:
        """Return the endpoints of all links. A link takes over its tcp connection, which reports failures."""
        endpoints = Endpoints()
        for peer, link in self._links.items():
            control = connections[peer].socket
            control.setblocking(False)
            host_watch.leave_out(control)
            link.control(_native.TcpConnection(control.detach(), self._port, CONTROL_WINDOW_BYTES, False))
            if link.incoming is not None:
                endpoints.incoming[peer] = link.incoming
            if link.outgoing is not None:
                endpoints.outgoing[peer] = link.outgoing
        return endpoints

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._links.clear()

    def _open_device(self, address: str) -> PortChoice:
        try:
            _native.load_verbs()
            choice = choose_port(device_ports(), address, must_match=self._node_ips is not None)
            self._device = _native.RdmaPort(self._port, choice.device, choice.port, choice.gid_index)
        except _native.VerbsError as error:
            raise TransportError(str(error)) from None
        return choice

    def _greetings(self, offers: Mapping[int, RdmaOffer]) -> dict[int, bytes]:
        return {peer: link.greeting(self._job_token(peer, offers)) for peer, link in self._links.items()}

    def _job_token(self, peer: int, offers: Mapping[int, RdmaOffer]) -> bytes:
        """Return the job token of the pair: the token of the higher rank."""
        return offers[max(peer, self._rank)].tcp.token

    def _connect_pair(self, peer: int, link: _native.RdmaLink, greeting: bytes, job_token: bytes) -> None:
        try:
            link.connect(greeting, job_token)
        except (_native.VerbsError, _native.LinkError) as error:
            raise TransportError(
                f"rank {self._rank}: no RDMA connection to rank {peer}: {error}.", peer
            ) from None

    def _await_ready(self, peer: int, connection: PeerConnection, deadline: float) -> None:
        connection.socket.settimeout(max(0.001, deadline - time.monotonic()))
        problem = "connection closed"
        try:
            if connection.socket.recv(len(_READY)) == _READY:
                return
        except OSError as error:
            problem = error.strerror or str(error)
        raise TransportError(
            f"rank {self._rank}: rank {peer} has not connected its side of the RDMA link (got {problem}). Look for "
            f"the first error in the output of rank {peer}.",
            peer,
        )
