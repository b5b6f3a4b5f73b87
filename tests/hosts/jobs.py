"""Jobs over the hosts of a cluster: launchers started on them, watched from outside, and what remains on each host."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.hosts.cluster import NO_ENV, Cluster, Host
from tests.launch.jobs import BIN, ROOT, environment

PORT = 29_600  # the hosts have no other jobs
SCRIPT = str(ROOT / "train_gpt.py")


class Launch:
    """A command on a host, with the time of each line that it prints, in seconds of time.monotonic()."""

    def __init__(self, host: Host, words: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
        self.host = host
        self.process = host.start(
            words,
            cwd,
            env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    def join(self) -> None:
        """Read the rest of the output."""
        self._reader.join(5)


class HostsJob:
    """Job of one command per launcher; every process on the hosts belongs to it.

    Args:
        commands: host and words of each launcher.
        cwd: shared folder in which they start.
        env: variables besides those of a rank.
    """

    def __init__(
        self,
        hosts: Cluster,
        commands: Sequence[tuple[int, Sequence[str]]],
        cwd: Path,
        env: Mapping[str, str] = NO_ENV,
    ) -> None:
        self.hosts = hosts
        self.launches = [Launch(hosts[host], words, cwd, environment(**env)) for host, words in commands]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for host in self.hosts.hosts:
            host.end_processes()
        for launch in self.launches:
            launch.process.kill()
            launch.process.wait()
            launch.join()

    @property
    def lines(self) -> list[str]:
        """Lines of all launchers in the order of their arrival, without pdsh's name of the host."""
        lines = sorted(line for launch in self.launches for line in list(launch.lines))
        return [re.sub(r"^node\d+: ", "", line) for _, line in lines]

    @property
    def text(self) -> str:
        """All lines."""
        return "\n".join(self.lines)

    def processes(self) -> dict[Host, dict[int, str]]:
        """Return the command lines of all processes on the hosts, without hosts that have none."""
        found = {host: host.processes() for host in self.hosts.hosts}
        return {host: processes for host, processes in found.items() if processes}

    def ranks(self) -> dict[int, int]:
        """Return rank -> process id."""
        return {rank: process for host in self.hosts.hosts for rank, process in host.ranks().items()}

    def wait_for(self, words: str, timeout_s: float = 120) -> None:
        """Wait for a line that contains ``words``; fail if all launchers end before."""
        deadline = time.monotonic() + timeout_s
        while not any(words in line for line in self.lines):
            running = any(launch.process.poll() is None for launch in self.launches)
            assert running and time.monotonic() < deadline, f"no {words!r} in:\n{self.text}"
            time.sleep(0.05)

    def wait(self, timeout_s: float = 180) -> list[int]:
        """Return the exit codes of the launchers; fail if one is still running."""
        deadline = time.monotonic() + timeout_s
        codes: list[int] = []
        for launch in self.launches:
            try:
                codes.append(launch.process.wait(max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{self.processes()} still alive:\n{self.text}") from None
            launch.join()
        return codes

    def seconds_until_gone(self, limit_s: float, ranks_only: bool = False) -> float:
        """Return how long from now until no process, or no rank, is alive on any host."""
        started = time.monotonic()
        while self.ranks() if ranks_only else self.processes():
            waited = time.monotonic() - started
            assert waited < limit_s, f"{self.processes()} still alive after {waited:.0f} s:\n{self.text}"
            time.sleep(0.1)
        return time.monotonic() - started


def deepspeed(*words: str, port: int = PORT) -> list[str]:
    """Return a command of DeepSpeed's launcher."""
    return [str(BIN / "deepspeed"), "--master_port", str(port), *words]


def torchrun(
    hosts: Sequence[Host], slots: Sequence[int], *script: str, static: bool = False
) -> list[tuple[int, list[str]]]:
    """Return torchrun's command on each host, with the rendezvous on the first.

    Args:
        static: every host has its rank from --node_rank; otherwise --rdzv_endpoint is given.
    """
    master = hosts[0].name
    flags = ["--nnodes", str(len(hosts))]
    flags += ["--master_addr", master, "--master_port", str(PORT)] if static else []
    flags += [] if static else ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{master}:{PORT}"]
    return [
        (
            host.number,
            [
                *(str(BIN / "torchrun"), *flags, *(["--node_rank", str(rank)] if static else [])),
                *("--nproc_per_node", str(count), *script),
            ],
        )
        for rank, (host, count) in enumerate(zip(hosts, slots, strict=True))
    ]


def records(metrics: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file."""
    return [json.loads(line) for line in metrics.read_text().splitlines()]
