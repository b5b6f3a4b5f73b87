"""Identity of a run: which checkpoints it has written and loaded, also before the launcher restarted its ranks.

A run is one start of the launcher, with all its restarts of the ranks. torchrun has a folder on each host for as long
as it runs (``--log-dir``, else a temporary one). The first line of a file in it is for the next start of the ranks:

    ds_ext_run.json      {"id": id of the run, "step": its last complete step, "loaded": checksums of loaded manifests}
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import secrets
from collections.abc import Collection
from pathlib import Path

import torch.distributed as dist

from ...environment import error_file, local_rank
from ...errors import ConfigError
from ..all_ranks import on_all_ranks
from ..types import Json, Record
from .folder import LATEST, complete_checkpoints, current_tag, has_checkpoint, open_checkpoint, read_manifest
from .lock import FolderLock

logger = logging.getLogger(__name__)


class Run:
    """Identity of this run. All ranks must build it together; see :func:`this_run`.

    Attributes:
        id: the same on all ranks, and after restarts.
        continues: an earlier start of the ranks had begun to train.
        reached: last step that an earlier start is known to have completed.
    """

    def __init__(self) -> None:
        self._began = False
        self._locks: dict[Path, FolderLock] = {}
        self._memory = _open_memory()
        answers = on_all_ranks(lambda: (_read(self._memory), secrets.token_hex(6)))
        memories = [memory for memory, _ in answers if memory is not None]
        self.continues = bool(memories)
        self.id: str = memories[0]["id"] if memories else answers[0][1]
        self.reached: int = max((memory["step"] for memory in memories), default=0)
        self._loaded: set[int] = {crc32 for memory in memories for crc32 in memory["loaded"]}

    def begin(self, step: int) -> None:
        """Store what the next start of the ranks needs. To be called before a step and before a save.

        ``step`` is the last complete one. The first call reports steps of an earlier start that are lost.
        """
        if not self._began and step < self.reached and dist.get_rank() == 0:
            logger.warning(
                "restart of the ranks: steps %d to %d are lost, and run again", step + 1, self.reached
            )
        self._began = True
        if self._memory is None:
            return
        memory = {"id": self.id, "step": step, "loaded": sorted(self._loaded)}
        try:
            os.pwrite(self._memory, f"{json.dumps(memory)}\n".encode(), 0)
        except OSError as error:
            self._memory = None
            logger.warning(
                "the folder of torchrun's logs cannot be written (got %s). After a restart, the ranks cannot recognize "
                "checkpoints of other runs.",
                error.strerror,
            )

    def lock(self, folder: Path, tags: Collection[str] | None = None) -> None:
        """Take the lock of a folder until the end of this process. Only one rank calls this.

        The first call for a folder names the checkpoints of other runs that this run may replace: those newer than its
        own ones, and with ``tags`` only those of these names.
        """
        if folder in self._locks:
            return self._locks[folder].take()
        lock = FolderLock(folder, self.id)
        lock.take()
        self._locks[folder] = lock
        newest_first = complete_checkpoints(folder)[::-1]
        newer = itertools.takewhile(lambda name: not self._owns(folder, name), newest_first)
        replaced = [name for name in newer if tags is None or name in tags][::-1]
        if replaced:
            logger.warning(
                "%s: contains checkpoints of another run, which a save of the same name replaces: %s",
                *(folder, ", ".join(replaced)),
            )

    def record_load(self, manifest: Json) -> None:
        self._loaded.add(manifest["crc32"])

    def choose(self, folder: Path, tag: str | None) -> str | None:
        """Return the name of the checkpoint to load; None without a tag and a checkpoint.

        Without a tag it is the current checkpoint; a warning names it if ``latest`` is missing. After a restart of the
        ranks, this or else the newest one must have been written or loaded by this run.
        """
        if tag is not None or not self.continues:
            name = open_checkpoint(folder, tag)[0].name if tag or has_checkpoint(folder) else None
            if name is not None and tag is None and not (folder / LATEST).exists():
                logger.warning(
                    "%s: missing, or a broken link, so the newest complete checkpoint is loaded: %s",
                    *(folder / LATEST, name),
                )
            return name
        candidates = [name for name in complete_checkpoints(folder) if self._owns(folder, name)]
        with contextlib.suppress(ConfigError):
            current = current_tag(folder)
            if current in candidates:
                return current
        return candidates[-1] if candidates else None

    def saved_step(self, folder: Path) -> int:
        """Return the step of the checkpoint that :meth:`choose` returns without a tag.

        It is 0 without one, and if the manifest has no step, as that of a converted model.
        """
        name = self.choose(folder, None)
        return 0 if name is None else read_manifest(folder / name)["job"].get("step", 0)

    def _owns(self, folder: Path, name: str) -> bool:
        manifest = read_manifest(folder / name)
        return manifest["job"].get("run") == self.id or manifest["crc32"] in self._loaded


@functools.cache
def this_run() -> Run:
    """Return the run of this process, for all its engines. All ranks must call this together."""
    return Run()


def _open_memory() -> int | None:
    """Return a descriptor of the file in torchrun's folder on one rank of a host, and None on the others."""
    # FOLDER/attempt_0/0/error.json
    path = error_file()
    if path is None or local_rank() != 0 or not path.parent.parent.name.startswith("attempt_"):
        return None
    return os.open(path.parents[2] / "ds_ext_run.json", os.O_RDWR | os.O_CREAT, 0o600)


def _read(file: int | None) -> Record | None:
    """Return what the last start of the ranks has stored; None if it had not begun."""
    text = b"" if file is None else os.pread(file, 1 << 20, 0)
    with contextlib.suppress(ValueError):
        return json.loads(text.partition(b"\n")[0])
    return None
