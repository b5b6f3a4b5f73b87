"""Rank, world size and address of rank 0 from the variables of Slurm's srun."""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Iterator

import pytest

from ds_ext.errors import ConfigError
from ds_ext.launch import slurm

# Task 2 of `srun --nodes 2 --ntasks 3`: two tasks on node7, one on node8.
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "node[7-8]",
}
RANK = {
    "RANK": "2",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": str(10_000 + (16 * 4711 + 2) % 20_000),
}


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Replace the process's environment by a step, and undo set_rank() afterwards."""
    found = dict(STEP)
    monkeypatch.setattr(os, "environ", found)
    monkeypatch.setattr(slurm, "_launched_by", None)
    yield found


def added(environ: dict[str, str]) -> dict[str, str]:
    before = dict(environ)
    slurm.set_rank()
    return {name: value for name, value in environ.items() if before.get(name) != value}


def test_variables_of_a_launcher(environ: dict[str, str]) -> None:
    assert added(environ) == RANK
    step = slurm.launched_by()
    assert step is not None and step.is_by_host
    assert slurm.launcher_words() == [
        *("srun", "--nodes", "2", "--ntasks", "3", "--kill-on-bad-exit=1"),
        *("--distribution=block", sys.executable),
    ]
    assert added(environ) == {}  # a second call, by init_distributed() after process.run()


def test_address_and_port_of_the_batch_script_are_kept(environ: dict[str, str]) -> None:
    environ.update(MASTER_ADDR="10.0.0.7", MASTER_PORT="29500")
    assert not added(environ).keys() & {"MASTER_ADDR", "MASTER_PORT"}


@pytest.mark.parametrize(
    "changes",
    [
        {"RANK": "0", "WORLD_SIZE": "8"},  # torchrun or deepspeed, which srun has started
        {"OMPI_COMM_WORLD_RANK": "1"},  # mpirun, which starts its daemons with srun
        {"SLURM_STEP_ID": None},  # the batch script
        {"SLURM_STEP_ID": None, "SLURM_PROCID": None},  # a shell of salloc
        {"SLURM_STEP_ID": "4294967290"},  # interactive step (slurm.h: SLURM_INTERACTIVE_STEP)
    ],
)
def test_processes_that_srun_did_not_start_as_ranks(
    environ: dict[str, str], changes: dict[str, str | None]
) -> None:
    for name, value in changes.items():
        environ.pop(name, None)
        if value is not None:
            environ[name] = value
    assert added(environ) == {}
    assert slurm.launched_by() is None and slurm.launcher_words() is None


@pytest.mark.parametrize(
    ("changes", "subject"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_PROCID"),
        ({"SLURM_PROCID": "3"}, "SLURM_PROCID"),
        ({"SLURM_NODEID": "2"}, "SLURM_PROCID"),
        ({"SLURM_LOCALID": "1"}, "SLURM_PROCID"),
        ({"SLURM_NODEID": None}, "SLURM_NODEID"),
        ({"SLURM_LOCALID": "x"}, "SLURM_LOCALID"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({"SLURM_STEP_NODELIST": None}, "SLURM_STEP_NODELIST"),
        ({"SLURM_STEP_NODELIST": "node["}, "SLURM_STEP_NODELIST"),
        ({"SLURM_HET_SIZE": "2"}, "SLURM_HET_SIZE"),
        ({"SLURM_PROCID": "1"}, "SLURM_PROCID"),  # numbered round robin
        ({"SLURM_STEP_TASKS_PER_NODE": "1,2", "CUDA_VISIBLE_DEVICES": "0"}, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_contradictions_are_refused(
    environ: dict[str, str], changes: dict[str, str | None], subject: str
) -> None:
    for name, value in changes.items():
        environ.pop(name, None)
        if value is not None:
            environ[name] = value
    with pytest.raises(ConfigError, match=f"^{subject}: "):
        slurm.set_rank()


def test_ranks_see_one_gpu_each_or_none(environ: dict[str, str]) -> None:
    for visible in ("", "-1", "NoDevFiles", "3"):  # node8 has one task
        environ["CUDA_VISIBLE_DEVICES"] = visible
        environ.pop("RANK", None)
        slurm.set_rank()
        assert environ["RANK"] == "2"


def test_shell_of_srun_is_not_a_rank_of_several(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    master, terminal = pty.openpty()
    environ.update(SLURM_PROCID="0", SLURM_NODEID="0", SLURM_LOCALID="0")
    with open(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(ConfigError, match=r"^SLURM_STEP_NUM_TASKS: "):
            slurm.set_rank()
        assert "WORLD_SIZE" not in environ
        environ.pop("RANK")
        environ.update(SLURM_STEP_NUM_TASKS="1", SLURM_STEP_TASKS_PER_NODE="1")
        slurm.set_rank()
        assert environ["WORLD_SIZE"] == "1"
    os.close(master)


@pytest.mark.parametrize(
    ("text", "expected"), [("1", (1,)), ("2(x3),1", (2, 2, 2, 1)), ("4(x2),8", (4, 4, 8)), ("3,2", (3, 2))]
)
def test_tasks_per_host(text: str, expected: tuple[int, ...]) -> None:
    assert slurm.tasks_per_host(text) == expected


@pytest.mark.parametrize("text", ["", "2(x3", "a", "2,,1", "-1"])
def test_wrong_tasks_per_host(text: str) -> None:
    with pytest.raises(ConfigError):
        slurm.tasks_per_host(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu5", "gpu5"),
        ("gpu5,gpu6", "gpu5"),
        ("node[1-3,07],gpu5", "node1"),
        ("node[07,1-3]", "node07"),
        ("n[007-009]-ib", "n007-ib"),
        ("rack[2-3]node[11-12]", "rack2node11"),
        ("a.b-c_d,node[1-3]", "a.b-c_d"),
        ("10.0.0.[4-5]", "10.0.0.4"),
    ],
)
def test_first_host(text: str, expected: str) -> None:
    assert slurm.first_host(text) == expected


@pytest.mark.parametrize("text", ["", "node[", "node[]", "node[a-b]", "[1-2", ",node1", "node[1-3]]"])
def test_wrong_node_lists(text: str) -> None:
    with pytest.raises(ConfigError):
        slurm.first_host(text)


def test_jobs_and_steps_have_different_ports() -> None:
    ports = {
        slurm.read_step(STEP | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port
        for job in range(900, 1100)
        for step in range(16)
    }
    assert len(ports) == 200 * 16 and min(ports) >= 10_000 and max(ports) < 30_000
