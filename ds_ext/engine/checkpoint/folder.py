"""Checkpoint folders: atomic writes and completeness checks. Needs no torch.

    DIR/latest                     name of the current checkpoint
    DIR/step_20/ds_ext.json        manifest: size and checksum of every other file; written last
    DIR/.step_30.tmp-3f9a01c2/     checkpoint that is being written, or whose writer was killed
    DIR/.step_20.old-77b0e4d1/     checkpoint that is being replaced by a new one with the same name
    DIR/.ds_ext.lock               lock of the job that writes here (lock.py)

A checkpoint is written to a folder with a temporary name. The folder is renamed when all files are on disk, and then
``latest`` is replaced. ``latest`` names a complete checkpoint even if the writer is killed. Without the file ``latest``
the newest complete checkpoint is the current one. The caller of :func:`start_writing` and :func:`publish` has the lock.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from ...errors import CheckpointError, ConfigError, DsExtError
from ..types import Json, Record
from ..wrappers import plain_manifest

MANIFEST = "ds_ext.json"
LATEST = "latest"
_VERSION = 1
_SCRATCH = re.compile(r"\.(?P<tag>.+)\.(?P<kind>tmp|old)-[0-9a-f]{8}")
_BLOCK_BYTES = 1 << 24
_WRONG_CHECKSUM = "damaged file: the checksum does not match the written data"


class CheckedFile:
    """New file that records its size and checksum, and is synchronized to disk when it is closed.

    with CheckedFile(path) as file:
        file.write(data)
    file.record  # {"bytes": ..., "crc32": ...}, for the manifest
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = {"bytes": 0, "crc32": 0}

    def __enter__(self) -> CheckedFile:
        self._file = self.path.open("wb")
        return self

    def write(self, data: bytes | memoryview) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise _with_path(error, self.path) from None
        self.record["bytes"] += len(data)
        self.record["crc32"] = zlib.crc32(data, self.record["crc32"])

    def __exit__(
        self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()
        except OSError as failure:
            if kind is None:
                raise _with_path(failure, self.path) from None


# --- reading ---


def open_checkpoint(folder: Path, tag: str | None = None) -> tuple[Path, Record]:
    """Return the folder and the manifest of the checkpoint ``tag``, or of the current one without ``tag``.

    Checks that every file exists and has the recorded size, without reading the contents.
    """
    name = tag or current_tag(folder)
    checkpoint = _locate(folder, name)
    if checkpoint is None:
        origin = "" if tag else f" in {LATEST!r}"
        raise ConfigError(f"{folder}: no such checkpoint (got {name!r}{origin}). {_alternatives(folder)}")
    try:
        manifest = read_manifest(checkpoint)
        _check_sizes(checkpoint, manifest)
    except CheckpointError as error:
        raise CheckpointError(f"{error} {_alternatives(folder, excluded=checkpoint.name)}") from None
    return checkpoint, plain_manifest(manifest)


def has_checkpoint(folder: Path) -> bool:
    """Return whether the folder has a current checkpoint, even a damaged one."""
    return os.path.lexists(folder / LATEST) or bool(complete_checkpoints(folder))


def current_tag(folder: Path) -> str:
    """Return the name in ``latest``, of the folder that it links to, or else of the newest complete checkpoint."""
    latest = folder / LATEST
    if latest.is_dir():
        return _linked_tag(latest)
    if not latest.exists():  # also False for a link that leads to itself
        return _newest_tag(folder)
    try:
        tag = latest.read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{latest}: cannot be read (got {error}). {_alternatives(folder)}") from None
    if not _is_name(tag):
        raise ConfigError(
            f"{latest}: must contain the name of a checkpoint (got {tag!r}). {_alternatives(folder)}"
        )
    return tag


def _linked_tag(latest: Path) -> str:
    """Return the name of the checkpoint to which ``latest`` links, which must be in the same folder."""
    target = latest.resolve()
    if target.parent == latest.parent.resolve() and latest.is_symlink():
        return target.name
    got = f"a link to {target}" if latest.is_symlink() else "a folder"
    alternative = f", or load {target.name!r} of {target.parent}" if (target / MANIFEST).is_file() else ""
    raise ConfigError(
        f"{latest}: must be a file with the name of a checkpoint, or a link to one in the same folder (got {got}). "
        f"Remove it to load the newest complete checkpoint of the folder{alternative}."
    )


def _newest_tag(folder: Path) -> str:
    complete = complete_checkpoints(folder)
    if complete:
        return complete[-1]
    if (folder / MANIFEST).is_file():
        raise ConfigError(
            f"{folder}: is a single checkpoint, not a folder of checkpoints. Use {folder.parent}, and write "
            f"{folder.name!r} to {folder.parent / LATEST} unless it is the newest one."
        )
    raise ConfigError(
        f"{folder}: no checkpoint (the file {LATEST!r} is missing, or a broken link). Omit --load to start a new run."
    )


def check_contents(checkpoint: Path, manifest: Json, share: int = 0, shares: int = 1) -> None:
    """Compare checksums with the manifest, of every ``shares``-th file from ``share``: ranks divide the files."""
    for name in sorted(manifest["files"])[share::shares]:
        checksum, problem = 0, _WRONG_CHECKSUM
        try:
            with (checkpoint / name).open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    checksum = zlib.crc32(block, checksum)
        except OSError as error:
            checksum, problem = None, f"cannot be read ({error.strerror})"
        if checksum != manifest["files"][name]["crc32"]:
            others = _alternatives(checkpoint.parent, excluded=checkpoint.name)
            raise CheckpointError(f"{checkpoint / name}: {problem}. {others}")


def complete_checkpoints(folder: Path) -> list[str]:
    """Return the names of the complete checkpoints, whose files all have the recorded sizes, with the newest last.

    The order is the time in the manifest, because copied folders have other file times.
    """
    complete = []
    for path in folder.glob(f"*/{MANIFEST}"):
        if _is_name(path.parent.name):
            try:
                manifest = read_manifest(path.parent)
                _check_sizes(path.parent, manifest)
                at = manifest["job"].get("at") or path.stat().st_mtime
                complete.append((at, path.parent.name))
            except (CheckpointError, OSError):
                continue
    return [name for _, name in sorted(complete)]


def _alternatives(folder: Path, excluded: str = "") -> str:
    complete = [name for name in complete_checkpoints(folder) if name != excluded]
    if not complete:
        return "There is no other checkpoint. Omit --load to start a new run."
    return f"Write the name of a complete checkpoint to {folder / LATEST}: {', '.join(complete)}."


def _locate(folder: Path, tag: str) -> Path | None:
    """Return the folder of a checkpoint. After a kill it may still have its temporary name."""
    replaced = [path for path, replaced_tag in _scratch(folder, "old") if replaced_tag == tag]
    return next((path for path in (folder / tag, *replaced) if path.is_dir()), None)


def read_manifest(checkpoint: Path) -> Record:
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        if not isinstance(manifest, dict) or manifest.get("version") != _VERSION:
            raise CheckpointError(
                f"{path}: this version of ds_ext loads only checkpoints of version {_VERSION}."
            )
        if manifest.get("crc32") != _checksum(manifest):
            raise CheckpointError(f"{path}: {_WRONG_CHECKSUM}.")
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: missing, because the checkpoint is incomplete or was not written by ds_ext."
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}).") from None
    return manifest


def _check_sizes(checkpoint: Path, manifest: Json) -> None:
    for name, record in manifest["files"].items():
        try:
            size = (checkpoint / name).stat().st_size
        except OSError:
            raise CheckpointError(
                f"{checkpoint / name}: missing. All hosts must share one file system."
            ) from None
        if size != record["bytes"]:
            raise CheckpointError(
                f"{checkpoint / name}: damaged file: {record['bytes']} bytes were written (got {size})."
            )


# --- writing ---


def start_writing(folder: Path, tag: str) -> Path:
    """Create the folder for writing the checkpoint ``tag``, and clean up after killed writers."""
    require_tag(folder, tag)
    if (folder / LATEST).is_dir() and not (folder / LATEST).is_symlink():
        raise ConfigError(f"{folder / LATEST}: must be a file (got a folder). Rename it.")
    folder.mkdir(parents=True, exist_ok=True)
    for path, replaced_tag in _scratch(folder, "old"):
        if (folder / replaced_tag).exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(folder / replaced_tag)  # the writer was killed between two renames
    for path, _ in _scratch(folder, "tmp"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    written = folder / _scratch_name(tag, "tmp")
    written.mkdir()
    return written


def require_tag(folder: Path, tag: str) -> None:
    """Raise ConfigError unless ``tag`` can be the name of a checkpoint in a folder.

    It must not be that of a file, a link, or a folder of another program, which a save would replace.
    """
    if not _is_name(tag):
        raise ConfigError(
            f"tag: must be a folder name, without '/', control characters, a leading dot or spaces at its ends, and "
            f"not {LATEST!r} (got {tag!r}). Use, for example, step_10."
        )
    path = folder / tag
    if os.path.lexists(path) and (path.is_symlink() or not (path / MANIFEST).is_file()):
        kind = "link" if path.is_symlink() else "folder" if path.is_dir() else "file"
        raise ConfigError(
            f"{path}: a save would replace it, and it is no checkpoint of ds_ext (got a {kind} without {MANIFEST}). "
            f"Move it away, or use another folder or tag."
        )


def require_keep(keep: int) -> None:
    if not isinstance(keep, int) or keep < 0:
        raise ConfigError(
            f"keep: must be a number of checkpoints, or 0 for all (got {keep!r}). Use, for example, 3."
        )


def publish(written: Path, tag: str, manifest: Json, make_current: bool = True) -> Path:
    """Write the manifest, rename the folder ``written``, and make it the current checkpoint.

    All its files must be on disk. Returns the folder of the checkpoint.
    """
    folder, checkpoint = written.parent, written.parent / tag
    content = {"version": _VERSION, **manifest}
    _check_sizes(written, manifest)
    with CheckedFile(written / MANIFEST) as file:
        file.write(json.dumps({"crc32": _checksum(content), **content}).encode())
    _sync(written)
    name = folder / _scratch_name(LATEST, "tmp")  # before the renames: the disk may be full
    if make_current:
        with CheckedFile(name) as file:
            file.write(tag.encode())
    replaced = folder / _scratch_name(tag, "old") if checkpoint.exists() else None
    if replaced is not None:
        checkpoint.rename(replaced)
    written.rename(checkpoint)
    _sync(folder)
    if make_current:
        name.replace(folder / LATEST)
        _sync(folder)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)
    return checkpoint


def remove_older(folder: Path, keep: int) -> str:
    """Remove the complete checkpoints of training runs except the newest ``keep`` and the current one; 0: none.

    Links in the folder do not count, and checkpoints that they lead to stay. Returns why some could not be removed;
    empty if all were.
    """
    if keep == 0:
        return ""
    problems: list[str] = []
    try:
        retained = {path.resolve() for path in folder.iterdir() if path.is_symlink()}
        retained.add((folder / current_tag(folder)).resolve())
        trained = [
            path
            for name in complete_checkpoints(folder)
            if not (path := folder / name).is_symlink() and "run" in read_manifest(path)["job"]
        ]
        for path in trained[:-keep]:
            if path.resolve() not in retained:
                problems += _remove(path)
    except (OSError, DsExtError) as error:
        problems.append(str(error))
    return "; ".join(problems)


def _remove(checkpoint: Path) -> list[str]:
    """Rename a checkpoint, so that none is incomplete, and remove it. Returns the error, if there is one."""
    scratch = checkpoint.with_name(_scratch_name(checkpoint.name, "tmp"))
    try:
        checkpoint.rename(scratch)
        shutil.rmtree(scratch)
    except OSError as error:
        return [str(error)]
    return []


def _scratch(folder: Path, kind: str) -> Iterator[tuple[Path, str]]:
    """Yield path and tag of the temporary files and folders of this module, if ``folder`` exists."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        match = _SCRATCH.fullmatch(path.name)
        if match is not None and match["kind"] == kind:
            yield path, match["tag"]


def _scratch_name(tag: str, kind: str) -> str:
    return f".{tag}.{kind}-{secrets.token_hex(4)}"


def _is_name(tag: str) -> bool:
    is_folder = bool(tag) and tag == Path(tag).name.strip() and not tag.startswith(".")
    return is_folder and tag.isprintable() and tag != LATEST  # surrogates are not printable either


def _sync(folder: Path) -> None:
    """fsync a folder, so that the renames in it are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(manifest: Json) -> int:
    content = {key: value for key, value in manifest.items() if key != "crc32"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _with_path(error: OSError, path: Path) -> OSError:
    return OSError(error.errno, error.strerror, str(path))
