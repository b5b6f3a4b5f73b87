"""Client of the process that holds the memory of snapshots on this host (keeper_process.py)."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from . import keeper_process
from .keeper_process import ANSWER_S, MAX_BYTES, Address, KeeperError, Record, address, user_of

_START_S = 20.0
_POLL_S = 0.02
_ROOT = Path(__file__).parents[3]  # of the package ds_ext


class Snapshots(NamedTuple):
    """Snapshots of a rank that a keeper holds: their steps, and the rank's progress (last step, its end in ns)."""

    steps: list[int]
    progress: tuple[int, int]


class Exits(NamedTuple):
    """Number of a start of the ranks (-1: none), and rank -> time of its exit in ns since 1970, or RUNS."""

    start: int
    times: dict[int, int]


class Keeper:
    """Client of this host's keeper, which exits with the process ``launcher``.

    Every method raises KeeperError if the keeper does not answer.
    """

    def __init__(self, launcher: int) -> None:
        self._launcher, self._address = launcher, address(launcher)
        self._process: int | None = None  # pidfd_open(2)

    def is_running(self) -> bool:
        """Return whether the keeper that :meth:`start` has reached is running."""
        assert self._process is not None
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return not poll.poll(0)

    def start(self, rank: int, start: int) -> tuple[str, str]:
        """Start the keeper unless it is running, and have it take the time at which this process exits.

        Returns the id of the keeper, and the reason given to :meth:`stop`, or an empty string. ``start`` is the number
        of the restart.
        """
        deadline = time.monotonic() + _START_S
        process: subprocess.Popen[bytes] | None = None
        while True:
            try:
                answer = self._ask("hello", rank=rank, start=start, process=os.getpid())
                if self._process is not None:
                    os.close(self._process)
                self._process = os.pidfd_open(answer["process"])
                return answer["id"], answer["stopped"]
            except (KeeperError, ProcessLookupError) as error:
                # A keeper that finds another one exits with status 0.
                if process is None or process.poll() not in (None, 0):
                    process = self._spawn()
                if time.monotonic() > deadline:
                    raise KeeperError(f"did not start within {_START_S:g} s ({error})") from None
                time.sleep(_POLL_S)

    def files(self) -> dict[str, int]:
        return self._ask("list")["files"]

    def open(self, name: str, size: int | None = None) -> int:
        """Return a descriptor of a file, owned by the caller.

        With a ``size`` in bytes, create the file, or again if it has a different one; None: it must exist.
        """
        with self._connect() as connection:
            connection.send(json.dumps({"do": "open", "name": name, "size": size}).encode())
            data, descriptors, _, _ = socket.recv_fds(connection, MAX_BYTES, 1)
            _parse_answer(data)
            return descriptors[0]

    def listen(self, ip: str) -> Address:
        """Accept copies from other hosts at an address of this host. Returns the ``to`` of copy() and move()."""
        return self._ask("listen", ip=ip)["to"]

    def exits(self, start: int) -> Exits:
        """Return the exits on this host in the last start before ``start``."""
        answer = self._ask("exits", start=start)
        return Exits(answer["start"], {int(rank): time_ns for rank, time_ns in answer["exits"].items()})

    def snapshots(self) -> dict[int, Snapshots]:
        """Return the snapshots of every rank that has some on this host."""
        snapshots = self._ask("snapshots")["snapshots"]
        return {int(rank): Snapshots(steps, tuple(progress)) for rank, (steps, progress) in snapshots.items()}

    def begin(self, start: int, after: int, ranks: list[int]) -> None:
        """Begin with a restart.

        Args:
            start: number of the restart; copies from earlier ones are refused from now on.
            after: forget the snapshots of later steps.
            ranks: ranks that keep their files here.
        """
        self._ask("begin", start=start, after=after, ranks=ranks)

    def stop(self, reason: str) -> None:
        """Set a reason against continuing the job, for all ranks that start later."""
        self._ask("stop", reason=reason)

    def copy(self, rank: int, step: int, start: int, to: Address) -> None:
        """Start to copy a snapshot to another host. The records show when the copy has ended."""
        with self._connect() as connection:
            connection.send(
                json.dumps({"do": "copy", "rank": rank, "step": step, "start": start, "to": to}).encode()
            )

    def move(self, rank: int, step: int, start: int, to: Address, timeout_s: float) -> None:
        """Copy a snapshot to another host, and wait for it."""
        self._ask("move", timeout_s, rank=rank, step=step, start=start, to=to)

    def copy_error(self, rank: int) -> str:
        return self._ask("error", rank=rank)["copy_error"]

    def _spawn(self) -> subprocess.Popen[bytes]:
        """Start a process of the keeper, which exits with status 0 if this launcher already has one.

        It has a new session, because the launcher signals the process groups of its ranks. It has none of their
        environment variables, so that it does not look like a rank.
        """
        environ = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        environ["PYTHONPATH"] = str(_ROOT)
        return subprocess.Popen(
            [sys.executable, "-S", "-P", str(Path(keeper_process.__file__)), str(self._launcher)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env=environ,
        )

    def _ask(self, do: str, timeout_s: float = ANSWER_S, **arguments: object) -> Record:
        with self._connect() as connection:
            connection.settimeout(timeout_s)
            connection.send(json.dumps({"do": do, **arguments}).encode())
            return _parse_answer(connection.recv(MAX_BYTES))

    def _connect(self) -> _Connection:
        return _Connection(self._address)


class _Connection:
    """Context of a connection to a keeper of the same user, in which an OSError becomes a KeeperError."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def __enter__(self) -> socket.socket:
        try:
            self._socket.settimeout(ANSWER_S)
            self._socket.connect(self._address)
            if user_of(self._socket) != os.getuid():
                raise KeeperError("another user's process has its address")
        except OSError as error:
            self._socket.close()
            raise KeeperError(error.strerror or str(error)) from None
        except KeeperError:
            self._socket.close()
            raise
        return self._socket

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._socket.close()
        if isinstance(error, OSError):
            raise KeeperError(error.strerror or str(error)) from None


def _parse_answer(data: bytes) -> Record:
    if not data:
        raise KeeperError("it refused this process")
    answer = json.loads(data)
    if "error" in answer:
        raise KeeperError(answer["error"])
    return answer


__all__ = ["Exits", "Keeper", "KeeperError", "Snapshots"]
