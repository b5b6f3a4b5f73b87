"""Address at which a rank listens: from node_ips, or the one from which it reaches MASTER_ADDR."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Sequence

from ds_ext.errors import ConfigError, TransportError

_ANYWHERE = ("192.0.2.1", "2001:db8::1")  # unassigned (RFC 5737, 3849): shows which interface leads outside


def own_address(rank: int, world_size: int, node_ips: Sequence[str] | None) -> str:
    """Return the address for this rank's connections.

    Args:
        node_ips: None, or one address for each rank, or one for each host in the launcher's order.

    Raises:
        ConfigError: the number of addresses fits neither ranks nor hosts; the same on every rank.
        TransportError: this host does not have the address.
    """
    if node_ips is None:
        return _address_towards_master()
    hosts, host = _hosts(world_size), _host_of(rank, world_size)
    if len(node_ips) not in (world_size, hosts):
        raise ConfigError(
            f'"transport_options": "node_ips" has {len(node_ips)} addresses; give one for each of the {world_size} '
            f"ranks, or one for each of the {hosts} hosts."
        )
    given = node_ips[rank if len(node_ips) == world_size else host]
    try:
        with listening(given):
            return given
    except OSError as error:
        raise TransportError(
            f'"transport_options": "node_ips" gives rank {rank} (host {host}, {socket.gethostname()}) the address '
            f"{given}, which it cannot use ({error.strerror}). From there MASTER_ADDR is reached by "
            f"{_address_towards_master()}."
        ) from None


def listening(address: str) -> socket.socket:
    """Return a socket that listens at a free port of the address. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.bind((address, 0))
        made.listen(512)
    except OSError:
        made.close()
        raise
    return made


def is_loopback(address: str) -> bool:
    """Return whether only the host itself reaches the address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _address_towards_master() -> str:
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    found = _address_towards(master) or "127.0.0.1"
    # On its own host a name often stands for 127.0.1.1, which means nothing to the other hosts.
    if is_loopback(found) and _hosts(int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        outside = (_address_towards(address) for address in _ANYWHERE)
        found = next((address for address in outside if address), found)
    return found


def _address_towards(name: str) -> str | None:
    """The local address of packets to a host; nothing is sent."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                return probe.getsockname()[0]
    return None


def _ranks_here(world_size: int) -> int:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        with contextlib.suppress(KeyError, ValueError):
            return max(1, int(os.environ[name]))
    return world_size


def _hosts(world_size: int) -> int:
    return max(1, -(-world_size // _ranks_here(world_size)))


def _host_of(rank: int, world_size: int) -> int:
    for name in ("GROUP_RANK", "CROSS_RANK"):
        with contextlib.suppress(KeyError, ValueError):
            return min(max(0, int(os.environ[name])), _hosts(world_size) - 1)
    return rank // _ranks_here(world_size)
