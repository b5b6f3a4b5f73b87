"""Address on which a rank listens: from node_ips, or the local address on the route to MASTER_ADDR."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Sequence

from ...environment import host_number, master_address, num_hosts
from ...errors import ConfigError, TransportError

_OUTSIDE = ("192.0.2.1", "2001:db8::1")  # unassigned (RFC 5737, 3849), routed via the default interface


def own_address(rank: int, world_size: int, node_ips: Sequence[str] | None) -> str:
    """Return the address for this rank's connections.

    ``node_ips`` has one address for each rank, or one for each host in the launcher's order. None: the local address
    on the route to MASTER_ADDR.
    """
    if node_ips is None:
        return _address_towards_master()
    hosts, host = num_hosts(world_size), host_number(rank, world_size)
    if len(node_ips) not in (world_size, hosts):
        raise ConfigError(
            f"ds_ext.transport_options.node_ips: needs one address for each of the {world_size} ranks or {hosts} hosts "
            f"(got {len(node_ips)})."
        )
    address = node_ips[rank if len(node_ips) == world_size else host]
    try:
        with listening(address):
            return address
    except OSError as error:
        raise TransportError(
            f"ds_ext.transport_options.node_ips: rank {rank} cannot listen on its address on host {host} "
            f"({socket.gethostname()}) (got {address}: {error.strerror}). Its address on the route to MASTER_ADDR is "
            f"{_address_towards_master()}."
        ) from None


def listening(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(512)
    except OSError:
        listener.close()
        raise
    return listener


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _address_towards_master() -> str:
    towards_master = _address_towards(master_address()) or "127.0.0.1"
    # A host's name often resolves to 127.0.1.1 on the host itself, which other hosts cannot reach.
    if is_loopback(towards_master) and num_hosts() > 1:
        outside = (_address_towards(address) for address in _OUTSIDE)
        return next((address for address in outside if address), towards_master)
    return towards_master


def _address_towards(name: str) -> str | None:
    """Return the local address on the route to a host. Sends no packet."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                return probe.getsockname()[0]
    return None
