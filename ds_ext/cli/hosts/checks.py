"""Checks that compare several hosts: versions, clocks, folders, names."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...comm.tcp.address import is_loopback
from ...errors import DsExtError
from ..doctor import Finding
from . import pairs
from .report import FAIL, Host, Options, Report, Session, group_by_value
from .ssh import RemoteAgent, agent_command, ssh_words

_MOST_CLOCK_S = 1.0
_MOST_PARALLEL = 64


def examine_hosts(names: Sequence[str], options: Options) -> Report:
    """Start an agent on every host, and return all findings. Every wait has a limit."""
    report = Report({name: [] for name in names})
    if shutil.which("pdsh") is None:
        remedy = "install it (Debian, Ubuntu: apt install pdsh), or use `torchrun` on every host"
        report.job.append(Finding("pdsh", "warn", "missing here; `deepspeed --hostfile` needs it", remedy))
    ssh, command = ssh_words(options.ssh_port), agent_command()
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(_MOST_PARALLEL))
        hosts = [Host(name, RemoteAgent(name, ssh, command)) for name in names]
        for host in hosts:
            stack.callback(host.agent.close)
        _run(Session(report, hosts, options, pool))
    return report


def _run(session: Session) -> None:
    session.start()
    if not session.hosts:
        return
    job = session.report.job
    job += _versions(session)
    job += _clocks(session)
    paths = (os.getcwd(), *(str(Path(path).absolute()) for path in session.options.paths))
    job += [Finding(f"path {path}", *_path(session, path)) for path in paths]
    master = pairs.find_addresses(session)
    _check_names(session)
    if len(session.hosts) > 1:
        job += pairs.rendezvous(session, master)
        pairs.measure_tcp(session)
        pairs.reach_gloo(session)
        pairs.measure_rdma(session)
    job += pairs.ports(session)
    order = {name: number for number, name in enumerate(session.report.hosts)}
    session.report.pairs.sort(key=lambda pair: (order[pair.source], order[pair.target]))


def _versions(session: Session) -> Iterator[Finding]:
    """Compare the versions that the roll call of a job compares, and the native code."""
    shown = []
    for key in session.hosts[0].facts["versions"]:
        versions = {host.name: host.facts["versions"].get(key, "missing") for host in session.hosts}
        name = key.removeprefix("version of ")
        if len(set(versions.values())) == 1:
            shown.append(f"{name} {next(iter(versions.values()))}")
        elif key == "native code":
            remedy = "if links are refused, build it from the same sources on every host"
            yield Finding(name, "warn", f"built separately: {group_by_value(versions)}", remedy)
        else:
            yield Finding(
                name, FAIL, f"hosts differ: {group_by_value(versions)}", "install the same on every host"
            )
    yield Finding("versions", "ok", ", ".join(shown))


def _clocks(session: Session) -> Iterator[Finding]:
    offsets: dict[str, float] = {}

    def ask(host: Host) -> None:
        trips = []  # (round trip, offset)
        for _ in range(3):
            start = time.time()
            remote_time = host.agent.ask("clock")
            end = time.time()
            trips.append((end - start, remote_time - (start + end) / 2))
        _, offsets[host.name] = min(trips)

    session.check_all(ask)
    late = {name: f"{offset:+.1f} s" for name, offset in offsets.items() if abs(offset) > _MOST_CLOCK_S}
    if late:
        remedy = "synchronize the clocks (chrony, ntpd); logs and file times of these hosts do not match"
        yield Finding("clocks", "warn", f"differ from this host: {group_by_value(late)}", remedy)
    elif offsets:
        yield Finding("clocks", "ok", f"within {max(offsets.values()) - min(offsets.values()):.2f} s")


def _path(session: Session, path: str) -> tuple[str, str, str]:
    """Return state, text and remedy of a folder or file on all hosts."""
    answers = session.ask_all("path", name=path)
    kinds = {name: answer["is"] for name, answer in answers.items()}
    if "missing" in kinds.values() or len(set(kinds.values())) > 1:
        return FAIL, group_by_value(kinds), "create it, with the same path on every host"
    systems = group_by_value({name: answer["file_system"] or "unknown" for name, answer in answers.items()})
    if "folder" in kinds.values():
        return _folder(session, path, {name: answer["writable"] for name, answer in answers.items()}, systems)
    sizes = {name: f"{answer['bytes']:,} bytes" for name, answer in answers.items()}
    if len(set(sizes.values())) > 1:
        return FAIL, f"hosts differ: {group_by_value(sizes)}", "copy the same file to every host"
    return "ok", f"the same size on all hosts ({systems})", ""


def _folder(session: Session, path: str, writable: dict[str, bool], systems: str) -> tuple[str, str, str]:
    """Test whether the hosts share a folder, with a file that the first of those creates to which it is writable."""
    writer = next((host for host in session.hosts if writable.get(host.name)), None)
    if writer is None:
        return "ok", f"on all hosts, read-only ({systems})", ""
    visible_on = _see(session, path, writer)
    if visible_on is None:
        return "warn", f"{writer.name} cannot create a file there", "check quota and free space"
    if not all(writable.values()):
        read_only = ", ".join(name for name, is_writable in writable.items() if not is_writable)
        return (
            "warn",
            f"read-only on {read_only} ({systems})",
            "if ranks write there, make it writable on every host",
        )
    if len(writable) == 1:
        return "ok", f"on {writer.name} ({systems}); the other hosts failed", ""
    separate = ", ".join(name for name, is_visible in visible_on.items() if not is_visible)
    if not separate:
        return "ok", f"shared by all hosts ({systems})", ""
    if path == os.getcwd():
        return "ok", f"separate on {separate} ({systems}); keep the copies equal", ""
    remedy = "--save needs a shared folder; data may be separate if its contents are equal"
    return "warn", f"separate: a file of {writer.name} is not on {separate}", remedy


def _see(session: Session, path: str, writer: Host) -> dict[str, bool] | None:
    """Create a file on one host and return which hosts see it; None if it cannot be created."""
    name = f"{path}/.ds_ext-doctor-{secrets.token_hex(8)}"
    try:
        writer.agent.ask("create", name=name)
        return session.ask_all("exists", path=name)
    except DsExtError:
        return None
    finally:
        with contextlib.suppress(DsExtError):
            writer.agent.ask("remove", path=name)


def _check_names(session: Session) -> None:
    """Resolve the names of every host and of the first one, and set the addresses at which gloo listens."""
    master = session.hosts[0].name

    def check(host: Host) -> None:
        hostname = host.facts["hostname"]
        addresses = host.agent.ask("resolve", names=[hostname, master])
        interface = host.facts["gloo_interface"].partition(",")[0]
        if interface:
            host.gloo_address = host.facts["interfaces"].get(interface, "")
        else:
            host.gloo_address = next(iter(addresses[hostname]), "")
        findings = session.report.hosts[host.name]
        if interface and not host.gloo_address:
            remedy = "correct it in .deepspeed_env; `ip -brief address` lists the interfaces"
            problem = f"no such interface (got {interface})"
            findings.append(Finding("GLOO_SOCKET_IFNAME", FAIL, problem, remedy))
        elif len(session.hosts) > 1 and (not host.gloo_address or is_loopback(host.gloo_address)):
            findings.append(_loopback_finding(host))
        if not addresses[master]:
            remedy = "use addresses in the hostfile, or add the name to DNS or /etc/hosts"
            findings.append(Finding("names", "warn", f"{master} does not resolve", remedy))

    session.check_all(check)


def _loopback_finding(host: Host) -> Finding:
    hostname, interfaces = host.facts["hostname"], host.facts["interfaces"]
    problem = f"resolves to {host.gloo_address}" if host.gloo_address else "does not resolve"
    interface = next((name for name, address in interfaces.items() if address == host.address), "eth0")
    remedy = (
        f"gloo would listen on loopback. Set GLOO_SOCKET_IFNAME={interface} in .deepspeed_env, or add "
        f"`{host.address} {hostname}` to /etc/hosts there"
    )
    return Finding("own name", FAIL, f"{hostname} {problem}", remedy)
