"""Job steps of Slurm over several hosts; tests/slurm has `srun`."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.hosts.cluster import Cluster
from tests.launch.jobs import ROOT, Job

TOY = str(ROOT / "tests" / "launch" / "toy.py")
SRUN = str(ROOT / "tests" / "slurm" / "srun")


def step(hosts: Cluster, cwd: Path, *words: str) -> Job:
    """Start a step with two tasks on each host."""
    allocation = {
        "FAKE_SLURM_ENTER": json.dumps({host.name: host.enter(cwd) for host in hosts.hosts}),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": f"node[0-{len(hosts.hosts) - 1}]",
        "SLURM_TASKS_PER_NODE": f"2(x{len(hosts.hosts)})",
    }
    return Job([sys.executable, SRUN, "--kill-on-bad-exit=1", sys.executable, *words], cwd, **allocation)


def test_step_over_hosts_trains(hosts: Callable[..., Cluster], tmp_path: Path) -> None:
    with step(hosts(2), tmp_path, TOY, "2", "60") as job:
        assert job.wait(120) == 0, job.text
        assert "step 2 done" in job.text


def test_dead_host_ends_the_step(hosts: Callable[..., Cluster], tmp_path: Path) -> None:
    two = hosts(2)
    with step(two, tmp_path, TOY, "1000000", "60") as job:
        job.wait_for("step 3 done", 120)
        started = time.monotonic()
        two.power_off(1)
        while two[0].processes():
            assert time.monotonic() - started < 20, job.text
            time.sleep(0.1)
        assert job.wait(20) != 0
        reports = [line for line in job.lines if re.match(r"(rank \d )?stopped", line)]
        assert any(re.search(r"\branks 2, 3\b.*\bnode1\b", line) for line in reports), job.text
