"""Transports that this host supports, and remedies for the others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..comm.rdma import devices as rdma_devices
from ..comm.spin import usable_cores
from ..environment import Address, interface_addresses
from ..errors import TransportError
from .hosts.rdma import try_rdma

SHARED_FILES = Path("/dev/shm")
_MIB = 1 << 20
_LEAST_SHARED, _LEAST_LOCKED = 1 << 30, 256 * _MIB


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``state`` is "ok", "warn" or, for several hosts, "fail"; problems have a ``remedy``."""

    subject: str
    state: str
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    checks: list[Callable[[], Iterator[Finding]]] = [_cores, _native_code, _shared_memory, _left_files]
    checks += [_locked_memory, _addresses, _rdma, _cuda]
    return [finding for check in checks for finding in check()]


def _ok(subject: str, result: str) -> Finding:
    return Finding(subject, "ok", result)


def _warn(subject: str, result: str, remedy: str) -> Finding:
    return Finding(subject, "warn", result, remedy)


def _cores() -> Iterator[Finding]:
    yield _ok("cores", f"{usable_cores():g} usable; with more ranks, waiting ranks sleep instead of spinning")


def _native_code() -> Iterator[Finding]:
    try:
        from ..comm import _native
    except ImportError as error:
        yield _warn("native code", str(error), "build it: `pip install -e .` in the checkout (needs g++)")
    else:
        yield _ok("native code", str(_native.__file__))


def _shared_memory() -> Iterator[Finding]:
    try:
        os.close(os.memfd_create("ds_ext-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        yield _ok("shared memory", "memfd with seals, for the transport shm")
    except OSError as error:
        result = f"memfd_create fails ({error.strerror}); files in /dev/shm are used instead"
        yield _warn("shared memory", result, "allow memfd_create in the container's seccomp profile")
    try:
        space = os.statvfs("/dev/shm")
    except OSError as error:
        yield _warn("/dev/shm", str(error.strerror), "mount a tmpfs there")
        return
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    result = f"{size / _MIB:.0f} MiB, {free / _MIB:.0f} MiB free"
    if size < _LEAST_SHARED:
        remedy = (
            "data loaders and DeepSpeed's CPU collectives need more: `docker run --shm-size 8g` or --ipc=host"
        )
        yield _warn("/dev/shm", result, remedy)
    else:
        yield _ok("/dev/shm", result)


def _left_files() -> Iterator[Finding]:
    # A killed job leaves one file per rank from DeepSpeed's CPU collectives.
    files = list(SHARED_FILES.glob("deepspeed_allreduce_buffer_*"))
    total = 0
    for file in files:
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    if files:
        result = f"{len(files)} file{'s' * (len(files) > 1)} from DeepSpeed jobs, {total / _MIB:.0f} MiB"
        remedy = "if no DeepSpeed job is running: rm /dev/shm/deepspeed_allreduce_buffer_*"
        yield _warn("stale files", result, remedy)


def _locked_memory() -> Iterator[Finding]:
    limit = rdma_devices.lockable_bytes()
    is_needed = bool(rdma_devices.device_ports())
    result = "unlimited" if limit == float("inf") else f"{limit / _MIB:.0f} MiB"
    if limit < _LEAST_LOCKED and is_needed:
        yield _warn("locked memory", result, rdma_devices.MEMLOCK_REMEDY)
    else:
        yield _ok("locked memory", result + ("" if is_needed else " (only RDMA needs it)"))


def _addresses() -> Iterator[Finding]:
    text = ", ".join(f"{address} ({name})" for name, address in addresses() if not address.is_loopback)
    if text:
        yield _ok("addresses", f"{text}; transport_options.node_ips selects one")
    else:
        yield _warn("addresses", "loopback only", "connect the host to a network for jobs on several hosts")


def addresses() -> list[tuple[str, Address]]:
    """Return (interface, address) of this host, without link-local addresses of IPv6."""
    return [(name, ip) for name, ip in interface_addresses() if ip.version == 4 or not ip.is_link_local]


def _rdma() -> Iterator[Finding]:
    ports = rdma_devices.device_ports()
    if not ports:
        yield _ok("RDMA", "no device; tcp is used between hosts")
        return
    for port in ports:
        gids = ", ".join(f"{gid.index}: {gid.ip} {gid.kind}" for gid in port.gids)
        lid = f", LID {port.lid}" if port.lid else ""
        result = f"{port.link_layer}, {port.state}{lid}; GIDs {gids or 'none'}"
        if port.state == "ACTIVE":
            yield _ok(port.name, result)
        else:
            yield _warn(
                port.name,
                result,
                "check the cable, the link (`rdma link`, `ibstat`) and, for InfiniBand, the subnet manager",
            )
    try:
        port = rdma_devices.choose_port(ports, None)
        num_bytes = try_rdma(port)
    except TransportError as error:
        yield _warn("RDMA", str(error), "tcp is used between hosts")
    else:
        yield _ok("RDMA", f"{port.name}, GID {port.gid_index}: sent {num_bytes >> 10} KiB to itself")


def _cuda() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield _warn("torch", str(error), "pip install torch")
        return
    count = torch.cuda.device_count()
    if count:
        names = ", ".join(torch.cuda.get_device_name(device) for device in range(count))
        yield _ok("CUDA", f"torch {torch.__version__}, {count} device{'s' * (count > 1)}: {names}")
        from ..comm.cuda.device import findings

        for subject, result, remedy in findings():
            yield _warn(subject, result, remedy) if remedy else _ok(subject, result)
    else:
        yield _ok("CUDA", f"torch {torch.__version__}, no device; jobs train on the CPU")
