"""Killed ranks, killed hosts and cut cables: everything on all hosts ends within 20 s, with the cause, and can resume.

Every case prints a row for the table in docs/troubleshooting.md: `make test-hosts PYTEST_FLAGS="-s -k failure"`.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from tests.hosts.cluster import Cluster
from tests.hosts.jobs import SCRIPT, HostsJob, deepspeed, records, torchrun
from tests.launch.forked import run_forked
from tests.launch.jobs import LAUNCHERS, find_free_port, tiny_config, write_json
from tests.selection import select

LIMIT_S = 20.0
STEPS = "100000"  # more than are reached; the order of the samples depends on it
SAVE_INTERVAL = 5
# Without this, ssh waits for a host that does not answer until the kernel gives up, after some 15 minutes.
SSH_KEEPALIVE = {"PDSH_SSH_ARGS_APPEND": "-o ServerAliveInterval=2 -o ServerAliveCountMax=3"}

# Case -> (what happens, hosts that are lost, what the first message names). Ranks 0 and 1 are on node0, with the
# launcher or the rendezvous; ranks 2 and 3 are on node1.
CASES: dict[str, tuple[Callable[[Cluster, HostsJob], None], set[int], str]] = {
    "rank 0 killed": (lambda hosts, job: os.kill(job.ranks()[0], signal.SIGKILL), set(), r"\brank 0\b"),
    "rank 3 killed": (lambda hosts, job: os.kill(job.ranks()[3], signal.SIGKILL), set(), r"\brank 3\b"),
    "node0 off": (lambda hosts, job: hosts.power_off(0), {0}, r"\branks 0, 1\b"),
    "node1 off": (lambda hosts, job: hosts.power_off(1), {1}, r"\branks 2, 3\b"),
    "cable of node1 unplugged": (lambda hosts, job: hosts.unplug(1), set(), r"\branks (0, 1|2, 3)\b"),
    "packets of both directions lost": (lambda hosts, job: hosts.cut(1), set(), r"\branks (0, 1|2, 3)\b"),
    "packets to node1 lost": (lambda hosts, job: hosts.cut(1, of=False), set(), r"\branks? [0-3]"),
    "packets from node1 lost": (lambda hosts, job: hosts.cut(1, to=False), set(), r"\branks? [0-3]"),
}
SELECTED = select(
    [*product(LAUNCHERS, CASES)],
    [
        ("deepspeed", "rank 0 killed"),
        ("torchrun", "rank 3 killed"),
        ("deepspeed", "node1 off"),
        ("deepspeed", "packets of both directions lost"),
    ],
)


@pytest.mark.parametrize(("launcher", "case"), SELECTED, ids=lambda word: word.replace(" ", "_"))
def test_failure_ends_all_hosts(
    hosts: Callable[..., Cluster], corpus: Path, tmp_path: Path, launcher: str, case: str
) -> None:
    two = hosts(2)
    two.hostfile(tmp_path / "hostfile", 2, 2)
    (tmp_path / ".deepspeed_env").write_text("DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\n")
    config = write_json(tmp_path / "c.json", tiny_config(corpus))
    flags = ["--deepspeed_config", config.name, "--train-iters", STEPS, "--eval-iters", "0"]
    keep = ["--save", "saved", "--save-interval", str(SAVE_INTERVAL), "--metrics-file", "all.jsonl"]
    if launcher == "deepspeed":
        commands = [(0, deepspeed("--hostfile", "hostfile", SCRIPT, *flags, *keep))]
    else:
        commands = torchrun(two.hosts, [2, 2], SCRIPT, *flags, *keep, static=True)
    happens, lost, named = CASES[case]
    with HostsJob(two, commands, tmp_path, SSH_KEEPALIVE) as job:
        job.wait_for(f"step {SAVE_INTERVAL}: saved ")
        time.sleep(3)  # the ranks learn their neighbors' process ids
        failed_at = time.monotonic()
        happens(two, job)
        ranks_s = job.seconds_until_gone(LIMIT_S, ranks_only=True)
        all_s = job.seconds_until_gone(max(0.1, LIMIT_S - ranks_s)) + ranks_s
        for launch in job.launches:
            launch.join()
    # What node0 has printed over pdsh is lost with it.
    printed = reports(job, failed_at)
    if not (launcher == "deepspeed" and 0 in lost):
        assert re.search(named, printed[0]), job.text
        full = [text for text in printed if ", because " not in text and not text.endswith("SIGTERM.")]
        if (launcher, case) == ("deepspeed", "rank 0 killed"):
            most = 3  # rank 0 serves the store, so the other ranks cannot agree on one report
        elif case in ("rank 0 killed", "rank 3 killed", "node0 off", "node1 off"):
            most = 1
        else:
            # Each side of a cut reports; under torchrun, each rank of the side without the store.
            most = 2 + (launcher == "torchrun")
        assert len(full) <= most, job.text
        # On each side of a cut, a rank that the launcher stops may add a line.
        assert len(printed) <= most + 1, job.text
    first = printed[0] if printed else "(none: the launcher's host is off)"
    print(f"\n| {launcher} | {case} | {ranks_s:.0f} | {all_s:.0f} | `{first[:140]}` |")

    resumed = [SCRIPT, *flags, "--load", "saved", "--metrics-file", "again.jsonl"]
    resumed[resumed.index(STEPS)] = str(last_step(tmp_path) + 2)
    done = run_forked([resumed] * 4, tmp_path, port=find_free_port())
    assert [rank.returncode for rank in done] == [0] * 4, done[0].stderr
    assert [record["step"] for record in records(tmp_path / "again.jsonl")] == [
        last_step(tmp_path) + 1,
        last_step(tmp_path) + 2,
    ]


def reports(job: HostsJob, since: float) -> list[str]:
    """Return the lines after ``since`` with which ranks end, in their order."""
    found: list[str] = []
    for at, line in sorted(line for launch in job.launches for line in launch.lines):
        text = re.sub(r"^node\d+: ", "", line)
        if at >= since and re.match(r"rank \d (stopped|failed)(?!.* in \w+.*:$)|stopped", text):
            found.append(text)
    return found


def last_step(folder: Path) -> int:
    """Return the step of the last complete checkpoint."""
    return int((folder / "saved" / "latest").read_text().strip().removeprefix("step_"))


START = """
import os, time
from ds_ext import init_distributed
from ds_ext.comm import groups
from ds_ext.launch import process

def wait():
    print("waits", flush=True)
    time.sleep(600)

def main():
    if os.environ["RANK"] == "0":  # the other rank waits for this one, in the meeting or for its addresses
        if "{point}" == "meeting":
            wait()
        groups.host_watch.own_addresses = wait
    init_distributed()

process.run(main)
"""


@pytest.mark.parametrize("point", select(["meeting", "addresses"], ["meeting"]))
def test_a_cable_that_is_cut_while_the_ranks_join(
    hosts: Callable[..., Cluster], tmp_path: Path, point: str
) -> None:
    """The rank on the other host ends within seconds, long before the kernel gives up its connection to the store."""
    two, script = hosts(2), tmp_path / "start.py"
    script.write_text(START.replace("{point}", point))
    commands = torchrun(two.hosts, [1, 1], str(script), static=True)
    with HostsJob(two, commands, tmp_path) as job:
        job.wait_for("waits")
        time.sleep(5)  # the other rank has reached its wait too
        two.cut(1)
        deadline = time.monotonic() + LIMIT_S
        while not re.search("rank 1 (stopped|failed)", job.text):
            assert time.monotonic() < deadline, job.text
            time.sleep(0.1)
    two.mend(1)
    assert re.search("has not answered for 2 s", job.text), job.text
