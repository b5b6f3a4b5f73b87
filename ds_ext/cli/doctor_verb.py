"""Subcommand ``doctor`` of ``python -m ds_ext``: what this host, or the hosts of a job, support."""

from __future__ import annotations

import argparse
import ipaddress
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from ..errors import ConfigError
from ..parallel.hosts import parse_hosts
from ..planner.text import aligned
from .doctor import Finding, examine
from .hosts.checks import examine_hosts
from .hosts.report import FAIL, Options, Pair, Report

_MOST_PAIRS = 10
_MASTER_PORT = 29500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    hosts = parser.add_argument_group("several hosts", "checks every host over ssh, and every pair of hosts")
    named = hosts.add_mutually_exclusive_group()
    named.add_argument("--hostfile", metavar="FILE", help="hostfile of `deepspeed`: lines `worker-0 slots=8`")
    named.add_argument("--hosts", metavar="A,B", help="names of the hosts")
    hosts.add_argument("--node-ips", metavar="IP,IP", help="transport_options.node_ips, one address per host")
    hosts.add_argument(
        "--path", action="append", default=[], help="folder or file of the job; may be repeated"
    )
    hosts.add_argument("--master-port", type=int, help=f"rendezvous port ({_MASTER_PORT})")
    hosts.add_argument("--ssh-port", type=int, help="port of sshd (ssh's default)")


def run(args: argparse.Namespace) -> int:
    """Print the findings. Return 1 if jobs on several hosts will fail.

    The result for one host is 0, because a host need not support every transport.
    """
    ports = [("--master-port", args.master_port), ("--ssh-port", args.ssh_port)]
    for flag, port in ports:
        if port is not None and not 0 < port < 1 << 16:
            raise ConfigError(f"{flag}: must be from 1 to 65535 (got {port}).")
    if args.hostfile is None and args.hosts is None:
        for flag, value in (("--node-ips", args.node_ips), ("--path", ", ".join(args.path)), *ports):
            if value:
                raise ConfigError(f"{flag}: needs several hosts (got {value}). Add --hostfile or --hosts.")
        findings = examine()
        print(json.dumps([asdict(f) for f in findings], indent=1) if args.json else table(findings))
        return 0
    names = _names(args.hostfile, args.hosts)
    node_ips = _node_ips(args.node_ips, len(names))
    options = Options(node_ips, args.master_port or _MASTER_PORT, tuple(args.path), args.ssh_port)
    report = examine_hosts(names, options)
    print(json.dumps(asdict(report), indent=1) if args.json else describe(report))
    return int(report.failed)


def _node_ips(text: str | None, num_hosts: int) -> list[str] | None:
    if text is None:
        return None
    addresses = text.split(",")
    if len(addresses) != num_hosts or not all(map(_is_address, addresses)):
        raise ConfigError(
            f"--node-ips: needs one IP address per host (got {text!r} for {num_hosts} hosts). Example: "
            "10.0.0.1,10.0.0.2."
        )
    return addresses


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def table(findings: Sequence[Finding]) -> str:
    rows = []
    for finding in findings:
        rows.append((f"{finding.state:4}", finding.subject, finding.found))
        if finding.remedy:
            rows.append(("", "", f"-> {finding.remedy}"))
    return "\n".join(aligned(rows, left=(0, 1, 2)))


def describe(report: Report) -> str:
    """Return the text of a report: problems of each host, comparisons, pairs."""
    width = max(map(len, report.hosts))
    findings = []
    for host, host_findings in report.hosts.items():
        problems = [finding for finding in host_findings if finding.state != "ok"]
        findings += [replace(problem, subject=f"{host:{width}}  {problem.subject}") for problem in problems]
        if not problems:
            addresses = next((f.found for f in host_findings if f.subject == "addresses"), "")
            findings.append(Finding(host, "ok", addresses.partition(";")[0]))
    tables = {"hosts": findings, "job": report.job}
    tables["pairs (tcp: round trip, one connection)"] = list(_pair_findings(report.pairs))
    return "\n\n".join(f"{title}\n{table(rows)}" for title, rows in tables.items() if rows)


def _pair_findings(pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Yield the pairs without a connection, then the speed of the others, or of the 10 slowest."""
    for pair in pairs:
        if pair.error:
            name = f"{pair.source} -> {pair.target}"
            remedy = f"allow TCP from {pair.source} to {pair.target}, or use other addresses with --node-ips"
            yield Finding(name, FAIL, f"{pair.address}: {pair.error}", remedy)
    with_speed = [pair for pair in pairs if pair.tcp_gbit_s is not None]
    if len(with_speed) <= _MOST_PAIRS:
        yield from map(_speed_finding, with_speed)
    else:
        slowest = sorted(with_speed, key=lambda pair: pair.tcp_gbit_s or 0.0)[:_MOST_PAIRS]
        yield from map(_speed_finding, slowest)
        yield Finding("", "ok", f"the slowest {_MOST_PAIRS} of {len(with_speed)} pairs; --json lists all")


def _speed_finding(pair: Pair) -> Finding:
    name = f"{pair.source} - {pair.target}"
    speed = f"{pair.round_trip_us:.0f} us, {pair.tcp_gbit_s:.1f} Gbit/s"
    if pair.rdma_gbit_s is not None:
        return Finding(name, "ok", f"{speed}; rdma {pair.rdma}: {pair.rdma_gbit_s:.1f} Gbit/s")
    if pair.rdma:
        return Finding(name, "warn", f"{speed}; rdma {pair.rdma}", "tcp is used between these hosts")
    return Finding(name, "ok", speed)


def _names(hostfile: str | None, hosts: str | None) -> list[str]:
    if hostfile is not None:
        if not Path(hostfile).is_file():
            raise ConfigError(f"--hostfile: no such file (got {hostfile}). Write lines `worker-0 slots=8`.")
        return list(parse_hosts(hostfile).names)
    if Path(hosts or "").is_file() or re.fullmatch(r"[0-9]+(x[0-9]+|(,[0-9]+)*)", hosts or ""):
        raise ConfigError(
            f"--hosts: must be names of hosts (got {hosts!r}). Use --hosts A,B or --hostfile FILE."
        )
    names = [name.strip() for name in (hosts or "").split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise ConfigError(f"--hosts: must be different names, separated by commas (got {hosts!r}).")
    return names
