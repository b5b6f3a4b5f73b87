"""Engines under test: each runs on a pool of ranks, one step on request."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any, Protocol

from ds_ext.pipe_schedules import Timetable
from ds_ext.pipe_schedules.costs import Costs

from .rank_pool import RankFailure, RankPool, fork_server

_START_LIMIT_S = 180.0
# A device's allocator keeps freed memory. The C library would return large tensors to the system, and filling new
# pages takes longer than copying the tensor.
_KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
_PRELOAD = ["torch", "torch._dynamo", "deepspeed", "benchmarks.rivals"]
_SPINNER = """
import os
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, [{cpu}])
while os.getppid() == {parent}:  # ends with the benchmark, however that ends
    for _ in range(100_000):
        pass
"""


class Worker(Protocol):
    """One rank's part of an engine under test."""

    @property
    def timetable(self) -> Timetable | None:
        """Order of the ops, if the engine has one; only that of rank 0 is read."""
        ...

    def run(self) -> Any:
        """Measure once. All ranks call it after a barrier."""
        ...


@dataclass(frozen=True)
class Job:
    """Settings of all engines of a benchmark.

    Args:
        build: called on every rank with the name of the engine and this job.
        num_ranks: ranks of an engine.
        timeout_s: limit on every wait of an engine for its peers.
        micro_batches: N per step.
        costs: times of emulated passes in milliseconds.
        message_kb: size of an activation in KiB.
        modules: modules to import before the engines are built, because they register schedules.
        device: "cpu" or "cuda". Ranks share GPUs if they outnumber them.
        vocabulary_parallel_head: our engines compute a part of the head on every device.
    """

    build: Callable[[str, Any], Worker]
    num_ranks: int
    timeout_s: float
    micro_batches: int = 1
    costs: Costs = field(default_factory=Costs)
    message_kb: float = 4.0
    modules: tuple[str, ...] = ()
    device: str = "cpu"
    vocabulary_parallel_head: bool = False

    def torch_device(self) -> Any:
        """Return the torch.device of this rank."""
        import torch

        if self.device == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())


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
    context = _start_server(job.device)
    runs = {name: Run() for name in names}
    with ExitStack() as stack:
        stack.callback(_show, "")
        pools = {
            name: stack.enter_context(closing(RankPool(job.num_ranks, context, one_line=True)))
            for name in names
        }
        for turn in range(1 + rounds):
            for name, run in runs.items():
                if run.error is not None:
                    continue
                _show(f"{name}: {f'round {turn} of {rounds}' if turn else 'starting'}")
                try:
                    if turn:
                        # Longer than the engine's limit, whose error has more details.
                        run.rounds.append(pools[name].run(run_engine, timeout_s=2 * job.timeout_s))
                    else:
                        answers = pools[name].run(build_engine, name, job, timeout_s=_START_LIMIT_S)
                        run.timetable = answers[0]
                except RankFailure as failure:
                    if not keep_going:
                        raise
                    run.error = str(failure)
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


def _start_server(device: str) -> ForkServerContext:
    """Start the fork server. Ranks inherit its environment: device, one thread each, freed memory kept."""
    os.environ.update(DS_ACCELERATOR=device, OMP_NUM_THREADS="1", **_KEPT_MEMORY)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # A process that has used CUDA cannot fork ranks that use it, and an import may do so.
    context = fork_server(_PRELOAD if device == "cpu" else [])
    forkserver.ensure_running()
    return context


def _show(progress: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{progress}", end="", file=sys.stderr, flush=True)


# --- on a rank ---

_worker: Worker | None = None


def build_engine(rank: int, name: str, job: Job) -> Timetable | None:
    """Join the other ranks and build the engine ``name``. Returns its timetable on rank 0."""
    global _worker
    import torch

    if job.device == "cuda":
        num_gpus = torch.cuda.device_count()
        os.environ["LOCAL_RANK"] = str(rank % num_gpus)
        torch.cuda.set_device(rank % num_gpus)
        if job.num_ranks > num_gpus:  # nccl refuses two ranks on one GPU
            torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=job.timeout_s))
    from ds_ext.engine import init_distributed

    torch.set_num_threads(1)
    torch.manual_seed(0)
    init_distributed(job.timeout_s)
    _worker = job.build(name, job)
    return _worker.timetable if rank == 0 else None


def run_engine(rank: int) -> Any:
    """Run the engine once, together with the other ranks."""
    import torch.distributed as dist

    assert _worker is not None
    dist.barrier()
    return _worker.run()
