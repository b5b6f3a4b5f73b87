"""Snapshots in memory: what a kill leaves, what the keeper holds and for how long."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ds_ext.comm.tcp.handshake import initiate
from ds_ext.engine.recovery.keeper import Exits, Keeper, KeeperError
from ds_ext.engine.recovery.keeper_process import (
    HANDSHAKE_S,
    MAX_UNAUTHENTICATED,
    RECEIVER,
    RUNS,
    SENDER,
    address,
    free_bytes,
    run_handshake,
)
from ds_ext.engine.recovery.recovery import first_exits, last_exits
from ds_ext.engine.recovery.slots import Slots, pack_state, unpack_state
from ds_ext.errors import CheckpointError, ConfigError
from ds_ext.launch.launcher import require_restarts
from tests.selection import EVERYTHING

LIMIT_S = 20.0


def start_launcher() -> subprocess.Popen[bytes]:
    """Start a process that runs until it is killed, and return when the kernel has loaded its program."""
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"1")
    process.stdout.read(1)
    return process


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for a launcher."""
    process = start_launcher()
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def keeper(launcher: subprocess.Popen[bytes]) -> Keeper:
    """A running keeper."""
    started = Keeper(launcher.pid)
    started.start(0, 0)
    return started


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def keepers(launcher: int) -> list[str]:
    words = ["pgrep", "-f", f"keeper_process.py {launcher}$"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()


def progress(keeper: Keeper) -> int:
    """Last completed step of rank 0."""
    found = keeper.snapshots()
    return found[0].progress[0] if 0 in found else 0


def tensors(step: int, size: int = 5000) -> dict[str, torch.Tensor]:
    return {
        "weight/a": torch.full((size // 10, 10), float(step)),
        "state/a": torch.full((7,), step, dtype=torch.bfloat16),
        "weight/b": torch.full((3, 3), step, dtype=torch.float64),
        "empty": torch.zeros(0),
    }


def test_files_outlive_the_ranks_and_end_with_the_launcher(launcher: subprocess.Popen[bytes]) -> None:
    code = (
        "import os, sys\n"
        "from ds_ext.engine.recovery.keeper import Keeper\n"
        "keeper = Keeper(int(sys.argv[1]))\n"
        "keeper.start(0, 0)\n"
        "os.pwrite(keeper.open(sys.argv[2], 4096), b'kept', 0)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(launcher.pid), name], start_new_session=True)
        for name in ("a", "b", "c")
    ]
    assert [rank.wait(60) for rank in ranks] == [-signal.SIGKILL] * 3
    keeper = Keeper(launcher.pid)
    assert keeper.files() == {"a": 4096, "b": 4096, "c": 4096}
    until(lambda: len(keepers(launcher.pid)) == 1)  # others exit when they find it
    descriptor = keeper.open("b")
    assert os.pread(descriptor, 4, 0) == b"kept"
    os.close(descriptor)
    launcher.kill()
    launcher.wait()
    until(lambda: not keepers(launcher.pid))
    with pytest.raises(KeeperError):
        keeper.files()


def test_the_keeper_refuses_what_does_not_fit_and_survives_nonsense(
    launcher: subprocess.Popen[bytes], keeper: Keeper
) -> None:
    free = free_bytes()
    assert 1 << 20 < free < 1 << 50
    with pytest.raises(KeeperError, match=f"{2 * free:,} bytes"):
        keeper.open("large", 2 * free)
    with pytest.raises(KeeperError, match="'missing'"):
        keeper.open("missing")
    for question in (b"", b"{", b"[]", json.dumps({"do": "open"}).encode(), b"\xff" * 1000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(LIMIT_S)
            connection.connect(address(launcher.pid))
            connection.send(question)
    assert keeper.files() == {}


def test_the_keeper_takes_the_times_of_exits(launcher: subprocess.Popen[bytes], keeper: Keeper) -> None:
    """Of the last start: rank 1 exits first, rank 0 later, rank 2 runs."""
    code = (
        "import sys, time\n"
        "from ds_ext.engine.recovery.keeper import Keeper\n"
        "Keeper(int(sys.argv[1])).start(int(sys.argv[2]), int(sys.argv[3]))\n"
        "print(flush=True)\n"
        "time.sleep(600)\n"
    )

    def rank(number: int, start: int) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", code, str(launcher.pid), str(number), str(start)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline()
        return process

    assert keeper.exits(0) == (-1, {})
    earlier = rank(0, 0)
    earlier.kill()
    assert keeper.exits(1).start == 0
    ranks = [rank(number, 2) for number in range(3)]
    began = time.time_ns()
    for number in (1, 0):
        ranks[number].kill()
        until(lambda number=number: keeper.exits(3).times[number] != RUNS)  # type: ignore[misc]
    found = keeper.exits(3)
    ranks[2].kill()
    assert found.start == 2 and set(found.times) == {0, 1, 2} and found.times[2] == RUNS
    assert began < found.times[1] < found.times[0] < time.time_ns()
    assert first_exits(last_exits([found, found, found]), 3) == (
        (1,),
        (found.times[0] - found.times[1]) / 1e9,
    )
    for process in (earlier, *ranks):
        process.wait()


def test_ranks_of_a_lost_host_exited_first() -> None:
    one, empty = Exits(4, {0: 50, 1: 40}), Exits(-1, {})
    assert first_exits(last_exits([one, one, empty, empty]), 4) == ((2, 3), None)
    assert first_exits(last_exits([empty, empty]), 2) == ((), None)
    assert first_exits({0: RUNS, 1: RUNS}, 2) == ((), None)
    assert first_exits({0: RUNS, 1: 7}, 2) == ((1,), None)
    assert last_exits([one, Exits(3, {1: 30})]) == {0: 50, 1: 40}


def test_snapshots_alternate_and_are_read_back(keeper: Keeper) -> None:
    slots = Slots(keeper, 3)
    assert slots.steps() == [] and keeper.snapshots()[3] == ([], (0, 0))
    for step in (1, 2, 3):
        slots.write(step, tensors(step), pack_state({"step": step}))
    assert sorted(slots.steps()) == [2, 3]
    slots.mark_complete(3)
    again = Slots(keeper, 3)  # as after a restart
    done, at_ns = keeper.snapshots()[3].progress
    assert done == 3 and abs(at_ns / 1e9 - time.time()) < LIMIT_S
    for step in (2, 3):
        found, state = again.read(step)
        assert unpack_state(state) == {"step": step} and list(found) != []
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors(step).items())
        assert all(found[name].dtype == tensor.dtype for name, tensor in tensors(step).items())
    with pytest.raises(CheckpointError, match="step 1"):
        again.read(1)
    keeper.begin(1, after=2, ranks=[3])
    assert again.steps() == [2] and keeper.snapshots()[3].steps == [2]
    again.write(3, tensors(3), pack_state({"step": 3}))
    assert sorted(again.steps()) == [2, 3] and Slots(keeper, 2).steps() == []
    keeper.begin(1, after=3, ranks=[2])
    assert list(keeper.snapshots()) == [2] and list(keeper.files()) == ["rank2.records"]


def test_a_new_layout_leaves_the_other_snapshot(keeper: Keeper) -> None:
    """More tensors, or a larger state, as when a script adds parameters."""
    slots = Slots(keeper, 0)
    slots.write(1, tensors(1), pack_state({}))
    slots.write(2, tensors(2), pack_state({}))
    slots.write(3, tensors(3, size=20_000), pack_state({"text": "x" * 100_000}))
    assert sorted(slots.steps()) == [2, 3]
    assert torch.equal(slots.read(2)[0]["weight/a"], tensors(2)["weight/a"])
    assert unpack_state(slots.read(3)[1])["text"] == "x" * 100_000


def test_a_flipped_bit_is_found(keeper: Keeper) -> None:
    slots = Slots(keeper, 0)
    slots.write(1, tensors(1), pack_state({}))
    descriptor = keeper.open("rank0.0")
    place = os.fstat(descriptor).st_size // 2
    byte = os.pread(descriptor, 1, place)[0]
    os.pwrite(descriptor, bytes([byte ^ 4]), place)
    os.close(descriptor)
    with pytest.raises(CheckpointError, match="step 1"):
        slots.read(1)


def test_a_kill_at_any_moment_leaves_a_whole_snapshot(keeper: Keeper) -> None:
    """A writer is killed at random moments; the newest snapshot is whole, and at most one step behind."""
    torch.set_num_threads(1)  # a fork does not copy threads
    moments, in_a_write = random.Random(7), 0
    for _ in range(200 if EVERYTHING else 40):
        first = max(Slots(keeper, 0).steps(), default=0) + 1
        writer = os.fork()
        if writer == 0:
            slots = Slots(keeper, 0)
            for step in range(first, first + 100_000):
                slots.write(step, tensors(step, size=200_000), pack_state({"step": step}))
                slots.mark_complete(step)
            os._exit(0)
        until(lambda first=first: progress(keeper) >= first)
        time.sleep(moments.random() * 0.01)
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        slots = Slots(keeper, 0)
        in_a_write += len(slots.steps()) < 2
        newest = max(slots.steps())
        assert newest >= progress(keeper) >= first
        found, state = slots.read(newest)
        assert unpack_state(state) == {"step": newest}
        expected = tensors(newest, size=200_000)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert in_a_write > 0


@pytest.fixture
def two_keepers() -> Iterator[list[Keeper]]:
    """Keepers of two launchers, as of two hosts."""
    launchers = [start_launcher() for _ in range(2)]
    made = [Keeper(launcher.pid) for launcher in launchers]
    for keeper in made:
        keeper.start(0, 0)
    yield made
    for launcher in launchers:
        launcher.kill()
        launcher.wait()


def test_copies_on_another_host_are_whole(two_keepers: list[Keeper]) -> None:
    here, there = two_keepers
    assert here.start(0, 0)[0] != there.start(1, 0)[0]
    there.stop("corrupted")
    assert [keeper.start(0, 0)[1] for keeper in two_keepers] == ["", "corrupted"]
    to = there.listen("127.0.0.1")
    assert there.listen("127.0.0.1") == to
    slots = Slots(here, 1)
    for step in (1, 2, 3):
        slots.write(step, tensors(step, size=100_000), pack_state({"step": step}))
        slots.mark_complete(step)
        here.copy(1, step, 0, to)
        until(lambda step=step: slots.last_ended_copy == step)
        assert slots.last_failed_copy == 0
        assert there.snapshots()[1] == (there.snapshots()[1].steps, here.snapshots()[1].progress)
    copy = Slots(there, 1)
    assert sorted(copy.steps()) == [2, 3]
    for step in (2, 3):
        found, state = copy.read(step)
        assert unpack_state(state) == {"step": step}
        assert all(torch.equal(found[name], t) for name, t in tensors(step, size=100_000).items())


def test_a_snapshot_moves_to_the_rank_s_new_host(two_keepers: list[Keeper]) -> None:
    here, there = two_keepers
    to = there.listen("127.0.0.1")
    Slots(here, 0).write(5, tensors(5), pack_state({}))
    here.move(0, 5, 1, to, LIMIT_S)
    assert Slots(there, 0).steps() == [5]
    with pytest.raises(KeeperError, match="step 4"):
        here.move(0, 4, 1, to, LIMIT_S)


def test_copies_that_cannot_be_made_are_reported(two_keepers: list[Keeper]) -> None:
    """From before a restart, with a wrong token, to a closed port: nothing is stored, and the records say so."""
    here, there = two_keepers
    ip, port, token = there.listen("127.0.0.1")
    slots = Slots(here, 0)
    slots.write(1, tensors(1), pack_state({}))
    there.begin(2, after=9, ranks=[])
    unused = socket.create_server(("127.0.0.1", 0))
    closed = unused.getsockname()[1]
    unused.close()
    slots.write(2, tensors(2), pack_state({}))
    for step, start, to in ((1, 1, [ip, port, token]), (2, 2, [ip, port, "ab"]), (2, 2, [ip, closed, token])):
        with pytest.raises(KeeperError, match=r"127\.0\.0\.1 port"):
            here.move(0, step, start, to, LIMIT_S)
    here.copy(0, 2, 1, [ip, port, token])
    until(lambda: slots.last_ended_copy == 2)
    assert slots.last_failed_copy == 2 and f"port {port}" in here.copy_error(0)
    assert there.snapshots() == {}
    here.begin(2, after=2, ranks=[0])
    assert (slots.last_ended_copy, slots.last_failed_copy) == (0, 0)
    here.copy(
        0, 2, 1, [ip, closed, token]
    )  # from before the restart: says nothing about the step that runs again
    here.copy(0, 2, 2, [ip, port, token])
    until(lambda: slots.last_ended_copy == 2)
    assert slots.last_failed_copy == 0 and there.snapshots()[0].steps == [2]


def greet(sender: socket.socket, token: str, header: dict[str, Any]) -> None:
    """Run the sender's side of the handshake of a copy."""
    note = json.dumps(header).encode()
    run_handshake(initiate(sender, SENDER, RECEIVER, bytes.fromhex(token), note), sender)


def test_a_copy_that_is_changed_on_the_way_is_refused(two_keepers: list[Keeper]) -> None:
    """The token is not sent, a header has the sender's HMAC, and the file the header's checksum."""
    here, there = two_keepers
    ip, port, token = there.listen("127.0.0.1")
    received, flip = bytearray(), [0]
    relay = socket.create_server(("127.0.0.1", 0))

    def forward(source: socket.socket, target: socket.socket, sent: bool) -> None:
        while data := bytearray(source.recv(1 << 16)):
            before = len(received)
            if sent:
                received.extend(data)
                if flip[0] and before <= flip[0] < len(received):
                    data[flip[0] - before] ^= 1
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    def accept() -> None:
        while True:
            near, _ = relay.accept()
            far = socket.create_connection((ip, port))
            received.clear()
            for arguments in ((near, far, True), (far, near, False)):
                threading.Thread(target=forward, args=arguments, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    to = [ip, relay.getsockname()[1], token]
    Slots(here, 0).write(1, tensors(1), pack_state({}))
    here.move(0, 1, 0, to, LIMIT_S)
    assert token.encode() not in received and bytes.fromhex(token) not in received
    assert Slots(there, 0).steps() == [1]
    Slots(here, 0).write(2, tensors(2), pack_state({}))
    header, middle = received.index(b'"progress"'), len(received) - 100
    for place in (header, middle):
        flip[0] = place
        with pytest.raises(KeeperError):
            here.move(0, 2, 0, to, LIMIT_S)
        assert Slots(there, 0).steps() == [1]
    flip[0] = 0
    here.move(0, 2, 0, to, LIMIT_S)
    assert sorted(Slots(there, 0).steps()) == [1, 2]


def test_connections_without_a_handshake_are_limited(two_keepers: list[Keeper]) -> None:
    """The listener closes further connections immediately, and silent ones after a time limit. Then it takes copies."""
    here, there = two_keepers
    ip, port, token = there.listen("127.0.0.1")
    Slots(here, 0).write(1, tensors(1), pack_state({}))
    silent = [socket.create_connection((ip, port), LIMIT_S) for _ in range(MAX_UNAUTHENTICATED)]
    with socket.create_connection((ip, port), LIMIT_S) as beyond:
        beyond.settimeout(HANDSHAKE_S / 2)
        assert beyond.recv(1) == b""
    assert all(connection.recv(100) == b"" for connection in silent)
    here.move(0, 1, 0, [ip, port, token], LIMIT_S)
    assert Slots(there, 0).steps() == [1]


def test_only_the_launcher_s_user_can_compute_its_keeper_s_address(
    launcher: subprocess.Popen[bytes],
) -> None:
    launchers = (launcher.pid, os.getpid())  # not the parent, which may be an init that hides its addresses
    secrets = [address(process).rpartition("/")[2] for process in launchers]
    assert len(set(secrets)) == 2 and all(len(secret) == 32 for secret in secrets)
    if os.getuid() != 0:
        return
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        os.write(writer, b" ".join(address(process).rpartition("/")[2].encode() for process in launchers))
        os._exit(0)
    os.waitpid(child, 0)
    guesses = os.read(reader, 1000).decode().split()
    assert len(guesses) == 2 and not set(guesses) & set(secrets)


def test_a_keeper_that_is_killed_is_noticed_and_started_again(
    launcher: subprocess.Popen[bytes], keeper: Keeper
) -> None:
    assert keeper.is_running()
    (process,) = keepers(launcher.pid)
    os.kill(int(process), signal.SIGKILL)
    until(lambda: not keeper.is_running())
    keeper.start(0, 0)
    assert keeper.is_running() and keepers(launcher.pid) != [process]
    assert keeper.files() == {}


def test_a_copy_that_ends_halfway_is_not_taken(two_keepers: list[Keeper]) -> None:
    """The sender dies in the second copy: the first one stays, and no part of the second one counts."""
    here, there = two_keepers
    ip, port, token = there.listen("127.0.0.1")
    Slots(here, 0).write(1, tensors(1), pack_state({}))
    here.move(0, 1, 0, [ip, port, token], LIMIT_S)
    header = {"rank": 0, "slot": 1, "start": 0, "record": [2, 7, 1 << 20, 10], "progress": [2, 5]}
    with socket.create_connection((ip, port), LIMIT_S) as sender:
        greet(sender, token, header)
        assert sender.gettimeout() == LIMIT_S
        assert sender.recv(1000).endswith(b"{}")
        sender.sendall(b"x" * (1 << 19))
    until(lambda: there.files().get("rank0.1") == 1 << 20)
    time.sleep(0.2)
    assert there.snapshots()[0].steps == [1]
    with socket.create_connection((ip, port), LIMIT_S) as sender:
        sender.sendall(b"\xff" * 100)
        with contextlib.suppress(ConnectionResetError):
            assert b"{}" not in sender.recv(1000)
    assert Slots(there, 0).read(1)[0]["weight/a"][0, 0] == 1


@pytest.mark.parametrize("allowed", [None, "0"])
def test_a_launcher_that_does_not_restart_is_refused(
    monkeypatch: pytest.MonkeyPatch, allowed: str | None
) -> None:
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", allowed)
    with pytest.raises(ConfigError, match=r"^ds_ext\.recovery: .*--max-restarts 3"):
        require_restarts()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    require_restarts()
