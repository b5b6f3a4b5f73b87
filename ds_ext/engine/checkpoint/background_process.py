"""Process that writes a rank's files of a checkpoint to disk while the rank trains. Imports the standard library only.

The files are anonymous ones (memfd_create(2)) that the rank has filled. The process of every rank writes and syncs its
files, and then leaves a note with their sizes and checksums, or with its error. The one that publishes waits for all
notes, completes the manifest with them, and renames the folder. It ends with its rank, if that is killed.

Its input is a JSON object with the fields of :class:`Task`. Its output is a line with a JSON object when the files are
on disk, and another one after publishing: the ``error`` so far ("": none), and the time ``at`` which this was, in
seconds since 1970. The second one also has ``not_removed``, the result of :func:`.folder.remove_older`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ...errors import CheckpointError
from ..types import Record
from .folder import CheckedFile, publish, remove_older

_CHUNK = 16 << 20
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1  # prctl(2)


class Task(NamedTuple):
    """Files and checkpoint to write.

    Attributes:
        parent: process id of the rank.
        written: folder for the files, with a temporary name.
        files: name -> descriptor of the anonymous file.
        ranks: number of ranks that leave a note, for the process that publishes; 0 for the others.
        manifest: manifest of the checkpoint without the records of the files.
        make_current: write the tag to ``latest``.
        keep: number of complete checkpoints of this run to keep; 0: all.
        limit_s: time in which another rank must write something.
    """

    rank: int
    parent: int
    written: str
    files: dict[str, int]
    ranks: int
    tag: str
    manifest: Record
    make_current: bool
    keep: int
    limit_s: float


def main() -> None:
    task = Task(**json.load(sys.stdin))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != task.parent:
        return
    os.nice(10)  # the steps have precedence
    error = _write(task)
    _report(error)
    if task.ranks:
        not_removed, error = "", error or _publish(task)
        if error:
            shutil.rmtree(task.written, ignore_errors=True)
        else:
            not_removed = remove_older(Path(task.written).parent, task.keep)
        _report(error, not_removed)


def _report(error: str, not_removed: str = "") -> None:
    print(json.dumps({"error": error, "at": time.time(), "not_removed": not_removed}), flush=True)


def _write(task: Task) -> str:
    """Write and sync the files, and leave the note. Returns the error."""
    folder, records, error = Path(task.written), {}, ""
    try:
        for name, descriptor in task.files.items():
            with CheckedFile(folder / name) as file, open(descriptor, "rb", buffering=0) as memory:
                memory.seek(0)
                while block := memory.read(_CHUNK):
                    file.write(block)
            records[name] = file.record
    except OSError as failure:
        error = f"rank {task.rank}: {failure.strerror}: {failure.filename}"
    return leave_note(folder, task.rank, records, error)


def leave_note(folder: Path, rank: int, records: Mapping[str, object], error: str) -> str:
    """Write the note of a rank. Returns ``error``, or else the error of writing the note."""
    scratch = folder / f".note_{rank}.tmp"
    try:
        scratch.write_text(json.dumps({"files": records, "error": error}))
    except OSError as failure:
        error = error or f"rank {rank}: {failure.strerror}: {failure.filename}"
    with contextlib.suppress(OSError):  # an empty note, as on a full disk, is an error too
        scratch.rename(_note(folder, rank))
    return error


def _note(folder: Path, rank: int) -> Path:
    return folder / f".note_{rank}.json"


def _publish(task: Task) -> str:
    """Wait for the notes of all ranks, and publish the checkpoint. Returns the error."""
    folder, files = Path(task.written), {}
    try:
        for rank in range(task.ranks):
            note = _wait_for_note(folder, rank, task.limit_s)
            if note["error"]:
                return note["error"]
            files |= note["files"]
        publish(folder, task.tag, {**task.manifest, "files": files}, task.make_current)
    except OSError as failure:
        return f"rank {task.rank}: {failure.strerror}: {failure.filename}"
    except CheckpointError as failure:
        return str(failure)
    return ""


def _wait_for_note(folder: Path, rank: int, limit_s: float) -> Record:
    """Return the note of a rank, and remove it.

    Raises CheckpointError if no rank writes for ``limit_s``, or if the note is incomplete.
    """
    path, folder_size, deadline = _note(folder, rank), -1, 0.0
    while not path.exists():
        if (size := _size(folder)) != folder_size:
            folder_size, deadline = size, time.monotonic() + limit_s
        elif time.monotonic() > deadline:
            raise CheckpointError(f"rank {rank} has written nothing for {limit_s:g} s")
        time.sleep(_POLL_S)
    try:
        note = json.loads(path.read_text())
    except ValueError:
        raise CheckpointError(f"rank {rank} could not write its note {path}") from None
    path.unlink()
    return note


def _size(folder: Path) -> int:
    """Return the bytes and the number of all files, which change whenever a rank writes."""
    total = 0
    for entry in os.scandir(folder):
        try:
            total += 1 + entry.stat().st_size
        except OSError:  # it was just renamed
            continue
    return total
