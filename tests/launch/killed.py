"""Runs train_gpt.py, and kills ranks at given points of given attempts.

DS_EXT_TEST_KILLS is a JSON list with a [rank, step, point] for each attempt of the launcher. Points are names of
instructions, also with "after ", and "gather" (the gathers beside the next step have started), "snapshot" (of the
step, written but not committed), "recover" (before loading) and "save" (in a checkpoint after the step).
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def kill_at(rank: int, step: int, point: str) -> None:
    """Kill this process when it reaches the point, if it is this rank."""
    if int(os.environ["RANK"]) != rank:
        return
    from ds_ext.engine import PipelineEngine
    from ds_ext.engine.executor import Executor, Observer
    from ds_ext.engine.rank_state import RankState
    from ds_ext.engine.recovery import slots
    from ds_ext.engine.weights.gathers import WeightGathers

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    run, crc32, load, gather = Executor.run, slots.zlib.crc32, RankState.load, WeightGathers.start
    train, save = PipelineEngine.train_batch, PipelineEngine.save_checkpoint
    steps = [0]

    def train_batch(engine: Any, *args: Any) -> Any:
        steps[0] = engine.global_steps + 1
        return train(engine, *args)

    class Killer(Observer):
        def before(self, instruction: Any) -> None:
            if steps[0] == step and type(instruction).__name__ == point:
                die()

        def after(self, instruction: Any) -> None:
            if steps[0] == step and f"after {type(instruction).__name__}" == point:
                die()

    killer = Killer()

    def run_or_die(executor: Executor, *args: Any) -> None:
        if killer not in executor.observers:
            executor.observers.append(killer)
        run(executor, *args)

    def crc32_or_die(data: Any) -> int:
        if point == "snapshot" and steps[0] == step + 1:
            die()
        return crc32(data)

    def load_or_die(*args: Any) -> None:
        if point == "recover":
            die()
        load(*args)

    def gather_and_die(gathers: WeightGathers, *args: Any, **options: Any) -> None:
        gather(gathers, *args, **options)
        if point == "gather" and steps[0] == step:
            die()

    def save_or_die(engine: Any, *args: Any, **options: Any) -> Any:
        if point == "save" and engine.global_steps == step:
            die()
        return save(engine, *args, **options)

    WeightGathers.start = gather_and_die  # type: ignore[method-assign]
    PipelineEngine.save_checkpoint = save_or_die  # type: ignore[method-assign]
    PipelineEngine.train_batch = train_batch  # type: ignore[method-assign]
    Executor.run = run_or_die  # type: ignore[method-assign]
    slots.zlib = type("zlib", (), {"crc32": staticmethod(crc32_or_die)})  # type: ignore[assignment]
    RankState.load = load_or_die  # type: ignore[method-assign]


if __name__ == "__main__":
    kills = json.loads(os.environ["DS_EXT_TEST_KILLS"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt < len(kills):
        kill_at(*kills[attempt])
    sys.argv = [str(ROOT / "train_gpt.py"), *sys.argv[1:]]
    runpy.run_path(sys.argv[0], run_name="__main__")
