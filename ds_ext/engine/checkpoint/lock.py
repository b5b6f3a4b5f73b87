"""Lock of a folder of checkpoints, so that one job at a time writes to it. Needs no torch.

    DIR/.ds_ext.lock     JSON: run, host and process of the owner, and since when it has the lock

The process with the lock touches the file every few seconds, and removes it at its end. A lock is broken, with a
warning, if its process has exited on this host, or if nothing has touched it for ``STALE_S`` while another job watched
it. So a killed job blocks no other one, and clocks of hosts may differ. A later start of the same run takes its lock.

A job that was stopped for longer may find its lock taken. It checks this at the start and the end of every save.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError

logger = logging.getLogger(__name__)

LOCK = ".ds_ext.lock"
BEAT_S, STALE_S = 5.0, 60.0
_POLL_S = 0.2
_OWNER = ("run", "machine", "process", "started")


def started_ticks(process: int) -> int | None:
    """Return when a process started, in clock ticks since the boot; None for an unknown, exited or zombie process."""
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return None if words[0] in "ZX" else int(words[19])
    except (OSError, ValueError, IndexError):
        return None


def process_key() -> dict[str, Any]:
    """Return the machine, its namespace of process ids, and the process id and start of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    machine = f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return {"machine": machine, "process": os.getpid(), "started": started_ticks(os.getpid())}


class FolderLock:
    """Lock of one folder.

    Args:
        folder: folder of checkpoints; it is created.
        run: id of the run.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._path = folder, folder / LOCK
        self._owner = {"run": run, "host": socket.gethostname(), **process_key()}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> None:
        """Take the lock, or check that this process still has it.

        Raises:
            CheckpointError: another job has the lock.
            OSError: the lock cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        while not self._is_own(holder := self._read()):
            if holder is None:
                self._create()
                continue
            self._require_free(holder)
            new = self._path.with_name(f"{LOCK}.tmp-{secrets.token_hex(4)}")
            new.write_text(self._text())
            new.replace(self._path)
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="ds_ext-lock", daemon=True)
            self._thread.start()

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Remove the lock if this process has it. A forked process has not."""
        self._stop.set()
        with contextlib.suppress(OSError):
            if os.getpid() == self._owner["process"] and self._is_own(self._read()):
                self._path.unlink()

    def _create(self) -> None:
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(self._text())
        except OSError:
            self._path.unlink(missing_ok=True)
            raise

    def _text(self) -> str:
        return json.dumps({**self._owner, "at": time.time()})

    def _is_own(self, holder: Mapping[str, Any] | None) -> bool:
        return holder is not None and all(holder.get(key) == self._owner[key] for key in _OWNER)

    def _read(self) -> dict[str, Any] | None:
        """Return the content and "touched", the time of the last beat in ns; None without a lock."""
        try:
            with self._path.open() as file:  # opening also asks a network file system for the present times
                touched, text = os.fstat(file.fileno()).st_mtime_ns, file.read()
        except FileNotFoundError:
            return None
        try:
            content = json.loads(text)
        except ValueError:  # its writer is between two calls, or was killed there
            content = {}
        return {**(content if isinstance(content, dict) else {}), "touched": touched}

    def _require_free(self, holder: Mapping[str, Any]) -> None:
        """Raise CheckpointError if the owner of the lock is alive and of another run."""
        if holder.get("run") == self._owner["run"]:
            return  # an earlier start of this run, which the launcher has ended
        reason = f"no sign of life for {STALE_S:g} s"
        if holder.get("machine") == self._owner["machine"]:
            alive, reason = _is_running(holder["process"], holder["started"]), "its process has exited"
        else:
            alive = self._is_touched(holder)
        if alive:
            age_s = time.time() - holder.get("at", time.time())
            raise CheckpointError(
                f"{self._folder}: another job saves its checkpoints there (got run {holder.get('run')}, process "
                f"{holder.get('process')} on host {holder.get('host')}, for {age_s:.0f} s). Use another folder, or end "
                f"that job first."
            )
        logger.warning(
            "%s: removed the lock of run %s, process %s on host %s: %s",
            *(self._folder, holder.get("run"), holder.get("process"), holder.get("host"), reason),
        )

    def _is_touched(self, holder: Mapping[str, Any]) -> bool:
        """Watch a lock for ``STALE_S``. Returns whether its owner touches it."""
        deadline = time.monotonic() + STALE_S
        while time.monotonic() < deadline:
            if (now := self._read()) != holder:
                return now is not None
            time.sleep(_POLL_S)
        return False

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            with contextlib.suppress(OSError):
                if self._is_own(self._read()):
                    os.utime(self._path)


def _is_running(process: int, started: int) -> bool:
    """Return whether the process that started then is running, and not a later one with the same id."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user; its start may be hidden
        return started_ticks(process) in (started, None)
    return started_ticks(process) == started
