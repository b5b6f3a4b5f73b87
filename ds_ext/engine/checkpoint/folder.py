"""The folder of a checkpoint: what is in it, whether that is whole, and how it becomes the current one. Pure.

    DIR/latest                     the name of the current checkpoint
    DIR/step_20/ds_ext.json        the manifest: every other file with its size and checksum; written last
    DIR/.step_30.tmp-3f9a01c2/     one that is being written, or whose writer was killed
    DIR/.step_20.old-77b0e4d1/     one that is being replaced by a new one of the same name

A checkpoint is written into a folder of a temporary name, which is renamed when everything in it is on the disk;
then ``latest`` is replaced. Killed at any moment, ``latest`` names a whole checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ...errors import CheckpointError, ConfigError

MANIFEST = "ds_ext.json"
LATEST = "latest"
_VERSION = 1
_SCRATCH = re.compile(r"\.(?P<tag>.+)\.(?P<kind>tmp|old)-[0-9a-f]{8}")
_BLOCK_BYTES = 1 << 24


class CheckedFile:
    """A new file that counts and checksums what is written to it, and is on the disk when it is closed.

        with CheckedFile(path) as file:
            file.write(data)
        file.record  # {"bytes": ..., "crc32": ...}, as the manifest keeps it

    Raises:
        OSError: of opening, writing or closing, with the name of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = {"bytes": 0, "crc32": 0}

    def __enter__(self) -> CheckedFile:
        self._file = self.path.open("wb")
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Write and count data. Raises OSError with the name of the file."""
        try:
            self._file.write(data)
        except OSError as error:
            raise _named(error, self.path) from None
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
                raise _named(failure, self.path) from None


# --- reading ---


def open_checkpoint(folder: Path, tag: str | None = None) -> tuple[Path, dict[str, Any]]:
    """The checkpoint ``tag`` of ``folder`` (by default the current one) and its manifest.

    Every file that the manifest lists is there in its full size; their contents are not read.

    Raises:
        ConfigError: there is no checkpoint, or none of that name.
        CheckpointError: the checkpoint is not whole; names the file at fault and the checkpoints that are good.
    """
    named = tag or current_tag(folder)
    checkpoint = _locate(folder, named)
    if checkpoint is None:
        source = (
            f"{folder} has no checkpoint {named!r}"
            if tag
            else f"{folder}: 'latest' names {named!r}, which is not there"
        )
        raise ConfigError(f"{source}. {_good_ones(folder)}")
    try:
        manifest = _read_manifest(checkpoint)
        _check_sizes(checkpoint, manifest)
    except CheckpointError as error:
        raise CheckpointError(f"{error} {_good_ones(folder, but=checkpoint.name)}") from None
    return checkpoint, manifest


def has_checkpoint(folder: Path) -> bool:
    """Return whether there is a current checkpoint, good or damaged."""
    return (folder / LATEST).is_file()


def current_tag(folder: Path) -> str:
    """Return the name in ``latest``. Raises ConfigError when there is no such file, or no name in it."""
    try:
        tag = (folder / LATEST).read_text(errors="replace").strip()
    except OSError:
        if (folder / MANIFEST).is_file():
            raise ConfigError(
                f"{folder} is one checkpoint, and a folder of checkpoints is needed: give {folder.parent}, and write "
                f"{folder.name!r} into {folder.parent / LATEST} if it is not the last."
            ) from None
        raise ConfigError(
            f"{folder}: there is no checkpoint (no file '{LATEST}' in it). Leave --load out to start from the "
            f"beginning."
        ) from None
    if not _is_name(tag):
        raise ConfigError(f"{folder / LATEST} names no checkpoint, but {tag!r}. {_good_ones(folder)}")
    return tag


def check_contents(checkpoint: Path, manifest: Mapping[str, Any], share: int = 0, shares: int = 1) -> None:
    """Read every ``shares``-th file, and compare its checksum with the manifest's.

    Raises:
        CheckpointError: names the damaged file and the checkpoints that are good.
    """
    for name in sorted(manifest["files"])[share::shares]:
        found = 0
        try:
            with (checkpoint / name).open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    found = zlib.crc32(block, found)
        except OSError as error:
            found, why = None, f"cannot be read ({error.strerror})"
        else:
            why = "is damaged: its checksum is not the one it was written with"
        if found != manifest["files"][name]["crc32"]:
            others = _good_ones(checkpoint.parent, but=checkpoint.name)
            raise CheckpointError(f"{checkpoint / name} {why}. {others}")


def good_checkpoints(folder: Path) -> list[str]:
    """The names of the checkpoints whose files are all there in full size, the newest last."""
    found = []
    for manifest in folder.glob(f"*/{MANIFEST}"):
        if _is_name(manifest.parent.name):
            try:
                _check_sizes(manifest.parent, _read_manifest(manifest.parent))
                found.append((manifest.stat().st_mtime_ns, manifest.parent.name))
            except (CheckpointError, OSError):
                continue
    return [name for _, name in sorted(found)]


def _good_ones(folder: Path, but: str = "") -> str:
    """Return the fix for a checkpoint that cannot be loaded."""
    good = [name for name in good_checkpoints(folder) if name != but]
    if not good:
        return "There is no other checkpoint here: leave --load out to start from the beginning."
    return f"Write the name of one that is whole into {folder / LATEST}: {', '.join(good)}."


def _locate(folder: Path, tag: str) -> Path | None:
    """The folder of a checkpoint. A kill may have left it under the name that it had while it was replaced."""
    replaced = [path for path in _scratch(folder, "old") if path.name.startswith(f".{tag}.old-")]
    return next((path for path in (folder / tag, *replaced) if path.is_dir()), None)


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        if not isinstance(manifest, dict) or manifest.get("version") != _VERSION:
            raise CheckpointError(
                f"{path} is none of a checkpoint that this version can load (it needs version {_VERSION})."
            )
        if manifest.pop("crc32", None) != _checksum(manifest):
            raise CheckpointError(f"{path} is damaged: its checksum is not the one it was written with.")
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: {checkpoint} was not written to its end, or not by ds_ext."
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: it cannot be read ({error}).") from None
    return manifest


def _check_sizes(checkpoint: Path, manifest: Mapping[str, Any]) -> None:
    for name, record in manifest["files"].items():
        try:
            size = (checkpoint / name).stat().st_size
        except OSError:
            raise CheckpointError(
                f"{checkpoint / name} is missing. (With several hosts, all must see one file system.)"
            ) from None
        if size != record["bytes"]:
            raise CheckpointError(
                f"{checkpoint / name} is damaged: it has {size} bytes, and was written with {record['bytes']}."
            )


# --- writing ---


def start_writing(folder: Path, tag: str) -> Path:
    """Make the folder to write the checkpoint ``tag`` into, and remove what killed writers have left.

    Raises:
        ConfigError: ``tag`` is no name of a folder.
        OSError: the folder cannot be made.
    """
    if not _is_name(tag):
        raise ConfigError(
            f"a checkpoint's tag is the name of a folder: without '/', not '{LATEST}', and with no dot at its start; "
            f"got {tag!r}."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path in _scratch(folder, "old"):
        match = _SCRATCH.fullmatch(path.name)
        assert match is not None
        if (folder / match["tag"]).exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(folder / match["tag"])  # killed before the new one was in its place
    for path in _scratch(folder, "tmp"):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    written = folder / _scratch_name(tag, "tmp")
    written.mkdir()
    return written


def publish(written: Path, tag: str, manifest: Mapping[str, Any], make_current: bool = True) -> Path:
    """Give the folder ``written`` its manifest and its name, and make it the current checkpoint.

    All files in it must be on the disk. Returns the checkpoint's folder.

    Raises:
        OSError: something cannot be written; what was current still is.
    """
    folder, checkpoint = written.parent, written.parent / tag
    whole = {"version": _VERSION, **manifest}
    with CheckedFile(written / MANIFEST) as file:
        file.write(json.dumps({"crc32": _checksum(whole), **whole}).encode())
    _sync(written)
    replaced = folder / _scratch_name(tag, "old") if checkpoint.exists() else None
    if replaced is not None:
        checkpoint.rename(replaced)
    written.rename(checkpoint)
    _sync(folder)
    if make_current:
        name = folder / _scratch_name(LATEST, "tmp")
        with CheckedFile(name) as file:
            file.write(tag.encode())
        name.replace(folder / LATEST)
        _sync(folder)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)
    return checkpoint


def _scratch(folder: Path, kind: str) -> Iterator[Path]:
    """Our own temporary files and folders in ``folder``."""
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _SCRATCH.fullmatch(path.name)
        if match is not None and match["kind"] == kind:
            yield path


def _scratch_name(tag: str, kind: str) -> str:
    return f".{tag}.{kind}-{secrets.token_hex(4)}"


def _is_name(tag: str) -> bool:
    return bool(tag) and tag == Path(tag).name and not tag.startswith(".") and tag != LATEST


def _sync(folder: Path) -> None:
    """Renames in a folder are on the disk when the folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _named(error: OSError, path: Path) -> OSError:
    return OSError(error.errno, error.strerror, str(path))
