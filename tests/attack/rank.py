"""Rank of an attacked job: ``rank.py SCRIPT [FLAG ...]`` runs the script, and waits at the points of its attack.

The environment variable ATTACK_FOLDER names a folder. Its file ``points.json`` lists the points as (number, start,
rank, point, step). At point 3, this rank creates the file ``3.reached`` there, and continues when ``3.passed`` exists.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

HELD_S = 240.0  # if the attacker is gone
FOLDER = Path(os.environ["ATTACK_FOLDER"])
RANK, START = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
INSTRUCTIONS = {
    "ForwardPass": "forward",
    "BackwardPass": "backward",
    "ReduceGrads": "reduce",
    "OptimizerStep": "optimizer",
}


class Points:
    """Points of this rank in this start that are still to come."""

    def __init__(self) -> None:
        self.step = 0  # the current one, or the last one between two steps
        listed = json.loads((FOLDER / "points.json").read_text())
        self._points = [
            (number, point, step)
            for number, start, rank, point, step in listed
            if (start, rank) == (START, RANK)
        ]

    def hold(self, name: str) -> None:
        """Wait if this is one of the points."""
        for number, point, step in self._points:
            if point == name and step in (0, self.step):
                self._points.remove((number, point, step))
                (FOLDER / f"{number}.reached").touch()
                deadline = time.monotonic() + HELD_S
                while not (FOLDER / f"{number}.passed").exists() and time.monotonic() < deadline:
                    time.sleep(0.005)
                return

    def around(self, owner: Any, name: str, before: str = "", after: str = "") -> None:
        """Have a function hold before or after it."""
        function = getattr(owner, name)

        def held(*args: Any, **options: Any) -> Any:
            self.hold(before)
            result = function(*args, **options)
            self.hold(after)
            return result

        setattr(owner, name, held)


def place(points: Points) -> None:
    """Have ds_ext's functions hold at the points."""
    from ds_ext.engine import PipelineEngine
    from ds_ext.engine.checkpoint import folder, save
    from ds_ext.engine.executor import Executor, Observer
    from ds_ext.engine.rank_state import RankState
    from ds_ext.engine.recovery import recovery, slots

    train, run, sync = PipelineEngine.train_batch, Executor.run, folder._sync
    crc32, synced = slots.zlib.crc32, [0]

    def train_batch(engine: Any, *args: Any) -> Any:
        points.step = engine.global_steps + 1
        return train(engine, *args)

    class Hold(Observer):
        def before(self, instruction: Any) -> None:
            points.hold(INSTRUCTIONS.get(type(instruction).__name__, ""))

    hold = Hold()

    def hold_and_run(executor: Executor, *args: Any) -> None:
        if hold not in executor.observers:
            executor.observers.append(hold)
        run(executor, *args)

    def hold_in_snapshot(data: Any) -> int:
        points.hold("snapshot")
        return crc32(data)

    def sync_and_hold(path: Path) -> None:
        sync(path)
        points.hold(("manifest", "renamed", "current")[synced[0] % 3])
        synced[0] += 1

    PipelineEngine.train_batch = train_batch  # type: ignore[method-assign]
    Executor.run = hold_and_run  # type: ignore[method-assign]
    slots.zlib = type("zlib", (), {"crc32": staticmethod(hold_in_snapshot)})  # type: ignore[assignment]
    folder._sync = sync_and_hold
    points.around(PipelineEngine, "recover", before="recover", after="recovered")
    points.around(PipelineEngine, "eval_batch", before="evaluate")
    points.around(PipelineEngine, "save_checkpoint", before="save", after="saved")
    points.around(PipelineEngine, "load_checkpoint", before="read")
    points.around(folder.CheckedFile, "__exit__", before="file")
    points.around(save, "publish", before="publish")
    points.around(recovery.Recovery, "snapshot", after="snapshot taken")
    points.around(recovery.Recovery, "complete", before="complete")
    points.around(RankState, "load", before="load")
    atexit.register(points.hold, "end")


if __name__ == "__main__":
    here = Points()
    here.hold("import")
    place(here)
    sys.argv = sorted(
        sys.argv[1:], key=lambda word: word.startswith("--local_rank")
    )  # deepspeed's first word last
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
