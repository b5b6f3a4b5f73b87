"""Launcher of a job: the only rank of a process without one, restarts, and the command that starts a job again."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Sequence

from ..environment import (
    chosen_devices,
    chosen_port,
    local_world_size,
    max_restarts,
    spans_hosts,
    started_by_torchrun,
)
from ..errors import ConfigError
from . import slurm

# The `deepspeed` command starts NODE_LAUNCHER, which starts the ranks. Killing the command kills neither.
DEFAULT_PORT = 29500  # of --master_port, in both launchers
DEEPSPEED, NODE_LAUNCHER = ("deepspeed", "deepspeed.pt", "ds"), "deepspeed.launcher.launch"


def set_single_rank() -> None:
    """Make a process that no launcher has started the only rank of its job, through the launchers' variables."""
    if any(name in os.environ for name in slurm.OTHER_LAUNCHERS):
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(port))


def require_restarts() -> None:
    allowed = max_restarts()
    if allowed is None or allowed < 1:
        got = "a launcher that does not" if allowed is None else f"--max-restarts {allowed}"
        raise ConfigError(
            f"ds_ext.recovery: needs a launcher that restarts ranks (got {got}). Start with `torchrun --nproc_per_node "
            f"RANKS --max-restarts 3 SCRIPT ...`, or remove the section."
        )


def launch_again(arguments: Sequence[str]) -> tuple[str, str]:
    """Return the command for a script and its flags with as many ranks on this host, and a note on what it lacks."""
    if (srun := slurm.launcher_words()) is not None:
        return shlex.join([*srun, *arguments]), "inside an allocation"
    ranks, note = local_world_size(), "add the launcher's flags for several hosts" if spans_hosts() else ""
    launcher = ["deepspeed", "--num_gpus", str(ranks)]
    if started_by_torchrun():
        launcher = ["torchrun", "--nproc_per_node", str(ranks)]
    elif not note and (devices := chosen_devices()) not in ("", ",".join(map(str, range(ranks)))):
        launcher = ["deepspeed", "--include", f"localhost:{devices}"]  # its own choice, or that of --include
    if (port := chosen_port()) not in (None, DEFAULT_PORT):
        launcher += ["--master_port", str(port)]
    return shlex.join([*launcher, *arguments]), note
