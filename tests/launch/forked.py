"""Ranks without a launcher, in processes that the fork server of tests/ranks.py forks.

A new Python process needs 3 s of CPU time to import torch and DeepSpeed; a forked one has them.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, Self

from tests.hosts.network import inside
from tests.launch.jobs import environment, without_gloo
from tests.ranks import fork_server

NO_ENV: Mapping[str, str] = MappingProxyType({})


class Output:
    """Pipe of a process, read by a thread."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        self._bytes = bytearray()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while read := os.read(self._read_end, 65536):
            self._bytes += read
        os.close(self._read_end)

    def text(self) -> str:
        """Return what has been read."""
        return without_gloo(self._bytes.decode(errors="replace"))

    def whole_text(self) -> str:
        """Return everything that the process wrote, after its end."""
        self._thread.join(5)
        return self.text()


class ForkedJob:
    """Ranks of a job, each with the environment that a launcher would set.

    Args:
        commands: script and flags of each rank.
        port: rendezvous port; None: a rendezvous fails immediately.
        env: environment of every rank or of each, for example WORLD_SIZE where not all ranks start.
        namespaces: files of the network namespaces of the ranks, if they have some.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        cwd: Path,
        *,
        port: int | None = None,
        env: Mapping[str, str] | Sequence[Mapping[str, str]] = NO_ENV,
        namespaces: Sequence[str] = (),
    ) -> None:
        self._processes: list[BaseProcess] = []
        self._outputs: list[tuple[Output, Output]] = []
        for rank, words in enumerate(commands):
            settings = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(commands)),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(len(commands)),
            }
            if port is not None:
                settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            settings |= env if isinstance(env, Mapping) else env[rank]
            outputs = Output(), Output()
            self._outputs.append(outputs)
            self._processes.append(
                _Script(
                    list(words), cwd, environment(**settings), outputs, *namespaces[rank : rank + 1]
                ).start()
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid or 0 for process in self._processes]

    @property
    def text(self) -> str:
        """Output of all ranks, rank by rank."""
        return "".join(output.text() for outputs in self._outputs for output in outputs)

    def wait_for(self, words: str, timeout_s: float = 600) -> None:
        """Wait until the output contains ``words``; fail if a rank ends before."""
        deadline = time.monotonic() + timeout_s
        while words not in self.text:
            running = all(process.is_alive() for process in self._processes)
            assert running and time.monotonic() < deadline, f"no {words!r} in:\n{self.text}"
            time.sleep(0.05)

    def wait(self, timeout_s: float = 600) -> list[subprocess.CompletedProcess[str]]:
        """Return exit code, standard output and standard error of every rank; fail if a rank is still running."""
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self._processes]
        assert None not in codes, self.text
        return [
            subprocess.CompletedProcess((), code or 0, out.whole_text(), error.whole_text())
            for code, (out, error) in zip(codes, self._outputs, strict=True)
        ]


def run_forked(
    commands: Sequence[Sequence[str]],
    cwd: Path,
    *,
    port: int | None = None,
    env: Mapping[str, str] = NO_ENV,
) -> list[subprocess.CompletedProcess[str]]:
    """Run a :class:`ForkedJob` to its end."""
    with ForkedJob(commands, cwd, port=port, env=env) as job:
        return job.wait()


class _Script:
    """Script that a forked process runs as a new interpreter would."""

    def __init__(
        self,
        words: list[str],
        cwd: Path,
        env: dict[str, str],
        outputs: tuple[Output, Output],
        namespace: str | None = None,
    ) -> None:
        self.words, self.cwd, self.env, self.namespace = words, cwd, env, namespace
        self.outputs: Any = outputs

    def start(self) -> BaseProcess:
        process = fork_server().Process(target=self)
        process.start()
        for output in self.outputs:
            os.close(output.write_end)
        return process

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"outputs": [DupFd(output.write_end) for output in self.outputs]}

    def __call__(self) -> NoReturn:
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        from benchmarks.rank_server import end_with_server, redirect_output
        from tests.reduced_host.sitecustomize import hide

        end_with_server()
        os.chdir(self.cwd)
        os.environ.clear()
        os.environ.update(self.env)
        descriptors = [output.detach() for output in self.outputs]
        redirect_output(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        hide(CPU_Accelerator, self.env.get("DS_EXT_TEST_WITHOUT", ""))
        sys.argv = self.words
        sys.path.insert(0, str(Path(self.words[0]).parent))
        with inside(self.namespace) if self.namespace else contextlib.nullcontext():
            runpy.run_path(self.words[0], run_name="__main__")
        os._exit(0)
