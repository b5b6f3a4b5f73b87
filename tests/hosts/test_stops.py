"""Requests to end a run over two hosts: it saves a checkpoint, and a resumed run has the same losses and weights."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_ext.engine.checkpoint.folder import open_checkpoint
from tests.hosts.cluster import Cluster
from tests.hosts.jobs import SCRIPT, HostsJob, deepspeed, records, torchrun
from tests.launch.jobs import BIN, tiny_config, write_json
from tests.selection import select

STEPS = 200


def launcher_of(hosts: Cluster, launcher: str) -> int:
    """Return the process of the launcher on the first host."""
    processes = hosts[0].processes()
    return min(process for process, words in processes.items() if str(BIN / launcher) in words)


@pytest.mark.parametrize(
    ("schedule", "launcher", "target", "number"),
    select(
        [
            ("bitpipe", "deepspeed", "launcher", "SIGTERM"),
            ("bitpipe", "torchrun", "launcher", "SIGTERM"),
            ("bitpipe", "torchrun", "launcher", "SIGUSR1"),
            ("bitpipe", "torchrun", "rank", "SIGUSR1"),
            ("fbd", "deepspeed", "launcher", "SIGTERM"),
            ("fbd", "deepspeed", "rank", "SIGUSR1"),
            ("fbd", "torchrun", "launcher", "SIGTERM"),
        ],
        [("bitpipe", "torchrun", "launcher", "SIGTERM")],
    ),
)
def test_a_signal_on_one_host(
    hosts: Callable[..., Cluster],
    corpus: Path,
    folder: Path,
    schedule: str,
    launcher: str,
    target: str,
    number: str,
) -> None:
    two = hosts(2)
    two.hostfile(folder / "hostfile", 2, 2)
    config = write_json(folder / "c.json", tiny_config(corpus, schedule=schedule))

    def start(name: str) -> HostsJob:
        flags = ["--train-iters", str(STEPS), "--eval-iters", "0", "--exit-signal-handler", "--save", name]
        words = [
            SCRIPT,
            "--deepspeed_config",
            config.name,
            "--metrics-file",
            f"{name}.jsonl",
            "--load",
            name,
            *flags,
        ]
        if launcher == "torchrun":
            return HostsJob(two, torchrun(two.hosts, [2, 2], *words, static=True), folder)
        return HostsJob(two, [(0, deepspeed("--hostfile", "hostfile", *words))], folder)

    with start("whole") as job:
        assert set(job.wait()) == {0}, job.text
    with start("parts") as job:
        job.wait_for("schedule  ")
        process = job.ranks()[3] if target == "rank" else launcher_of(two, launcher)
        job.wait_for(f" 1/{STEPS} ")
        os.kill(process, signal.Signals[number])
        job.seconds_until_gone(60)
        codes = job.wait()
        assert "stopped, because rank" in job.text or target == "launcher", job.text
        assert target == "launcher" or set(codes) == {0}, job.text
    assert 1 <= int(open_checkpoint(folder / "parts")[0].name.removeprefix("step_")) < STEPS
    with start("parts") as job:
        assert set(job.wait()) == {0}, job.text
    losses = [
        [(line["step"], line["loss"]) for line in records(folder / f"{name}.jsonl")]
        for name in ("whole", "parts")
    ]
    assert losses[0] == losses[1]
    files = [open_checkpoint(folder / name)[1]["files"] for name in ("whole", "parts")]
    weights = [
        {name: record for name, record in of.items() if name.startswith(("layer", "optim"))} for of in files
    ]
    assert weights[0] == weights[1]
