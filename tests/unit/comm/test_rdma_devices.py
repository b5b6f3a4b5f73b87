"""Selection of a rank's RDMA port and GID, from copies of sysfs."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from ds_ext.comm.rdma.devices import choose_port, device_ports, lockable_bytes
from ds_ext.errors import TransportError

GidRow = tuple[str, str, str]  # value, type, interface


def add_port(
    sysfs: Path,
    device: str,
    gids: Sequence[GidRow],
    *,
    port: int = 1,
    state: str = "4: ACTIVE",
    layer: str = "Ethernet",
    lid: str = "0x0",
) -> None:
    folder = sysfs / "class/infiniband" / device / "ports" / str(port)
    for name in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (folder / name).mkdir(parents=True)
    for name, text in (("state", state), ("link_layer", layer), ("lid", lid)):
        (folder / name).write_text(text + "\n")
    for index, (value, kind, interface) in enumerate(gids):
        (folder / "gids" / str(index)).write_text(value + "\n")
        if kind:
            (folder / "gid_attrs/types" / str(index)).write_text(kind + "\n")
            (folder / "gid_attrs/ndevs" / str(index)).write_text(interface + "\n")


def roce(address: str, interface: str) -> list[GidRow]:
    """Return the GID table of a RoCE port: link-local and IPv4 address, each as v1 and v2, then an empty entry."""
    a, b, c, d = map(int, address.split("."))
    mapped = f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"
    local = "fe80:0000:0000:0000:0202:c9ff:fe00:0001"
    rows = [(value, kind, interface) for value in (local, mapped) for kind in ("IB/RoCE v1", "RoCE v2")]
    return [*rows, ("0000:0000:0000:0000:0000:0000:0000:0000", "", "")]


@pytest.fixture
def two_devices(tmp_path: Path) -> Path:
    add_port(tmp_path, "mlx5_0", roce("10.0.0.1", "eth0"))
    add_port(tmp_path, "mlx5_1", roce("10.0.1.1", "eth1"))
    return tmp_path


def chosen(
    sysfs: Path, address: str | None, environment: Mapping[str, str] | None = None, **more: bool
) -> tuple[str, int, int]:
    choice = choose_port(device_ports(sysfs), address, environment=environment or {}, **more)
    return choice.device, choice.port, choice.gid_index


def test_selection_by_address(two_devices: Path) -> None:
    assert chosen(two_devices, "10.0.1.1") == ("mlx5_1", 1, 3)
    assert chosen(two_devices, "10.0.0.1") == ("mlx5_0", 1, 3)
    # An address of another network selects the IPv4 GID of the first device.
    assert chosen(two_devices, "192.168.0.7") == chosen(two_devices, None) == ("mlx5_0", 1, 3)


def test_given_address_must_belong_to_a_device(two_devices: Path) -> None:
    with pytest.raises(TransportError, match=r"192\.168\.0\.7.* 10\.0\.1\.1 \(mlx5_1 port 1\)"):
        chosen(two_devices, "192.168.0.7", must_match=True)
    environment = {"DS_EXT_RDMA_DEV": "mlx5_1"}
    assert chosen(two_devices, "192.168.0.7", environment, must_match=True) == ("mlx5_1", 1, 3)


def test_environment_overrides(two_devices: Path) -> None:
    assert chosen(two_devices, None, {"DS_EXT_RDMA_DEV": "mlx5_1:1"}) == ("mlx5_1", 1, 3)
    assert chosen(two_devices, None, {"DS_EXT_RDMA_GID_INDEX": "1"}) == ("mlx5_0", 1, 1)
    assert chosen(two_devices, None, {"NCCL_IB_GID_INDEX": "2"}) == ("mlx5_0", 1, 2)
    assert chosen(two_devices, None, {"NCCL_IB_GID_INDEX": "77"}) == ("mlx5_0", 1, 3)
    for variable, value, known in (
        ("DS_EXT_RDMA_DEV", "mlx4_0", "mlx5_0:1, mlx5_1:1"),
        ("DS_EXT_RDMA_GID_INDEX", "77", "0, 1, 2, 3"),
    ):
        with pytest.raises(TransportError, match=f"{variable}.*{value}.*{known}"):
            chosen(two_devices, None, {variable: value})


def test_ipv6_addresses(tmp_path: Path) -> None:
    add_port(tmp_path, "rxe0", [("2001:0db8:0000:0000:0000:0000:0000:0005", "RoCE v2", "eth0")])
    assert chosen(tmp_path, "2001:db8::5", must_match=True) == ("rxe0", 1, 0)


def test_infiniband_needs_no_ip_address(tmp_path: Path) -> None:
    gid = [("fe80:0000:0000:0000:e41d:2d03:0012:3451", "", "")]
    add_port(tmp_path, "mlx5_0", gid, state="2: INIT", layer="InfiniBand", lid="0xffff")
    add_port(tmp_path, "mlx5_0", gid, port=2, layer="InfiniBand", lid="0x2a")
    assert chosen(tmp_path, "10.0.0.1", must_match=True) == ("mlx5_0", 2, 0)
    first, second = device_ports(tmp_path)
    assert (first.state, second.lid, second.name) == ("INIT", 42, "mlx5_0 port 2")


def test_unusable_ports(tmp_path: Path) -> None:
    with pytest.raises(TransportError):
        chosen(tmp_path, None)
    add_port(tmp_path, "mlx5_0", roce("10.0.0.1", "eth0"), state="1: DOWN")
    add_port(tmp_path, "mlx5_1", [row for row in roce("10.0.1.1", "eth1") if row[1] == "IB/RoCE v1"])
    with pytest.raises(TransportError, match=r"mlx5_0 port 1 .*DOWN.*mlx5_1 port 1 .*RoCE v2"):
        chosen(tmp_path, "10.0.0.1")


def test_limit_on_locked_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    expected = float("inf") if hard == resource.RLIM_INFINITY else hard
    assert lockable_bytes() in (expected, float("inf"))  # unlimited with CAP_IPC_LOCK


def test_module_loads_without_libibverbs() -> None:
    script = (
        "from ds_ext.comm import _native\n"
        "assert 'ibverbs' not in open('/proc/self/maps').read()\n"
        "try: _native.load_verbs()\n"
        "except _native.VerbsError as error: print(error)"
    )
    environment = {"DS_EXT_IBVERBS": "/nonexistent/libibverbs.so", "PATH": "/usr/bin:/bin"}
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, text=True
    )
    assert "/nonexistent/libibverbs.so" in done.stdout and "rdma-core" in done.stdout, done


def test_holes_in_the_gid_table(tmp_path: Path) -> None:
    empty = ("fe80:0000:0000:0000:0000:0000:0000:0000", "", "")
    add_port(
        tmp_path, "mlx5_0", [empty] * 20 + [row for row in roce("10.0.0.1", "eth0") if row[1] == "RoCE v2"]
    )
    assert chosen(tmp_path, "10.0.0.1", must_match=True) == ("mlx5_0", 1, 21)
