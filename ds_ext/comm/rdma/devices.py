"""RDMA devices of this host, from sysfs, and the selection of a rank's port and GID. Needs no library and no torch."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...environment import has_capability
from ...errors import TransportError

INFINIBAND, ETHERNET = "InfiniBand", "Ethernet"
ROCE_V2 = "RoCE v2"
DEVICE_VARIABLE, GID_VARIABLE = "DS_EXT_RDMA_DEV", "DS_EXT_RDMA_GID_INDEX"
NCCL_GID_VARIABLE = "NCCL_IB_GID_INDEX"  # many clusters set it
ACTIVE = "ACTIVE"
_EMPTY = ":0000:0000:0000:0000"
_MAX_HOLES = 64
_CAP_IPC_LOCK = 14
_SYSFS = Path("/sys")

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Gid:
    """Entry of a port's GID table."""

    index: int
    value: ipaddress.IPv6Address
    kind: str

    @property
    def ip(self) -> IpAddress:
        """IP address of a RoCE GID."""
        return self.value.ipv4_mapped or self.value


@dataclass(frozen=True)
class DevicePort:
    """Port of a device. ``gids`` are its non-empty GIDs."""

    device: str
    port: int
    state: str
    link_layer: str
    lid: int
    gids: tuple[Gid, ...]

    @property
    def name(self) -> str:
        """Name in messages, such as ``mlx5_0 port 1``."""
        return f"{self.device} port {self.port}"

    @property
    def usable_gids(self) -> tuple[Gid, ...]:
        """GIDs that a connection can use: all on InfiniBand, RoCE v2 on Ethernet."""
        return tuple(gid for gid in self.gids if self.link_layer == INFINIBAND or gid.kind == ROCE_V2)


@dataclass(frozen=True)
class PortChoice:
    device: str
    port: int
    gid_index: int
    link_layer: str

    @property
    def name(self) -> str:
        return f"{self.device} port {self.port}"


def device_ports(sysfs: Path = _SYSFS) -> list[DevicePort]:
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
    """Select the port and GID of a rank.

    The order of preference is: DS_EXT_RDMA_DEV (``mlx5_0`` or ``mlx5_0:1``) and DS_EXT_RDMA_GID_INDEX; the port that
    has the address; the first active port.

    Args:
        address: numeric address of the rank; None: unknown.
        must_match: whether the user set the address; if so, using any other port is an error.
    """
    if not ports:
        raise TransportError("RDMA: no device on this host (/sys/class/infiniband is empty)")
    allowed = _allowed_ports(ports, environment.get(DEVICE_VARIABLE))
    active = [port for port in allowed if port.state == ACTIVE and port.usable_gids]
    if not active:
        states = ", ".join(
            f"{p.name} is {p.state}" if p.state != ACTIVE else f"{p.name} has no RoCE v2 GID" for p in allowed
        )
        raise TransportError(f"RDMA: no usable port: {states}")
    for port in active:
        for gid in port.usable_gids:
            if address is not None and gid.ip == ipaddress.ip_address(address):
                return _make_choice(port, gid, environment)
    is_free = not must_match or bool(environment.get(DEVICE_VARIABLE))
    if not is_free and all(port.link_layer == ETHERNET for port in active):
        known = ", ".join(f"{gid.ip} ({port.name})" for port in active for gid in port.usable_gids)
        raise TransportError(
            f"node_ips: not an address of an RDMA device (got {address}). Use one of {known}, or set "
            f"{DEVICE_VARIABLE}"
        )
    return _make_choice(active[0], _best_gid(active[0]), environment)


def _allowed_ports(ports: Sequence[DevicePort], device: str | None) -> list[DevicePort]:
    allowed = [port for port in ports if device in (None, "", port.device, f"{port.device}:{port.port}")]
    if not allowed:
        names = ", ".join(f"{port.device}:{port.port}" for port in ports)
        raise TransportError(f"{DEVICE_VARIABLE}: no such device (got {device!r}). Use one of {names}")
    return allowed


def _best_gid(port: DevicePort) -> Gid:
    """Return the preferred GID: IPv4 before IPv6, routable before link-local."""
    return min(port.usable_gids, key=lambda gid: (gid.ip.version, gid.ip.is_link_local, gid.index))


def _make_choice(port: DevicePort, gid: Gid, environment: Mapping[str, str]) -> PortChoice:
    """Return the choice of a port, with ``gid`` unless a variable sets the index."""
    for variable in (GID_VARIABLE, NCCL_GID_VARIABLE):
        index = environment.get(variable)
        if not index:
            continue
        known = [entry.index for entry in port.gids]
        if index.isdecimal() and int(index) in known:
            return PortChoice(port.device, port.port, int(index), port.link_layer)
        if variable == GID_VARIABLE:  # NCCL's variable is only a hint
            raise TransportError(
                f"{variable}: {port.name} has no such GID (got {index!r}). Use one of {', '.join(map(str, known))}"
            )
    return PortChoice(port.device, port.port, gid.index, port.link_layer)


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
    """Yield the non-empty GIDs of a port by index. Stop after ``_MAX_HOLES`` empty entries."""
    # A table may have a thousand entries, but new addresses use the lowest free entry, so holes are rare.
    empty = 0
    for index in sorted(int(name) for name in os.listdir(folder / "gids") if name.isdecimal()):
        text = _text(f"{folder}/gids/{index}")
        if text.endswith(_EMPTY):  # an empty entry may have a subnet prefix
            empty += 1
            if empty == _MAX_HOLES:
                return
            continue
        with contextlib.suppress(ValueError):
            value = ipaddress.IPv6Address(text)
            yield Gid(index, value, _text(f"{folder}/gid_attrs/types/{index}"))


def _text(file: Path | str) -> str:
    """Return the contents of a file; "" if it cannot be read, like the attributes of an empty GID."""
    try:
        return Path(file).read_text().strip()
    except OSError:
        return ""


def lockable_bytes() -> float:
    """Raise the soft limit on locked memory to the hard limit, and return it in bytes."""
    if has_capability(_CAP_IPC_LOCK):
        return float("inf")
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    return float("inf") if hard == resource.RLIM_INFINITY else float(hard)


def require_lockable(needed: int) -> None:
    limit = lockable_bytes()
    if needed > limit:
        raise TransportError(
            f"locked memory: RDMA needs {needed / 2**20:.1f} MiB (got a limit of {limit / 2**20:.1f} MiB). "
            f"{MEMLOCK_REMEDY}"
        )


MEMLOCK_REMEDY = (
    "Raise the limit with `ulimit -l unlimited` in the shell that starts the job, memlock in "
    "/etc/security/limits.conf, LimitMEMLOCK=infinity in a systemd unit, or `docker run --ulimit memlock=-1`"
)
