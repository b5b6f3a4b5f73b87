"""Checks of every pair of hosts: rendezvous, tcp, gloo's addresses, RDMA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ...comm.tcp.address import is_loopback
from ...errors import DsExtError
from ..doctor import Finding
from .probe import new_token
from .report import FAIL, Host, Pair, Session, group_by_value
from .ssh import HostError

_OPEN_PORTS = "allow TCP between the hosts, in both directions, to the ports under `ports`"
T = TypeVar("T")


def find_addresses(session: Session) -> str:
    """Find the address on which the ranks of each host would listen. Return the address of the first host."""
    first = session.hosts[0]
    addresses = first.facts["listed_addresses"] or first.facts["addresses"]
    master: str = next(iter(addresses), first.name)
    numbers = {host.name: number for number, host in enumerate(session.hosts)}
    node_ips = session.options.node_ips
    if node_ips is not None:  # without those of hosts that have failed
        node_ips = [ip for name, ip in zip(session.report.hosts, node_ips, strict=True) if name in numbers]

    def find(host: Host) -> None:
        arguments = {"master": master, "rank": numbers[host.name], "world_size": len(numbers)}
        try:
            host.address = host.agent.ask("own_address", node_ips=node_ips, **arguments)
        except HostError:
            raise
        except DsExtError as error:
            remedy = "correct --node-ips: one address per host, in the order of the hosts"
            session.report.hosts[host.name].append(Finding("node_ips", FAIL, str(error), remedy))

    session.check_all(find)
    return master


def rendezvous(session: Session, master: str) -> Iterator[Finding]:
    master_host, port = session.hosts[0], session.options.master_port
    token = new_token()
    place = f"{master}:{port} on {master_host.name}"
    try:
        master_host.agent.ask("listen", address=master, port=port, token=token)
    except DsExtError as error:
        remedy = "stop the job that uses it, or pass another --master_port to the launcher"
        yield Finding("rendezvous", "warn", f"{place}: {error}", remedy)
        return
    failed: dict[str, str] = {}

    def reach(host: Host) -> None:
        try:
            host.agent.ask("reach", address=master, port=port, token=token)
        except HostError:
            raise
        except DsExtError as error:
            failed[host.name] = str(error)

    session.check_all(reach)
    if failed:
        yield Finding("rendezvous", FAIL, f"{place}: {group_by_value(failed)}", _OPEN_PORTS)
    else:
        yield Finding("rendezvous", "ok", f"{place} is reached from all hosts")


def measure_tcp(session: Session) -> None:
    """Connect every host to every other one, both ways. Pairs that run at the same time share no host."""
    hosts = _ready(session)
    token = new_token()
    ports: dict[str, int] = {}  # name of a host -> port that answers probes

    def listen(host: Host) -> None:
        ports[host.name] = host.agent.ask("listen", address=host.address, port=0, token=token)

    def probe(action: str, source: Host, target: Host) -> Pair:
        pair = Pair(source.name, target.name, target.address)
        arguments = {"address": target.address, "port": ports[target.name], "token": token}
        try:
            speed = source.agent.ask(action, **arguments)
        except DsExtError as error:
            pair.error = str(error)
        else:
            if speed:
                pair.round_trip_us = speed["round_trip_us"]
                pair.tcp_gbit_s = speed["gbit_s"]
        return pair

    def probe_both_ways(pair: tuple[Host, Host]) -> list[Pair]:
        a, b = sorted(pair, key=hosts.index)
        return [probe("measure", a, b), probe("reach", b, a)]

    session.check_all(listen)
    for turn in round_robin([host for host in hosts if host.name in ports]):
        for pairs in session.pool.map(probe_both_ways, turn):
            session.report.pairs += pairs


def reach_gloo(session: Session) -> None:
    """Connect to the address of gloo on each host where it is not the address of the ranks' links."""
    token = new_token()
    for target in _ready(session):
        if target.gloo_address in ("", target.address) or is_loopback(target.gloo_address):
            continue
        try:
            port = target.agent.ask("listen", address=target.gloo_address, port=0, token=token)
        except DsExtError as error:
            remedy = "set GLOO_SOCKET_IFNAME in .deepspeed_env"
            problem = f"cannot listen on {target.gloo_address}: {error}"
            session.report.hosts[target.name].append(Finding("gloo", FAIL, problem, remedy))
            continue

        def reach(source: Host, target: Host = target, port: int = port) -> None:
            try:
                source.agent.ask("reach", address=target.gloo_address, port=port, token=token)
            except DsExtError as error:
                session.report.pairs.append(Pair(source.name, target.name, target.gloo_address, str(error)))

        session.check_all(reach)


def measure_rdma(session: Session) -> None:
    """Write over RDMA between the hosts of each pair that both have an active port."""
    hosts = {host.name: host for host in _ready(session) if host.facts["rdma"]}
    tcp_pairs = {
        frozenset((pair.source, pair.target)): pair
        for pair in session.report.pairs
        if pair.round_trip_us is not None and {pair.source, pair.target} <= hosts.keys()
    }
    for turn in round_robin(list(hosts.values())):
        keys = (frozenset((a.name, b.name)) for a, b in turn)
        pairs = [tcp_pairs[key] for key in keys if key in tcp_pairs]
        list(session.pool.map(lambda pair: _write(pair, hosts[pair.source], hosts[pair.target]), pairs))


def _write(pair: Pair, source: Host, target: Host) -> None:
    """Write from one host to the other, and note the ports and the bandwidth, or the error, in ``pair``."""
    key = f"{source.name} {target.name}"
    job = new_token()
    sides = ((source, True), (target, False))
    try:
        links = [
            host.agent.ask("rdma_open", key=key, address=host.address, sends=sends, job=job)
            for host, sends in sides
        ]
        pair.rdma = " - ".join(link["name"] for link in links)
        source_link, target_link = links
        if source_link["network"] != target_link["network"]:
            pair.rdma += f": different networks ({source_link['network']}, {target_link['network']})"
            return
        source.agent.ask("rdma_connect", key=key, greeting=target_link["greeting"], job=job)
        target.agent.ask("rdma_connect", key=key, greeting=source_link["greeting"], job=job)
        bandwidth = ThreadPoolExecutor(1).submit(target.agent.ask, "rdma_receive", key=key)
        source.agent.ask("rdma_send", key=key)
        pair.rdma_gbit_s = bandwidth.result()
    except DsExtError as error:
        pair.rdma = f"{pair.rdma}: {error}".removeprefix(": ")
    finally:
        for host, _ in sides:
            with contextlib.suppress(DsExtError):
                host.agent.ask("rdma_close", key=key)


def _ready(session: Session) -> list[Host]:
    return [host for host in session.hosts if host.address]


def ports(session: Session) -> Iterator[Finding]:
    ranges = {host.name: "-".join(host.facts["port_range"]) or "unknown" for host in session.hosts}
    rendezvous_port = f"TCP {session.options.master_port} to {session.hosts[0].name}"
    yield Finding("ports", "ok", f"{rendezvous_port}; TCP {group_by_value(ranges)} between all hosts")


def round_robin(items: Sequence[T]) -> Iterator[list[tuple[T, T]]]:
    """Yield all pairs of items, grouped so that no item is twice in a group (round-robin tournament)."""
    seats: list[T | None] = [*items, *([None] if len(items) % 2 else [])]
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]
