"""Report about several hosts, and the agents that the checks use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ...errors import DsExtError
from ..doctor import Finding
from .ssh import HostError, RemoteAgent

FAIL = "fail"  # state of a finding that keeps jobs from running on these hosts


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
    """Measured connection from one host to another. None: not measured.

    Args:
        error: why there is no connection; empty if there is one.
        round_trip_us: round trip of 64 bytes over tcp, in microseconds.
        tcp_gbit_s: bandwidth of one tcp connection.
        rdma_gbit_s: bandwidth of RDMA writes.
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
        findings = [finding for of_host in self.hosts.values() for finding in of_host] + self.job
        return any(finding.state == FAIL for finding in findings) or any(pair.error for pair in self.pairs)


@dataclass
class Host:
    """Host with its agent, its facts and its addresses."""

    name: str
    agent: RemoteAgent
    facts: dict[str, Any] = field(default_factory=dict)
    has_failed: bool = False
    address: str = ""  # of the ranks' links
    gloo_address: str = ""


@dataclass(frozen=True)
class Session:
    """Agents on all hosts of a report, which the checks fill; threads of ``pool`` ask the agents."""

    report: Report
    all_hosts: Sequence[Host]
    options: Options
    pool: ThreadPoolExecutor

    @property
    def hosts(self) -> list[Host]:
        return [host for host in self.all_hosts if not host.has_failed]

    def start(self) -> None:
        """Wait for all agents, and add the findings of their hosts to the report."""

        def fetch_facts(host: Host) -> None:
            host.agent.start()
            host.facts = host.agent.ask("facts", limit_s=90.0)
            self.report.hosts[host.name] += [Finding(**finding) for finding in host.facts["findings"]]

        self.check_all(fetch_facts)

    def check_all(self, check: Callable[[Host], None]) -> None:
        """Run a check on all hosts in parallel. A DsExtError becomes a finding; a HostError also excludes the host."""

        def guarded(host: Host) -> None:
            try:
                check(host)
            except DsExtError as error:
                remedy = getattr(error, "remedy", "run `python -m ds_ext doctor` on that host")
                self.report.hosts[host.name].append(Finding("host", FAIL, str(error), remedy))
                host.has_failed |= isinstance(error, HostError) or not host.facts

        list(self.pool.map(guarded, self.hosts))  # waits for all, and raises other errors again

    def ask_all(self, action: str, **arguments: Any) -> dict[str, Any]:
        """Return the answers by host name, without the hosts that failed."""
        answers: dict[str, Any] = {}

        def ask(host: Host) -> None:
            answers[host.name] = host.agent.ask(action, **arguments)

        self.check_all(ask)
        return {host.name: answers[host.name] for host in self.hosts if host.name in answers}


def group_by_value(values: Mapping[str, str]) -> str:
    """Return ``"value on host, host; value on host"``; only the value if all hosts have the same."""
    hosts: dict[str, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(value, []).append(host)
    if len(hosts) == 1:
        return next(iter(hosts))
    return "; ".join(f"{value} on {', '.join(names)}" for value, names in hosts.items())
