"""Events of a run's checkpoints, for its record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from ..recovery.recovery import Recovered
from ..types import Record
from .background import BackgroundSave


class CheckpointEvents:
    """Checkpoints saved, loaded and recovered by this run.

    Attributes:
        all: events so far: ``event`` ("saved", "failed", "loaded" or "recovered"), ``path``, ``step``, ``seconds``
            taken, and ``at``, its end in seconds since 1970. "recovered" has the other attributes of
            :class:`..recovery.recovery.Recovered` too.
        on_event: function called on this rank after each new event; None: none.
    """

    def __init__(self) -> None:
        self.all: list[Record] = []
        self.on_event: Callable[[], None] | None = None

    @contextmanager
    def saving(self, path: Path, step: int, goes_on: Callable[[], bool]) -> Iterator[None]:
        """Context of a save. It adds "failed" if an exception leaves it, else "saved" unless the save ``goes_on``."""
        begin, event = time.perf_counter(), "failed"
        try:
            yield
            event = "saved"
        finally:
            if event == "failed" or not goes_on():
                self._add(event, path, step, time.perf_counter() - begin)

    @contextmanager
    def finishing(self, save: BackgroundSave) -> Iterator[None]:
        """Context that waits for a save in the background. It adds "saved", or "failed" if an exception leaves it."""
        event = "failed"
        try:
            yield
            event = "saved"
        finally:
            self._add(event, save.path, save.step, save.seconds)

    def loaded(self, path: Path, step: int, begin: float) -> None:
        """Add "loaded". ``begin`` is a reading of :func:`time.perf_counter`."""
        self._add("loaded", path, step, time.perf_counter() - begin)

    def recovered(self, recovered: Recovered) -> None:
        facts = asdict(recovered)
        self._append(
            {
                "event": "recovered",
                "path": "host memory",
                "seconds": facts.pop("load_s"),
                "at": time.time(),
                **facts,
            }
        )

    def _add(self, event: str, path: Path, step: int, seconds: float) -> None:
        place = str(path.absolute())
        self._append({"event": event, "path": place, "step": step, "seconds": seconds, "at": time.time()})

    def _append(self, event: Record) -> None:
        self.all.append(event)
        if self.on_event is not None:
            self.on_event()
