"""The ranks of one engine under test: processes of this host, joined by gloo, that run a step when they are told.

They are forked from a server that has imported torch and DeepSpeed once. Every wait for them has a limit, and they end
with the process that started them, however it ends. Between their steps they are stopped: a thread of every gloo group
wakes 100 times a second, and all of them together would take a good part of a core from the engine that is measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ..errors import DsExtError
from ..pipe_schedules import Timetable
from ..pipe_schedules.costs import Costs

START_LIMIT_S = 180.0
_KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
_PRELOAD = ["ds_ext.bench.rank_server", "torch", "torch._dynamo", "deepspeed", "ds_ext.bench.rivals"]


class RankFailure(DsExtError):
    """A rank failed, died or did not answer in time; the text is one line."""


@dataclass(frozen=True)
class Job:
    """What every engine is to run: D devices, N micro-batches, costs in milliseconds, KiB of an activation.

    ``timeout_s`` bounds every wait of an engine for its peers; ``builder`` is the module whose ``build(name, job)``
    makes what the ranks run; ``modules`` are imported before, as they register schedules.
    """

    devices: int
    micro_batches: int
    costs: Costs
    message_kb: float
    timeout_s: float
    builder: str = "ds_ext.bench.rivals"
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Timing:
    """One step: from the first rank past the barrier to the end of the last computation of all ranks.

    ``computed_ms`` is what the passes of all ranks took together, without any waiting.
    """

    milliseconds: float
    computed_ms: float
    loss: float


@dataclass(frozen=True)
class _Failed:
    text: str


class RankGroup:
    """D ranks with one engine.

    Args:
        name: of the engine, for :func:`ds_ext.bench.rivals.build`.
        job: what it runs, the sizes.
        folder: for the ranks' output.
    """

    def __init__(self, name: str, job: Job, folder: Path) -> None:
        self.name, self.job, self._folder = name, job, folder
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._lifelines: list[Connection] = []
        self._store: object = None

    def start(self) -> Timetable:
        """Start the ranks and build the engine. Returns the order that it runs; raises RankFailure."""
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        context = multiprocessing.get_context("forkserver")
        # Served by this process, on a port that the system picks, so that nobody can take it in between.
        store = self._store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        for rank in range(self.job.devices):
            self._log(rank).touch()
            ours, theirs = context.Pipe()
            end_of_life, lifeline = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(rank, self.name, self.job, store.port, theirs, end_of_life, str(self._log(rank))),
                daemon=True,
            )
            process.start()
            theirs.close()
            end_of_life.close()
            self._processes.append(process)
            self._pipes.append(ours)
            self._lifelines.append(lifeline)
        timetable = self._collect(START_LIMIT_S)[0]
        self._signal(signal.SIGSTOP)
        return timetable

    def ask(self, limit_s: float) -> list[Any]:
        """Have all ranks run once, from a barrier on. Returns what each measured; raises RankFailure."""
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            # The pipe of a rank that is gone is broken; its end is found below.
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        answers = self._collect(limit_s)
        self._signal(signal.SIGSTOP)
        return answers

    def step(self, limit_s: float) -> Timing:
        """Run one step of :mod:`.rivals` on all ranks. Raises RankFailure."""
        starts, ends, computed, losses = zip(*self.ask(limit_s), strict=True)
        known = [loss for loss in losses if loss is not None]
        milliseconds = 1000 * (max(ends) - min(starts))
        return Timing(milliseconds, sum(computed), known[0] if known else float("nan"))

    def close(self) -> None:
        """Kill the ranks."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in (*self._pipes, *self._lifelines):
            pipe.close()
        self._processes, self._pipes, self._lifelines, self._store = [], [], [], None

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _collect(self, limit_s: float) -> list[Any]:
        """One answer a rank. The first failure is raised from here."""
        deadline = time.monotonic() + limit_s
        answers: dict[int, Any] = {}
        while len(answers) < len(self._pipes):
            open_pipes = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = ", ".join(map(str, sorted(open_pipes.values())))
                raise RankFailure(f"no answer from rank {silent} within {limit_s:g} s")
            for pipe in ready:
                rank = open_pipes[pipe]  # pyright: ignore[reportArgumentType]
                answers[rank] = self._receive(rank)
                if isinstance(answers[rank], _Failed):
                    raise RankFailure(f"rank {rank}: {answers[rank].text}")
        return [answers[rank] for rank in range(len(self._pipes))]

    def _receive(self, rank: int) -> Any:
        try:
            return self._pipes[rank].recv()
        except (EOFError, OSError):
            self._processes[rank].join(timeout=5.0)
            said = self._log(rank).read_text(errors="replace").strip().splitlines()
            last = f": {said[-1]}" if said else ""
            return _Failed(f"died with exit code {self._processes[rank].exitcode}{last}")

    def _log(self, rank: int) -> Path:
        return self._folder / f"{self.name}.{rank}.log"


def take_turns(
    names: Sequence[str], job: Job, rounds: int, warm_up: int, limit_s: float
) -> dict[str, list[Any]]:
    """Start all engines, and let each run in turn, so that what disturbs the machine disturbs them alike.

    Returns for every engine what its ranks measured in each round after the ``warm_up`` first. Raises RankFailure.
    """
    prepare_host()
    found: dict[str, list[Any]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="ds_ext_bench_") as folder:
        groups = {name: RankGroup(name, job, Path(folder)) for name in names}
        try:
            for group in groups.values():
                group.start()
            for turn in range(warm_up + rounds):
                for name, group in groups.items():
                    answers = group.ask(limit_s)
                    if turn >= warm_up:
                        found[name].append(answers)
        finally:
            for group in groups.values():
                group.close()
    return found


def prepare_host() -> None:
    """Start the server of the ranks; what they inherit is set here: CPU only, one thread each, memory that they keep.

    A device's allocator keeps what is freed. The C library would give large tensors back to the system, and every next
    one would be made of new pages, which takes longer than to copy it.
    """
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", **_KEPT_MEMORY)
    from multiprocessing import forkserver

    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOAD)
    forkserver.ensure_running()


def _rank_main(
    rank: int, name: str, job: Job, port: int, pipe: Connection, end_of_life: Connection, log: str
) -> None:
    """The life of a rank: build the engine, then a step for every message."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that holds the other end
    threading.Thread(target=_end_with, args=(end_of_life,), daemon=True).start()
    end_when_stopped()
    _write_to(log)
    try:
        import torch.distributed as dist

        built = _build(rank, name, job, port)
        pipe.send(built.timetable if rank == 0 else None)
        while True:
            pipe.recv()
            dist.barrier()
            pipe.send(built.run())
    except EOFError:
        os._exit(0)
    except BaseException as error:
        first = (str(error).strip() or "no message").splitlines()[0]
        with contextlib.suppress(OSError):
            pipe.send(_Failed(f"{type(error).__name__}: {first}"))
        os._exit(1)


def _end_with(end_of_life: Connection) -> None:
    """A rank may be in a collective that nobody will answer; the other end closes with the process that holds it."""
    with contextlib.suppress(EOFError, OSError):
        end_of_life.recv()
    os._exit(1)


def end_when_stopped() -> None:
    """A stopped rank cannot look whether somebody is there: it ends with the server that forked it.

    In a group of its own, because the kernel hangs up a group that has stopped members when its shell goes.
    """
    os.setpgid(0, 0)
    end_with_parent()


def end_with_parent() -> None:
    """Have the kernel end this process when the one that started it is gone; Linux only."""
    if sys.platform == "linux":
        death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(death_signal, signal.SIGKILL)


def _write_to(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), line_buffering=True) for number in (1, 2)
    )


def _build(rank: int, name: str, job: Job, port: int) -> Any:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.devices),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(job.devices),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is served elsewhere, as it is by torchrun
    )
    import torch

    from ..engine import init_distributed

    torch.set_num_threads(1)
    torch.manual_seed(0)
    init_distributed(job.timeout_s)
    return importlib.import_module(job.builder).build(name, job)
