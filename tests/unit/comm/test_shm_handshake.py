"""Handshake of ranks of one host: check of the job token, and clean-up after a failure."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ds_ext.comm import spin
from ds_ext.comm.shm_handshake import PeerFiles, ShmOffer, UnixListener, exchange_files
from ds_ext.comm.spin import SPIN_VARIABLE, spin_us
from ds_ext.errors import TransportError

HELLO = struct.Struct("<16sI")


def open_files() -> set[str]:
    """Return the open files of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue
    return found


@contextmanager
def ranks(count: int) -> Iterator[tuple[list[UnixListener], list[ShmOffer]]]:
    listeners = [UnixListener() for _ in range(count)]
    yield listeners, [listener.offer() for listener in listeners]
    for listener in listeners:
        listener.close()


def exchange_all(
    listeners: list[UnixListener], offers: list[ShmOffer], timeout_s: float = 30.0
) -> list[dict[int, PeerFiles] | str]:
    """Run every rank in a thread. It sends each peer a pipe from which its rank can be read."""
    results: list[dict[int, PeerFiles] | str] = [""] * len(listeners)

    def one(rank: int) -> None:
        peers = [peer for peer in range(len(listeners)) if peer != rank]
        pipes = {peer: os.pipe() for peer in peers}
        for _, end in pipes.values():
            os.write(end, bytes([rank]))
        files = {peer: [pipes[peer][0]] for peer in peers}
        try:
            results[rank] = exchange_files(
                listeners[rank], rank, dict(enumerate(offers)), files, dict.fromkeys(peers, 1), timeout_s
            )
        except TransportError as error:
            results[rank] = str(error)
        finally:
            for pipe in pipes.values():
                for end in pipe:
                    os.close(end)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(listeners))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def intrude(offer: ShmOffer, hello: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(offer.name)
    reader, writer = os.pipe()
    socket.send_fds(connection, [hello], [reader])
    os.close(reader)
    os.close(writer)
    return connection


def test_unknown_processes_are_rejected() -> None:
    with ranks(3) as (listeners, offers):
        token = offers[2].token
        wrong = [
            HELLO.pack(secrets.token_bytes(16), 0),  # token of another job
            HELLO.pack(offers[1].token, 0),  # token of another rank
            HELLO.pack(token, 7),  # unexpected rank
            token[:5],
            b"GET / HTTP/1.1",
        ]
        intruders = [intrude(offers[2], hello) for hello in wrong]
        silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        silent.connect(offers[2].name)
        for rank, received in enumerate(exchange_all(listeners, offers)):
            assert isinstance(received, dict) and set(received) == {0, 1, 2} - {rank}
            for peer, each in received.items():
                assert [os.read(file, 1) for file in each.files] == [bytes([peer])]
                assert each.watch >= 0
                each.close()
        for intruder in intruders:
            assert intruder.recv(100) == b""
            intruder.close()
        silent.close()


def test_failed_handshake_leaves_no_file_open() -> None:
    before = open_files()
    with ranks(3) as (listeners, offers):
        # Rank 0 has a wrong token for rank 1. Rank 2 may have connected to both before.
        stranger = ShmOffer(offers[1].name, secrets.token_bytes(16))
        first, second, third = exchange_all(listeners, [offers[0], stranger, offers[2]], timeout_s=2.0)
        assert "rank 1" in str(first) and "rank 0" in str(second) and " 2 s" in str(second)
        for received in third.values() if isinstance(third, dict) else ():
            received.close()
        del listeners, offers
    assert open_files() <= before


def test_exited_rank_is_an_error() -> None:
    with ranks(2) as (listeners, offers):
        listeners[1].close()
        with pytest.raises(TransportError, match="Connection refused"):
            exchange_files(listeners[0], 0, dict(enumerate(offers)), {1: []}, {1: 0}, 5.0)


def test_no_spin_if_ranks_outnumber_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SPIN_VARIABLE, raising=False)
    monkeypatch.setattr(spin, "usable_cores", lambda: 2.0)
    assert spin_us(1) == spin_us(2) > 0 and spin_us(3) == 0
    monkeypatch.setenv(SPIN_VARIABLE, "7.5")
    assert spin_us(1) == spin_us(10_000) == 7.5


@pytest.mark.parametrize("setting", ["often", "inf", "nan", "1e300"])
def test_a_spin_time_that_is_no_time_is_refused(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code converts it to an integer."""
    monkeypatch.setenv(SPIN_VARIABLE, setting)
    with pytest.raises(TransportError, match=rf"{SPIN_VARIABLE}.*'{setting}'"):
        spin_us(1)
