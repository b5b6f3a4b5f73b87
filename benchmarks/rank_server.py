"""Process that forks the ranks, and the life of a rank. Importing this module ties a process to its parent.

The fork server imports it first. Otherwise the server would live as long as its ranks, and a stopped rank as long as
the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import sys
from multiprocessing.connection import Connection

from .job import Job, RankFailure, Worker


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; Linux only."""
    if sys.platform == "linux":
        death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(death_signal, signal.SIGKILL)


end_with_parent()


def end_with_server() -> None:
    """End a rank with the server that forked it. A stopped rank cannot notice that end itself.

    The rank gets a process group to itself, because the kernel sends SIGHUP to a group with stopped members when its
    shell exits.
    """
    os.setpgid(0, 0)
    end_with_parent()


def rank_main(rank: int, name: str, job: Job, port: int, pipe: Connection, log: str) -> None:
    """Build the engine, then run it once for every message on ``pipe``.

    Args:
        port: port of the store through which the ranks join.
        log: file for the rank's output.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the benchmark, and that ends the ranks
    end_with_server()
    _redirect_output(log)
    try:
        import torch.distributed as dist

        worker = _build(rank, name, job, port)
        pipe.send(worker.timetable if rank == 0 else None)
        while True:
            pipe.recv()
            dist.barrier()
            pipe.send(worker.run())
    except EOFError:
        os._exit(0)
    except BaseException as error:
        first_line = (str(error).strip() or "no message").splitlines()[0]
        with contextlib.suppress(OSError):
            pipe.send(RankFailure(f"{type(error).__name__}: {first_line}"))
        os._exit(1)


def _redirect_output(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), line_buffering=True) for number in (1, 2)
    )


def _build(rank: int, name: str, job: Job, port: int) -> Worker:
    import torch

    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.num_ranks),
        LOCAL_RANK=str(rank if job.device == "cpu" else rank % torch.cuda.device_count()),
        LOCAL_WORLD_SIZE=str(job.num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the benchmark serves the store, as torchrun does
    )
    from ds_ext.engine import init_distributed

    if job.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    init_distributed(job.timeout_s)
    return job.build(name, job)
