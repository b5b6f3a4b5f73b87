"""Process that forks the ranks, and the life of a rank. Importing this module ties a process to its parent.

The fork server imports it first. Otherwise the server would live as long as its ranks, and a stopped rank as long as
the server.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection

from .rank_pool import Failure


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; Linux only."""
    if sys.platform == "linux":
        death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(death_signal, signal.SIGKILL)


end_with_parent()


def end_with_server() -> None:
    """End a rank with the server that forked it. A stopped rank cannot notice that end itself.

    The rank gets a process group to itself, because the kernel sends SIGHUP to a group with stopped members when its
    shell exits, and a terminal sends SIGINT to the group of the process that started the server.
    """
    os.setpgid(0, 0)
    end_with_parent()


def redirect_output(stdout: int, stderr: int) -> None:
    """Write the output of this process to two open files."""
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), line_buffering=True) for number in (1, 2)
    )


def rank_main(rank: int, world_size: int, port: int, pipe: Connection, log: str) -> None:
    """Execute the calls that arrive on ``pipe``. SIGUSR1 adds the stack of every thread to the output.

    Args:
        port: port of the store through which the ranks join.
        log: file for the rank's output.
    """
    end_with_server()
    threading.Thread(target=_end_with_pool, daemon=True, name="pool watch").start()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    redirect_output(descriptor, descriptor)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the pool serves the store, as torchrun does
    )
    while True:
        try:
            path, message = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        sys.path[:] = path
        importlib.invalidate_caches()
        pipe.send_bytes(_answer(rank, message))


def _end_with_pool() -> None:
    """End a rank with the process that started the pool. The server may have ended before it forked the rank."""
    pool = multiprocessing.parent_process()
    assert pool is not None
    pool.join()
    os._exit(1)


def _answer(rank: int, message: bytes) -> bytes:
    """Execute a call and return its pickled result or Failure."""
    try:
        fn, args = pickle.loads(message)
        return pickle.dumps(fn(rank, *args))
    except BaseException as error:
        first_line = (str(error).strip() or "no message").splitlines()[0]
        failure = Failure(None, f"{type(error).__name__}: {first_line}", traceback.format_exc())
        try:
            pickle.loads(pickle.dumps(error))
            return pickle.dumps(Failure(error, failure.summary, failure.text))
        except Exception:
            return pickle.dumps(failure)
