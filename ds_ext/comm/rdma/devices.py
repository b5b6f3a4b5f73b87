"""RDMA devices of this host as the kernel shows them, and the port and address that a rank uses.

Reads sysfs only, so it needs no library, no rights and no torch.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_ext.errors import TransportError

INFINIBAND, ETHERNET = "InfiniBand", "Ethernet"
ROCE_V2 = "RoCE v2"
DEVICE_VARIABLE, GID_VARIABLE = "DS_EXT_RDMA_DEV", "DS_EXT_RDMA_GID_INDEX"
NCCL_GID_VARIABLE = "NCCL_IB_GID_INDEX"  # clusters set it already
ACTIVE = "ACTIVE"
_EMPTY = ":0000:0000:0000:0000"
_MOST_HOLES = 64
_CAP_IPC_LOCK = 14
_SYSFS = Path("/sys")

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Gid:
    """One address of a port: its number, its value and its type."""

    index: int
    value: ipaddress.IPv6Address
    kind: str

    @property
    def ip(self) -> IpAddress:
        """The IP address that it stands for; of RoCE GIDs made from IPv4 that one."""
        return self.value.ipv4_mapped or self.value


@dataclass(frozen=True)
class DevicePort:
    """One port of one device; ``gids`` without the empty ones."""

    device: str
    port: int
    state: str
    link_layer: str
    lid: int
    gids: tuple[Gid, ...]

    @property
    def name(self) -> str:
        """``mlx5_0 port 1``, as all messages call it."""
        return f"{self.device} port {self.port}"

    @property
    def usable_gids(self) -> tuple[Gid, ...]:
        """GIDs by which a connection can be made: RoCE v2 ones of an Ethernet port."""
        return tuple(gid for gid in self.gids if self.link_layer == INFINIBAND or gid.kind == ROCE_V2)


@dataclass(frozen=True)
class PortChoice:
    """The port and GID of a rank."""

    device: str
    port: int
    gid_index: int
    link_layer: str

    @property
    def name(self) -> str:
        """Same as DevicePort.name."""
        return f"{self.device} port {self.port}"


def device_ports(sysfs: Path = _SYSFS) -> list[DevicePort]:
    """All ports of all RDMA devices of this host, by name."""
    return [
        _read_port(port) for port in sorted(sysfs.glob("class/infiniband/*/ports/*")) if port.name.isdecimal()
    ]


def choose_port(
    ports: Sequence[DevicePort],
    address: str | None,
    *,
    must_match: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> PortChoice:
    """The port and GID that a rank with this IP address uses.

    In this order: what DS_EXT_RDMA_DEV (``mlx5_0`` or ``mlx5_0:1``) and DS_EXT_RDMA_GID_INDEX say; the port that has
    the address; the first active port.

    Args:
        ports: of this host.
        address: numeric; of the interface that the ranks reach each other by.
        must_match: the user has given the address, so another port is an error.

    Raises:
        TransportError: why there is none.
    """
    if not ports:
        raise TransportError("this host has no RDMA device (/sys/class/infiniband is empty)")
    wanted = environment.get(DEVICE_VARIABLE)
    allowed = [port for port in ports if wanted in (None, "", port.device, f"{port.device}:{port.port}")]
    if not allowed:
        raise TransportError(f"{DEVICE_VARIABLE} is {wanted!r}; this host has {_names(ports)}")
    active = [port for port in allowed if port.state == ACTIVE and port.usable_gids]
    if not active:
        states = ", ".join(
            f"{p.name} is {p.state}" if p.state != ACTIVE else f"{p.name} has no RoCE v2 GID" for p in allowed
        )
        raise TransportError(f"no RDMA port can be used: {states}")
    for port in active:
        for gid in port.usable_gids:
            if address is not None and gid.ip == ipaddress.ip_address(address):
                return _chosen(port, gid, environment)
    if must_match and not wanted and all(port.link_layer == ETHERNET for port in active):
        known = ", ".join(f"{gid.ip} ({port.name})" for port in active for gid in port.usable_gids)
        raise TransportError(
            f"{address} is the address of no RDMA device; those of this host are {known}. "
            f"Give one of them in node_ips, or the device in {DEVICE_VARIABLE}"
        )
    return _chosen(active[0], _best(active[0]), environment)


def _best(port: DevicePort) -> Gid:
    """An IPv4 address rather than IPv6, a routable one rather than one of the link."""
    return min(port.usable_gids, key=lambda gid: (gid.ip.version, gid.ip.is_link_local, gid.index))


def _chosen(port: DevicePort, gid: Gid, environment: Mapping[str, str]) -> PortChoice:
    for variable in (GID_VARIABLE, NCCL_GID_VARIABLE):
        given = environment.get(variable)
        if not given:
            continue
        known = [each.index for each in port.gids]
        if given.isdecimal() and int(given) in known:
            return PortChoice(port.device, port.port, int(given), port.link_layer)
        if variable == GID_VARIABLE:  # the other one is meant for another program, and only a hint
            raise TransportError(
                f"{variable} is {given!r}; {port.name} has the GIDs {', '.join(map(str, known))}"
            )
    return PortChoice(port.device, port.port, gid.index, port.link_layer)


def _names(ports: Sequence[DevicePort]) -> str:
    return ", ".join(f"{port.device}:{port.port}" for port in ports)


def _read_port(folder: Path) -> DevicePort:
    state = _text(folder / "state").partition(":")[2].strip() or "unknown"
    lid = _text(folder / "lid")
    return DevicePort(
        device=folder.parent.parent.name,
        port=int(folder.name),
        state=state,
        link_layer=_text(folder / "link_layer") or ETHERNET,
        lid=int(lid, 0) if lid else 0,
        gids=tuple(_read_gids(folder)),
    )


def _read_gids(folder: Path) -> Iterator[Gid]:
    # An address gets the lowest free entry, so only removed ones leave holes. A table may have a thousand entries.
    empty = 0
    for index in sorted(int(name) for name in os.listdir(folder / "gids") if name.isdecimal()):
        text = _text(f"{folder}/gids/{index}")
        if text.endswith(_EMPTY):  # the subnet before it may be set
            empty += 1
            if empty == _MOST_HOLES:
                return
            continue
        with contextlib.suppress(ValueError):
            value = ipaddress.IPv6Address(text)
            yield Gid(index, value, _text(f"{folder}/gid_attrs/types/{index}"))


def _text(file: Path | str) -> str:
    """ "" for what is not there: the kernel refuses to read the attributes of an empty GID."""
    try:
        with open(file) as opened:
            return opened.read().strip()
    except OSError:
        return ""


def lockable_bytes() -> float:
    """Return how much memory this process may lock, registered memory included. Raises its soft limit if it may."""
    if _has_capability(_CAP_IPC_LOCK):
        return float("inf")
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    return float("inf") if hard == resource.RLIM_INFINITY else float(hard)


def require_lockable(needed: int) -> None:
    """Refuse to begin what the limit on locked memory would stop. Raises TransportError with the remedy."""
    room = lockable_bytes()
    if needed > room:
        raise TransportError(
            f"RDMA needs {needed / 2**20:.1f} MiB of locked memory at first, and this process may lock "
            f"{room / 2**20:.1f} MiB. {MEMLOCK_REMEDY}"
        )


MEMLOCK_REMEDY = (
    "Raise it: `ulimit -l unlimited` in the shell that starts the job, memlock in /etc/security/limits.conf, "
    "LimitMEMLOCK=infinity in a systemd unit, or `docker run --ulimit memlock=-1`"
)


def _has_capability(number: int) -> bool:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> number & 1)
    return False
