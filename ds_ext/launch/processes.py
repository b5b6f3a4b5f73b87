"""Processes on this host, from /proc, and the launcher that started this rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

# Variables that the launcher sets for one rank. Programs between the launcher and the rank inherit all of them.
_OF_RANK = ("RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_OF_RANK += ("SLURM_PROCID", "SLURM_STEP_ID")
_USE_TORCH = ("TORCHELASTIC_RUN_ID", "CROSS_RANK")  # set by torchrun and by DeepSpeed's launcher
_GROUP, _STARTED = 2, 19  # fields of /proc/PID/stat, counted from the state (proc(5))


def process_state(process: int) -> tuple[str, int]:
    """Return (state letter, parent) of a process from /proc; ("", 0) if it exited or there is no /proc."""
    fields = stat_fields(process)
    return (fields[0], int(fields[1])) if fields else ("", 0)


def is_running(process: int) -> bool:
    """Return whether a process has not exited; False without /proc."""
    return process_state(process)[0] not in ("Z", "X", "")


def stat_fields(process: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if the process exited or there is no /proc."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def parent_of(process: int) -> int:
    """Return the parent of a process; 0 if it is unknown."""
    return os.getppid() if process == os.getpid() else process_state(process)[1]


def group_of(process: int) -> int:
    """Return the process that leads a process's group; 0 if it is unknown."""
    return int((stat_fields(process) or ["0"] * 3)[_GROUP])


def words_of(process: int) -> list[str]:
    """Return the command line of a process; empty if it is unknown."""
    return _strings(process, "cmdline")


def variables_of(process: int) -> list[str]:
    """Return the variables with which a process started, as NAME=VALUE; empty if they are unknown."""
    return _strings(process, "environ")


def running() -> Iterator[int]:
    """Yield the processes on this host."""
    yield from map(int, filter(str.isdigit, os.listdir("/proc")))


def find_launcher() -> tuple[int, int] | None:
    """Return (child, launcher): the launcher of this rank, and the program that it started for the rank.

    The child is the rank itself, or a wrapper such as a shell script, numactl or a profiler. Without launcher or /proc,
    the launcher is the parent. None: the launcher has exited.
    """
    own = {f"{name}={os.environ[name]}" for name in _OF_RANK if name in os.environ}
    knows_torch = any(name in os.environ for name in _USE_TORCH) and os.path.exists("/proc/self/maps")

    def launched(process: int) -> tuple[int, int] | None:
        child = process
        while parent := parent_of(child):
            of_rank = bool(own) and own <= set(variables_of(parent))
            if not of_rank and (_has_loaded_torch(parent) or not knows_torch):
                return child, parent
            child = parent
        # The launcher of a rank in a container with its own process ids is outside.
        outside = not knows_torch or child == process or own <= set(variables_of(child))
        return (process, os.getppid()) if outside else None

    if (pair := launched(os.getpid())) is not None or not knows_torch:
        return pair
    # A profiler may have detached the rank from the program that the launcher started, which is older.
    pairs = (launched(process) for process in running() if own <= set(variables_of(process)))
    return next(
        (pair for pair in pairs if pair is not None and _started(pair[0]) <= _started(os.getpid())), None
    )


def _started(process: int) -> int:
    """Return the start of a process, in clock ticks since the start of this host."""
    return int((stat_fields(process) or ["0"] * (_STARTED + 1))[_STARTED])


def _has_loaded_torch(process: int) -> bool:
    with contextlib.suppress(OSError):
        return "/libtorch" in Path(f"/proc/{process}/maps").read_text(errors="replace")
    return False


def _strings(process: int, name: str) -> list[str]:
    try:
        return Path(f"/proc/{process}/{name}").read_text(errors="replace").split("\0")[:-1]
    except OSError:
        return []
