"""Folders of checkpoints: errors for damaged files, and writers that are killed at any moment."""

from __future__ import annotations

import argparse
import contextlib
import errno
import itertools
import os
import random
import shutil
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_ext.engine.checkpoint.folder import (
    MANIFEST,
    CheckedFile,
    check_contents,
    complete_checkpoints,
    has_checkpoint,
    open_checkpoint,
    publish,
    remove_older,
    require_keep,
    start_writing,
)
from ds_ext.engine.checkpoint.lock import LOCK
from ds_ext.errors import CheckpointError, ConfigError
from ds_ext.recipes.training.loop import EXIT_NOT_SAVED, Trainer
from ds_ext.recipes.training.preflight import _check_load, require_checkpoint
from tests.launch.jobs import ROOT
from tests.ranks import fork_server


def write(folder: Path, tag: str, text: str = "weights", make_current: bool = True) -> Path:
    """Write a checkpoint of two files. Returns its folder."""
    written, files = start_writing(folder, tag), {}
    for name in ("a", "b"):
        with CheckedFile(written / name) as file:
            file.write((text + name).encode())
        files[name] = file.record
    return publish(written, tag, {"files": files, "job": {"tag": tag}}, make_current)


def test_the_last_checkpoint_is_current_and_no_temporary_files_remain(tmp_path: Path) -> None:
    for text in ("one", "two"):
        write(tmp_path, "first", text)
    made = write(tmp_path, "second")
    write(tmp_path, "third", make_current=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "latest", "second", "third"]
    checkpoint, manifest = open_checkpoint(tmp_path)
    assert checkpoint == made and manifest["job"] == {"tag": "second"}
    check_contents(checkpoint, manifest)
    checkpoint, manifest = open_checkpoint(tmp_path, "first")
    check_contents(checkpoint, manifest)
    assert (checkpoint / "a").read_text() == "twoa"
    assert complete_checkpoints(tmp_path) == ["first", "second", "third"]


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    other = tmp_path / "other" / "kept"
    other.parent.mkdir()
    other.write_text("kept")
    (tmp_path / "file").write_text("kept")
    write(tmp_path, "saved")
    (tmp_path / "link").symlink_to(tmp_path / "saved")
    for tag in ("other", "file", "link"):
        with pytest.raises(ConfigError):
            write(tmp_path, tag)
    assert other.read_text() == (tmp_path / "file").read_text() == "kept" and (tmp_path / "link").is_symlink()


def publish_trained(folder: Path, *tags: str) -> None:
    """Publish empty checkpoints of a training run, with the last one as the newest."""
    for number, tag in enumerate(tags, start=1):
        publish(start_writing(folder, tag), tag, {"files": {}, "job": {"at": number, "run": "a"}})


def test_links_stay_with_what_they_lead_to(tmp_path: Path) -> None:
    publish_trained(tmp_path, "a", "b", "c", "d")
    (tmp_path / "best").symlink_to("a")
    (tmp_path / "newest").symlink_to("d")
    assert remove_older(tmp_path, 2) == ""
    assert (tmp_path / "best").is_symlink()
    assert complete_checkpoints(tmp_path) == ["a", "best", "c", "d", "newest"]
    assert not [*tmp_path.glob(".*tmp-*")]


def test_a_checkpoint_that_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("busy", "damaged"):
        publish_trained(tmp_path / folder, "a", "b", "c")
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name == "a":
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    assert str(tmp_path / "busy" / "a") in remove_older(tmp_path / "busy", 1)
    assert complete_checkpoints(tmp_path / "busy") == ["a", "c"]
    (tmp_path / "damaged" / "latest").write_text("")
    assert "latest" in remove_older(tmp_path / "damaged", 1)
    assert complete_checkpoints(tmp_path / "damaged") == ["a", "b", "c"]


@pytest.mark.parametrize("keep", [-1, None, 1.5])
def test_keep_is_a_number_of_checkpoints(keep: Any) -> None:
    with pytest.raises(ConfigError, match=r"^keep: "):
        require_keep(keep)


def test_a_full_disk_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when ``latest`` is written."""
    publish_trained(tmp_path, "a")
    write_data = CheckedFile.write

    def fill(file: CheckedFile, data: bytes | memoryview) -> None:
        if bytes(data) == b"b":
            raise OSError(errno.ENOSPC, "No space left on device", str(file.path))
        write_data(file, data)

    monkeypatch.setattr(CheckedFile, "write", fill)
    with pytest.raises(OSError, match="No space"):
        publish_trained(tmp_path, "b")
    assert complete_checkpoints(tmp_path) == ["a"] and open_checkpoint(tmp_path)[0].name == "a"


def test_the_newest_checkpoint_is_so_in_a_copy_of_its_folder(tmp_path: Path) -> None:
    for number, tag in enumerate(("c", "a", "b")):
        publish(start_writing(tmp_path, tag), tag, {"files": {}, "job": {"at": 1e9 + number}})
        os.utime(tmp_path / tag / MANIFEST, (2e9 - number, 2e9 - number))
    assert complete_checkpoints(tmp_path) == ["c", "a", "b"]


DAMAGE = {
    "missing": (lambda path: (path / "b").unlink(), "b: missing"),
    "half": (
        lambda path: (path / "b").write_text("wei"),
        "b: damaged file: 8 bytes were written (got 3)",
    ),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), f"{MANIFEST}: missing"),
    "half a manifest": (
        lambda path: (path / MANIFEST).write_text('{"version"'),
        f"{MANIFEST}: cannot be read",
    ),
    "another manifest": (lambda path: (path / MANIFEST).write_text("[1]"), f"{MANIFEST}: this version"),
    "changed manifest": (
        lambda path: (path / MANIFEST).write_text((path / MANIFEST).read_text().replace('"b"', '"c"')),
        f"{MANIFEST}: damaged",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_errors_name_the_damaged_file_and_the_complete_checkpoints(tmp_path: Path, damage: str) -> None:
    for tag in ("step_1", "step_2", "step_3"):
        write(tmp_path, tag)
    break_checkpoint, problem = DAMAGE[damage]
    break_checkpoint(tmp_path / "step_3")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert f"{tmp_path / 'step_3'}/{problem}" in str(caught.value)
    assert str(caught.value).endswith(f" {tmp_path / 'latest'}: step_1, step_2.")
    with pytest.raises(ConfigError, match=f"--load {tmp_path}: .*step_3/"):
        require_checkpoint(str(tmp_path))
    shutil.rmtree(tmp_path / "step_1")
    (tmp_path / "step_2" / "a").unlink()
    with pytest.raises(CheckpointError, match="no other checkpoint"):
        open_checkpoint(tmp_path)


def test_a_changed_byte_is_found_by_the_rank_that_checks_the_file(tmp_path: Path) -> None:
    made = write(tmp_path, "step_1")
    (made / "b").write_text("weightsB")
    checkpoint, manifest = open_checkpoint(tmp_path)
    check_contents(checkpoint, manifest, share=0, shares=2)
    with pytest.raises(CheckpointError, match="step_1/b: damaged"):
        check_contents(checkpoint, manifest, share=1, shares=2)


def test_latest_must_name_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint"):
        open_checkpoint(tmp_path)
    write(tmp_path, "step_1")
    for text, problem in (
        ("step_9\n", "'step_9' in 'latest'"),
        ("", "got ''"),
        ("../x", "'../x'"),
    ):
        (tmp_path / "latest").write_text(text)
        with pytest.raises(ConfigError, match=problem) as caught:
            open_checkpoint(tmp_path)
        assert str(caught.value).endswith("latest: step_1.")
    for tag in ("a/b", "latest", ".hidden", "", "step_1 ", " step_1", "step_\udcff", "a\0b", "a\nb"):
        with pytest.raises(ConfigError, match=r"^tag: "):
            start_writing(tmp_path, tag)


LATEST = {
    "missing": lambda latest: latest.unlink(),
    "dangling link": lambda latest: (latest.unlink(), latest.symlink_to("gone")),
    "link to itself": lambda latest: (latest.unlink(), latest.symlink_to("latest")),
    "link to the folder of a checkpoint": lambda latest: (latest.unlink(), latest.symlink_to("step_2")),
}


@pytest.mark.parametrize("change", LATEST)
def test_a_folder_without_the_file_latest_has_its_newest_checkpoint(tmp_path: Path, change: str) -> None:
    for tag in ("step_1", "step_2", "step_3"):
        write(tmp_path, tag)
    (tmp_path / "step_3" / "a").unlink()
    LATEST[change](tmp_path / "latest")
    assert has_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path)[0] == tmp_path / "step_2"
    write(tmp_path, "step_4")
    assert open_checkpoint(tmp_path)[0] == tmp_path / "step_4"


def test_a_folder_in_the_place_of_latest_is_named(tmp_path: Path) -> None:
    write(tmp_path, "step_1")
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    for use in (open_checkpoint, lambda folder: start_writing(folder, "step_2")):
        with pytest.raises(ConfigError, match="latest: "):
            use(tmp_path)


def test_a_link_to_a_checkpoint_of_another_folder_is_named_with_its_folder(tmp_path: Path) -> None:
    saved, other = tmp_path / "saved", tmp_path / "other"
    write(saved, "step_1")
    write(other, "step_9")
    for target, words in ((other / "step_9", ["'step_9'", str(other)]), (tmp_path, [f"link to {tmp_path}"])):
        (saved / "latest").unlink()
        (saved / "latest").symlink_to(target)
        with pytest.raises(ConfigError) as caught:
            open_checkpoint(saved)
        assert all(word in str(caught.value) for word in words) and "Errno" not in str(caught.value)
    write(saved, "step_2")
    assert open_checkpoint(saved)[0] == saved / "step_2" and list(other.glob("*"))


def test_latest_is_utf_8_under_every_locale(tmp_path: Path) -> None:
    write(tmp_path, "größe_1")
    code = """if True:
        import sys
        from pathlib import Path
        from types import ModuleType
        for name in ("ds_ext", "ds_ext.engine", "ds_ext.engine.checkpoint"):  # which would import torch
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = [str(Path(sys.argv[1], *name.split(".")))]
        from ds_ext.engine.checkpoint.folder import current_tag
        sys.exit(current_tag(Path(sys.argv[2])) != "gr\\xf6\\xdfe_1")
    """
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-X", "utf8=0", "-c", code, str(ROOT), str(tmp_path)]
    assert subprocess.run(words, env=os.environ | ascii_only, check=False).returncode == 0


def test_an_incomplete_checkpoint_is_not_published(tmp_path: Path) -> None:
    write(tmp_path, "step_1")
    written = start_writing(tmp_path, "step_2")
    with CheckedFile(written / "a") as file:
        file.write(b"weights")
    for files in ({"a": file.record, "b": file.record}, {"a": file.record | {"bytes": 8}}):
        with pytest.raises(CheckpointError, match=r"/[ab]: "):
            publish(written, "step_2", {"files": files})
    assert (
        complete_checkpoints(tmp_path) == ["step_1"] and open_checkpoint(tmp_path)[0] == tmp_path / "step_1"
    )


def test_only_files_of_killed_writers_are_removed(tmp_path: Path) -> None:
    write(tmp_path, "step_1")
    start_writing(tmp_path, "step_2")
    (tmp_path / ".latest.tmp-0123abcd").write_text("step_")
    (tmp_path / ".step_2.tmp-of-a-user").mkdir()
    (tmp_path / "step_1").rename(
        tmp_path / ".step_1.old-0123abcd"
    )  # the writer was killed between two renames
    checkpoint, manifest = open_checkpoint(tmp_path)
    check_contents(checkpoint, manifest)
    write(tmp_path, "step_3", make_current=False)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".step_2.tmp-of-a-user", "latest", "step_1", "step_3"]


def write_endlessly(folder: Path, finished: Connection) -> None:
    """Save checkpoints alternately under a new name and under the name of the current one; send their numbers."""
    for number in itertools.count():
        write(folder, f"step_{number // 2 % 5}", f"{number:06}" * 1000)
        finished.send(number)


def test_a_writer_killed_at_random_moments(tmp_path: Path) -> None:
    moments = random.Random(0)
    for _ in range(10):
        reader, sender = fork_server().Pipe(duplex=False)
        writer = fork_server().Process(target=write_endlessly, args=(tmp_path, sender))
        writer.start()
        sender.close()
        last = reader.recv()
        time.sleep(moments.random() * 0.02)
        writer.kill()
        writer.join()
        with contextlib.suppress(EOFError):
            while True:
                last = reader.recv()
        checkpoint, manifest = open_checkpoint(tmp_path)
        check_contents(checkpoint, manifest)
        # The next checkpoint may be finished although its number was not sent.
        assert int((checkpoint / "a").read_text()[:6]) in (last, last + 1)


def test_a_run_that_could_not_save_names_its_last_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = write(tmp_path / "saved", "step_2")
    args = argparse.Namespace(save=str(tmp_path / "saved"), load=None)
    trainer: Any = SimpleNamespace(args=args, not_saved=[4])
    assert Trainer.exit_code(trainer, 1.0) == EXIT_NOT_SAVED
    error = capsys.readouterr().err
    assert "step 4" in error and str(checkpoint) in error
    shutil.rmtree(checkpoint.parent)
    assert Trainer.exit_code(trainer, 1.0) == EXIT_NOT_SAVED
    assert str(tmp_path) not in capsys.readouterr().err


def test_a_folder_with_only_a_lock_starts_a_new_run(tmp_path: Path) -> None:
    args = argparse.Namespace(load=str(tmp_path), exit_on_missing_checkpoint=False, dry_run=False, notes=[])
    (tmp_path / LOCK).write_text("{}")
    _check_load(args)
    assert args.load is None and len(args.notes) == 1
    args.load = str(tmp_path)
    (tmp_path / "other").touch()
    with pytest.raises(ConfigError, match=r"^--load "):
        _check_load(args)


def test_a_dry_run_names_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, "step_2")
    args = argparse.Namespace(load=str(tmp_path), exit_on_missing_checkpoint=False, dry_run=True, notes=[])
    _check_load(args)
    assert args.load == str(tmp_path)
    assert [note.split() for note in args.notes] == [["load", str(checkpoint)]]
