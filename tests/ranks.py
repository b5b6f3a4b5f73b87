"""A pool of real ranks (processes joined by gloo) that many tests share.

Importing torch and DeepSpeed costs seconds; a fork server does it once and every rank is forked from it.
A pool is started at its first use, and anew after some calls and after any failure, because a failed rank
leaves messages behind. Between its calls a pool is stopped: a thread of every gloo group wakes 100 times a second, and
the pools of all sizes together would take a good part of a core from the test that runs.

    def sum_of_ranks(rank: int, offset: int) -> float:          # a module-level function: it is sent by name
        value = torch.tensor(float(rank + offset))
        torch.distributed.all_reduce(value)
        return value.item()

    def test_sum(ranks: Ranks) -> None:
        assert ranks(4).run(sum_of_ranks, 10) == [46.0] * 4
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
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from ds_ext.comm.spin import usable_cores
from tests.rank_process import Failure, rank_main

PRELOAD = ["benchmarks.rank_server", "torch", "torch._dynamo", "deepspeed", "pytest", "hypothesis"]
START_LIMIT_S = 180.0
BUSY = 2.0  # times as long as on a host that does nothing else
GRACE_S = 3.0  # after the first failure, for the other ranks to report theirs
STACK_DUMP_S = 0.5
OUTPUT_TAIL_BYTES = 8000
# Each engine leaves some ten gloo groups behind, with three threads each, which DeepSpeed keeps in its own tables:
# after a hundred calls the ranks would be busy with their threads alone.
CALLS_PER_START = 8


class RankError(RuntimeError):
    """A rank died, or raised something that cannot be sent to the test."""


class RankTimeout(TimeoutError):
    """A call did not end within its limit; the notes hold every rank's stack."""


def fork_server() -> ForkServerContext:
    """Return the context whose processes are forked from a server that has imported torch and DeepSpeed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


class RankPool:
    """`world_size` processes in one gloo world, each with RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* set."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._calls = 0
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._store: object = None

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty while the pool is not running."""
        return [process.pid for process in self._processes if process.pid is not None]

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Call `fn(rank, *args)` on every rank and return the results by rank.

        The first exception of any rank is raised here, with that rank's traceback and output as notes. After the
        time limit RankTimeout is raised with every rank's stack. Seeds are set to 0 before the call.

        Args:
            timeout_s: limit of a host with one core a rank. Ranks that share a core get more time.
        """
        if "<locals>" in fn.__qualname__ or fn.__name__ == "<lambda>":
            raise TypeError(f"{fn.__qualname__} is sent to the ranks by name: move it to module level")
        if self._calls >= CALLS_PER_START:
            self.close()
        if not self._processes:
            self._start()
        self._calls += 1
        call = pickle.dumps((fn, args))
        offsets = [self._log(rank).stat().st_size for rank in range(self.world_size)]
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            # A broken pipe means that the rank is gone: _collect reads the end of file and reports it.
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(pickle.dumps((sys.path, call)))
        try:
            answers = self._collect(fn.__qualname__, self._limit_s(timeout_s), offsets)
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)
        return answers

    def close(self) -> None:
        """Kill the ranks. The next run() starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._directory is not None:
            self._directory.cleanup()
        self._processes, self._pipes, self._directory, self._store = [], [], None, None
        self._calls = 0

    def _start(self) -> None:
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        context = fork_server()
        # The test process serves the store, on a port that the system picks: no other process can take it first.
        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._store = store
        self._directory = tempfile.TemporaryDirectory(prefix="ranks_")
        for rank in range(self.world_size):
            self._log(rank).touch()
            ours, theirs = context.Pipe()
            arguments = (rank, self.world_size, store.port, theirs, str(self._log(rank)), os.getpid())
            process = context.Process(target=rank_main, args=arguments, name=f"rank{rank}of{self.world_size}")
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        try:
            self._collect("start-up", self._limit_s(START_LIMIT_S), [0] * self.world_size)
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def _limit_s(self, timeout_s: float) -> float:
        return timeout_s * BUSY * max(1.0, self.world_size / usable_cores())

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _collect(self, name: str, timeout_s: float, offsets: list[int]) -> list[Any]:
        """Wait for one answer per rank; any failure is raised from here."""
        deadline = time.monotonic() + timeout_s
        answers: dict[int, Any] = {}
        failed: list[int] = []
        while len(answers) < self.world_size:
            waiting = {self._pipes[rank]: rank for rank in range(self.world_size) if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]  # pyright: ignore[reportArgumentType]
                answers[rank] = self._receive(rank)
                if isinstance(answers[rank], Failure):
                    failed.append(rank)
            if len(failed) == 1:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if failed:
            self._raise_failure(name, failed, answers, offsets)
        if len(answers) < self.world_size:
            error = RankTimeout(f"{name} did not end within {timeout_s:g} s on {self.world_size} ranks")
            for rank in range(self.world_size):
                state = "had ended" if rank in answers else "was still running"
                stack = self._stack(rank, offsets[rank])
                error.add_note(f"--- rank {rank} {state}; its output and stack:\n{stack}")
            raise error
        return [answers[rank] for rank in range(self.world_size)]

    def _receive(self, rank: int) -> Any:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            self._processes[rank].join(timeout=GRACE_S)
            return Failure(None, f"rank {rank} died with exit code {self._processes[rank].exitcode}\n")

    def _raise_failure(
        self, name: str, failed: list[int], answers: dict[int, Any], offsets: list[int]
    ) -> NoReturn:
        rank, first = failed[0], answers[failed[0]]
        error = first.exception or RankError(f"{name} failed on rank {rank}: {first.summary}")
        error.add_note(f"--- {name} failed first on rank {rank} of {self.world_size}:\n{first.text}")
        error.add_note(f"--- rank {rank}'s output:\n{self._output(rank, offsets[rank])}")
        for other in failed[1:]:
            error.add_note(f"--- rank {other} failed too: {answers[other].summary}")
        for other in set(range(self.world_size)) - set(answers):
            stack = self._stack(other, offsets[other])
            error.add_note(f"--- rank {other} did not end; its output and stack:\n{stack}")
        raise error

    def _log(self, rank: int) -> Path:
        assert self._directory is not None
        return Path(self._directory.name) / f"rank{rank}.log"

    def _output(self, rank: int, offset: int) -> str:
        return self._log(rank).read_bytes()[offset:][-OUTPUT_TAIL_BYTES:].decode(errors="replace")

    def _stack(self, rank: int, offset: int) -> str:
        """The rank's output, at whose end its fault handler writes the Python stack of every thread."""
        pid = self._processes[rank].pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
            time.sleep(STACK_DUMP_S)
        return self._output(rank, offset)


class Ranks:
    """The pools of a session, one per world size, each started at its first use."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world_size: int) -> RankPool:
        return self._pools.setdefault(world_size, RankPool(world_size))

    def close(self) -> None:
        """End every rank of every pool."""
        for pool in self._pools.values():
            pool.close()
