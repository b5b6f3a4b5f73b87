"""Scripts as ranks without a launcher, in processes that the fork server of tests/ranks.py forks.

A new Python process needs 3 s of processor time to import torch and DeepSpeed; a forked one has them.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import subprocess
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from tests.launch.jobs import environment
from tests.ranks import fork_server


def run_forked(
    words: list[str],
    cwd: Path,
    ranks: int = 1,
    *,
    port: int | None = None,
    timeout_s: float = 600,
    **env: str,
) -> list[subprocess.CompletedProcess[str]]:
    """Run a script to its end and return exit code, standard output and standard error of every rank.

    Args:
        words: script and its flags.
        ranks: number of ranks to start.
        port: rendezvous port; None: a rendezvous fails immediately.
        env: environment of every rank, for example another RANK and WORLD_SIZE of a single rank.
    """
    with tempfile.TemporaryDirectory(prefix="forked_") as folder:
        processes: list[BaseProcess] = []
        outputs = [(Path(folder, f"out{rank}"), Path(folder, f"err{rank}")) for rank in range(ranks)]
        try:
            for rank, output in enumerate(outputs):
                settings = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(ranks),
                }
                if port is not None:
                    settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                process = fork_server().Process(
                    target=_run, args=(words, str(cwd), environment(**settings | env), *map(str, output))
                )
                process.start()
                processes.append(process)
            deadline = time.monotonic() + timeout_s
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [
            subprocess.CompletedProcess(words, process.exitcode or 0, *(path.read_text() for path in output))
            for process, output in zip(processes, outputs, strict=True)
        ]


def _run(words: list[str], cwd: str, env: dict[str, str], out: str, err: str) -> NoReturn:
    """Run a script in this process as a new interpreter would."""
    from ds_ext.bench.rank_server import end_with_server

    end_with_server()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, path in ((1, out), (2, err)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (lives as long as the process)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    _hide_precisions(env.get("DS_EXT_TEST_WITHOUT", ""))
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    with contextlib.suppress(SystemExit):
        runpy.run_path(words[0], run_name="__main__")
    os._exit(0)


def _hide_precisions(names: str) -> None:
    """Do what tests/reduced_host does at the import of the accelerator."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    from tests.reduced_host.sitecustomize import hide

    hide(CPU_Accelerator, names)
