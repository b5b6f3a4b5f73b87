"""Cluster on one machine: hosts with their own network, processes, mounts, name, home, /dev/shm, /var/tmp and sshd.

The file system is shared, except for these folders. A host's name is node0, node1, ...; its addresses are 10.77.0.1,
10.77.0.2, ... and, on a second network, 10.78.0.1, ... Any host reaches any other with ssh, without a password.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.hosts.delay_line import MTU, DelayLine, Link, interface, mac
from tests.hosts.network import NoHosts, do

NO_ENV: Mapping[str, str] = MappingProxyType({})
_TOOLS = ("setpriv", "unshare", "nsenter", "ip", "sshd", "ssh", "ssh-keygen", "pdsh")
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
_START_LIMIT_S = 20.0
# Runs as process 1 of the host: $1 folder of the host, $2 its name, $3 its home, $4 sshd. sshd reaps orphans.
_INIT = """
set -e
mount --bind "$1/../etc/ssh" /etc/ssh
mount --bind "$1/../etc/hosts" /etc/hosts
mount --bind "$1/passwd" /etc/passwd
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=1777 tmpfs /var/tmp
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/sshd
hostname "$2"
cd "$3"
exec "$4" -D -e -f /etc/ssh/sshd_config
"""
_SSHD_CONFIG = """
HostKey {key}
AuthorizedKeysFile {key}.pub
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
MaxStartups 100
PidFile none
"""
_SSH_CONFIG = """
IdentityFile {key}
BatchMode yes
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""


class Host:
    """Host of a :class:`Cluster`.

    Args:
        number: number in the cluster.
        folder: folder of its files.
        keeper: process that owns the namespaces.
    """

    def __init__(self, number: int, folder: Path, keeper: subprocess.Popen[bytes]) -> None:
        self.number, self.name, self.address = number, _name(number), address(number)
        self.home = folder / "home"
        self._keeper, self._folder = keeper, folder
        self.init = self._find_init()

    def __repr__(self) -> str:
        return self.name

    def _find_init(self) -> int:
        """Return process 1 of the host as the machine counts it."""
        deadline = time.monotonic() + _START_LIMIT_S
        children = Path(f"/proc/{self._keeper.pid}/task/{self._keeper.pid}/children")
        while self._keeper.poll() is None and time.monotonic() < deadline:
            if words := children.read_text().split():
                return int(words[0])
            time.sleep(0.01)
        raise NoHosts(f"unshare: {self.log()[-1]}")

    def log(self) -> list[str]:
        """Return the lines that the host's start and its sshd have written."""
        lines = (self._folder / "log").read_text(errors="replace").strip().splitlines()
        return lines or ["no output"]

    @property
    def network_file(self) -> str:
        """File of the network namespace."""
        return f"/proc/{self.init}/ns/net"

    def enter(self, cwd: Path | str | None = None) -> list[str]:
        """Return the words before a command that run it on this host."""
        spaces = ["--net", "--pid", "--mount", "--uts", "--ipc"]
        folder = str(cwd or self.home)
        return ["nsenter", f"--target={self.init}", *spaces, "--", "env", "-C", folder, f"HOME={self.home}"]

    def start(
        self,
        words: Sequence[str],
        cwd: Path | str | None = None,
        env: Mapping[str, str] = NO_ENV,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Start a command on this host.

        Args:
            env: variables besides those of the caller.
            options: further arguments of Popen.
        """
        merged = {**os.environ, **env}
        return subprocess.Popen(
            [*self.enter(cwd), *words], env=merged, text=True, errors="replace", **options
        )

    def run(
        self,
        words: Sequence[str],
        cwd: Path | str | None = None,
        env: Mapping[str, str] = NO_ENV,
        timeout_s: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this host to its end; its output is collected."""
        with self.start(words, cwd, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                output, error = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                self.end_processes()
                raise
        return subprocess.CompletedProcess(words, process.returncode, output, error)

    def processes(self) -> dict[int, str]:
        """Return the command line of every living process on this host, without its sshd.

        Process ids are those of the machine.
        """
        found: dict[int, str] = {}
        with contextlib.suppress(OSError):
            space = os.readlink(f"/proc/{self.init}/ns/pid")
            for name in filter(str.isdigit, os.listdir("/proc")):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{name}/ns/pid") != space:
                        continue
                    process = Path("/proc", name)
                    state = (process / "stat").read_text().rpartition(")")[2].split()[0]
                    if state not in "ZX" and (process / "comm").read_text().strip() != "sshd":
                        words = (process / "cmdline").read_bytes().decode(errors="replace")
                        found[int(name)] = words.replace("\0", " ").strip()
        return found

    def environment(self, process: int) -> dict[str, str]:
        """Return the environment with which a process was started; empty if it is gone."""
        try:
            words = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            return {}
        return dict(word.split("=", 1) for word in words if "=" in word)

    def ranks(self) -> dict[int, int]:
        """Return rank -> process id for the ranks on this host."""
        of_process = {process: self.environment(process) for process in self.processes()}
        return {int(env["RANK"]): process for process, env in sorted(of_process.items()) if "RANK" in env}

    def end_processes(self) -> None:
        """Kill everything on this host except its sshd."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _wait_for_sshd(self) -> None:
        deadline = time.monotonic() + _START_LIMIT_S
        while not any("Server listening" in line for line in self.log()):
            if self._keeper.poll() is not None or time.monotonic() > deadline:
                raise NoHosts(f"{self.name}: {self.log()[-1]}")
            time.sleep(0.02)


class Cluster:
    """Hosts and the switch between them; see :func:`cluster`."""

    def __init__(self, hosts: Sequence[Host], line: DelayLine, networks: int) -> None:
        self.hosts, self._line, self._networks = list(hosts), line, networks
        self._links: dict[tuple[int, int, int], Link] = {}

    def __getitem__(self, host: int) -> Host:
        return self.hosts[host]

    def hostfile(self, path: Path, *slots: int) -> Path:
        """Write a hostfile with the number of slots of each host, from host 0 on."""
        lines = [f"{_name(host)} slots={count}\n" for host, count in enumerate(slots)]
        path.write_text("".join(lines))
        return path

    def slow(self, link: Link) -> None:
        """Set delay, rate and losses of every link between two hosts."""
        for network, source, target in self._pairs():
            self._set(network, source, target, link)

    def cut(self, host: int, *, to: bool = True, of: bool = True) -> None:
        """Lose every packet to a host, from it (``of``), or both. Its interfaces stay up."""
        self._change_losses(host, to, of, 1.0)

    def mend(self, host: int) -> None:
        """Undo :meth:`cut`."""
        self._change_losses(host, True, True, 0.0)

    def unplug(self, host: int) -> None:
        """Switch the host's interfaces off."""
        for network in range(self._networks):
            do(" ".join([*_in_network(self.hosts[host]), f"ip link set {interface(network)} down"]))

    def power_off(self, host: int) -> None:
        """End a host without a last packet: no connection is closed."""
        self.cut(host)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.hosts[host].init, signal.SIGKILL)

    def _change_losses(self, host: int, to: bool, of: bool, loss: float) -> None:
        for key in self._pairs():
            if (to and key[2] == host) or (of and key[1] == host):
                self._set(*key, replace(self._links.get(key, Link()), loss=loss))

    def _pairs(self) -> Iterator[tuple[int, int, int]]:
        count = len(self.hosts)
        for network in range(self._networks):
            yield from ((network, a, b) for a in range(count) for b in range(count) if a != b)

    def _set(self, network: int, source: int, target: int, link: Link) -> None:
        self._links[network, source, target] = link
        self._line.set(network, source, target, link)


def address(host: int, network: int = 0) -> str:
    """Return the address of a host on a network."""
    return f"10.{77 + network}.0.{host + 1}"


@contextlib.contextmanager
def cluster(count: int, networks: int = 1) -> Iterator[Cluster]:
    """Start hosts; at the end, everything on them is killed.

    Args:
        count: number of hosts, 1 to 200.
        networks: number of networks that join all hosts.

    Raises:
        NoHosts: if namespaces are refused, or a tool is missing.
    """
    tools = _tools()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts_")))
        _write_etc(folder / "etc", count, networks)
        hosts = [stack.enter_context(_host(number, folder, tools)) for number in range(count)]
        line = DelayLine([host.network_file for host in hosts], networks)
        stack.callback(line.close)
        for host in hosts:
            inside = " ".join(_in_network(host))
            for network in range(networks):
                name = interface(network)
                do(
                    f"{inside} ip link set {name} address {mac(network, host.number)} mtu {MTU} addrgenmode none"
                )
                do(f"{inside} ip addr add {address(host.number, network)}/24 dev {name}")
                do(f"{inside} ip link set {name} up")
            do(f"{inside} ip link set lo up")
        for host in hosts:
            host._wait_for_sshd()
        yield Cluster(hosts, line, networks)


def _name(host: int) -> str:
    return f"node{host}"


def _in_network(host: Host) -> list[str]:
    return ["nsenter", f"--net={host.network_file}"]


def _tools() -> dict[str, str]:
    """Return the path of every tool. Raises NoHosts if one is missing, or without root."""
    if os.geteuid() != 0:
        raise NoHosts("namespaces need root")
    if not os.path.exists("/dev/net/tun"):
        raise NoHosts("/dev/net/tun is missing")
    found = {
        name: shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{_SBIN}") for name in _TOOLS
    }
    if missing := [name for name, path in found.items() if path is None]:
        raise NoHosts(f"{', '.join(missing)}: not installed (Debian, Ubuntu: openssh-server, pdsh, iproute2)")
    return {name: path for name, path in found.items() if path is not None}


def _write_etc(etc: Path, count: int, networks: int) -> None:
    """Write the hosts' /etc/hosts and /etc/ssh, with new keys."""
    (etc / "ssh").mkdir(parents=True)
    lines = ["127.0.0.1 localhost", *(f"{address(host)} {_name(host)}" for host in range(count))]
    for network in range(1, networks):
        lines += [f"{address(host, network)} {_name(host)}-net{network}" for host in range(count)]
    (etc / "hosts").write_text("\n".join(lines) + "\n")
    key = etc / "ssh" / "key"
    do(f"ssh-keygen -q -t ed25519 -N '' -f {key}")
    (etc / "ssh" / "sshd_config").write_text(_SSHD_CONFIG.format(key=key))
    (etc / "ssh" / "ssh_config").write_text(_SSH_CONFIG.format(key=key))


@contextlib.contextmanager
def _host(number: int, folder: Path, tools: Mapping[str, str]) -> Iterator[Host]:
    own = folder / _name(number)
    (own / "home").mkdir(parents=True)
    users = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
    for user in users:
        if user[2:3] == ["0"]:
            user[5:7] = [str(own / "home"), shutil.which("bash") or "/bin/sh"]
    (own / "passwd").write_text("".join(":".join(user) + "\n" for user in users))
    spaces = ["--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    init = ["sh", "-c", _INIT, "init", str(own), _name(number), str(own / "home"), tools["sshd"]]
    with open(own / "log", "wb") as log:
        keeper = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *spaces, *init],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield Host(number, own, keeper)
    finally:
        keeper.kill()
        keeper.wait()
