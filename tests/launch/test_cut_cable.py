"""A host that does not answer any more ends the job in seconds, whatever carries the data between hosts."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest

from tests.hosts.network import INTERFACE, Network, NoHosts, switched_hosts
from tests.launch.forked import ForkedJob
from tests.selection import covering, extensive, select

SCRIPT = str(Path(__file__).with_name("far.py"))
LIMIT_S = 20.0
STORE = """
import sys
from torch.distributed import TCPStore

store = TCPStore(sys.argv[1], int(sys.argv[2]), None, True, wait_for_workers=False)
sys.stdin.read()
"""


class FarJob(ForkedJob):
    """Ranks of far.py, each in a process on its host, without a launcher.

    Args:
        placement: the host of each rank.
        words: arguments of the script.
        agent_store: whether another process keeps the rendezvous store, on host 0.
    """

    def __init__(
        self,
        network: Network,
        placement: Sequence[int],
        words: Sequence[str],
        port: int,
        folder: Path,
        agent_store: bool,
    ) -> None:
        self.network = network
        env = [
            {
                "LOCAL_RANK": str(list(placement[:rank]).count(host)),
                "LOCAL_WORLD_SIZE": str(list(placement).count(host)),
                "MASTER_ADDR": network.address(0),
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "TORCHELASTIC_USE_AGENT_STORE": str(agent_store),
            }
            for rank, host in enumerate(placement)
        ]
        namespaces = [network.file(host) for host in placement]
        super().__init__(
            [[SCRIPT, *words]] * len(placement), folder, port=port, env=env, namespaces=namespaces
        )

    def steps(self) -> int:
        """Number of steps done."""
        return len(re.findall(r"^step \d+ done$", self.text, re.MULTILINE))

    def wait_for_step(self, step: int, timeout_s: float = 180) -> None:
        """Wait until a step is done; fail if a rank ends before."""
        self.wait_for(f"step {step} done\n", timeout_s)

    def codes(self, limit_s: float) -> list[int]:
        """Exit codes by rank; fail if a rank is still running after ``limit_s``."""
        return [rank.returncode for rank in self.wait(limit_s)]

    def reports(self) -> dict[int, str]:
        """The line by rank with which it ends, if it has one."""
        lines = re.findall(r"^(rank (\d) (?:stopped|failed).*)", self.text, re.MULTILINE)
        return {int(rank): line for line, rank in reversed(lines)}


@pytest.fixture
def launch(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Callable[..., FarJob]]:
    """Start a job: launch([host of each rank], words of the script, agent_store=False)."""
    with contextlib.ExitStack() as stack:

        def start(placement: Sequence[int], *words: str, agent_store: bool = False) -> FarJob:
            try:
                network = stack.enter_context(switched_hosts(max(placement) + 1))
            except NoHosts as error:
                pytest.skip(f"no network namespaces: {error}")
            port = free_port()
            if agent_store:
                command = [*network.enter(0), sys.executable, "-c", STORE, network.address(0), str(port)]
                stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE))
            return stack.enter_context(FarJob(network, placement, words, port, tmp_path, agent_store))

        yield start


GLOO, TORCH = pytest.param(("1", "auto", "64"), id="gloo"), pytest.param(("4", "torch", "64"), id="torch")
FULL = pytest.param(("4", "torch", "4000000"), id="full")
CUTS = [
    pytest.param(words, cut, id=f"{backend}-{name}")
    for (backend, words), (name, cut) in covering(
        product(
            [("gloo", ("1", "auto", "64")), ("torch", ("4", "torch", "64"))],
            [("drop", Network.drop), ("down", Network.link_down)],
        ),
        1,
    )
]


@pytest.mark.parametrize(("words", "cut"), CUTS)
def test_host_behind_a_cut_cable_is_lost(
    launch: Callable[..., FarJob], words: tuple[str, ...], cut: Callable[[Network, int], None]
) -> None:
    job = launch([0, 0, 1, 1], *words)
    job.wait_for_step(3)
    cut(job.network, 1)
    assert job.codes(LIMIT_S) == [1] * 4
    reports = job.reports()
    # The ranks on the side of the store agree on one cause; without the store, each rank of the other side has its own.
    near = [reports[rank] for rank in (0, 1) if rank in reports]
    causes = {re.sub(r"^rank \d stopped, because ", "", report) for report in near}
    assert len(causes) == 1, reports
    assert all(re.search(r"\branks 2, 3\b.*TransportError.*\bstep \d+\)", cause) for cause in causes), reports
    assert any(
        re.search(r"\branks 0, 1\b.*TransportError.*\bstep \d+\)", reports.get(r, "")) for r in (2, 3)
    ), reports


@pytest.mark.parametrize("words", select([GLOO, TORCH], [TORCH]))
def test_host_that_cannot_receive_is_lost(launch: Callable[..., FarJob], words: tuple[str, ...]) -> None:
    """The ranks of the other host still receive: packets that its kernel sends again, and the ends of connections."""
    job = launch([0, 0, 1, 1], *words)
    job.wait_for_step(3)
    job.network.drop_to(1)
    assert job.codes(LIMIT_S) == [1] * 4
    assert {2, 3} & job.reports().keys(), job.text


@extensive
def test_rank_away_from_the_cut_cable_ends_too(launch: Callable[..., FarJob]) -> None:
    job = launch([0, 1, 2], "3", "torch", "64")
    job.wait_for_step(3)
    job.network.drop(2)
    assert job.codes(LIMIT_S) == [1] * 3
    reports = job.reports()
    assert all(re.search(r"\brank 2 on host\b", reports[rank]) for rank in (0, 1)), reports


def test_host_that_has_only_the_store(launch: Callable[..., FarJob]) -> None:
    job = launch([1, 1], "1", "auto", "64", "0.1", agent_store=True)
    job.wait_for_step(3)
    job.network.drop(0)
    assert job.codes(LIMIT_S) == [1] * 2
    assert f"host {job.network.address(0)}" in job.text, job.text


@extensive
@pytest.mark.parametrize("words", select([GLOO, FULL], [FULL]))
def test_stopped_process_is_waited_for(launch: Callable[..., FarJob], words: tuple[str, ...]) -> None:
    # 32 MB messages: the receive window of the stopped process is full.
    job = launch([0, 0, 1, 1], *words)
    job.wait_for_step(3)
    stopped = job.pids[2]
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(1)
    done = job.steps()
    time.sleep(5)
    os.kill(stopped, signal.SIGCONT)
    assert job.steps() <= done + 1
    job.wait_for_step(done + 3, timeout_s=30)
