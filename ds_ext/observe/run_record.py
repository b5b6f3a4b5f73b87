"""Record of a run, written beside its metrics file: what ran, where, and which checkpoints it saved and loaded.

``metrics.jsonl`` has the record ``metrics.run.json``: ``{"version": 1, "starts": [...]}``, with one object for every
start of the job (docs/reference.md, "Run record"). ``python -m ds_ext report`` reads it. Imports no torch.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..environment import started_s

logger = logging.getLogger(__name__)

VERSION = 1
SUFFIX = ".run.json"
_GIT_S = 5.0
_GROWTH = 1.01  # of a rank's peak memory before the file is written again, unless it is the largest peak


def record_file(metrics_file: Path) -> Path:
    return metrics_file.with_name(metrics_file.name.removesuffix(".jsonl") + SUFFIX)


def read_starts(path: Path) -> list[dict[str, Any]]:
    """Return the starts in a record. Raises OSError, or ValueError for a file that is not a record."""
    record = json.loads(path.read_text("utf-8"))
    starts = record.get("starts") if isinstance(record, dict) and record.get("version") == VERSION else None
    if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
        raise ValueError(f"not a run record of version {VERSION}")
    return starts


class RunRecord:
    """Record of this start of the job. Each change replaces the file, so a kill leaves the old or the new one.

    A file that cannot be written does not stop the run: a warning reports the first failure.

    Args:
        metrics_file: metrics file of the job. If it is empty, an earlier record is replaced, else continued.
        facts: :attr:`ds_ext.engine.PipelineEngine.run_facts`.
        events: checkpoints saved and loaded so far and from now on; the list is read at each write.
    """

    def __init__(
        self, metrics_file: Path, facts: Mapping[str, Any], events: Sequence[Mapping[str, Any]]
    ) -> None:
        self._path = record_file(metrics_file)
        self._events = events
        self._failing = False
        self._start: dict[str, Any] = {
            "at": started_s(),
            "command": shlex.join(sys.argv),
            "commit": _commit(Path(sys.argv[0]).absolute().parent),
            "metrics_bytes": metrics_file.stat().st_size if metrics_file.exists() else 0,
            **facts,
            "peak_memory_bytes": [],
        }
        self._earlier = self._read_earlier() if self._start["metrics_bytes"] else []
        self.write()

    def note_memory(self, peaks: Sequence[int]) -> None:
        """Note the peak memory of every rank, in bytes. Write the file if the largest has grown, or one by 1%."""
        noted_peaks = self._start["peak_memory_bytes"]
        if (
            not noted_peaks
            or max(peaks) > max(noted_peaks)
            or any(peak > _GROWTH * noted for peak, noted in zip(peaks, noted_peaks, strict=True))
        ):
            self._start["peak_memory_bytes"] = list(peaks)
            self.write()

    def write(self) -> None:
        start = {**self._start, "checkpoints": [dict(event) for event in self._events]}
        text = json.dumps({"version": VERSION, "starts": [*self._earlier, start]}, default=str)
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            new.write_text(f"{text}\n", "utf-8")
            os.replace(new, self._path)
            self._failing = False
        except OSError as error:
            if not self._failing:
                logger.warning(
                    "%s: cannot be written (got %s). Training continues; `python -m ds_ext report` lacks this.",
                    *(self._path, error.strerror),
                )
            self._failing = True

    def _read_earlier(self) -> list[dict[str, Any]]:
        try:
            return read_starts(self._path)
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            logger.warning("%s: not readable (got %s). A new record replaces it.", self._path, error)
            return []


def _commit(folder: Path) -> str | None:
    """Return the git commit of a folder, with a "+" if tracked files have changed; None outside a repository."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True).stdout

    try:
        commit = git("rev-parse", "HEAD").strip()
        return commit + "+" * bool(git("status", "--porcelain", "--untracked-files=no").strip())
    except (OSError, subprocess.SubprocessError):
        return None
