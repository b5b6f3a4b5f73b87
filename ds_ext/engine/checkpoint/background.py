"""Save of a checkpoint in the background: the process that writes a rank's files, and the memory for them."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from ...launch import process
from ..recovery.keeper_process import free_bytes
from .background_process import Task, leave_note

logger = logging.getLogger(__name__)

_ROOT = Path(__file__).parents[3]  # of the package ds_ext
# Program of the process. Empty packages stand for those whose __init__.py imports torch.
_PROGRAM = """
import sys, types
for name in ("ds_ext.engine", "ds_ext.engine.checkpoint"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [sys.argv[1] + "/" + name.replace(".", "/")]
from ds_ext.engine.checkpoint.background_process import main
main()
"""
_FAILED_EXIT_S = 3.0  # a failed rank waits for its writer, which waits for those of other ranks
_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class BackgroundSave:
    """Process that writes this rank's files. The descriptors of ``task`` are closed here.

    ``began`` is the start of the save, in seconds since 1970. ``seconds``, the time from then to the end of the save,
    is known after :meth:`wait`.
    """

    def __init__(self, task: Task, step: int, began: float) -> None:
        self.path, self.step, self.seconds = Path(task.written).parent / task.tag, step, 0.0
        self._task, self._began, self._error = task._replace(manifest={}), began, ""
        environ = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        # The process inherits the blocked signals: launchers signal all descendants of a rank.
        earlier = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-P", "-c", _PROGRAM, str(_ROOT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=list(task.files.values()),
                env={**environ, "PYTHONPATH": str(_ROOT)},
                text=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
            for descriptor in task.files.values():
                os.close(descriptor)
        assert self._process.stdin is not None
        # Also at the flush when the stream is closed.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stream:
            json.dump(task._asdict(), stream)
        _running.append(self)
        # Registered again, because a forked process of Python 3.13 has lost earlier registrations.
        atexit.unregister(_finish)
        atexit.register(_finish)

    def is_done(self) -> bool:
        """Return whether the files are on disk, or could not be written."""
        return self._process.poll() is not None

    def wait_for_files(self) -> str:
        """Wait until the files of this rank are on disk, and return the error; empty without one."""
        if self in _running:
            assert self._process.stdout is not None
            self._take(self._process.stdout.readline())
        return self._error

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait for the process, and return its error; empty for a complete checkpoint."""
        if self in _running:
            assert self._process.stdout is not None
            self._process.wait(timeout_s)
            _running.remove(self)
            # Not communicate(), which would miss what readline() has left in the buffer.
            output = self._process.stdout.read()
            has_result, failed_later = bool(self.seconds), self._process.returncode and not self._error
            if output or not has_result or failed_later:
                self._take(output)
        return self._error

    def stop(self) -> None:
        """End the process, which may wait for the files of another rank, and remove what it has written."""
        self._process.kill()
        self.wait()
        if self._task.ranks:
            shutil.rmtree(self._task.written, ignore_errors=True)

    def _take(self, output: str) -> None:
        """Take the last result of the process. If it has none, the process that publishes gets the error."""
        last = (output.strip().splitlines() or [_describe_exit(self._process.wait())])[-1]
        try:
            result = json.loads(last)
        except ValueError:
            error = f"rank {self._task.rank}: its writer ended ({last})"
            leave_note(Path(self._task.written), self._task.rank, {}, error)
            result = {"error": error, "at": time.time()}
        self._error, self.seconds = result["error"], result["at"] - self._began
        warn_not_removed(result.get("not_removed", ""))


def warn_not_removed(problem: str) -> None:
    if problem:
        logger.warning("keep: older checkpoints were not removed: %s", problem)


def _describe_exit(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


_running: list[BackgroundSave] = []


def _finish(timeout_s: float | None = None) -> None:
    """Wait for the saves of this process, because their writers end with it."""
    for save in [*_running]:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if error := save.wait(timeout_s):
                print(f"error: the checkpoint {save.path.name!r} was not saved: {error}", file=sys.stderr)


process.before_failed_exit.append(lambda: _finish(_FAILED_EXIT_S))


def memory_problem(answers: list[tuple[str, int, int]]) -> str:
    """Return why copies of the ranks' states do not fit into memory, by their :func:`memory_needs`; "" if they do."""
    for host in dict.fromkeys(host for host, _, _ in answers):
        needed = sum(size for of_host, size, _ in answers if of_host == host)
        free = min(free for of_host, _, free in answers if of_host == host)
        if needed > free:
            return f"host {host} needs {needed:,} bytes of memory for a copy of the state (got {free:,} free bytes)"
    return ""


def memory_needs(size: int) -> tuple[str, int, int]:
    """Return this host's name, the bytes that this rank copies, and the bytes that are free."""
    return socket.gethostname(), size, free_bytes()
