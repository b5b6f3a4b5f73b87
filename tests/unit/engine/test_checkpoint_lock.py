"""Lock of a folder of checkpoints: who is refused, and when the lock ends."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import signal
import stat
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from ds_ext.engine.checkpoint.lock import LOCK, FolderLock
from ds_ext.errors import CheckpointError
from tests.ranks import fork_server


def hold(folder: Path, pipe: Connection) -> None:
    """Take the lock for the run "first" with a forked child, as of a data loader, and take it again on demand."""
    lock = FolderLock(folder, "first")
    lock.take()
    if (child := os.fork()) == 0:
        lock.release()
        pipe.send(os.getpid())
        time.sleep(600)
    assert child
    while pipe.recv():
        lock.take()
        pipe.send(None)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process of the run "first" that has the lock."""
    ours, theirs = fork_server().Pipe()
    process = fork_server().Process(target=hold, args=(tmp_path / "saved", theirs))
    process.start()
    child = ours.recv()
    yield process, ours
    process.kill()
    process.join()
    os.kill(child, signal.SIGKILL)


Holder = tuple[BaseProcess, Connection]


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_a_second_job_is_refused_until_the_first_ends(tmp_path: Path, holder: Holder, ending: int) -> None:
    (process, _), second = holder, FolderLock(tmp_path / "saved", "second")
    for _ in range(2):
        with pytest.raises(CheckpointError) as caught:
            second.take()
        assert re.search(rf"run first, process {process.pid} on host \S+, for \d+ s\)", str(caught.value))
    assert process.pid
    os.kill(process.pid, ending)
    process.join()
    second.take()
    second.take()
    second.release()
    assert json.loads((tmp_path / "saved" / LOCK).read_text())["run"] == "second"


def test_a_later_start_of_a_run_continues_without_the_lock_until_the_earlier_one_ends(
    tmp_path: Path, holder: Holder
) -> None:
    (process, _), again = holder, FolderLock(tmp_path / "saved", "first")
    again.take()
    with pytest.raises(CheckpointError, match=f"process {process.pid} "):
        FolderLock(tmp_path / "saved", "second").take()
    process.kill()
    process.join()
    again.take()
    assert json.loads(os.pread(again._file or 0, 4096, 0))["process"] == os.getpid()
    again.release()


def test_the_owner_is_awaited_and_never_guessed(tmp_path: Path, holder: Holder) -> None:
    """Another process of the same run reads the owner later if it is being written, and refuses a lock without one."""
    path, again = tmp_path / "saved" / LOCK, FolderLock(tmp_path / "saved", "first")
    owner = path.read_bytes()
    path.write_bytes(b"")
    with pytest.raises(CheckpointError):
        again.take()
    writer = threading.Timer(0.2, path.write_bytes, [owner])
    writer.start()
    again.take()
    writer.join()


def test_the_lock_of_a_replaced_folder_is_taken_again(tmp_path: Path, holder: Holder) -> None:
    (process, pipe), second = holder, FolderLock(tmp_path / "saved", "second")
    shutil.rmtree(tmp_path / "saved")
    pipe.send(True)
    pipe.recv()
    with pytest.raises(CheckpointError, match=f"process {process.pid} "):
        second.take()


@pytest.mark.parametrize(
    ("folder_mode", "mode"), [(0o755, 0o644), (0o2775, 0o664), (0o770, 0o660), (0o1777, 0o666)], ids=oct
)
def test_who_may_write_to_the_folder_may_take_its_lock(tmp_path: Path, folder_mode: int, mode: int) -> None:
    saved, before = tmp_path / "saved", os.umask(0o077)
    try:
        saved.mkdir()
        saved.chmod(folder_mode)
        if os.geteuid() == 0:
            os.chown(saved, 12_345, 23_456)
        with FolderLock(saved, "first"):
            found = (saved / LOCK).stat()
    finally:
        os.umask(before)
    assert stat.S_IMODE(found.st_mode) == mode
    assert (found.st_uid, found.st_gid) == (saved.stat().st_uid, saved.stat().st_gid)
    with FolderLock(saved, "second"):
        assert json.loads((saved / LOCK).read_text())["run"] == "second"


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    def lockf(file: int, command: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    lock = FolderLock(tmp_path, "first")
    with caplog.at_level(logging.WARNING, "ds_ext"):
        lock.take()
        lock.take()
    assert len(caplog.records) == 1
    lock.release()


def test_a_lock_that_cannot_be_opened_or_locked_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "file"))):
        FolderLock(tmp_path / "file", "first").take()
    failure = OSError(errno.EIO, os.strerror(errno.EIO))
    monkeypatch.setattr(fcntl, "lockf", lambda *_: (_ for _ in ()).throw(failure))
    with pytest.raises(OSError) as caught:
        FolderLock(tmp_path, "first").take()
    assert caught.value.filename == str(tmp_path / LOCK)
