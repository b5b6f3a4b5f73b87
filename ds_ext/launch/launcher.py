"""Command that started a job, read from the launcher's processes on this host.

A rank gets only the script's own flags. Those of the launcher (hostfile, hosts, rendezvous) are in /proc.
DeepSpeed's command starts a launcher on every host, over pdsh and ssh. Where that command runs on this host, it is an
ancestor of the process that carries the same ``--world_info``.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import ConfigError
from . import slurm
from .failure import world_size
from .processes import find_launcher, parent_of, running, words_of
from .roll_call import spans_hosts

# The `deepspeed` command starts NODE_LAUNCHER, which starts the ranks. Killing the command kills neither.
DEEPSPEED, NODE_LAUNCHER = ("deepspeed", "deepspeed.pt", "ds"), "deepspeed.launcher.launch"
_TORCHRUN = ("torchrun", "torch.distributed.run")
_ADDED = ("--local_rank", "--local-rank")
_UNKNOWN_HOSTFILE = "HOSTFILE"


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
    allowed = os.environ.get("TORCHELASTIC_MAX_RESTARTS")
    if allowed is None or int(allowed) < 1:
        got = "a launcher that does not" if allowed is None else f"--max-restarts {allowed}"
        raise ConfigError(
            f"ds_ext.recovery: needs a launcher that restarts ranks (got {got}). Start with `torchrun --nproc_per_node "
            f"RANKS --max-restarts 3 SCRIPT ...`, or remove the section."
        )


def launch_again(script: Sequence[str], arguments: Sequence[str]) -> tuple[str, str]:
    """Return the command that runs ``arguments`` with the same launcher, and a note on how to use it.

    Args:
        script: this rank's ``sys.argv``, by which the launcher's own flags are recognized.
        arguments: script and flags of the new run.

    Returns:
        The command, and what it does not contain; "" if it is complete.
    """
    flags, note = _launcher_flags([word for word in script if word.partition("=")[0] not in _ADDED])
    return shlex.join([*flags, *arguments]), note


def _launcher_flags(script: Sequence[str]) -> tuple[list[str], str]:
    if (srun := slurm.launcher_words()) is not None:
        return srun, "inside an allocation"
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    parent = words_of((find_launcher() or (0, 0))[1])
    if torchrun:
        flags = _before_script(parent, _TORCHRUN, script)
        return (["torchrun", *flags], _per_host(flags)) if flags is not None else _by_size(["torchrun"])
    if NODE_LAUNCHER not in parent:
        return _by_size(["deepspeed"])
    world_info = next((word for word in parent if word.startswith("--world_info=")), None)
    for process in _with_word(world_info) if world_info else ():
        flags = _before_script(words_of(parent_of(process)), DEEPSPEED, script)
        if flags is not None:
            return ["deepspeed", *flags], _per_host(flags)
    if world_info is not None and spans_hosts(world_size()):
        flags = ["--hostfile", _UNKNOWN_HOSTFILE, "--include", _include(world_info.partition("=")[2])]
        return ["deepspeed", *flags], f"{_UNKNOWN_HOSTFILE}: the hostfile of this run"
    return _by_size(["deepspeed"])


def _by_size(launcher: list[str]) -> tuple[list[str], str]:
    """Return the command for this host's ranks, because the launcher's flags are unknown."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or str(world_size())
    flag = "--nproc_per_node" if launcher == ["torchrun"] else "--num_gpus"
    note = "add the launcher's flags for several hosts" if spans_hosts(world_size()) else ""
    return [*launcher, flag, ranks], note


def _per_host(flags: Sequence[str]) -> str:
    """Return a note for a launcher that is started on every host."""
    names = {word.partition("=")[0].replace("-", "_") for word in flags}
    if not spans_hosts(world_size()) or not names & {"__nnodes", "__no_ssh"}:
        return ""
    return "on every host, each with its --node_rank" if "__node_rank" in names else "on every host"


def _before_script(words: Sequence[str], names: Sequence[str], script: Sequence[str]) -> list[str] | None:
    """Return the flags in a launcher's command line; None if it is another program or runs another script."""
    at = next((i for i, word in enumerate(words[:4]) if Path(word).name in names), None)
    end = len(words) - len(script)
    if at is None or end <= at or list(words[end:]) != list(script):
        return None
    return list(words[at + 1 : end])


def _include(world_info: str) -> str:
    """Return the value of ``--include`` for DeepSpeed's encoded hosts and slots."""
    slots: dict[str, list[int]] = json.loads(base64.urlsafe_b64decode(world_info))
    return "@".join(f"{host}:{','.join(map(str, numbers))}" for host, numbers in slots.items())


def _with_word(word: str) -> Iterator[int]:
    """Yield the processes on this host whose command line contains ``word``."""
    return (process for process in running() if word in words_of(process))
