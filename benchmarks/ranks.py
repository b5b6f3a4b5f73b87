"""Ranks of an engine under test: processes on this host, connected by gloo, that run a step on request.

A server forks them after importing torch and DeepSpeed once. Every wait for them has a limit, and they end with the
process that started them, no matter how it ends. Between their steps they are stopped: a thread of every gloo group
wakes 100 times a second, and together these threads would take a large share of a core from the engine being measured.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ds_ext.pipe_schedules import Timetable

from .job import Job, RankFailure

_START_LIMIT_S = 180.0
# A device's allocator keeps freed memory. The C library would return large tensors to the system, and filling new
# pages takes longer than copying the tensor.
_KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
_PRELOAD = ["benchmarks.rank_server", "torch", "torch._dynamo", "deepspeed", "benchmarks.rivals"]
_SPINNER = """
import os
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, [{cpu}])
while os.getppid() == {parent}:  # ends with the benchmark, however that ends
    for _ in range(100_000):
        pass
"""


@dataclass
class Run:
    """Outcome of one engine.

    Attributes:
        timetable: order of its ops, if it has one.
        rounds: answers of all ranks in each round.
        error: one line; None for an engine that did not fail.
    """

    timetable: Timetable | None = None
    rounds: list[list[Any]] = field(default_factory=list)
    error: str | None = None


def take_turns(names: Sequence[str], job: Job, rounds: int, *, keep_going: bool = False) -> dict[str, Run]:
    """Start all engines, then run each once per round, so that noise on the host affects all engines equally.

    Args:
        names: names of the engines, for ``job.build``.
        keep_going: continue without an engine that failed, and record its error.

    Raises:
        RankFailure: an engine failed, unless ``keep_going``.
    """
    _start_server(job.device)
    runs = {name: Run() for name in names}
    with tempfile.TemporaryDirectory(prefix="ds_ext_bench_") as folder:
        groups = {name: _RankGroup(name, job, Path(folder)) for name in names}
        try:
            for turn in range(1 + rounds):
                for name, run in runs.items():
                    if run.error is not None:
                        continue
                    _show(f"{name}: {f'round {turn} of {rounds}' if turn else 'starting'}")
                    try:
                        if turn:
                            run.rounds.append(groups[name].ask())
                        else:
                            run.timetable = groups[name].start()
                    except RankFailure as failure:
                        if not keep_going:
                            raise
                        run.error = str(failure)
                        groups[name].close()
        finally:
            for group in groups.values():
                group.close()
            _show("")
    return runs


@contextmanager
def processors_awake() -> Iterator[None]:
    """Keep the processors of this process from idling; no effect if the system has no idle scheduling class.

    The host of a virtual machine lends an idle processor to others, and it comes back with cold caches: after 20 ms
    of sleep, 50 us of work can take 1000. Devices that compute never pay this, so layers that wait must not either. A
    process in the lowest scheduling class spins on every processor, and runs only when the processor is otherwise idle.
    """
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "SCHED_IDLE") else []
    code = [_SPINNER.format(cpu=cpu, parent=os.getpid()) for cpu in usable]
    spinners = [subprocess.Popen([sys.executable, "-I", "-S", "-c", text]) for text in code]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
        for spinner in spinners:
            spinner.wait()


def _start_server(device: str) -> None:
    """Start the fork server. Ranks inherit its environment: device, one thread each, freed memory kept."""
    os.environ.update(DS_ACCELERATOR=device, OMP_NUM_THREADS="1", **_KEPT_MEMORY)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # A process that has used CUDA cannot fork ranks that use it, and an import may do so.
    preload = _PRELOAD if device == "cpu" else _PRELOAD[:1]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    forkserver.ensure_running()


def _show(progress: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{progress}", end="", file=sys.stderr, flush=True)


class _RankGroup:
    """Ranks of one engine.

    Args:
        folder: folder for the ranks' output.
    """

    def __init__(self, name: str, job: Job, folder: Path) -> None:
        self._name, self._job, self._folder = name, job, folder
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._store: object = None

    def start(self) -> Timetable | None:
        """Start the ranks and build the engine. Raises RankFailure."""
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        context = multiprocessing.get_context("forkserver")
        # This process serves the store on a port that the system picks, so no other process can take the port.
        store = self._store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        for rank in range(self._job.num_ranks):
            self._log(rank).touch()
            ours, theirs = context.Pipe()
            args = (rank, self._name, self._job, store.port, theirs, str(self._log(rank)))
            process = context.Process(target=_run_rank, args=args, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        timetable = self._collect(_START_LIMIT_S)[0]
        self._signal(signal.SIGSTOP)
        return timetable

    def ask(self) -> list[Any]:
        """Run all ranks once. Returns their answers. Raises RankFailure."""
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            # The pipe of a dead rank is broken; _collect reports the rank.
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        answers = self._collect(
            2 * self._job.timeout_s
        )  # longer than the engine's limit, whose error has more details
        self._signal(signal.SIGSTOP)
        return answers

    def close(self) -> None:
        """Kill the ranks."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._store = [], [], None

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _collect(self, limit_s: float) -> list[Any]:
        """Return one answer of each rank. Raises RankFailure at the first failure."""
        deadline = time.monotonic() + limit_s
        answers: dict[int, Any] = {}
        while len(answers) < len(self._pipes):
            open_pipes = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = ", ".join(map(str, sorted(open_pipes.values())))
                raise RankFailure(f"rank {silent}: no answer within {limit_s:g} s")
            for pipe in ready:
                rank = open_pipes[pipe]  # pyright: ignore[reportArgumentType]
                answers[rank] = self._receive(rank)
                if isinstance(answers[rank], RankFailure):
                    raise RankFailure(f"rank {rank}: {answers[rank]}")
        return [answers[rank] for rank in range(len(self._pipes))]

    def _receive(self, rank: int) -> Any:
        try:
            return self._pipes[rank].recv()
        except (EOFError, OSError):
            self._processes[rank].join(timeout=5.0)
            output = self._log(rank).read_text(errors="replace").strip().splitlines()
            last_line = f": {output[-1]}" if output else ""
            return RankFailure(f"died with exit code {self._processes[rank].exitcode}{last_line}")

    def _log(self, rank: int) -> Path:
        return self._folder / f"{self._name}.{rank}.log"


def _run_rank(*args: Any) -> None:
    """Call ``rank_main`` in the new rank; importing its module here would tie the benchmark to its parent."""
    from .rank_server import rank_main

    rank_main(*args)
