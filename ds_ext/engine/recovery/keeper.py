"""Process on each host that holds the memory of snapshots while the launcher restarts the ranks.

The memory consists of anonymous files (memfd_create(2)) without a name in any file system. The keeper holds them open,
and ranks receive them over a local socket. When the launcher exits, so does the keeper, and the kernel frees the
memory, even if all processes of a job are killed at once. Run as a script, this file imports only the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from typing import Any

_START_S = 20.0
_ANSWER_S = 5.0
_MAX_BYTES = 1 << 16
_POLL_S = 0.02


class KeeperError(Exception):
    """The keeper cannot be reached, or cannot provide memory."""


class Keeper:
    """Client of this host's keeper.

    Args:
        launcher: process id of the launcher; the keeper exits with it.
    """

    def __init__(self, launcher: int) -> None:
        self._launcher, self._address = launcher, address(launcher)

    def start(self) -> None:
        """Start the keeper unless it is running, and wait until it answers. Raises KeeperError."""
        deadline = time.monotonic() + _START_S
        process: subprocess.Popen[bytes] | None = None
        while True:
            try:
                self.files()
                return
            except KeeperError as error:
                # A keeper that finds another one exits with status 0.
                if process is None or process.poll() not in (None, 0):
                    process = self._spawn()
                if time.monotonic() > deadline:
                    raise KeeperError(f"did not start within {_START_S:g} s ({error})") from None
                time.sleep(_POLL_S)

    def files(self) -> dict[str, int]:
        """Return a dict of name -> size of all files. Raises KeeperError."""
        return self._ask({"do": "list"})[0]["files"]

    def open(self, name: str, size: int | None = None) -> int:
        """Return a descriptor of a file, owned by the caller.

        Args:
            size: create the file with this size in bytes, or again if it has a different one; None: it must exist.

        Raises:
            KeeperError: the file does not exist, or there is not enough memory.
        """
        answer, descriptor = self._ask({"do": "open", "name": name, "size": size})
        if descriptor is None:
            raise KeeperError(answer["error"])
        return descriptor

    def _spawn(self) -> subprocess.Popen[bytes]:
        # A new session, because the launcher signals the process groups of its ranks. Without their variables, so that
        # it does not look like a rank.
        environ = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        return subprocess.Popen(
            [sys.executable, "-S", "-E", __file__, str(self._launcher)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env=environ,
        )

    def _ask(self, question: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.settimeout(_ANSWER_S)
                connection.connect(self._address)
                if _user_of(connection) != os.getuid():
                    raise KeeperError("another user's process has its address")
                connection.send(json.dumps(question).encode())
                data, descriptors, _, _ = socket.recv_fds(connection, _MAX_BYTES, 1)
        except OSError as error:
            raise KeeperError(error.strerror or str(error)) from None
        if not data:
            raise KeeperError("it refused this process")
        return json.loads(data), descriptors[0] if descriptors else None


def address(launcher: int) -> str:
    """Return the abstract address (unix(7)) of the keeper of a launcher. It vanishes with the keeper."""
    return f"\0ds_ext/keeper/{os.getuid()}/{os.stat('/proc/self/ns/pid').st_ino}/{launcher}"


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1]


def serve(launcher: int) -> None:
    """Hold files until the launcher exits."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(address(launcher))
        watch = os.pidfd_open(launcher)
    except OSError:
        return  # another keeper has the address, or the launcher has exited
    listener.listen(128)
    files: dict[str, tuple[int, int]] = {}  # name -> (descriptor, size)
    while True:
        readable, _, _ = select.select([listener, watch], [], [])
        if watch in readable:
            return
        connection, _ = listener.accept()
        # One rank's question must not end the keeper of all ranks.
        with connection, contextlib.suppress(Exception):
            connection.settimeout(_ANSWER_S)
            if _user_of(connection) == os.getuid():
                _answer(connection, json.loads(connection.recv(_MAX_BYTES)), files)


def _answer(connection: socket.socket, question: dict[str, Any], files: dict[str, tuple[int, int]]) -> None:
    if question["do"] == "list":
        answer = {"files": {name: size for name, (_, size) in files.items()}}
        connection.send(json.dumps(answer).encode())
        return
    name, size = question["name"], question["size"]
    if size is not None and (name not in files or files[name][1] != size):
        if name in files:
            os.close(files.pop(name)[0])
        free = free_bytes()
        if size > free:
            # Do not try: the kernel would end processes instead of reporting an error.
            problem = f"cannot reserve {size:,} bytes of memory (got {free:,} free bytes)"
            connection.send(json.dumps({"error": problem}).encode())
            return
        descriptor = os.memfd_create(f"ds_ext {name}")
        os.posix_fallocate(descriptor, 0, size)
        files[name] = descriptor, size
    if name not in files:
        connection.send(json.dumps({"error": f"has no file {name!r}"}).encode())
        return
    socket.send_fds(connection, [b"{}"], [files[name][0]])


def free_bytes() -> int:
    """Return the memory that this process can still allocate: that of the host, or of its control group (cgroup v2)."""
    with open("/proc/meminfo", encoding="ascii") as file:
        available = next(line for line in file if line.startswith("MemAvailable:"))
    free = int(available.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/cgroup", encoding="ascii") as file:
            group = next(line for line in file if line.startswith("0::"))[3:].strip()
        numbers = []
        for name in ("max", "current"):
            with open(f"/sys/fs/cgroup{group}/memory.{name}", encoding="ascii") as file:
                numbers.append(int(file.read()))  # "max" without a limit
        free = min(free, numbers[0] - numbers[1])
    return free


if __name__ == "__main__":
    serve(int(sys.argv[1]))
