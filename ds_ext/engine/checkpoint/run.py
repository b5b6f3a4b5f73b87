"""Identity of a run: which checkpoints it has written and loaded, also before the launcher restarted its ranks.

A run is one start of the launcher, with all its restarts of the ranks. torchrun has a folder on each host for as long
as it runs (``--log-dir``, else a temporary one). A file in it keeps what the next start of the ranks must know:

    ds_ext_run.json      {"id": id of the run, "process": its writer, "loaded": checksums of the loaded manifests}

A new host gets this from the others. The file is written before the first step, and before anything is saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..together import together
from .folder import current_tag, good_checkpoints, has_checkpoint, open_checkpoint, read_manifest
from .lock import FolderLock, process_key

logger = logging.getLogger(__name__)

_MEMORY = "ds_ext_run.json"


class Run:
    """Identity of this run. All ranks must build it together.

    Attributes:
        id: the same on all ranks, for all engines of the run, and after restarts.
        continues: an earlier start of the ranks had begun to train.
    """

    def __init__(self) -> None:
        self._loaded: set[int] = set()
        self._written: dict[str, Any] | None = None
        self._locks: dict[Path, FolderLock] = {}
        weakref.finalize(self, _release, self._locks)
        memory = _read(_memory_file())
        found = together(
            lambda: (memory, memory["process"] == process_key() if memory else True, process_key())
        )
        memories = [memory for memory, _, _ in found if memory is not None]
        first = json.dumps(found[0][2], sort_keys=True).encode()
        self.id: str = memories[0]["id"] if memories else hashlib.sha256(first).hexdigest()[:12]
        self.continues = any(not own for _, own, _ in found)
        if self.continues:
            self._loaded = {crc32 for memory in memories for crc32 in memory["loaded"]}

    def begin(self) -> None:
        """Store the identity for the next start of the ranks. To be called before a step and before a save."""
        memory = {"id": self.id, "process": process_key(), "loaded": sorted(self._loaded)}
        path = _memory_file()
        if path is None or os.environ.get("LOCAL_RANK") != "0" or memory == self._written:
            return
        self._written = memory
        others = set((_read(path) or {}).get("loaded", ()))  # of another engine of this process
        new = path.with_name(f"{_MEMORY}.{secrets.token_hex(4)}")
        try:
            new.write_text(json.dumps({**memory, "loaded": sorted(self._loaded | others)}))
            new.replace(path)
        except OSError as error:
            logger.warning(
                "%s: cannot be written (got %s). After a restart without snapshots, the ranks will load no checkpoint.",
                *(path, error.strerror),
            )

    def lock(self, folder: Path) -> None:
        """Take the lock of a folder until the end of this process. Only one rank calls this.

        Raises the errors of :meth:`.lock.FolderLock.take`.
        """
        if folder not in self._locks:
            self._locks[folder] = FolderLock(folder, self.id)
        self._locks[folder].take()

    def unlock(self, folder: Path) -> None:
        """Give the lock of a folder back."""
        if folder in self._locks:
            self._locks.pop(folder).release()

    def loads(self, manifest: Mapping[str, Any]) -> None:
        """Record that this run has loaded a checkpoint."""
        self._loaded.add(manifest["crc32"])

    def owns(self, manifest: Mapping[str, Any]) -> bool:
        """Return whether this run has written or loaded a checkpoint."""
        return manifest["job"].get("run") == self.id or manifest["crc32"] in self._loaded

    def foreign(self, folder: Path) -> list[str]:
        """Return the complete checkpoints in a folder that this run has neither written nor loaded."""
        return [name for name in good_checkpoints(folder) if not self.owns(read_manifest(folder / name))]

    def last(self, folder: Path) -> str | None:
        """Return the current checkpoint, or else the newest, that this run has written or loaded; None without any."""
        own = [name for name in good_checkpoints(folder) if self.owns(read_manifest(folder / name))]
        with contextlib.suppress(ConfigError):
            own += [name for name in own if name == current_tag(folder)]
        return own[-1] if own else None

    def choose(self, folder: Path, tag: str | None) -> str | None:
        """Return the name of the checkpoint to load; None if ``tag`` is None and there is none for this run.

        Raises the errors of :func:`.folder.open_checkpoint`.
        """
        if tag is not None:
            return open_checkpoint(folder, tag)[0].name
        chosen = None
        if self.continues:
            chosen = self.last(folder)
        elif has_checkpoint(folder):
            chosen = open_checkpoint(folder)[0].name
        if chosen is None and self.continues:
            logger.warning(
                "%s: no checkpoint that this run wrote or loaded before the restart of its ranks (got %s). The steps "
                "before the restart are lost.",
                *(folder, ", ".join(good_checkpoints(folder)) or "none"),
            )
        elif chosen is None:
            logger.warning("%s: no checkpoint", folder)
        return chosen


def _memory_file() -> Path | None:
    """Return the file in torchrun's folder; None for another launcher."""
    # FOLDER/attempt_0/0/error.json
    path = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    return path.parents[2] / _MEMORY if path.parent.parent.name.startswith("attempt_") else None


def _read(path: Path | None) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text()) if path is not None else None
    return None


def _release(locks: dict[Path, FolderLock]) -> None:
    for lock in locks.values():
        lock.release()
