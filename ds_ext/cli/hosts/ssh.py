"""Agents on other hosts, started over ssh with the command line that ``deepspeed --hostfile`` uses.

The launcher of the job cannot start them. An agent has to be asked, and ``deepspeed`` and pdsh pass no standard input
on. Ranks under a launcher could only exchange findings through its rendezvous, so a host without the folder, the
environment, pdsh or a route to the first host would end the run with the launcher's error, in place of the findings
with their remedies. ``torchrun`` starts nothing on other hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import DsExtError

MARK = "@ds_ext "
CONNECT_S = 5
_START_S = 90.0
_NO_FOLDER = 97  # exit status of the remote command, if the working directory is missing
_SSH_FAILED = 255
# Variables that DeepSpeed's launcher exports: these prefixes, and the lines of .deepspeed_env.
_EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
_REMEDIES = (
    ("Could not resolve hostname", "correct the name in the hostfile, or add the host to DNS or /etc/hosts"),
    ("Host key verification failed", "accept its key once: ssh-keyscan {host} >> ~/.ssh/known_hosts"),
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "remove its old key: ssh-keygen -R {host}"),
    ("Permission denied", "install your key there: ssh-copy-id {host}"),
    ("Connection refused", "start sshd there, or give its port with --ssh-port"),
    ("timed out", "check that the host is up, and that firewalls allow ssh to it"),
    ("No route to host", "check that the host is up and connected to this network"),
)


class HostError(DsExtError):
    """Failure of one host, with the remedy."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.remedy = remedy


class RemoteAgent:
    """Agent on one host. Requests of several threads run one after the other.

    Args:
        host: name as in the hostfile.
        ssh: ssh command with its options.
        command: shell command that starts the agent.
    """

    def __init__(self, host: str, ssh: Sequence[str], command: str) -> None:
        self.host = host
        self._lock = threading.Lock()
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (open for every error)
        self._process = subprocess.Popen(
            [*ssh, host, command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            errors="replace",
        )

    def start(self) -> None:
        """Wait until the agent is ready."""
        self._answer(_START_S)

    def ask(self, action: str, limit_s: float = 30.0, **arguments: Any) -> Any:
        """Return the agent's answer to one request; see ``agent.py``."""
        with self._lock:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps({"do": action, **arguments}) + "\n")
                self._process.stdin.flush()
            except (OSError, ValueError):  # ended, or closed
                raise self._end_reason() from None
            return self._answer(limit_s)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _answer(self, limit_s: float) -> Any:
        """Return the next answer. End the agent after ``limit_s`` without one."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + limit_s
        watchdog = threading.Timer(limit_s, self._process.kill)
        watchdog.start()
        try:
            for line in self._process.stdout:
                if line.startswith(MARK):
                    answer = json.loads(line.removeprefix(MARK))
                    if "error" in answer:
                        raise DsExtError(answer["error"])
                    return answer["value"]
        finally:
            watchdog.cancel()
        if time.monotonic() < deadline:
            raise self._end_reason()
        raise HostError(
            f"no answer within {limit_s:g} s", f"try `ssh {self.host} hostname`, and look at the load there"
        )

    def _end_reason(self) -> HostError:
        """Return the error of an ssh or agent that has ended; waits up to 5 s for its end, then kills it."""
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._errors.seek(0)
        text = self._errors.read().strip()
        message = text.rpartition("\n")[2].strip() or f"exit status {code}"
        if code == _SSH_FAILED:
            remedies = (remedy for sign, remedy in _REMEDIES if sign in text)
            return HostError(
                f"ssh: {message.removeprefix('ssh: ')}",
                next(remedies, "try `ssh {host} true`").format(host=self.host),
            )
        if code == _NO_FOLDER:
            problem = f"working directory {os.getcwd()} is missing"
            return HostError(problem, "use the same path on every host: a shared file system, or a copy")
        if code in (126, 127) or "No such file" in message:
            return HostError(message, f"install the same environment as here: {sys.executable}")
        if "No module named" in message:
            return HostError(message, f"install ds_ext there into the environment of {sys.executable}")
        return HostError(message, "run `python -m ds_ext doctor` on that host")


def ssh_words(port: int | None) -> list[str]:
    """Return the ssh command, with the options that pdsh would use and a limit on every wait."""
    words = ["ssh"]
    limits = (f"ConnectTimeout={CONNECT_S}", "ServerAliveInterval=5", "ServerAliveCountMax=2")
    for option in ("BatchMode=yes", *limits):
        words += ["-o", option]
    words += shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
    if port is not None:
        words += ["-p", str(port)]
    # The name of a host follows. After "--", ssh takes no word for an option, so a hostfile cannot pass options.
    return [*words, "--"]


def agent_command() -> str:
    """Return the shell command that starts the agent in this folder, with the Python that runs here."""
    exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in exported().items())
    start = f"exec {shlex.quote(sys.executable)} -u -m {__package__}.agent"
    return f"{exports}cd {shlex.quote(os.getcwd())} || exit {_NO_FOLDER}; {start}"


def exported(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that ``deepspeed --hostfile`` sets on every host."""
    variables = {name: value for name, value in environ.items() if name.startswith(_EXPORTED)}
    for folder in (Path.home(), Path()):
        path = folder / environ.get("DS_ENV_FILE", ".deepspeed_env")
        if path.is_file():
            lines = (line.strip().partition("=") for line in path.read_text().splitlines())
            variables |= {name: value for name, sign, value in lines if sign}
    return variables
