"""Process on each host that holds the memory of snapshots, and copies them to other hosts.

It outlives the ranks, which the launcher restarts, and exits with the launcher. The memory consists of anonymous files
(memfd_create(2)) without a name in any file system, so the kernel frees it even if all processes of a job are killed at
once. This file is run as a script and does not import torch.

Ranks send questions as JSON over a local socket. Keepers send snapshots to each other over TCP, one connection per
snapshot: the handshake of tcp links with a header as its note, an answer, the file, an answer. Copies need no rank:
they continue while ranks compute or die.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

from ds_ext.comm.tcp.handshake import Handshake, initiate, respond
from ds_ext.environment import available_bytes, control_groups, namespace, stat_fields
from ds_ext.errors import ProtocolError

MAX_BYTES = 1 << 20  # of a question or an answer
ANSWER_S = 5.0
SILENCE_S = 10.0  # of the other keeper during a copy
RUNS = 0  # time of the exit of a rank that has not exited
HANDSHAKE_S = 5.0
MAX_UNAUTHENTICATED = 64  # connections of other hosts during their handshakes
_CHUNK = 16 << 20
_ALLOCATED_PER_S = 1 << 30  # bytes; a slow host's time to allocate shared memory
SENDER, RECEIVER = 0, 1  # ranks of the two keepers in a handshake

# File "rank3.records": int64 numbers.
RECORDS_BYTES = 4096
NONE = 0  # step of an empty slot: a new file is zero, and the first snapshot is that of step 1
PROGRESS, PROGRESS_NS = 0, 1  # last complete step, and its end in ns since 1970
FIRST_SLOT, PER_SLOT = 2, 4
STEP, CHECKSUM, SIZE, STATE_BYTES = 0, 1, 2, 3  # of each of the two slots
COPIED, COPY_FAILED = 10, 11  # last step whose copy to another host has ended; last one whose copy failed


# Own types, because this file runs as a script.
Record = dict[str, Any]  # question or answer in JSON
Address = list[Any]  # address, port and token of a keeper that accepts copies


class KeeperError(Exception):
    """The keeper cannot be reached, or cannot do what it is asked for."""


def address(launcher: int) -> str:
    """Return the abstract address (unix(7)) of the keeper of a launcher. It vanishes with the keeper.

    Only the launcher's user can read where the kernel has placed its code, stack and heap (proc(5)), so no other user
    can bind this address first.
    """
    fields = stat_fields(launcher)
    if not fields:
        raise KeeperError(f"the launcher {launcher} has exited")
    start, code, stack, heap = fields[19], fields[23], fields[25], fields[44]
    secret = hashlib.sha256(" ".join((start, code, stack, heap)).encode()).hexdigest()
    return f"\0ds_ext/keeper/{os.getuid()}/{namespace('pid')}/{launcher}/{secret[:32]}"


def user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1]


def free_bytes() -> int:
    """Return the memory that this process can still allocate: that of the host, or of its control group (cgroup v2)."""
    free = available_bytes()
    with contextlib.suppress(OSError, ValueError, StopIteration):
        group = next(line for line in control_groups().splitlines() if line.startswith("0::"))[3:]
        numbers = []
        for name in ("max", "current"):
            with open(f"/sys/fs/cgroup{group}/memory.{name}", encoding="ascii") as file:
                numbers.append(int(file.read()))  # "max" without a limit
        free = min(free, numbers[0] - numbers[1])
    return free


class Memory:
    """Anonymous files by name. Thread-safe."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[int, int]] = {}  # name -> (descriptor, size)
        self._records: dict[int, mmap.mmap] = {}
        self._lock = threading.Lock()

    def sizes(self) -> dict[str, int]:
        with self._lock:
            return {name: size for name, (_, size) in self._files.items()}

    def open(self, name: str, size: int | None = None) -> int:
        """Return a new descriptor of a file. ``size`` is that of :meth:`.keeper.Keeper.open`."""
        with self._lock:
            if size is not None and (name not in self._files or self._files[name][1] != size):
                self._drop(name)
                free = free_bytes()
                if size > free:
                    # Do not try: the kernel would end processes instead of reporting an error.
                    raise KeeperError(f"cannot reserve {size:,} bytes of memory (got {free:,} free bytes)")
                descriptor = os.memfd_create(f"ds_ext {name}")
                os.posix_fallocate(descriptor, 0, size)
                self._files[name] = descriptor, size
            if name not in self._files:
                raise KeeperError(f"has no file {name!r}")
            return os.dup(self._files[name][0])

    def records(self, rank: int) -> memoryview:
        """Return the records of a rank, as int64 numbers."""
        if rank not in self._records:
            descriptor = self.open(f"rank{rank}.records", RECORDS_BYTES)
            try:
                self._records[rank] = mmap.mmap(descriptor, RECORDS_BYTES)
            finally:
                os.close(descriptor)
        return memoryview(self._records[rank]).cast("q")

    def ranks(self) -> list[int]:
        return sorted(int(name[4:].partition(".")[0]) for name in self.sizes() if name.endswith(".records"))

    def remove(self, rank: int) -> None:
        with self._lock:
            self._records.pop(rank, None)
            for name in [name for name in self._files if name.startswith(f"rank{rank}.")]:
                self._drop(name)

    def _drop(self, name: str) -> None:
        if name in self._files:
            os.close(self._files.pop(name)[0])


def record(records: memoryview, slot: int) -> memoryview:
    first = FIRST_SLOT + slot * PER_SLOT
    return records[first : first + PER_SLOT]


class KeeperProcess:
    """Process that answers the ranks of this host, and exchanges snapshots with the keepers of other hosts.

    It exits with the process ``launcher``.
    """

    def __init__(self, launcher: int) -> None:
        self._launcher = launcher
        self._memory = Memory()
        self._id = secrets.token_hex(16)
        self._token = secrets.token_hex(16)  # key of the handshakes with other keepers
        self._incoming: socket.socket | None = None
        self._unauthenticated = threading.BoundedSemaphore(MAX_UNAUTHENTICATED)
        self._lock = threading.Lock()  # held while a snapshot is marked as complete
        self._start = 0  # number of the launcher's restart; copies of earlier ones are refused
        self._stopped = ""
        self._sending: dict[int, threading.Lock] = {}
        self._errors: dict[int, str] = {}  # rank -> why its last copy failed
        self._alive: dict[int, tuple[int, int]] = {}  # pidfd_open(2) -> start and rank
        # Start -> rank -> time of its exit in ns since 1970, or RUNS.
        self._exits: dict[int, dict[int, int]] = {}
        self._answers: dict[str, Callable[..., Record]] = {
            "hello": self._hello,
            "list": lambda: {"files": self._memory.sizes()},
            "listen": self._listen,
            "exits": self._exits_before,
            "snapshots": self._snapshots,
            "begin": self._begin,
            "stop": self._stop,
            "copy": self._copy,
            "error": lambda rank: {"copy_error": self._errors.get(rank, "")},
        }

    def serve(self) -> None:
        """Hold files until the launcher exits."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(address(self._launcher))
            watch = os.pidfd_open(self._launcher)
        except (KeeperError, OSError):
            return  # another keeper has the address, or the launcher has exited
        listener.listen(128)
        while True:
            sources = [listener, watch, *self._alive, *([self._incoming] if self._incoming else [])]
            readable, _, _ = select.select(sources, [], [])
            if watch in readable:
                os._exit(0)  # without waiting for copies
            for process in self._alive.keys() & set(readable):
                self._record_exit(process)
            if self._incoming is not None and self._incoming in readable:
                self._accept_copy(self._incoming)
            if listener in readable:
                connection, _ = listener.accept()
                # One rank's question must not end the keeper of all ranks.
                with contextlib.suppress(Exception):
                    self._answer(connection)

    def _record_exit(self, process: int) -> None:
        start, rank = self._alive.pop(process)
        self._exits[start][rank] = time.time_ns()
        os.close(process)

    def _accept_copy(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        if self._unauthenticated.acquire(blocking=False):
            _in_thread(self._receive, connection)
        else:
            connection.close()

    def _answer(self, connection: socket.socket) -> None:
        """Answer the question of a process of the same user, and close the connection; a move does so at its end."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            connection.settimeout(ANSWER_S)
            if user_of(connection) != os.getuid():
                return
            question = json.loads(connection.recv(MAX_BYTES))
            if question["do"] == "move":
                _in_thread(self._answer_move, connection, question)
                stack.pop_all()
            else:
                self._answer_at_once(connection, **question)

    def _answer_at_once(self, connection: socket.socket, do: str, **question: Any) -> None:
        try:
            if do == "open":
                descriptor = self._memory.open(**question)
                try:
                    socket.send_fds(connection, [b"{}"], [descriptor])
                finally:
                    os.close(descriptor)
                return
            answer = self._answers[do](**question)
        except (KeeperError, OSError) as error:
            answer = {"error": str(error)}
        connection.send(json.dumps(answer).encode())

    # --- questions ---

    def _hello(self, rank: int, start: int, process: int) -> Record:
        """Take the time at which a rank of a start exits, from now on."""
        self._exits.setdefault(start, {})[rank] = RUNS
        self._alive[os.pidfd_open(process)] = start, rank
        return {"id": self._id, "process": os.getpid(), "stopped": self._stopped}

    def _listen(self, ip: str) -> Record:
        if self._incoming is None:
            family = socket.AF_INET6 if ":" in ip else socket.AF_INET
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.bind((ip, 0))
            listener.listen(128)
            self._incoming = listener
        ip, port = self._incoming.getsockname()[:2]
        return {"to": [ip, port, self._token]}

    def _exits_before(self, start: int) -> Record:
        last = max((earlier for earlier in self._exits if earlier < start), default=-1)
        return {"start": last, "exits": self._exits.get(last, {})}

    def _snapshots(self) -> Record:
        snapshots = {}
        for rank in self._memory.ranks():
            records = self._memory.records(rank)
            steps = [record(records, slot)[STEP] for slot in (0, 1)]
            snapshots[rank] = [[step for step in steps if step != NONE], list(records[:FIRST_SLOT])]
        return {"snapshots": snapshots}

    def _begin(self, start: int, after: int, ranks: list[int]) -> Record:
        with self._lock:
            self._start = max(start, self._start)
            for rank in self._memory.ranks():
                records = self._memory.records(rank)
                for slot in (0, 1):
                    if record(records, slot)[STEP] > after:
                        record(records, slot)[STEP] = NONE
                # Copies of earlier starts say nothing about the steps to come.
                records[COPIED] = records[COPY_FAILED] = NONE
                if rank not in ranks:
                    self._memory.remove(rank)
        return {}

    def _stop(self, reason: str) -> Record:
        self._stopped = reason
        return {}

    def _copy(self, rank: int, step: int, start: int, to: Address) -> Record:
        _in_thread(self._send, rank, step, start, to)
        return {}

    def _answer_move(self, connection: socket.socket, question: Record) -> None:
        """Send a snapshot to another keeper, and answer when that has ended: with the error if it failed."""
        with connection:
            rank, answer = question["rank"], {}
            try:
                self._send_snapshot(rank, question["step"], question["start"], question["to"])
            except (KeeperError, OSError) as error:
                answer = {"error": _reason(question["to"], error)}
            connection.send(json.dumps(answer).encode())

    # --- copies between keepers ---

    def _send(self, rank: int, step: int, start: int, to: Address) -> None:
        """Copy a snapshot to another keeper, after earlier copies of this rank, and record the end or the failure."""
        records = self._memory.records(rank)
        error = ""
        with self._sending.setdefault(rank, threading.Lock()):
            try:
                self._send_snapshot(rank, step, start, to)
            except (KeeperError, OSError) as failure:
                error = _reason(to, failure)
        with self._lock:
            if start >= self._start:
                if error:
                    self._errors[rank] = error
                    records[COPY_FAILED] = step
                records[COPIED] = step

    def _send_snapshot(self, rank: int, step: int, start: int, to: Address) -> None:
        records = self._memory.records(rank)
        slot = next((slot for slot in (0, 1) if record(records, slot)[STEP] == step), None)
        if slot is None:
            raise KeeperError(f"has no snapshot of step {step}")
        ip, port, token = to
        header = {
            "rank": rank,
            "slot": slot,
            "start": start,
            "record": list(record(records, slot)),
            "progress": list(records[:FIRST_SLOT]),
        }
        with socket.create_connection((ip, port), SILENCE_S) as connection:
            note = json.dumps(header).encode()
            run_handshake(initiate(connection, SENDER, RECEIVER, bytes.fromhex(token), note), connection)
            size = header["record"][SIZE]
            connection.settimeout(SILENCE_S + size / _ALLOCATED_PER_S)
            _require_success(connection)
            connection.settimeout(SILENCE_S)
            with os.fdopen(self._memory.open(f"rank{rank}.{slot}"), "rb") as file:
                for first in range(0, size, _CHUNK):
                    connection.sendfile(file, first, min(_CHUNK, size - first))
            _require_success(connection)

    def _receive(self, connection: socket.socket) -> None:
        with connection:
            try:
                header = json.loads(run_handshake(self._respond(connection), connection))
            finally:
                self._unauthenticated.release()
            connection.settimeout(SILENCE_S)
            try:
                self._store(connection, **header)
            except (KeeperError, OSError) as error:
                _send_message(connection, {"error": str(error)})

    def _respond(self, connection: socket.socket) -> Handshake:
        key = bytes.fromhex(self._token), b""
        return respond(connection, RECEIVER, "copy", lambda peer: peer == SENDER, lambda _: key)

    def _store(
        self,
        connection: socket.socket,
        rank: int,
        slot: int,
        start: int,
        record: list[int],
        progress: list[int],
    ) -> None:
        """Answer, receive a slot, set its record, and answer again."""
        self._mark(rank, slot, start, [NONE, *record[1:]])
        descriptor = self._memory.open(f"rank{rank}.{slot}", record[SIZE])
        try:
            _send_message(connection, {})
            with mmap.mmap(descriptor, record[SIZE]) as content, memoryview(content) as view:
                checksum = _receive_into(view, connection)
        finally:
            os.close(descriptor)
        if checksum != record[CHECKSUM]:
            raise KeeperError(
                f"the copy is damaged (got checksum {checksum:08x}, not {record[CHECKSUM]:08x})"
            )
        self._mark(rank, slot, start, record, progress)
        _send_message(connection, {})

    def _mark(
        self, rank: int, slot: int, start: int, numbers: list[int], progress: list[int] | None = None
    ) -> None:
        """Set the record of a slot, the step last, and the rank's progress."""
        with self._lock:
            if start < self._start:
                raise KeeperError(f"the ranks were restarted (got a copy of start {start})")
            records = self._memory.records(rank)
            target = record(records, slot)
            for index in (CHECKSUM, SIZE, STATE_BYTES, STEP):
                target[index] = numbers[index]
            if progress is not None:
                records[PROGRESS_NS] = progress[PROGRESS_NS]
                records[PROGRESS] = progress[PROGRESS]


def _reason(to: Address, error: Exception) -> str:
    return f"{to[0]} port {to[1]}: {getattr(error, 'strerror', None) or error}"


def _in_thread(function: Callable[..., None], *args: object) -> None:
    """Call a function in a thread that does not keep the process alive. Its exceptions are ignored."""

    def run() -> None:
        with contextlib.suppress(Exception):
            function(*args)

    threading.Thread(target=run, daemon=True).start()


def _send_message(connection: socket.socket, message: Record) -> None:
    data = json.dumps(message).encode()
    connection.sendall(struct.pack("!I", len(data)) + data)


def _read_message(connection: socket.socket) -> Record:
    (size,) = struct.unpack("!I", _read(connection, 4))
    if size > MAX_BYTES:
        raise KeeperError("a message is too long")
    return json.loads(_read(connection, size))


def _receive_into(view: memoryview, connection: socket.socket) -> int:
    """Fill memory from a connection, and return its CRC-32."""
    received = checksum = 0
    while received < len(view):
        count = connection.recv_into(view[received : received + _CHUNK])
        if count == 0:
            raise KeeperError("the connection was closed")
        checksum = zlib.crc32(view[received : received + count], checksum)
        received += count
    return checksum


def _read(connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """Return ``size`` bytes, received before a ``deadline`` of the monotonic clock."""
    data = b""
    while len(data) < size:
        if deadline is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(size - len(data))
        if not part:
            raise KeeperError("the connection was closed")
        data += part
    return data


def run_handshake(handshake: Handshake, connection: socket.socket) -> bytes:
    """Run a handshake within ``HANDSHAKE_S`` and return the other keeper's note."""
    deadline, limit_s = time.monotonic() + HANDSHAKE_S, connection.gettimeout()
    try:
        size = next(handshake)
        while True:
            size = handshake.send(_read(connection, size, deadline))
    except StopIteration as end:
        _, note = end.value
        return note
    except ProtocolError as error:
        raise KeeperError(str(error)) from None
    finally:
        connection.settimeout(limit_s)


def _require_success(connection: socket.socket) -> None:
    error = _read_message(connection).get("error")
    if error:
        raise KeeperError(error)


if __name__ == "__main__":
    KeeperProcess(int(sys.argv[1])).serve()
