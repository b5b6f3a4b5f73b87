"""What one rank of tests/ranks.py runs: join the world, then serve calls until the test process is gone."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import random
import select
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from ds_ext.environment import process_state


@dataclass
class Failure:
    """What a rank reports instead of a result: the exception, if it can be pickled, and its traceback."""

    exception: BaseException | None
    text: str

    @property
    def summary(self) -> str:
        return self.text.strip().splitlines()[-1]


def rank_main(rank: int, world_size: int, port: int, pipe: Connection, log: str, parent_pid: int) -> None:
    """Serve calls as rank `rank`; output goes to the file `log`, SIGUSR1 adds every thread's stack to it."""
    from benchmarks.rank_server import end_with_server  # the import ties this process to its parent

    threading.Thread(target=_exit_with, args=(parent_pid,), daemon=True, name="parent watch").start()
    end_with_server()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (lives as long as the process)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    _answer(pipe, lambda: _join_world(rank, world_size, port))
    while True:
        try:
            path, call = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        sys.path[:] = path
        importlib.invalidate_caches()
        _answer(pipe, lambda call=call: _run(call, rank))


def _exit_with(parent_pid: int) -> None:
    """A rank may be in a collective that nobody will answer, so a thread ends it with the test process."""
    try:
        parent = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # Linux before 5.3
        while process_state(parent_pid)[0] not in ("", "Z", "X"):
            time.sleep(0.5)
        os._exit(1)
    select.select([parent], [], [])
    os._exit(1)


def _join_world(rank: int, world_size: int, port: int) -> None:
    os.environ.update(
        DS_ACCELERATOR="cpu",
        OMP_NUM_THREADS="1",
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is served by the test process, as it is by torchrun
    )
    import deepspeed
    import deepspeed.ops
    import torch

    torch.set_num_threads(1)
    # Otherwise DeepSpeed compiles this op when the world is made: 30 s, for a collective not used here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    gc.freeze()  # what is imported by now never becomes garbage: the collection after each call stays cheap


def _run(call: bytes, rank: int) -> Any:
    import numpy
    import torch

    fn, args = pickle.loads(call)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    try:
        return fn(rank, *args)
    finally:
        gc.collect()
        # DeepSpeed keeps engines alive, and with them the locks that end with the process of a real job.
        for lock in [one for one in gc.get_objects() if type(one).__name__ == "FolderLock"]:
            lock.release()
        if run := sys.modules.get("ds_ext.engine.checkpoint.run"):
            run.this_run.cache_clear()


def _answer(pipe: Connection, work: Any) -> None:
    try:
        answer = pickle.dumps(work())
    except BaseException as error:
        text = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
            answer = pickle.dumps(Failure(error, text))
        except Exception:
            answer = pickle.dumps(Failure(None, text))
    pipe.send_bytes(answer)
