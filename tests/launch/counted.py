"""Runs train_gpt.py and writes how often each rank worked out a training timetable, step by step of the way."""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[2]
WATCHED = {
    ("ds_ext/pipe_schedules/definition.py", "timetable"): "generated",
    ("ds_ext/pipe_schedules/lowering.py", "lower"): "lowered",
    ("ds_ext/pipe_schedules/checks/program.py", "check"): "checked",
    ("ds_ext/pipe_schedules/simulation.py", "simulate"): "simulated",
}
counts: Counter[str] = Counter()


def count(frame: FrameType, event: str, _: object) -> None:
    """Count the calls of the watched functions; evaluation timetables do not train and do not count."""
    if event != "call":
        return
    file = frame.f_code.co_filename
    if "ds_ext/pipe_schedules/" not in file:
        return
    what = WATCHED.get((file[file.rindex("ds_ext/") :], frame.f_code.co_name))
    if what is None:
        return
    given = frame.f_locals.get("timetable", getattr(frame.f_locals.get("program"), "timetable", None))
    counts[what] += given is None or given.trains


def write() -> None:
    """Write this rank's counts into the folder of the job."""
    Path(f"counts.{os.environ['RANK']}.json").write_text(json.dumps(counts))


if __name__ == "__main__":
    atexit.register(write)
    sys.argv = [str(ROOT / "train_gpt.py"), *sys.argv[1:]]
    sys.setprofile(count)
    runpy.run_path(sys.argv[0], run_name="__main__")
