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
from .report import FAIL, Host, Options, Report, Session, by_value
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
    job += _paths(session)
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
    """Compare what the roll call of a job compares, and the native code."""
    shown = []
    for key in session.hosts[0].facts["versions"]:
        versions = {host.name: host.facts["versions"].get(key, "missing") for host in session.hosts}
        name = key.removeprefix("version of ")
        if len(set(versions.values())) == 1:
            shown.append(f"{name} {next(iter(versions.values()))}")
        elif key == "native code":
            remedy = "if links are refused, build it from the same sources on every host"
            yield Finding(name, "warn", f"built separately: {by_value(versions)}", remedy)
        else:
            yield Finding(name, FAIL, f"hosts differ: {by_value(versions)}", "install the same on every host")
    yield Finding("versions", "ok", ", ".join(shown))


def _clocks(session: Session) -> Iterator[Finding]:
    offsets: dict[str, float] = {}

    def ask(host: Host) -> None:
        trips = []
        for _ in range(3):
            started = time.time()
            there = host.agent.ask("clock")
            ended = time.time()
            trips.append((ended - started, there - (started + ended) / 2))
        offsets[host.name] = min(trips)[1]

    session.on_each(ask)
    late = {name: f"{offset:+.1f} s" for name, offset in offsets.items() if abs(offset) > _MOST_CLOCK_S}
    if late:
        remedy = "synchronize the clocks (chrony, ntpd); logs and file times of these hosts do not match"
        yield Finding("clocks", "warn", f"differ from this host: {by_value(late)}", remedy)
    elif offsets:
        yield Finding("clocks", "ok", f"within {max(offsets.values()) - min(offsets.values()):.2f} s")


def _paths(session: Session) -> Iterator[Finding]:
    for path in (os.getcwd(), *(str(Path(path).absolute()) for path in session.options.paths)):
        yield _path(session, path)


def _path(session: Session, path: str) -> Finding:
    subject = f"path {path}"
    answers = session.ask_all("path", name=path)
    kinds = {name: answer["is"] for name, answer in answers.items()}
    if "missing" in kinds.values() or len(set(kinds.values())) > 1:
        return Finding(subject, FAIL, by_value(kinds), "create it, with the same path on every host")
    systems = by_value({name: answer["file_system"] or "unknown" for name, answer in answers.items()})
    if "file" in kinds.values():
        sizes = {name: f"{answer['bytes']:,} bytes" for name, answer in answers.items()}
        if len(set(sizes.values())) > 1:
            return Finding(
                subject, FAIL, f"hosts differ: {by_value(sizes)}", "copy the same file to every host"
            )
        return Finding(subject, "ok", f"the same size on all hosts ({systems})")
    writers = [name for name, answer in answers.items() if answer["writable"]]
    if not writers:
        return Finding(subject, "ok", f"on all hosts, read-only ({systems})")
    seen = _see(session, path, next(host for host in session.hosts if host.name == writers[0]))
    if seen is None:
        return Finding(
            subject, "warn", f"{writers[0]} cannot create a file there", "check quota and free space"
        )
    without = [name for name, sees in seen.items() if not sees]
    read_only = [name for name in answers if name not in writers]
    if read_only:
        remedy = "if ranks write there, make it writable on every host"
        return Finding(subject, "warn", f"read-only on {', '.join(read_only)} ({systems})", remedy)
    if len(answers) == 1:
        return Finding(subject, "ok", f"on {writers[0]} ({systems}); the other hosts failed")
    if not without:
        return Finding(subject, "ok", f"shared by all hosts ({systems})")
    if path == os.getcwd():
        return Finding(subject, "ok", f"separate on {', '.join(without)} ({systems}); keep the copies equal")
    remedy = "--save needs a shared folder; data may be separate if its contents are equal"
    return Finding(
        subject, "warn", f"separate: a file of {writers[0]} is not on {', '.join(without)}", remedy
    )


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
    """Check the own name of every host, at which gloo listens, and the name of the first host."""
    first, alone = session.hosts[0].name, len(session.hosts) == 1

    def check(host: Host) -> None:
        findings, own = session.report.hosts[host.name], host.facts["hostname"]
        addresses = host.agent.ask("resolve", names=[own, first])
        interfaces, chosen = host.facts["interfaces"], host.facts["gloo_interface"].partition(",")[0]
        host.gloo_address = interfaces.get(chosen, "") if chosen else next(iter(addresses[own]), "")
        if chosen and not host.gloo_address:
            remedy = "correct it in .deepspeed_env; `ip -brief address` lists the interfaces"
            findings.append(Finding("GLOO_SOCKET_IFNAME", FAIL, f"no such interface (got {chosen})", remedy))
        elif not alone and (not host.gloo_address or is_loopback(host.gloo_address)):
            problem = f"resolves to {host.gloo_address}" if host.gloo_address else "does not resolve"
            name = next((name for name, address in interfaces.items() if address == host.address), "eth0")
            remedy = (
                f"gloo would listen on loopback. Set GLOO_SOCKET_IFNAME={name} in .deepspeed_env, or add "
                f"`{host.address} {own}` to /etc/hosts there"
            )
            findings.append(Finding("own name", FAIL, f"{own} {problem}", remedy))
        if not addresses[first]:
            remedy = "use addresses in the hostfile, or add the name to DNS or /etc/hosts"
            findings.append(Finding("names", "warn", f"{first} does not resolve", remedy))

    session.on_each(check)
