"""Ranks started by Slurm's ``srun``, one process per task.

``srun`` describes the job step in variables (srun(1), OUTPUT ENVIRONMENT VARIABLES). A process outside a step, such as
the batch script or a shell of ``salloc``, has no SLURM_STEP_ID, even where SLURM_PROCID is set.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ConfigError

# Variables of other launchers. An `mpirun` inside a job starts its daemons with srun, and its ranks inherit SLURM_*.
OTHER_LAUNCHERS = ("RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "MPI_LOCALRANKID")
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # batch script, interactive and external step (slurm.h)
_NO_GPU = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES on hosts without GPUs
_STEP_VARIABLES = (
    *("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
)
_FIRST_PORT, _PORTS, _STEPS = 10_000, 20_000, 16  # below the ephemeral ports, which start at 32768
_START = "Start the script with `srun python SCRIPT` inside an allocation"


@dataclass(frozen=True)
class Step:
    """Job step of ``srun``, as one of its tasks describes it.

    Args:
        rank, local_rank: number of this task in the step, and on its host.
        host: index of this task's host in the step.
        tasks: number of tasks on each host.
        first_host: name of the first host, where rank 0 runs.
        port: port for the rendezvous; other jobs and steps have other ports.
    """

    rank: int
    host: int
    local_rank: int
    tasks: tuple[int, ...]
    first_host: str
    port: int

    @property
    def is_by_host(self) -> bool:
        """True if the task has this rank when ranks are numbered host by host."""
        return self.rank == sum(self.tasks[: self.host]) + self.local_rank

    def variables(self) -> dict[str, str]:
        """Return the variables that ``torchrun`` would set for this rank."""
        numbers = {
            "RANK": self.rank,
            "WORLD_SIZE": sum(self.tasks),
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.tasks[self.host],
            "GROUP_RANK": self.host,
            "GROUP_WORLD_SIZE": len(self.tasks),
        }
        return {name: str(number) for name, number in numbers.items()}


_launched_by: Step | None = None  # the step, after set_rank() has read it


def set_rank() -> None:
    """Set RANK, WORLD_SIZE, MASTER_ADDR and the other variables of a launcher if ``srun`` started this process.

    Do nothing outside a step and under another launcher. MASTER_ADDR and MASTER_PORT keep their values if set.
    """
    global _launched_by
    environ = os.environ
    step_id = environ.get("SLURM_STEP_ID", "")
    in_step = environ.get("SLURM_PROCID", "").isdecimal() and step_id.isdecimal()
    if not in_step or int(step_id) >= _FIRST_SPECIAL_STEP or any(name in environ for name in OTHER_LAUNCHERS):
        return
    environ["RANK"] = environ["SLURM_PROCID"]  # so that only rank 0 reports an error of all ranks
    step = read_step(environ)
    if (tasks := sum(step.tasks)) > 1 and sys.stdin is not None and sys.stdin.isatty():
        raise ConfigError(
            f"SLURM_STEP_NUM_TASKS: the shell of `srun --pty` runs this script once (got a step of {tasks} tasks). "
            f"Leave the shell, and start the script with `srun --ntasks {tasks} python SCRIPT`."
        )
    environ.update(step.variables())
    environ.setdefault("MASTER_ADDR", step.first_host)
    environ.setdefault("MASTER_PORT", str(step.port))
    _launched_by = step
    _require_own_gpu(step)
    if not step.is_by_host:
        raise ConfigError(
            f"SLURM_PROCID: ranks must be numbered host by host (got rank {step.rank} for task {step.local_rank} of "
            f"host {step.host}). Add --distribution=block to srun."
        )


def launched_by() -> Step | None:
    """Return the step from which :func:`set_rank` took this process's rank; None under other launchers."""
    return _launched_by


def launcher_words() -> list[str] | None:
    """Return the ``srun`` command up to the script that starts the ranks of this job again; None without Slurm."""
    if _launched_by is None:
        return None
    tasks = _launched_by.tasks
    words = ["srun", "--nodes", str(len(tasks))]
    words += ["--ntasks-per-node", str(tasks[0])] if len(set(tasks)) == 1 else ["--ntasks", str(sum(tasks))]
    gpus = os.environ.get("SLURM_GPUS_PER_NODE")
    if gpus:
        words.append(f"--gpus-per-node={gpus}")
    return [*words, "--kill-on-bad-exit=1", "--distribution=block", sys.executable]


def read_step(environ: Mapping[str, str]) -> Step:
    if "SLURM_HET_SIZE" in environ:
        raise ConfigError(
            f"SLURM_HET_SIZE: heterogeneous jobs are not supported (got {environ['SLURM_HET_SIZE']} components). "
            "Submit one component, or start `torchrun` on every host."
        )
    step = Step(
        rank=_number(environ, "SLURM_PROCID"),
        host=_number(environ, "SLURM_NODEID"),
        local_rank=_number(environ, "SLURM_LOCALID"),
        tasks=tasks_per_host(_value(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")),
        first_host=first_host(_value(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")),
        port=_FIRST_PORT
        + (_STEPS * _number(environ, "SLURM_JOB_ID") + _number(environ, "SLURM_STEP_ID")) % _PORTS,
    )
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    has_task = step.host < len(step.tasks) and step.local_rank < step.tasks[step.host]
    if not (has_task and sum(step.tasks) == world_size and step.rank < world_size):
        shown = [f"{name}={environ[name]}" for name in _STEP_VARIABLES if name in environ]
        raise ConfigError(
            f"SLURM_PROCID: Slurm's variables contradict each other (got {', '.join(shown)}). {_START}, and do not "
            "set SLURM_* variables by hand."
        )
    return step


def tasks_per_host(text: str) -> tuple[int, ...]:
    """Return the number of tasks on each host from a list such as ``2(x3),1``."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ConfigError(
                f"SLURM_STEP_TASKS_PER_NODE: not a list of task counts (got {text!r}). {_START}."
            )
        tasks += [int(match[1])] * int(match[2] or 1)
    return tuple(tasks)


def first_host(nodelist: str) -> str:
    """Return the first name of a list such as ``node[1-3,07],gpu5``.

    A name may contain several brackets; the first name has the first number of each.
    """
    match = re.match(r"(?:[^\[\],\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+(?=,|$)", nodelist)
    if match is None:
        raise ConfigError(
            f"SLURM_STEP_NODELIST: no first host (got {nodelist!r}). Set MASTER_ADDR in the batch script: "
            "export MASTER_ADDR=$(scontrol show hostnames | head -n 1)."
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0])


def _require_own_gpu(step: Step) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    tasks = step.tasks[step.host]
    uses_gpus = visible not in _NO_GPU and os.environ.get("DS_ACCELERATOR") != "cpu"
    if uses_gpus and len(visible.split(",")) < tasks:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES: the {tasks} tasks of this host need {tasks} visible GPUs, because local rank r "
            f"uses GPU r (got {visible!r}). Use --gpus-per-node={tasks} instead of --gpus-per-task and --gpu-bind."
        )


def _value(environ: Mapping[str, str], *names: str) -> str:
    value = next((environ[name] for name in names if name in environ), None)
    if value is None:
        raise ConfigError(f"{names[0]}: not set, but SLURM_PROCID is. {_START}.")
    return value


def _number(environ: Mapping[str, str], *names: str) -> int:
    value = _value(environ, *names)
    if not value.isdecimal():
        raise ConfigError(f"{names[0]}: must be a number (got {value!r}). {_START}.")
    return int(value)
