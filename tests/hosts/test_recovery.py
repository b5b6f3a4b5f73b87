"""A rank killed in a job over two hosts: torchrun on both restarts the ranks, and they continue from memory."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.cluster import Cluster
from tests.hosts.jobs import SCRIPT, HostsJob, records, torchrun
from tests.launch.jobs import tiny_config, write_json

STEPS = 400


@pytest.mark.parametrize("static", [True, False])
def test_a_killed_rank_on_two_hosts(
    hosts: Callable[..., Cluster], corpus: Path, tmp_path: Path, static: bool
) -> None:
    two = hosts(2)
    config = write_json(tmp_path / "c.json", tiny_config(corpus, recovery={"every": 1}))
    flags = ["--deepspeed_config", config.name, "--train-iters", str(STEPS), "--eval-iters", "0"]
    commands = torchrun(two.hosts, [1, 1], SCRIPT, *flags, "--metrics-file", "all.jsonl", static=static)
    commands = [(host, [words[0], "--max-restarts", "1", *words[1:]]) for host, words in commands]
    with HostsJob(two, commands, tmp_path) as job:
        job.wait_for("step  10/")
        os.kill(job.ranks()[1], signal.SIGKILL)
        assert job.wait() == [0, 0], job.text
    recovered = re.findall(r"recovered at step (\d+) .*\(restart 1\): (\d+) steps? lost", job.text)
    assert len(recovered) == 1 and recovered[0][1] == "0" and int(recovered[0][0]) >= 10, job.text
    rows = records(tmp_path / "all.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert not any(host.processes() for host in two.hosts)
