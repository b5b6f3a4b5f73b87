"""Pool of ranks: processes on this host that execute calls together and can join by gloo.

A fork server imports torch and DeepSpeed once and forks the ranks. Every wait for them has a limit, and they end with
the process that started them, no matter how it ends. Between calls they are stopped: a thread of every gloo group wakes
100 times a second, and together these threads would take a large share of a core from the engine or test that runs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ds_ext.errors import DsExtError

_GRACE_S = 3.0  # after the first failure, for the other ranks to report theirs
_STACK_DUMP_S = 0.5
_OUTPUT_TAIL_BYTES = 8000


class RankFailure(DsExtError):
    """A rank failed, died or did not answer in time; the text is one line."""


class RankTimeout(RankFailure, TimeoutError):
    """A call did not end within its limit; the notes contain the stacks of the ranks that did not answer."""


@dataclass(frozen=True)
class Failure:
    """Answer of a rank whose call failed: the exception, if it can be pickled, one line and the traceback."""

    exception: BaseException | None
    summary: str
    text: str


def fork_server(preload: Sequence[str]) -> ForkServerContext:
    """Return the context whose processes are forked from a server that has imported ``preload``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.rank_server", *preload])
    return context


class RankPool:
    """Ranks with the environment that a launcher would set. The first call starts them, also after a failure.

    Args:
        context: context of the fork server.
        one_line: raise an exception of a rank as RankFailure.
    """

    def __init__(self, world_size: int, context: ForkServerContext, *, one_line: bool = False) -> None:
        self.world_size = world_size
        self._context, self._one_line = context, one_line
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._logs: list[Path] = []
        self._store: object = None

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty while the pool is not running."""
        return [process.pid for process in self._processes if process.pid is not None]

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
        """Call ``fn(rank, *args)``, a function at module level, on every rank and return the results by rank.

        The first exception of any rank is raised here, with the rank's traceback and output as notes. After any
        failure the ranks are killed.

        Raises:
            RankFailure: a rank died, or its exception cannot be pickled.
            RankTimeout: the call did not end in time.
        """
        message = pickle.dumps((sys.path, pickle.dumps((fn, args))))
        try:
            if not self._processes:
                self._start()
            self._signal(signal.SIGCONT, self.pids)
            for log, pipe in zip(self._logs, self._pipes, strict=True):
                os.truncate(log, 0)
                # The pipe of a dead rank is broken; _collect reports the rank.
                with contextlib.suppress(BrokenPipeError):
                    pipe.send_bytes(message)
            answers = self._collect(timeout_s)
            failures = {rank: one for rank, one in answers.items() if isinstance(one, Failure)}
            silent = [rank for rank in range(self.world_size) if rank not in answers]
            if failures or silent:
                raise self._error(failures, silent, timeout_s)
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP, self.pids)
        return [answers[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """Kill the ranks. The next call starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        for log in self._logs:
            log.unlink()
        self._processes, self._pipes, self._logs, self._store = [], [], [], None

    def _start(self) -> None:
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        # This process serves the store on a port that the system picks, so no other process can take the port.
        store = self._store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        for rank in range(self.world_size):
            descriptor, log = tempfile.mkstemp(prefix="ds_ext_rank_")
            os.close(descriptor)
            self._logs.append(Path(log))
            ours, theirs = self._context.Pipe()
            args = (rank, self.world_size, store.port, theirs, log)
            # No daemon, because a rank may start workers of a data loader.
            process = self._context.Process(target=_run_rank, args=args)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _signal(self, number: signal.Signals, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _collect(self, limit_s: float) -> dict[int, Any]:
        """Return the answers by rank, in the order of their arrival; silent ranks are missing."""
        deadline = time.monotonic() + limit_s
        answers: dict[int, Any] = {}
        while len(answers) < self.world_size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]  # pyright: ignore[reportArgumentType]
                answers[rank] = self._receive(rank)
                if isinstance(answers[rank], Failure):
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        return answers

    def _receive(self, rank: int) -> Any:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            self._processes[rank].join(timeout=_GRACE_S)
            output = self._output(rank).strip().splitlines()
            last_line = f": {output[-1]}" if output else ""
            text = f"died with exit code {self._processes[rank].exitcode}{last_line}"
            return Failure(None, text, text)

    def _error(self, failures: dict[int, Failure], silent: list[int], limit_s: float) -> BaseException:
        if failures:
            rank, first = next(iter(failures.items()))
            error = first.exception
            if error is None or self._one_line:
                error = RankFailure(f"rank {rank}: {first.summary}")
            error.add_note(f"--- failed first on rank {rank} of {self.world_size}:\n{first.text}")
            error.add_note(f"--- rank {rank}'s output:\n{self._output(rank)}")
            for other in list(failures)[1:]:
                error.add_note(f"--- rank {other} failed too: {failures[other].summary}")
        else:
            numbers = ", ".join(map(str, silent))
            error = RankTimeout(f"rank {numbers}: no answer within {limit_s:g} s")
        if silent:
            # A rank's fault handler writes the Python stack of every thread.
            self._signal(signal.SIGUSR1, [self.pids[rank] for rank in silent])
            time.sleep(_STACK_DUMP_S)
        for rank in silent:
            error.add_note(f"--- rank {rank} did not end; its output and stack:\n{self._output(rank)}")
        return error

    def _output(self, rank: int) -> str:
        """Return the end of what a rank has written during its call."""
        return self._logs[rank].read_bytes()[-_OUTPUT_TAIL_BYTES:].decode(errors="replace")


def _run_rank(*args: Any) -> None:
    """Call ``rank_main`` in the new rank; importing its module here would tie this process to its parent."""
    from .rank_server import rank_main

    rank_main(*args)
