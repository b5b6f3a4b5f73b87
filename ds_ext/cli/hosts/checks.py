"""Checks of several hosts and of every pair of them, through one agent per host."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

from ...errors import DsExtError
from ..doctor import Finding
from .probe import new_token
from .ssh import HostError, RemoteAgent, agent_command, ssh_words

FAIL = "fail"  # state of a finding that keeps jobs from running on these hosts
_MOST_CLOCK_S = 1.0
_MOST_PARALLEL = 64
_OPEN_PORTS = "allow TCP between the hosts, in both directions, to the ports under `ports`"
T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """Settings of the checks.

    Args:
        node_ips: one address per host that ranks shall use; None: the address on the route to the first host.
        master_port: port of the rendezvous on the first host.
        paths: folders or files that a job uses.
        ssh_port: port of sshd; None: ssh's default.
    """

    node_ips: list[str] | None = None
    master_port: int = 29500
    paths: tuple[str, ...] = ()
    ssh_port: int | None = None


@dataclass
class Pair:
    """Measured connection from one host to another.

    Args:
        source: name of the host that connects.
        target: name of the host that listens.
        address: address of the target.
        error: why there is no connection; empty if there is one.
        round_trip_us: round trip of 64 bytes over tcp, in microseconds; None: not measured.
        tcp_gbit_s: bandwidth of one tcp connection; None: not measured.
        rdma_gbit_s: bandwidth of RDMA writes; None: not measured.
        rdma: ports of both hosts, or why RDMA fails between hosts that have devices; empty without devices.
    """

    source: str
    target: str
    address: str
    error: str = ""
    round_trip_us: float | None = None
    tcp_gbit_s: float | None = None
    rdma_gbit_s: float | None = None
    rdma: str = ""


@dataclass
class Report:
    """Findings per host, findings that compare hosts, and all pairs."""

    hosts: dict[str, list[Finding]]
    job: list[Finding] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """True if jobs on these hosts will fail."""
        findings = [finding for found in self.hosts.values() for finding in found] + self.job
        return any(finding.state == FAIL for finding in findings) or any(pair.error for pair in self.pairs)


@dataclass
class _Host:
    name: str
    agent: RemoteAgent
    facts: dict[str, Any] = field(default_factory=dict)
    address: str = ""  # of the ranks' links
    gloo_address: str = ""


def examine_hosts(names: Sequence[str], options: Options) -> Report:
    """Start an agent on every host, and return all findings. Every wait has a limit."""
    report = Report({name: [] for name in names})
    if shutil.which("pdsh") is None:
        remedy = "install it (Debian, Ubuntu: apt install pdsh), or use `torchrun` on every host"
        report.job.append(Finding("pdsh", "warn", "missing here; `deepspeed --hostfile` needs it", remedy))
    ssh, command = ssh_words(options.ssh_port), agent_command()
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(_MOST_PARALLEL))
        hosts = [_Host(name, RemoteAgent(name, ssh, command)) for name in names]
        for host in hosts:
            stack.callback(host.agent.close)
        _Checks(report, hosts, options, pool).run()
    return report


class _Checks:
    def __init__(
        self, report: Report, hosts: list[_Host], options: Options, pool: ThreadPoolExecutor
    ) -> None:
        self._report, self._hosts, self._options, self._pool = report, hosts, options, pool
        self._names = [host.name for host in hosts]

    def run(self) -> None:
        self._on_each(self._start)
        self._hosts = [host for host in self._hosts if host.facts]
        if not self._hosts:
            return
        self._report.job += self._versions()
        self._report.job += self._clocks()
        self._report.job += self._paths()
        self._find_addresses()
        self._on_each(self._check_names)
        if len(self._hosts) > 1:
            self._report.job += self._rendezvous()
            self._measure_pairs()
            self._reach_gloo()
            self._measure_rdma()
        self._report.job += self._ports()
        order = {name: number for number, name in enumerate(self._report.hosts)}
        self._report.pairs.sort(key=lambda pair: (order[pair.source], order[pair.target]))

    def _on_each(self, check: Callable[[_Host], None]) -> None:
        """Run a check on all hosts in parallel, and note the hosts on which it fails."""

        def guarded(host: _Host) -> None:
            try:
                check(host)
            except DsExtError as error:
                remedy = getattr(error, "remedy", "run `python -m ds_ext doctor` on that host")
                self._report.hosts[host.name].append(Finding("host", FAIL, str(error), remedy))
                if isinstance(error, HostError):
                    host.facts = {}

        list(self._pool.map(guarded, self._hosts))

    def _ask_all(self, action: str, **arguments: Any) -> dict[str, Any]:
        """Return the answers by host name, without the hosts that failed."""
        answers: dict[str, Any] = {}

        def ask(host: _Host) -> None:
            answers[host.name] = host.agent.ask(action, **arguments)

        self._on_each(ask)
        return {host.name: answers[host.name] for host in self._hosts if host.name in answers}

    def _start(self, host: _Host) -> None:
        host.agent.start()
        host.facts = host.agent.ask("facts", limit_s=90.0)
        found = [Finding(**finding) for finding in host.facts["findings"]]
        self._report.hosts[host.name] += found

    def _versions(self) -> Iterator[Finding]:
        """Compare what the roll call of a job compares, and the native code."""
        shown = []
        for key in self._hosts[0].facts["versions"]:
            found = {host.name: host.facts["versions"].get(key, "missing") for host in self._hosts}
            name = key.removeprefix("version of ")
            if len(set(found.values())) == 1:
                shown.append(f"{name} {next(iter(found.values()))}")
            elif key == "native code":
                remedy = "if links are refused, build it from the same sources on every host"
                yield Finding(name, "warn", f"built separately: {_by_value(found)}", remedy)
            else:
                yield Finding(
                    name, FAIL, f"hosts differ: {_by_value(found)}", "install the same on every host"
                )
        yield Finding("versions", "ok", ", ".join(shown))

    def _clocks(self) -> Iterator[Finding]:
        offsets: dict[str, float] = {}

        def ask(host: _Host) -> None:
            trips = []
            for _ in range(3):
                started = time.time()
                there = host.agent.ask("clock")
                ended = time.time()
                trips.append((ended - started, there - (started + ended) / 2))
            offsets[host.name] = min(trips)[1]

        self._on_each(ask)
        late = {name: f"{offset:+.1f} s" for name, offset in offsets.items() if abs(offset) > _MOST_CLOCK_S}
        if late:
            remedy = "synchronize the clocks (chrony, ntpd); logs and file times of these hosts do not match"
            yield Finding("clocks", "warn", f"differ from this host: {_by_value(late)}", remedy)
        elif offsets:
            yield Finding("clocks", "ok", f"within {max(offsets.values()) - min(offsets.values()):.2f} s")

    def _paths(self) -> Iterator[Finding]:
        for path in (os.getcwd(), *(str(Path(path).absolute()) for path in self._options.paths)):
            yield self._path(path)

    def _path(self, path: str) -> Finding:
        subject = f"path {path}"
        found = self._ask_all("path", name=path)
        kinds = {name: answer["is"] for name, answer in found.items()}
        if "missing" in kinds.values() or len(set(kinds.values())) > 1:
            return Finding(subject, FAIL, _by_value(kinds), "create it, with the same path on every host")
        systems = _by_value({name: answer["file_system"] or "unknown" for name, answer in found.items()})
        if "file" in kinds.values():
            sizes = {name: f"{answer['bytes']:,} bytes" for name, answer in found.items()}
            if len(set(sizes.values())) > 1:
                return Finding(
                    subject, FAIL, f"hosts differ: {_by_value(sizes)}", "copy the same file to every host"
                )
            return Finding(subject, "ok", f"the same size on all hosts ({systems})")
        writers = [name for name, answer in found.items() if answer["writable"]]
        if not writers:
            return Finding(subject, "ok", f"on all hosts, read-only ({systems})")
        seen = self._see(path, next(host for host in self._hosts if host.name == writers[0]))
        without = [name for name, sees in seen.items() if not sees]
        read_only = [name for name in found if name not in writers]
        if read_only:
            remedy = "if ranks write there, make it writable on every host"
            return Finding(subject, "warn", f"read-only on {', '.join(read_only)} ({systems})", remedy)
        if len(found) == 1:
            return Finding(subject, "ok", f"on {writers[0]} ({systems}); the other hosts failed")
        if not without:
            return Finding(subject, "ok", f"shared by all hosts ({systems})")
        if path == os.getcwd():
            return Finding(
                subject, "ok", f"separate on {', '.join(without)} ({systems}); keep the copies equal"
            )
        remedy = "--save needs a shared folder; data may be separate if its contents are equal"
        return Finding(
            subject, "warn", f"separate: a file of {writers[0]} is not on {', '.join(without)}", remedy
        )

    def _see(self, path: str, writer: _Host) -> dict[str, bool]:
        """Create a file on one host and return which hosts see it."""
        name = f"{path}/.ds_ext-doctor-{secrets.token_hex(8)}"
        try:
            writer.agent.ask("create", name=name)
            return self._ask_all("exists", name=name)
        except DsExtError:
            return {}
        finally:
            with contextlib.suppress(DsExtError):
                writer.agent.ask("remove", name=name)

    def _find_addresses(self) -> None:
        """Find the address on which the ranks of each host would listen."""
        first = self._hosts[0]
        listed = first.facts["listed_addresses"] or [address for address in first.facts["addresses"]]
        self._master = next(iter(listed), first.name)
        numbers = {host.name: number for number, host in enumerate(self._hosts)}
        node_ips = self._options.node_ips
        if node_ips is not None:  # without those of hosts that have failed
            node_ips = [ip for name, ip in zip(self._names, node_ips, strict=True) if name in numbers]

        def find(host: _Host) -> None:
            arguments = {"master": self._master, "rank": numbers[host.name], "world_size": len(numbers)}
            host.address = host.agent.ask("own_address", node_ips=node_ips, **arguments)

        self._on_each(find)

    def _check_names(self, host: _Host) -> None:
        """Check the host's own name, at which gloo listens, and the name of the first host."""
        findings, own = self._report.hosts[host.name], host.facts["hostname"]
        first = self._hosts[0].name
        found = host.agent.ask("resolve", names=[own, first])
        chosen = host.facts["gloo_interface"]
        host.gloo_address = next(iter(found[own]), "")
        if chosen:
            host.gloo_address = host.facts["interfaces"].get(chosen.partition(",")[0], "")
            if not host.gloo_address:
                remedy = "correct it in .deepspeed_env; `ip -brief address` lists the interfaces"
                findings.append(
                    Finding("GLOO_SOCKET_IFNAME", FAIL, f"no such interface (got {chosen})", remedy)
                )
        elif len(self._hosts) > 1 and (
            not found[own] or ip_address(found[own][0].partition("%")[0]).is_loopback
        ):
            problem = f"{own} resolves to {found[own][0]}" if found[own] else f"{own} does not resolve"
            remedy = (
                f"gloo would listen on loopback. Set GLOO_SOCKET_IFNAME={self._interface(host)} in .deepspeed_env, or "
                f"add `{host.address} {own}` to /etc/hosts there"
            )
            findings.append(Finding("own name", FAIL, problem, remedy))
        if not found[first]:
            remedy = "use addresses in the hostfile, or add the name to DNS or /etc/hosts"
            findings.append(Finding("names", "warn", f"{first} does not resolve", remedy))

    @staticmethod
    def _interface(host: _Host) -> str:
        """Return the interface of the host's address."""
        return next((name for name, ip in host.facts["interfaces"].items() if ip == host.address), "eth0")

    def _rendezvous(self) -> Iterator[Finding]:
        """Connect from all hosts to the rendezvous port of the first one."""
        first, port, token = self._hosts[0], self._options.master_port, new_token().hex()
        where = f"{self._master}:{port} on {first.name}"
        try:
            first.agent.ask("listen", address=self._master, port=port, token=token)
        except DsExtError as error:
            remedy = "stop the job that uses it, or pass another --master_port to the launcher"
            yield Finding("rendezvous", "warn", f"{where}: {error}", remedy)
            return
        failed: dict[str, str] = {}

        def reach(host: _Host) -> None:
            try:
                host.agent.ask("reach", address=self._master, port=port, token=token)
            except HostError:
                raise
            except DsExtError as error:
                failed[host.name] = str(error)

        self._on_each(reach)
        with contextlib.suppress(DsExtError):
            first.agent.ask("close", port=port)
        if failed:
            yield Finding("rendezvous", FAIL, f"{where}: {_by_value(failed)}", _OPEN_PORTS)
        else:
            yield Finding("rendezvous", "ok", f"{where} is reached from all hosts")

    def _ready(self) -> list[_Host]:
        return [host for host in self._hosts if host.facts and host.address]

    def _measure_pairs(self) -> None:
        """Connect every host to every other one, both ways. Pairs that run at the same time share no host."""
        hosts, ports = self._ready(), {}
        token = new_token().hex()

        def listen(host: _Host) -> None:
            ports[host.name] = host.agent.ask("listen", address=host.address, port=0, token=token)

        self._on_each(listen)

        def measure(pair: list[_Host]) -> list[Pair]:
            found = []
            for (source, target), action in ((pair, "measure"), (pair[::-1], "reach")):
                result = Pair(source.name, target.name, target.address)
                try:
                    arguments = {"address": target.address, "port": ports[target.name], "token": token}
                    speed = source.agent.ask(action, **arguments)
                    if speed:
                        result.round_trip_us, result.tcp_gbit_s = speed["round_trip_us"], speed["gbit_s"]
                except DsExtError as error:
                    result.error = str(error)
                found.append(result)
            return found

        for turn in rounds([host for host in hosts if host.name in ports]):
            for found in self._pool.map(measure, [sorted(pair, key=hosts.index) for pair in turn]):
                self._report.pairs += found

    def _reach_gloo(self) -> None:
        """Connect to the address of gloo on each host where it is not the address of the ranks' links."""
        token = new_token().hex()
        for target in self._ready():
            if target.gloo_address in ("", target.address) or _is_loopback(target.gloo_address):
                continue
            try:
                port = target.agent.ask("listen", address=target.gloo_address, port=0, token=token)
            except DsExtError as error:
                remedy = "set GLOO_SOCKET_IFNAME in .deepspeed_env"
                found = f"cannot listen on {target.gloo_address}: {error}"
                self._report.hosts[target.name].append(Finding("gloo", FAIL, found, remedy))
                continue

            def reach(source: _Host, target: _Host = target, port: int = port) -> None:
                try:
                    source.agent.ask("reach", address=target.gloo_address, port=port, token=token)
                except DsExtError as error:
                    self._report.pairs.append(Pair(source.name, target.name, target.gloo_address, str(error)))

            self._on_each(reach)

    def _measure_rdma(self) -> None:
        """Write over RDMA between the hosts of each pair that both have an active port."""
        hosts = {host.name: host for host in self._ready() if host.facts["rdma"]}
        measured = {
            frozenset((pair.source, pair.target)): pair
            for pair in self._report.pairs
            if pair.round_trip_us is not None and {pair.source, pair.target} <= hosts.keys()
        }
        for turn in rounds(list(hosts.values())):
            pairs = [
                measured[key] for pair in turn if (key := frozenset(host.name for host in pair)) in measured
            ]
            list(
                self._pool.map(lambda pair: self._write(pair, hosts[pair.source], hosts[pair.target]), pairs)
            )

    def _write(self, pair: Pair, source: _Host, target: _Host) -> None:
        key, job = f"{source.name} {target.name}", new_token().hex()
        sides = ((source, True), (target, False))
        try:
            opened = [
                host.agent.ask("rdma_open", key=key, address=host.address, sends=sends, job=job)
                for host, sends in sides
            ]
            pair.rdma = " - ".join(side["name"] for side in opened)
            if opened[0]["network"] != opened[1]["network"]:
                pair.rdma += f": different networks ({opened[0]['network']}, {opened[1]['network']})"
                return
            for (host, _), other in zip(sides, opened[::-1], strict=True):
                host.agent.ask("rdma_connect", key=key, greeting=other["greeting"], job=job)
            received = ThreadPoolExecutor(1).submit(target.agent.ask, "rdma_receive", key=key)
            source.agent.ask("rdma_send", key=key)
            pair.rdma_gbit_s = received.result()
        except DsExtError as error:
            pair.rdma = f"{pair.rdma}: {error}".removeprefix(": ")
        finally:
            for host, _ in sides:
                with contextlib.suppress(DsExtError):
                    host.agent.ask("rdma_close", key=key)

    def _ports(self) -> Iterator[Finding]:
        ranges = {host.name: "-".join(host.facts["port_range"]) or "unknown" for host in self._hosts}
        found = f"TCP {self._options.master_port} to {self._hosts[0].name}; TCP {_by_value(ranges)} between all hosts"
        yield Finding("ports", "ok", found)


def rounds(items: Sequence[T]) -> Iterator[list[tuple[T, T]]]:
    """Yield all pairs of items, grouped so that no item is twice in a group (round-robin tournament)."""
    seats: list[T | None] = [*items, *([None] if len(items) % 2 else [])]
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def _is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


def _by_value(values: Mapping[str, str]) -> str:
    """Return ``"value on host, host; value on host"``; only the value if all hosts have the same."""
    hosts: dict[str, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(value, []).append(host)
    if len(hosts) == 1:
        return next(iter(hosts))
    return "; ".join(f"{value} on {', '.join(names)}" for value, names in hosts.items())
