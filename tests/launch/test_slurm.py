"""Jobs of Slurm: the batch script of examples/slurm, and how a step ends. tests/slurm has `sbatch` and `srun`."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from ds_ext.engine.checkpoint.folder import open_checkpoint
from tests.launch.jobs import ROOT, Job, processes, tiny_config, write_json
from tests.selection import extensive

SBATCH = str(ROOT / "tests" / "slurm" / "sbatch")
TOY = str(Path(__file__).with_name("toy.py"))
OWN_SCRIPT = """\
import os
import ds_ext
import torch.distributed as dist
from ds_ext.engine import init_distributed

init_distributed(60)
names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
found = [dist.get_rank(), dist.get_world_size(), *(int(os.environ[name]) for name in names)]
everything = [None] * dist.get_world_size()
dist.all_gather_object(everything, found)
if dist.get_rank() == 0:
    print("ranks", everything)
"""
ENDLESS = "1000000"
LIMIT_S = 30.0


class SlurmJob(Job):
    """A batch script that runs as a job on "hosts" 127.0.0.1, 127.0.0.2, ... of this machine."""

    def __init__(self, cwd: Path, script: str, *words: str, **env: str) -> None:
        hosts = {"FAKE_SLURM_NODELIST": "127.0.0.[1-2]", "FAKE_SLURM_JOB_ID": str(os.getpid())}
        super().__init__([sys.executable, SBATCH, script, *words], cwd, **hosts, **env)

    def ranks(self) -> dict[int, int]:
        """Process id by rank."""
        found = {
            int(env["SLURM_PROCID"]): pid
            for pid, env in processes(self.mark).items()
            if env.get("SLURM_TASK_PID") == str(pid)
        }
        return dict(sorted(found.items()))


def batch(folder: Path, command: str, nodes: int = 2, tasks: int = 1) -> str:
    """Write a batch script with one command."""
    path = folder / "job.sbatch"
    path.write_text(f"#!/bin/bash\n#SBATCH --nodes={nodes}\n#SBATCH --ntasks-per-node={tasks}\n{command}\n")
    return str(path)


def test_example_saves_before_its_time_limit_and_continues(corpus: Path, tmp_path: Path) -> None:
    config = write_json(tmp_path / "bitpipe.json", tiny_config(corpus))
    script = str(ROOT / "examples" / "slurm" / "train.sbatch")
    sizes, saved = ["--nodes=2", "--ntasks-per-node=1"], tmp_path / "saved"

    def submit(iters: int) -> SlurmJob:
        env = {"CONFIG": str(config), "SAVE": str(saved), "PYTHON": sys.executable, "ITERS": str(iters)}
        return SlurmJob(ROOT, *sizes, script, "--log-interval", "1", **env)

    with submit(1_000_000) as job:
        job.wait_for(" 2/1000000")
        for process in job.ranks().values():  # as --signal does
            os.kill(process, signal.SIGUSR1)
        assert job.wait(60) == 0, job.text
    assert f"scontrol requeue {os.getpid()}" in job.lines
    step = int(open_checkpoint(saved)[0].name.removeprefix("step_"))
    assert 2 <= step == int(re.findall(r"^step (\d+): stopped", job.text, re.MULTILINE)[0])

    with submit(step + 2) as job:
        assert job.wait(300) == 0, job.text
    trained = re.findall(r"^step +(\d+)/", job.text, re.MULTILINE)
    assert list(map(int, trained)) == [step + 1, step + 2], job.text
    assert "scontrol" not in job.text
    command = next(line for line in job.lines if line.startswith("next:")).split("  ")[-1].split()
    assert command[:5] == ["srun", "--nodes", "2", "--ntasks-per-node", "1"]
    assert command[command.index("--load") + 1] == str(saved)


SAVE_5 = 'echo step_5 > "$SAVE/latest"; '


@pytest.mark.parametrize(
    ("ending", "latest", "restarts", "code"),
    [
        ("kill -USR1 $$", "", 2, None),  # None: requeued
        (SAVE_5 + "kill -USR2 $$", "step_4", 9, None),
        ("kill -TERM $$", "step_4", 2, None),
        ("kill -TERM $$", "step_4", 3, 143),
        ("exit 3", "step_4", 0, None),
        ("exit 3", "", 0, 3),
        ("exit 3", "step_9", 0, 3),
        ("exit 0", "", 0, None),
        (SAVE_5 + "exit 0", "", 9, None),
        (SAVE_5 + "exit 0", "step_4", 9, None),
        ("exit 0", "step_5", 3, 0),  # nothing to train with --train-iters 5
        ("exit 0", "", 3, 0),  # --dry-run
        ("kill -USR1 $$", "", 3, 138),
        ("exit 0", "step_9", 0, 0),
        ("exit 1", "step_4", 0, 1),
        ("exit 2", "step_4", 0, 2),
    ],
)
def test_example_requeues(ending: str, latest: str, restarts: int, code: int | None, tmp_path: Path) -> None:
    python, saved = tmp_path / "python", tmp_path / "saved"
    python.write_text(f"#!/bin/sh\n{ending}\n")
    python.chmod(0o755)
    saved.mkdir()
    if latest:
        (saved / "latest").write_text(latest)
    env = {"PYTHON": str(python), "SAVE": str(saved), "ITERS": "9", "SLURM_RESTART_COUNT": str(restarts)}
    script = str(ROOT / "examples" / "slurm" / "train.sbatch")
    with SlurmJob(ROOT, "--nodes=1", "--ntasks-per-node=1", script, **env) as job:
        assert job.wait(300) == (code or 0), job.text
    assert (f"scontrol requeue {os.getpid()}" in job.lines) == (code is None), job.text


@extensive
def test_own_script_gets_its_rank(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_SCRIPT)
    with SlurmJob(tmp_path, batch(tmp_path, f"srun --ntasks 3 {sys.executable} own.py", tasks=2)) as job:
        assert job.wait(300) == 0, job.text
    found = next(line for line in job.lines if line.startswith("ranks"))
    # rank, world size, local rank, ranks of the host, host
    assert json.loads(found[6:]) == [[0, 3, 0, 2, 0], [1, 3, 1, 2, 0], [2, 3, 0, 1, 1]]


@extensive
@pytest.mark.parametrize("kill", ["1", "0"])
def test_killed_rank_ends_the_step(tmp_path: Path, kill: str) -> None:
    command = f"srun --kill-on-bad-exit={kill} {sys.executable} {TOY} {ENDLESS} 60"
    with SlurmJob(tmp_path, batch(tmp_path, command)) as job:
        job.wait_for("step 3 done")
        time.sleep(4)  # the ranks learn their neighbours' process ids
        os.kill(job.ranks()[1], signal.SIGKILL)
        assert job.seconds_until_gone(LIMIT_S) < 20
        assert job.wait(5) != 0
        reports = [line for line in job.lines if line.startswith(("rank 0 stopped", "stopped"))]
        assert len(reports) == 1, job.text
        # srun may end rank 0 before it knows which rank its collective has lost; srun then names it.
        assert re.search("rank 1", reports[0]) or re.search(r"task 1: Killed", job.text), job.text


@extensive
def test_killed_srun_ends_its_ranks(tmp_path: Path) -> None:
    command = f"exec srun {sys.executable} {TOY} {ENDLESS} 60"
    with SlurmJob(tmp_path, batch(tmp_path, command)) as job:
        job.wait_for("step 3 done")
        steps = [
            pid for pid in processes(job.mark) if b"slurm/srun" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        for pid in steps:
            os.kill(pid, signal.SIGKILL)
        assert job.seconds_until_gone(LIMIT_S) < 10
        assert len(re.findall("^stopped", job.text, re.MULTILINE)) == 1, job.text


@extensive
def test_round_robin_is_refused_once(tmp_path: Path) -> None:
    command = f"srun --kill-on-bad-exit=1 --distribution=cyclic --ntasks 3 {sys.executable} {TOY} 1 60"
    with SlurmJob(tmp_path, batch(tmp_path, command, tasks=2)) as job:
        assert job.wait(300) != 0
        assert sum("SLURM_PROCID" in line for line in job.lines) == 1, job.text
