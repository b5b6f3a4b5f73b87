"""Launcher of a job: the only rank of a process without one, restarts, and the command that starts a job again."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Sequence

from ..environment import local_world_size, max_restarts, spans_hosts, started_by_torchrun
from ..errors import ConfigError
from . import slurm

# The `deepspeed` command starts NODE_LAUNCHER, which starts the ranks. Killing the command kills neither.
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
    """Raise ConfigError unless the launcher restarts ranks."""
    allowed = max_restarts()
    if allowed is None or allowed < 1:
        got = "a launcher that does not" if allowed is None else f"--max-restarts {allowed}"
        raise ConfigError(
            f"ds_ext.recovery: needs a launcher that restarts ranks (got {got}). Start with `torchrun --nproc_per_node "
            f"RANKS --max-restarts 3 SCRIPT ...`, or remove the section."
        )


def launch_again(arguments: Sequence[str]) -> tuple[str, str]:
    """Return the command that runs a script with as many ranks on this host, and a note on what it does not contain.

    Args:
        arguments: script and flags.
    """
    if (srun := slurm.launcher_words()) is not None:
        return shlex.join([*srun, *arguments]), "inside an allocation"
    launcher = ["torchrun", "--nproc_per_node"] if started_by_torchrun() else ["deepspeed", "--num_gpus"]
    note = "add the launcher's flags for several hosts" if spans_hosts() else ""
    return shlex.join([*launcher, str(local_world_size()), *arguments]), note
