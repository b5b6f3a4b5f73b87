"""How ranks of one host meet: only those with the job's token, and nothing is left of a meeting that fails."""

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
from ds_ext.comm.rendezvous import Listener, Meeting, UnixCard, meet
from ds_ext.comm.spin import SPIN_VARIABLE, spin_us
from ds_ext.errors import TransportError

HELLO = struct.Struct("<16sI")


def open_files() -> set[str]:
    """What this process has open, without what other tests close in between."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue
    return found


@contextmanager
def ranks(count: int) -> Iterator[tuple[list[Listener], list[UnixCard]]]:
    listeners = [Listener() for _ in range(count)]
    yield listeners, [listener.card() for listener in listeners]
    for listener in listeners:
        listener.close()


def meet_all(
    listeners: list[Listener], cards: list[UnixCard], timeout_s: float = 30.0
) -> list[dict[int, Meeting] | str]:
    """Every rank in a thread of its own hands to each peer a pipe end on which its number can be read."""
    results: list[dict[int, Meeting] | str] = [""] * len(listeners)

    def one(rank: int) -> None:
        peers = [peer for peer in range(len(listeners)) if peer != rank]
        pipes = {peer: os.pipe() for peer in peers}
        for _, end in pipes.values():
            os.write(end, bytes([rank]))
        files = {peer: [pipes[peer][0]] for peer in peers}
        try:
            results[rank] = meet(
                listeners[rank], rank, dict(enumerate(cards)), files, dict.fromkeys(peers, 1), timeout_s
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


def intrude(card: UnixCard, hello: bytes) -> socket.socket:
    guest = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    guest.connect(card.name)
    reader, writer = os.pipe()
    socket.send_fds(guest, [hello], [reader])
    os.close(reader)
    os.close(writer)
    return guest


def test_strangers_are_turned_away_and_the_ranks_meet() -> None:
    with ranks(3) as (listeners, cards):
        token = cards[2].token
        wrong = [
            HELLO.pack(secrets.token_bytes(16), 0),  # another job's token
            HELLO.pack(cards[1].token, 0),  # another rank's
            HELLO.pack(token, 7),  # no rank that is waited for
            token[:5],
            b"GET / HTTP/1.1",
        ]
        guests = [intrude(cards[2], hello) for hello in wrong]
        silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        silent.connect(cards[2].name)
        for rank, met in enumerate(meet_all(listeners, cards)):
            assert isinstance(met, dict) and set(met) == {0, 1, 2} - {rank}
            for peer, meeting in met.items():
                assert [os.read(file, 1) for file in meeting.files] == [bytes([peer])]
                assert meeting.watch >= 0
                meeting.close()
        for guest in guests:
            assert guest.recv(100) == b""
            guest.close()
        silent.close()


def test_a_meeting_that_fails_leaves_no_file_open() -> None:
    before = open_files()
    with ranks(3) as (listeners, cards):
        # Rank 0 has a wrong token for rank 1. Rank 2 has met both before it learns of that, or it has not.
        stranger = UnixCard(cards[1].name, secrets.token_bytes(16))
        first, second, third = meet_all(listeners, [cards[0], stranger, cards[2]], timeout_s=2.0)
        assert "closed the connection" in str(first) and "did not connect within 2 s" in str(second)
        for meeting in third.values() if isinstance(third, dict) else ():
            meeting.close()
        del listeners, cards
    assert open_files() <= before


def test_a_rank_that_is_gone_is_an_error() -> None:
    with ranks(2) as (listeners, cards):
        listeners[1].close()
        with pytest.raises(TransportError, match="cannot be connected: Connection refused"):
            meet(listeners[0], 0, dict(enumerate(cards)), {1: []}, {1: 0}, 5.0)


def test_ranks_that_outnumber_the_cores_do_not_look_before_they_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(SPIN_VARIABLE, raising=False)
    monkeypatch.setattr(spin, "usable_cores", lambda: 2.0)
    assert spin_us(1) == spin_us(2) > 0 and spin_us(3) == 0
    monkeypatch.setenv(SPIN_VARIABLE, "7.5")
    assert spin_us(1) == spin_us(10_000) == 7.5
    monkeypatch.setenv(SPIN_VARIABLE, "often")
    with pytest.raises(TransportError, match="DS_EXT_SPIN_US must be a number of microseconds; got 'often'"):
        spin_us(1)
