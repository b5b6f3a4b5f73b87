"""Notes of the processes that write a checkpoint: the one that publishes gets every error."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from ds_ext.engine.checkpoint import background_process
from ds_ext.engine.checkpoint.background_process import Task, leave_note
from ds_ext.engine.checkpoint.folder import complete_checkpoints, start_writing


def publish(written: Path) -> str:
    """Publish a checkpoint of two ranks without files. Return the error."""
    task = Task(0, 0, str(written), {}, 2, "a", {"job": {"at": 1}}, True, 0, limit_s=600)
    return background_process._publish(task)


def test_the_error_of_another_rank(tmp_path: Path) -> None:
    written = start_writing(tmp_path, "a")
    assert leave_note(written, 0, {}, "") == ""
    assert leave_note(written, 1, {}, "rank 1: lost") == "rank 1: lost"
    assert publish(written) == "rank 1: lost"
    assert complete_checkpoints(tmp_path) == []


def test_a_note_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = start_writing(tmp_path, "a")
    leave_note(written, 0, {}, "")

    def fill(path: Path, text: str) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", fill)
        assert "No space" in leave_note(written, 1, {}, "")
    assert "rank 1" in publish(written)
    assert complete_checkpoints(tmp_path) == []
