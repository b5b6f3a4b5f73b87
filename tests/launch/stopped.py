"""Run a training script, and send a rank a signal at a chosen moment.

stopped.py MOMENT SIGNAL RANK STEP SCRIPT FLAGS...: in the forwards and backwards of the STEP-th "step", in the STEP-th
"evaluation", or in the STEP-th "save" of this rank. "dataloader" is a step in which the rank also has a worker process.
"start" is the moment before the ranks join.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import ds_ext.engine
from ds_ext.engine.engine import PipelineEngine
from ds_ext.environment import rank


def main() -> None:
    moment, name, chosen, step = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    sys.argv = sys.argv[5:]
    count, sent = 0, list[int]()

    def signalling(method: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            # An evaluation also has its requests as an argument.
            count += len(args) == 2 or attribute != "_exec_schedule"
            if rank() == chosen and count == step and not sent:
                sent.append(step)
                worker = None
                if moment == "dataloader":
                    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
                    worker.start()
                    # From another process than its parent, as by a launcher.
                    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
                os.kill(os.getpid(), signal.Signals[name])
                result = method(*args, **kwargs)
                if worker is not None:
                    assert worker.exitcode is None, worker.exitcode
                    worker.terminate()
                    worker.join(30)
                    assert worker.exitcode == -signal.SIGTERM, worker.exitcode
                return result
            return method(*args, **kwargs)

        return replacement

    attributes = {"evaluation": "eval_batch", "save": "save_checkpoint", "start": "check_precision"}
    attribute = attributes.get(moment, "_exec_schedule")
    owner: Any = ds_ext.engine if moment == "start" else PipelineEngine
    setattr(owner, attribute, signalling(getattr(owner, attribute)))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
