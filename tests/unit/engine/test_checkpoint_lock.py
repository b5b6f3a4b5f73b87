"""Lock of a folder of checkpoints: who is refused, and which locks are broken."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from ds_ext.engine.checkpoint import lock
from ds_ext.engine.checkpoint.lock import LOCK, FolderLock
from ds_ext.errors import CheckpointError
from tests.ranks import fork_server


def hold(folder: Path, taken: Connection) -> None:
    """Take the lock for the run "first" and keep it."""
    FolderLock(folder, "first").take()
    taken.send(True)
    time.sleep(600)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[BaseProcess]:
    """A process of the run "first" that has the lock."""
    reader, sender = fork_server().Pipe(duplex=False)
    process = fork_server().Process(target=hold, args=(tmp_path, sender))
    process.start()
    reader.recv()
    yield process
    process.kill()
    process.join()


def content(folder: Path) -> dict[str, Any]:
    return json.loads((folder / LOCK).read_text())


def test_a_second_job_is_refused_until_the_first_has_ended(tmp_path: Path, holder: BaseProcess) -> None:
    second = FolderLock(tmp_path, "second")
    with pytest.raises(CheckpointError, match=f"run first, process {holder.pid} on host "):
        second.take()
    holder.kill()
    holder.join()
    second.take()
    assert content(tmp_path)["run"] == "second"
    second.take()
    second.release()
    assert not (tmp_path / LOCK).exists()


def test_another_process_with_the_same_id_is_not_the_owner(tmp_path: Path) -> None:
    FolderLock(tmp_path, "first").take()
    (tmp_path / LOCK).write_text(json.dumps({**content(tmp_path), "started": 1}))
    FolderLock(tmp_path, "second").take()
    assert content(tmp_path)["run"] == "second"


def test_a_later_start_of_a_run_takes_its_lock(tmp_path: Path, holder: BaseProcess) -> None:
    again = FolderLock(tmp_path, "first")
    again.take()
    assert content(tmp_path)["process"] == os.getpid() != holder.pid


def test_a_job_that_lost_its_lock_is_refused(tmp_path: Path, holder: BaseProcess) -> None:
    """As after a stop that was longer than the limit."""
    taken = (tmp_path / LOCK).read_bytes()
    (tmp_path / LOCK).unlink()
    stopped = FolderLock(tmp_path, "second")
    stopped.take()
    (tmp_path / LOCK).write_bytes(taken)
    with pytest.raises(CheckpointError, match="run first"):
        stopped.take()
    stopped.release()
    assert content(tmp_path)["run"] == "first"


@pytest.mark.parametrize("text", [None, "", "{"])
def test_a_lock_of_another_host_is_broken_when_nothing_touches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.setattr(lock, "STALE_S", 0.5)
    FolderLock(tmp_path, "first").take()
    elsewhere = json.dumps({**content(tmp_path), "machine": "another"})
    (tmp_path / LOCK).write_text(elsewhere if text is None else text)
    FolderLock(tmp_path, "second").take()
    assert content(tmp_path)["run"] == "second"


def test_a_lock_of_another_host_that_is_touched_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = lock.process_key()
    monkeypatch.setattr(lock, "BEAT_S", 0.05)
    monkeypatch.setattr(lock, "process_key", lambda: {**key, "machine": "another"})
    first = FolderLock(tmp_path, "first")
    first.take()
    monkeypatch.setattr(lock, "process_key", lambda: key)
    with pytest.raises(CheckpointError, match="run first"):
        FolderLock(tmp_path, "second").take()
    first.release()


def test_of_many_jobs_one_gets_the_lock(tmp_path: Path) -> None:
    locks = [FolderLock(tmp_path, str(number)) for number in range(8)]
    refused: list[CheckpointError] = []

    def take(one: FolderLock) -> None:
        try:
            one.take()
        except CheckpointError as error:
            refused.append(error)

    threads = [threading.Thread(target=take, args=(one,)) for one in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7
