"""Lock of a folder of checkpoints, so that one run at a time writes to it. Needs no torch.

    DIR/.ds_ext.lock     JSON: run, host and process of the owner, and since when it has the lock

The lock is a POSIX record lock of this file. It ends with its process, however that ends, and forked processes do not
have it. The content is only for messages. The file is never removed, because that would race with the next owner.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path

from ...errors import CheckpointError
from ..types import Record

logger = logging.getLogger(__name__)

LOCK = ".ds_ext.lock"
_OWNER_BYTES = 512  # of the content, which is padded: a full disk allows writing over it
_OWNER_S = 1.0  # in which a new owner writes the content
_HELD = (errno.EAGAIN, errno.EACCES)
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class FolderLock:
    """Lock of one folder. A process must have one per folder: closing any descriptor of the file ends its lock."""

    def __init__(self, folder: Path, run: str) -> None:
        self._path, self._run = folder / LOCK, run
        self._file: int | None = None

    def take(self) -> None:
        """Take the lock, unless this object has it. If an earlier start of the same run has it, continue without."""
        with contextlib.suppress(FileNotFoundError):
            if self._file is not None and os.path.samestat(os.fstat(self._file), self._path.stat()):
                return
        self.release()  # the folder was replaced
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _open(self._path)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                return self._require_same_run()
            if error.errno not in _UNSUPPORTED:
                self.release()
                error.filename = str(self._path)
                raise
            logger.warning(
                "%s: no lock, so do not let two jobs save there (got %s)", self._path.parent, error.strerror
            )
        self._write_owner(self._file)

    def _write_owner(self, file: int) -> None:
        """Write what :meth:`_require_same_run` of other processes reads. A full disk has no effect on the lock."""
        owner = {"run": self._run, "host": socket.gethostname(), "process": os.getpid(), "at": time.time()}
        with contextlib.suppress(OSError):
            os.pwrite(file, json.dumps(owner).ljust(_OWNER_BYTES).encode(), 0)
            os.truncate(file, _OWNER_BYTES)

    def _require_same_run(self) -> None:
        """Raise CheckpointError unless the other process with the lock is of this run, and close the file."""
        assert self._file is not None
        try:
            owner = _read_owner(self._file)
        finally:
            self.release()
        if owner is None:
            raise CheckpointError(
                f"{self._path.parent}: another process has the lock (got no owner in {LOCK}). Use another folder, or "
                f"end that process first."
            )
        names = f"run {owner['run']}, process {owner['process']} on host {owner['host']}"
        if owner["run"] != self._run:
            age_s = max(0.0, time.time() - owner["at"])
            raise CheckpointError(
                f"{self._path.parent}: another job saves its checkpoints there (got {names}, for {age_s:.0f} s). Use "
                f"another folder, or end that job first."
            )
        logger.warning("%s: an earlier start of this run has the lock (got %s)", self._path.parent, names)

    def release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        self.release()


def _read_owner(file: int) -> Record | None:
    deadline = time.monotonic() + _OWNER_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ValueError):
            return json.loads(os.pread(file, 4096, 0))
        time.sleep(0.01)
    return None


def _open(path: Path) -> int:
    """Open the file of a lock. A new one can be opened by every user who may write to its folder."""
    with contextlib.suppress(FileExistsError):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        folder = path.parent.stat()
        for owner in (-1, folder.st_uid):  # only root may set the owner
            with contextlib.suppress(OSError):
                os.fchown(file, owner, folder.st_gid)
        with contextlib.suppress(OSError):  # independent of the umask; who may write may also read
            os.fchmod(file, folder.st_mode & 0o666 | (folder.st_mode & 0o222) << 1)
        return file
    return os.open(path, os.O_RDWR)
