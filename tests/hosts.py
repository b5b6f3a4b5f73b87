"""Two "hosts" on one machine: network namespaces that a virtual cable joins. Needs root, unshare and ip."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import subprocess
from collections.abc import Iterator

INTERFACE = "dsx0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
ADDRESSES_6 = ("fd77::1", "fd77::2")
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


class NoHosts(RuntimeError):
    """Why this machine has no namespaces for us."""


def _do(command: str) -> None:
    try:
        done = subprocess.run(command.split(), capture_output=True, text=True, timeout=20)
    except OSError as error:
        raise NoHosts(f"{command}: {error}") from None
    if done.returncode:
        raise NoHosts(f"{command}: {done.stderr.strip()}")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """The namespaces' files, for enter(). Raises NoHosts. They are gone afterwards, with everything in them."""
    keepers: list[subprocess.Popen[bytes]] = []
    try:
        # A keeper's first word comes when it is in its namespace.
        for _ in ADDRESSES:
            words = ["unshare", "--net", "sh", "-c", "echo; exec sleep 300"]
            try:
                keepers.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
            except OSError as error:
                raise NoHosts(f"unshare: {error}") from None
            pipe = keepers[-1].stdout
            if pipe is None or not pipe.readline():
                raise NoHosts("unshare --net is refused")
        names = [f"t{secrets.token_hex(4)}{side}" for side in "ab"]
        _do(f"ip link add {names[0]} type veth peer name {names[1]}")
        for keeper, name, address, address_6 in zip(keepers, names, ADDRESSES, ADDRESSES_6, strict=True):
            _do(f"ip link set {name} netns {keeper.pid} name {INTERFACE}")
            inside = f"nsenter --net=/proc/{keeper.pid}/ns/net"
            _do(f"{inside} ip addr add {address}/24 dev {INTERFACE}")
            _do(f"{inside} ip addr add {address_6}/64 dev {INTERFACE} nodad")
            for interface in (INTERFACE, "lo"):
                _do(f"{inside} ip link set {interface} up")
        yield f"/proc/{keepers[0].pid}/ns/net", f"/proc/{keepers[1].pid}/ns/net"
    finally:
        for keeper in keepers:
            keeper.kill()
            keeper.wait()
            if keeper.stdout is not None:
                keeper.stdout.close()


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread, and those that it starts, live in the namespace; the sockets that it has stay where they are."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(path: str) -> None:
        file = os.open(path, os.O_RDONLY)
        try:
            if libc.setns(file, _NEW_NETWORK) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        finally:
            os.close(file)

    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    enter(namespace)
    try:
        yield
    finally:
        try:
            if libc.setns(own, _NEW_NETWORK) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        finally:
            os.close(own)
