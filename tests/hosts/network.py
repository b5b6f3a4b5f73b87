"""Several "hosts" on one machine: network namespaces joined by virtual cables. Needs root, unshare and ip."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shlex
import subprocess
from collections.abc import Iterator

INTERFACE = "dsx0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
ADDRESSES_6 = ("fd77::1", "fd77::2")
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


class NoHosts(RuntimeError):
    """Why this machine has no namespaces for us."""


def do(command: str) -> None:
    """Run a command, split as a shell does. Raises NoHosts if it fails."""
    try:
        done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=20)
    except OSError as error:
        raise NoHosts(f"{command}: {error}") from None
    if done.returncode:
        raise NoHosts(f"{command}: {done.stderr.strip()}")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """The namespaces' files, for enter(). Raises NoHosts. They are gone afterwards, with everything in them."""
    with contextlib.ExitStack() as stack:
        keepers = [stack.enter_context(_namespace()) for _ in ADDRESSES]
        names = [f"t{secrets.token_hex(4)}{side}" for side in "ab"]
        do(f"ip link add {names[0]} type veth peer name {names[1]}")
        for keeper, name, address, address_6 in zip(keepers, names, ADDRESSES, ADDRESSES_6, strict=True):
            do(f"ip link set {name} netns {keeper.pid} name {INTERFACE}")
            inside = f"nsenter --net=/proc/{keeper.pid}/ns/net"
            do(f"{inside} ip addr add {address}/24 dev {INTERFACE}")
            do(f"{inside} ip addr add {address_6}/64 dev {INTERFACE} nodad")
            for interface in (INTERFACE, "lo"):
                do(f"{inside} ip link set {interface} up")
        yield f"/proc/{keepers[0].pid}/ns/net", f"/proc/{keepers[1].pid}/ns/net"


class Network:
    """Hosts on one switch, each with the address 10.77.0.<number + 1>.

    Args:
        switch, hosts: keepers of the namespaces.
    """

    def __init__(self, switch: subprocess.Popen[bytes], hosts: list[subprocess.Popen[bytes]]) -> None:
        self._switch, self._hosts = switch, hosts

    @staticmethod
    def address(host: int) -> str:
        """The host's address."""
        return f"10.77.0.{host + 1}"

    def enter(self, host: int) -> list[str]:
        """Words before a command that runs it on the host."""
        return ["nsenter", f"--net=/proc/{self._hosts[host].pid}/ns/net"]

    def file(self, host: int) -> str:
        """The host's namespace, for inside()."""
        return f"/proc/{self._hosts[host].pid}/ns/net"

    def drop(self, host: int) -> None:
        """Lose every packet from and to the host; its own link stays up."""
        do(f"nsenter --net=/proc/{self._switch.pid}/ns/net ip link set port{host} nomaster")

    def drop_to(self, host: int) -> None:
        """Lose every packet to the host. Packets from it still arrive."""
        at_switch = f"nsenter --net=/proc/{self._switch.pid}/ns/net"
        flags = "learning off flood off mcast_flood off bcast_flood off"
        do(f"{at_switch} bridge link set dev port{host} {flags}")
        do(f"{at_switch} ip link set port{host} type bridge_slave fdb_flush")

    def link_down(self, host: int) -> None:
        """Switch the host's interface off."""
        do(" ".join([*self.enter(host), f"ip link set {INTERFACE} down"]))


@contextlib.contextmanager
def switched_hosts(count: int) -> Iterator[Network]:
    """Start hosts on one switch. Raises NoHosts. They are gone afterwards, with everything in them."""
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(_namespace())
        hosts = [stack.enter_context(_namespace()) for _ in range(count)]
        network = Network(switch, hosts)
        at_switch = f"nsenter --net=/proc/{switch.pid}/ns/net"
        do(f"{at_switch} ip link add switch type bridge")
        do(f"{at_switch} ip link set switch up")
        for number, host in enumerate(hosts):
            do(f"{at_switch} ip link add port{number} type veth peer name {INTERFACE} netns {host.pid}")
            do(f"{at_switch} ip link set port{number} master switch up")
            inside = " ".join(network.enter(number))
            do(f"{inside} ip addr add {network.address(number)}/24 dev {INTERFACE}")
            for interface in (INTERFACE, "lo"):
                do(f"{inside} ip link set {interface} up")
        yield network


@contextlib.contextmanager
def _namespace() -> Iterator[subprocess.Popen[bytes]]:
    """A process that keeps a network namespace. Raises NoHosts."""
    words = ["unshare", "--net", "sh", "-c", "echo; exec sleep 600"]
    try:
        keeper = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError as error:
        raise NoHosts(f"unshare: {error}") from None
    pipe = keeper.stdout
    assert pipe is not None
    try:
        # The first line comes from inside the namespace.
        if not pipe.readline():
            raise NoHosts("unshare --net is refused")
        yield keeper
    finally:
        keeper.kill()
        keeper.wait()
        pipe.close()


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
