"""How a rank ends: one clear error, an exit code that tells its kind, and no process left behind.

A rank that waits inside a collective runs no Python signal handler, so a thread ends it: when a signal comes,
or when its launcher is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ..errors import ConfigError
from .failure import Ending, process_state, rank, report, say, world_size

__all__ = ["EXIT_CONFIG", "EXIT_FAILED", "EXIT_INTERRUPTED", "rank", "run", "world_size"]

EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130

_LAUNCHER_CHECK_S = 0.5
_SAME_CAUSE_S = 0.2
# The `deepspeed` command starts this launcher, which starts the ranks; a kill of the command reaches neither.
_NODE_LAUNCHER, _COMMANDS = "deepspeed.launcher.launch", ("deepspeed", "deepspeed.pt", "ds")


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run ``main`` as the whole life of a rank and exit: 0, 2 for a ConfigError (told once), 1 for a failure.

    SIGINT and SIGTERM end the rank at once, also inside a blocked collective, unless ``main`` installs handlers
    of its own; SIGUSR1 prints every thread's stack. Call it in the main thread.
    """
    # torch, when it is loaded: of a lost connection it would print a page of C++ frames; ours tells who was lost.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    ending = Ending()
    _watch(ending)
    try:
        code = main() or 0
    except SystemExit as stop:
        code = _exit_code(stop)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except BaseException as error:
        code = ending.code = EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
        report(error, ending)
    _leave(code)


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    say(str(stop.code))
    return EXIT_FAILED


def _leave(code: int) -> NoReturn:
    """End without running destructors: process groups with a dead peer would wait in theirs."""
    if code == 0:
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _watch(ending: Ending) -> None:
    """End this process from a thread: at SIGINT, at SIGTERM, and when its launcher is gone."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    # Python's handlers run in the main thread, between bytecodes; this byte is written by the signal itself.
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        # A shell starts background jobs with SIGINT ignored: Ctrl-C is not for them.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave_it_to_the_thread)
    os.register_at_fork(after_in_child=_unwatch)
    launchers = _launchers()

    def orphaned() -> bool:
        return any(_parent_of(child) != parent for child, parent in launchers)

    def watch() -> None:
        with writer:
            while True:
                received = _signals(reader, _LAUNCHER_CHECK_S)
                gone = ending.lost() if signal.SIGTERM in received else ""
                if signal.SIGTERM in received or orphaned():
                    # What made the launcher end its ranks, or itself, may be on its way here too.
                    received |= _signals(reader, _SAME_CAUSE_S)
                if signal.SIGINT in received:
                    # From a terminal it reaches every rank; the first to end look like failures to the others.
                    _tell("stopped by SIGINT.")
                    os._exit(EXIT_INTERRUPTED)
                if orphaned():
                    _tell("stopped: the launcher has ended.")
                    os._exit(EXIT_FAILED)
                if signal.SIGTERM in received:
                    _end_by_sigterm(ending, gone)
                if len(ending.neighbours) < int(os.environ.get("LOCAL_WORLD_SIZE", world_size())):
                    ending.neighbours.update(_neighbours(launchers[0][1]))

    threading.Thread(target=watch, name="ds_ext-watch", daemon=True).start()


def _signals(reader: socket.socket, timeout_s: float) -> set[int]:
    """The signals that came within a time and that the script has no handler of its own for."""
    readable, _, _ = select.select([reader], [], [], timeout_s)
    received = set(reader.recv(64)) if readable else set()
    return {number for number in received if signal.getsignal(number) is _leave_it_to_the_thread}


def _end_by_sigterm(ending: Ending, gone: str) -> NoReturn:
    """End at the launcher's or somebody's wish; ``gone`` are the ranks that had ended before."""
    # Nothing is flushed: the main thread may hold the streams' locks.
    if ending.text is not None:
        say(ending.text())
    elif ending.code is None:
        _tell(f"rank 0 stopped: {gone}Then came SIGTERM." if gone else "stopped by SIGTERM.")
    os._exit(ending.code or 128 + signal.SIGTERM)


def _tell(text: str) -> None:
    """Say what concerns all ranks, once."""
    if rank() == 0:
        say(text)


def _leave_it_to_the_thread(number: int, frame: Any) -> None:
    """The Python side of a signal that the thread acts on."""


def _unwatch() -> None:
    """In a forked child (a data loader's worker) signals are its own again."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _launchers() -> list[tuple[int, int]]:
    """(process, its parent), of which none changes while the launcher lives."""
    parent = os.getppid()
    pairs = [(os.getpid(), parent)]
    command = _parent_of(parent) if _NODE_LAUNCHER in _words(parent) else None
    if command is not None and any(Path(word).name in _COMMANDS for word in _words(command)[:3]):
        pairs.append((parent, command))
    return pairs


def _parent_of(process: int) -> int | None:
    """The parent's process id; None when that cannot be known (no /proc, or the process is gone)."""
    return os.getppid() if process == os.getpid() else process_state(process)[1] or None


def _neighbours(launcher: int) -> dict[int, int]:
    """Process id by rank of what a launcher has started on this node; empty where there is no /proc."""
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for process in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
            words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            ranks = [word[5:] for word in words if word.startswith(b"RANK=")]
            if ranks:
                found[int(ranks[0])] = int(process)
    return found


def _words(process: int) -> list[str]:
    """The command line of a process; empty when that cannot be known."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []
