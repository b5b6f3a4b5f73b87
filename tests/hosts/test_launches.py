"""Jobs over several hosts, started in every documented way, compute the losses of one host, and can be continued."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.cluster import Cluster, Host, address
from tests.hosts.delay_line import Link
from tests.hosts.jobs import SCRIPT, HostsJob, deepspeed, records, torchrun
from tests.launch.forked import run_forked
from tests.launch.jobs import ROOT, find_free_port, tiny_config, write_json
from tests.selection import extensive

Start = Callable[..., Cluster]
STEPS = 6
SAVED_AT = 3


def script(config: Path, *flags: str) -> list[str]:
    """Return train_gpt.py with a configuration; its metrics are in a file beside it."""
    metrics = config.with_suffix(".jsonl").name
    return [SCRIPT, "--deepspeed_config", config.name, "--metrics-file", metrics, *flags]


@pytest.fixture(scope="session")
def one_host(
    corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[tuple[float, float]]]:
    """Return losses and gradient norms of six steps of four ranks on one host: one_host(**section)."""
    known: dict[str, list[tuple[float, float]]] = {}

    def run(**section: Any) -> list[tuple[float, float]]:
        if str(section) not in known:
            folder = tmp_path_factory.mktemp("one_host")
            config = write_json(folder / "one.json", tiny_config(corpus, **section))
            done = run_forked(
                [script(config, "--train-iters", str(STEPS))] * 4, folder, port=find_free_port()
            )
            assert [rank.returncode for rank in done] == [0] * 4, done[0].stderr
            known[str(section)] = numbers(folder / "one.jsonl")
        return known[str(section)]

    return run


def numbers(metrics: Path) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of every step."""
    return [(record["loss"], record["grad_norm"]) for record in records(metrics)]


def received_bytes(host: Host, interface: str) -> int:
    """Return the bytes that a host has received over an interface."""
    devices = host.run(["cat", "/proc/net/dev"]).stdout.splitlines()
    return int(next(line.split()[1] for line in devices if line.strip().startswith(f"{interface}:")))


def continued(job: HostsJob, *launcher: str) -> list[str]:
    """Return script and flags of the command that the job printed for its continuation.

    The command starts with ``launcher``, and the note below it asks for the launcher's flags for several hosts.
    """
    at = next(number for number, line in enumerate(job.lines) if "continue training" in line)
    assert re.fullmatch(r" +\(.*\)", job.lines[at + 1])
    words = shlex.split(job.lines[at].split("continue training")[1])
    assert words[: len(launcher)] == list(launcher)
    return words[len(launcher) :]


def run(hosts: Cluster, commands: list[tuple[int, list[str]]], folder: Path) -> HostsJob:
    """Run a job to its end; it must succeed and leave nothing on any host."""
    with HostsJob(hosts, commands, folder) as job:
        assert set(job.wait()) == {0}, job.text
        job.seconds_until_gone(5)
    return job


def test_deepspeed_with_a_hostfile(
    hosts: Start, corpus: Path, folder: Path, one_host: Callable[..., Any]
) -> None:
    """Two of three hosts, data over the second network, variables from .deepspeed_env, and the printed continuation."""
    three = hosts(3, networks=2)
    three.hostfile(folder / "hostfile", 2, 2, 2)
    addresses = [address(0, 1), address(2, 1)]
    config = write_json(folder / "c.json", tiny_config(corpus, transport_options={"node_ips": addresses}))
    flags = ["--hostfile", "hostfile", "--exclude", "node1"]
    command = deepspeed(*flags, *script(config, "--save", "saved", "--train-iters", str(SAVED_AT)))
    first = run(three, [(0, command)], folder)
    assert numbers(folder / "c.jsonl") == one_host()[:SAVED_AT]
    assert re.search(r"^rank 0 \| INFO", first.text, re.MULTILINE)
    received = [received_bytes(host, "dsx1") for host in three.hosts]
    assert min(received[0], received[2]) > 10_000 > received[1]

    again = continued(first, "deepspeed", "--num_gpus", "2")
    run(three, [(0, deepspeed(*flags, *again))], folder)
    assert numbers(folder / "c.jsonl") == one_host()


def test_the_example_for_several_hosts(
    hosts: Start, corpus: Path, folder: Path, one_host: Callable[..., Any]
) -> None:
    """``examples/hosts/train.sh`` checks the hosts of its hostfile, then trains on them."""
    two = hosts(2)
    example = ROOT / "examples" / "hosts"
    shutil.copy(example / "hostfile", folder)
    config = write_json(folder / "c.json", tiny_config(corpus))
    command = ["bash", str(example / "train.sh"), "hostfile", *script(config, "--train-iters", str(SAVED_AT))]
    job = run(two, [(0, command)], folder)
    checks, _, _ = job.text.partition("schedule  bitpipe")
    assert re.search(r"^ok +node1 ", checks, re.MULTILINE)
    assert numbers(folder / "c.jsonl") == one_host()[:SAVED_AT]


@extensive
def test_deepspeed_with_unequal_slots(
    hosts: Start, corpus: Path, folder: Path, one_host: Callable[..., Any]
) -> None:
    """Three ranks on one host and one on the other; the command runs on a host without ranks."""
    three = hosts(3)
    three.hostfile(folder / "hostfile", 4, 4, 4)
    config = write_json(folder / "c.json", tiny_config(corpus))
    flags = ["--hostfile", "hostfile", "--include", "node0:0,1,2@node1:3"]
    command = deepspeed(*flags, *script(config, "--save", "saved", "--train-iters", str(SAVED_AT)))
    job = run(three, [(2, command)], folder)
    assert numbers(folder / "c.jsonl") == one_host()[:SAVED_AT]
    assert continued(job, "deepspeed", "--num_gpus", "3")


@extensive
def test_deepspeed_without_ssh(
    hosts: Start, corpus: Path, folder: Path, one_host: Callable[..., Any]
) -> None:
    two = hosts(2)
    two.hostfile(folder / "hostfile", 2, 2)
    config = write_json(folder / "c.json", tiny_config(corpus))
    words = script(config, "--save", "saved", "--train-iters", str(SAVED_AT))
    flags = ["--hostfile", "hostfile", "--no_ssh", "--master_addr", "node0", "--node_rank"]
    first = run(two, [(host, deepspeed(*flags, str(host), *words)) for host in range(2)], folder)
    assert numbers(folder / "c.jsonl") == one_host()[:SAVED_AT]

    again = continued(first, "deepspeed", "--num_gpus", "2")
    run(two, [(host, deepspeed(*flags, str(host), *again)) for host in range(2)], folder)
    assert numbers(folder / "c.jsonl") == one_host()


def test_torchrun_over_a_slow_and_lossy_link(
    hosts: Start, corpus: Path, folder: Path, one_host: Callable[..., Any]
) -> None:
    two = hosts(2)
    two.slow(Link(delay_ms=2, rate_mbit=100, loss=0.01))
    config = write_json(folder / "c.json", tiny_config(corpus))
    words = script(config, "--save", "saved", "--train-iters", str(SAVED_AT))
    first = run(two, torchrun(two.hosts, [2, 2], *words), folder)
    assert numbers(folder / "c.jsonl") == one_host()[:SAVED_AT]

    again = continued(first, "torchrun", "--nproc_per_node", "2")
    run(two, torchrun(two.hosts, [2, 2], *again), folder)
    assert numbers(folder / "c.jsonl") == one_host()


def test_fbd_with_forward_hosts(
    hosts: Start, corpus: Path, folder: Path, one_host: Callable[..., Any]
) -> None:
    """The forward ranks are those of one host."""
    two = hosts(2)
    two.hostfile(folder / "hostfile", 2, 2)
    section = {"schedule": "fbd", "fbd": {"forward_hosts": ["node1"]}}
    config = write_json(folder / "c.json", tiny_config(corpus, **section))
    command = deepspeed("--hostfile", "hostfile", *script(config, "--train-iters", str(SAVED_AT)))
    run(two, [(0, command)], folder)
    assert numbers(folder / "c.jsonl") == one_host(schedule="fbd")[:SAVED_AT]
