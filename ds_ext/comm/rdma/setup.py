"""The RDMA links of one rank on their way to its peers.

Two ranks first meet over tcp, where each gives the other its greeting: queue pair, address, keys. That connection
stays: over it each learns why the other fails, which a broken queue pair cannot tell. Needs no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_ext.comm import _native, host_watch
from ds_ext.comm.ends import SEND_WINDOW_BYTES, Ends, Pairs, peers_of
from ds_ext.comm.rdma.devices import Choice, choose, device_ports, require_lockable
from ds_ext.comm.tcp.address import own_address
from ds_ext.comm.tcp.meeting import Met, TcpCard, TcpListener, meet
from ds_ext.errors import TransportError

# What a link has at first, at both ends; more is added when messages need it.
SLAB_BYTES = 8 << 20
CONTROL_WINDOW_BYTES = 1 << 20  # of a connection that carries no message
_READY = b"\1"


@dataclass(frozen=True)
class RdmaCard:
    """What the others must know: how to meet, and what kind of network the port is in."""

    tcp: TcpCard
    link_layer: str
    slab_bytes: int


class RdmaSetup:
    """See LinkSetup in ends.py.

    Args:
        rank: this rank.
        port: its bell and its thread.
        node_ips: one address for each rank or each host, which chooses the device too; None: what reaches MASTER_ADDR.
        slab_bytes: registered for each link at first; the same on all ranks.
        window_bytes: unreceived bytes of a link from which on a send waits.
    """

    kind = "rdma"

    def __init__(
        self,
        rank: int,
        port: _native.Port,
        node_ips: Sequence[str] | None,
        slab_bytes: int = SLAB_BYTES,
        window_bytes: int = SEND_WINDOW_BYTES,
    ) -> None:
        self._rank, self._port, self._node_ips = rank, port, node_ips
        self._slab_bytes, self._window_bytes = slab_bytes, window_bytes
        self._listener: TcpListener | None = None
        self._device: _native.RdmaPort | None = None
        self._links: dict[int, _native.RdmaLink] = {}

    def card(self) -> RdmaCard:
        """Open the device, and say how to reach this rank."""
        address = own_address(self._rank, int(os.environ.get("WORLD_SIZE", "1")), self._node_ips)
        choice = self._open(address)
        self._listener = TcpListener(address)
        return RdmaCard(self._listener.card(), choice.link_layer, self._slab_bytes)

    @staticmethod
    def why_not(mine: Any, theirs: Any, same_host: bool) -> str | None:
        """What speaks against links between two ranks with these cards."""
        if mine.link_layer != theirs.link_layer:
            return f"have RDMA devices of different networks, {mine.link_layer} and {theirs.link_layer}"
        return None

    def prepare(self, pairs: Pairs) -> None:
        """Register what the links need."""
        assert self._device is not None and self._listener is not None
        peers, rank = peers_of(self._rank, pairs), self._rank
        ends = sum(rank in pair for pair in pairs)
        require_lockable(len(peers) * _native.RDMA_FIXED_BYTES + ends * self._slab_bytes)
        try:
            for peer in peers:
                self._links[peer] = _native.RdmaLink(
                    self._device,
                    rank,
                    peer,
                    (rank, peer) in pairs,
                    (peer, rank) in pairs,
                    self._window_bytes,
                    self._slab_bytes,
                )
        except _native.VerbsError as error:
            raise TransportError(str(error)) from None

    def connect(self, cards: Mapping[int, Any], pairs: Pairs, timeout_s: float) -> Ends:
        """Meet the peers, exchange greetings, and wait until the other sides expect messages."""
        assert self._device is not None and self._listener is not None
        deadline = time.monotonic() + timeout_s
        peers = {peer: cards[peer].tcp for peer in self._links}
        met = meet(self._listener, self._rank, peers, self._greetings(cards), timeout_s)
        try:
            for peer, link in self._links.items():
                self._connect_pair(peer, link, met[peer].note, self._job(peer, cards))
            for each in met.values():
                each.socket.sendall(_READY)
            for peer, each in met.items():
                self._await_ready(peer, each, deadline)
        except BaseException:
            for each in met.values():
                each.socket.close()
            raise
        ends = Ends()
        for peer, link in self._links.items():
            control = met[peer].socket
            control.setblocking(False)
            host_watch.leave_out(control)
            link.control(_native.TcpConnection(control.detach(), self._port, CONTROL_WINDOW_BYTES, False))
            if link.incoming is not None:
                ends.incoming[peer] = link.incoming
            if link.outgoing is not None:
                ends.outgoing[peer] = link.outgoing
        return ends

    def close(self) -> None:
        """Close what connect() has not handed over."""
        if self._listener is not None:
            self._listener.close()
        self._links.clear()

    def _open(self, address: str) -> Choice:
        try:
            _native.load_verbs()
            choice = choose(device_ports(), address, must_match=self._node_ips is not None)
            self._device = _native.RdmaPort(self._port, choice.device, choice.port, choice.gid_index)
        except _native.VerbsError as error:
            raise TransportError(str(error)) from None
        return choice

    def _greetings(self, cards: Mapping[int, Any]) -> dict[int, bytes]:
        return {peer: link.greeting(self._job(peer, cards)) for peer, link in self._links.items()}

    def _job(self, peer: int, cards: Mapping[int, Any]) -> bytes:
        """What both ranks of the pair know and no other job does: the token of the higher one."""
        return cards[max(peer, self._rank)].tcp.token

    def _connect_pair(self, peer: int, link: _native.RdmaLink, greeting: bytes, job: bytes) -> None:
        try:
            link.connect(greeting, job)
        except (_native.VerbsError, _native.LinkError) as error:
            raise TransportError(
                f"rank {self._rank}: rank {peer} cannot be connected by RDMA: {error}", peer
            ) from None

    def _await_ready(self, peer: int, met: Met, deadline: float) -> None:
        met.socket.settimeout(max(0.001, deadline - time.monotonic()))
        why = "it closed the connection; look for the first error in its output"
        try:
            if met.socket.recv(len(_READY)) == _READY:
                return
        except OSError as error:
            why = error.strerror or str(error)
        raise TransportError(
            f"rank {self._rank}: rank {peer} has not connected its side of the RDMA link: {why}", peer
        )
