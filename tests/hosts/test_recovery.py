"""A rank or a whole host lost in a job over two hosts: the ranks restart and continue from memory."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.cluster import Cluster
from tests.hosts.delay_line import Link
from tests.hosts.jobs import SCRIPT, HostsJob, records, torchrun
from tests.launch.jobs import tiny_config, write_json
from tests.launch.test_recovery import check_recoveries, check_steps, kill_at_random_moments, same_checkpoints
from tests.selection import EVERYTHING, extensive, select

STEPS = 400
COPIED_S = 1.5  # a copy of 100 KB takes milliseconds; a rank that does not answer for 2 s counts as lost


@pytest.mark.parametrize("static", select([True, False], [True]))
def test_kills_at_random_moments(
    hosts: Callable[..., Cluster], corpus: Path, tmp_path: Path, static: bool
) -> None:
    """While snapshots are copied between the hosts, and while the ranks start again."""
    two, (kills, steps) = hosts(2), (8, 1200) if EVERYTHING else (2, STEPS)
    config = write_json(tmp_path / "c.json", tiny_config(corpus, recovery={"every": 1}))
    flags = ["--deepspeed_config", config.name, "--train-iters", str(steps), "--eval-iters", "0"]
    metrics = tmp_path / "all.jsonl"
    commands = torchrun(two.hosts, [1, 1], SCRIPT, *flags, "--metrics-file", metrics.name, static=static)
    commands = [(host, [words[0], "--max-restarts", str(kills), *words[1:]]) for host, words in commands]
    with HostsJob(two, commands, tmp_path) as job:
        targets = [steps * number // (kills + 1) for number in range(1, kills + 1)]
        kill_at_random_moments(job, 2, metrics, targets, random.Random(int(static)))
        assert job.wait() == [0, 0], job.text
    check_recoveries(job.text, metrics, kills, steps)
    assert not any(host.processes() for host in two.hosts)


@pytest.mark.parametrize("static", select([True, False], [False]))
def test_a_lost_host_comes_back_empty(
    hosts: Callable[..., Cluster], corpus: Path, tmp_path: Path, static: bool
) -> None:
    """One host loses its ranks, launcher and memory. A new launcher takes its place: no step is lost.

    Rank 0 pauses before, in some step, so that the copies of the step before have arrived.
    """
    two = hosts(2)
    plain = write_json(tmp_path / "plain.json", tiny_config(corpus))
    config = write_json(tmp_path / "c.json", tiny_config(corpus, recovery={"every": 1}))
    flags = ["--train-iters", str(STEPS), "--eval-iters", "0"]
    script = [SCRIPT, "--deepspeed_config", plain.name, "--save", "plain", *flags]
    with HostsJob(two, torchrun(two.hosts, [1, 1], *script), tmp_path) as undisturbed:
        assert undisturbed.wait() == [0, 0], undisturbed.text
    script = [
        SCRIPT,
        "--deepspeed_config",
        config.name,
        "--metrics-file",
        "all.jsonl",
        "--save",
        "lost",
        *flags,
    ]
    commands = torchrun(two.hosts, [1, 1], *script, static=static)
    commands = [(host, [words[0], "--max-restarts", "2", *words[1:]]) for host, words in commands]
    # With a shared store, rank 0 of torch 2.13 does not tell a new host the store's address.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with HostsJob(two, commands, tmp_path, env) as job:
        job.wait_for("step  10/")
        rank_0 = job.ranks()[0]
        os.kill(rank_0, signal.SIGSTOP)
        time.sleep(COPIED_S)
        two.hosts[1].end_processes()
        os.kill(rank_0, signal.SIGCONT)
        with HostsJob(two, commands[1:], tmp_path, env) as replacement:
            assert replacement.wait() == [0], job.text + replacement.text
            assert job.wait()[0] == 0, job.text
    recovered = re.findall(r"recovered at step (\d+) .*\(restart 1\): (\d+) steps? lost, 1 rank ", job.text)
    # The snapshot of step 10 is written when step 11 begins.
    assert len(recovered) == 1 and recovered[0][1] == "0" and int(recovered[0][0]) >= 9, job.text
    check_steps(tmp_path / "all.jsonl", STEPS)
    same_checkpoints(tmp_path / "plain" / f"step_{STEPS}", tmp_path / "lost" / f"step_{STEPS}")
    assert not any(host.processes() for host in two.hosts)


def test_a_host_lost_while_its_copies_are_late(
    hosts: Callable[..., Cluster], corpus: Path, tmp_path: Path
) -> None:
    """The network takes longer for a snapshot than the ranks for a step: one step is lost, not the job."""
    two, steps = hosts(2), 40
    config = tiny_config(corpus, recovery={"every": 1})
    config["ds_ext"] |= {"schedule": "1f1b"}  # sends little else: bitpipe's mirrors exchange gradients
    config["ds_ext"]["train"] |= {"hidden_size": 256}
    job_config = write_json(tmp_path / "c.json", config)
    script = [SCRIPT, "--deepspeed_config", job_config.name, "--metrics-file", "all.jsonl"]
    script += ["--train-iters", str(steps), "--eval-iters", "0"]
    commands = torchrun(two.hosts, [1, 1], *script, static=True)
    commands = [(host, [words[0], "--max-restarts", "2", *words[1:]]) for host, words in commands]
    with HostsJob(two, commands, tmp_path) as job:
        job.wait_for("step  3/")
        two.slow(Link(rate_mbit=100))
        job.wait_for("step  8/")
        two.hosts[1].end_processes()
        two.slow(Link())
        with HostsJob(two, commands[1:], tmp_path) as replacement:
            assert replacement.wait() == [0], job.text + replacement.text
            assert job.wait()[0] == 0, job.text
    recovered = re.findall(r"recovered at step (\d+) .*\(restart 1\): (\d+) steps? lost, 1 rank ", job.text)
    assert len(recovered) == 1 and int(recovered[0][1]) <= 1 and int(recovered[0][0]) >= 7, job.text
    check_steps(tmp_path / "all.jsonl", steps)


def test_two_lost_hosts_with_each_others_copies(
    hosts: Callable[..., Cluster], corpus: Path, tmp_path: Path
) -> None:
    """No snapshot of one host remains: the ranks continue from the last checkpoint, and report the lost steps."""
    three, steps = hosts(3), 60
    config = tiny_config(corpus, recovery={"every": 1})
    config |= {"train_batch_size": 12}
    config["ds_ext"] |= {"schedule": "1f1b", "pipeline_parallel_size": 1}
    job_config = write_json(tmp_path / "c.json", config)
    script = [SCRIPT, "--deepspeed_config", job_config.name, "--metrics-file", "all.jsonl", "--save", "saved"]
    script += ["--save-interval", "10", "--train-iters", str(steps), "--eval-iters", "0"]
    commands = torchrun(three.hosts, [1, 1, 1], *script, static=True)
    commands = [(host, [words[0], "--max-restarts", "2", *words[1:]]) for host, words in commands]
    with HostsJob(three, commands, tmp_path) as job:
        job.wait_for("step 25/")
        for host in three.hosts[1:]:
            host.end_processes()
        with HostsJob(three, commands[1:], tmp_path) as replacements:
            assert replacements.wait() == [0, 0], job.text + replacements.text
            assert job.wait()[0] == 0, job.text
    lost = re.findall(r"steps? (\d+) to (\d+) are lost", job.text)
    assert len(lost) == 1, job.text
    assert int(lost[0][0]) % 10 == 1 and int(lost[0][1]) >= 25, job.text
    losses: dict[int, float] = {}
    for row in records(tmp_path / "all.jsonl"):
        assert losses.setdefault(row["step"], row["loss"]) == row["loss"]
    assert sorted(losses) == list(range(1, steps + 1))


@extensive
def test_the_lost_host_of_the_rendezvous(hosts: Callable[..., Cluster], corpus: Path, tmp_path: Path) -> None:
    """The job ends on the other host too, and a new one with ``--load`` has the losses of an undisturbed run."""
    two, steps = hosts(2), 40
    config = write_json(tmp_path / "c.json", tiny_config(corpus, recovery={"every": 1}))

    def commands(folder: str, *flags: str) -> list[tuple[int, list[str]]]:
        script = [SCRIPT, "--deepspeed_config", config.name, "--metrics-file", f"{folder}.jsonl", *flags]
        script += [
            "--save",
            folder,
            "--save-interval",
            "10",
            "--train-iters",
            str(steps),
            "--eval-iters",
            "0",
        ]
        started = torchrun(two.hosts, [1, 1], *script, static=True)
        return [(host, [words[0], "--max-restarts", "2", *words[1:]]) for host, words in started]

    with HostsJob(two, commands("plain"), tmp_path) as job:
        assert job.wait() == [0, 0], job.text
    with HostsJob(two, commands("lost"), tmp_path) as job:
        job.wait_for("step 20: saved")
        two.hosts[0].end_processes()
        assert job.wait()[1] != 0, job.text
    assert not two.hosts[1].processes()
    with HostsJob(two, commands("lost", "--load", "lost"), tmp_path) as job:
        assert job.wait() == [0, 0], job.text
    check_steps(tmp_path / "plain.jsonl", steps)
    losses = [
        {row["step"]: row["loss"] for row in records(tmp_path / f"{run}.jsonl")} for run in ("plain", "lost")
    ]
    assert losses[0] == losses[1]
    same_checkpoints(tmp_path / "plain" / f"step_{steps}", tmp_path / "lost" / f"step_{steps}")
