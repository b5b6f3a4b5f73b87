"""How ranks meet over tcp: strangers are turned away, and what fails says why and leaves nothing."""

from __future__ import annotations

import random
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from ds_ext.comm.matrix import Card, choose, describe
from ds_ext.comm.shm_setup import ShmSetup
from ds_ext.comm.tcp import address as tcp_address
from ds_ext.comm.tcp import talk as tcp_talk
from ds_ext.comm.tcp.address import own_address
from ds_ext.comm.tcp.meeting import Met, TcpCard, TcpListener, meet
from ds_ext.comm.tcp.setup import TcpSetup
from ds_ext.comm.tcp.talk import read_head
from ds_ext.errors import ConfigError, ProtocolError, TransportError
from tests.unit.comm.test_shm_meeting import open_files

HEAD = struct.Struct("<8sHHI")


@contextmanager
def ranks(count: int, address: str = "127.0.0.1") -> Iterator[tuple[list[TcpListener], list[TcpCard]]]:
    listeners = [TcpListener(address) for _ in range(count)]
    yield listeners, [listener.card() for listener in listeners]
    for listener in listeners:
        listener.close()


def meet_all(
    listeners: list[TcpListener], cards: list[dict[int, TcpCard]], timeout_s: float = 20.0
) -> list[dict[int, Met] | str]:
    """Every rank in a thread of its own gives each peer a note with both numbers."""
    results: list[dict[int, Met] | str] = [""] * len(listeners)

    def one(rank: int) -> None:
        notes = {peer: f"{rank} to {peer}".encode() for peer in cards[rank] if peer != rank}
        try:
            results[rank] = meet(listeners[rank], rank, cards[rank], notes, timeout_s)
        except TransportError as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(listeners))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def intrude(card: TcpCard, data: bytes) -> socket.socket:
    guest = socket.create_connection((card.address, card.port))
    guest.sendall(data)
    return guest


def hello(rank: int, peer: int, version: int = tcp_talk.VERSION) -> bytes:
    return HEAD.pack(b"DSX-TCP\0", version, 1, 24) + struct.pack("<II", rank, peer) + bytes(16)


def proof(data: bytes) -> bytes:
    return HEAD.pack(b"DSX-TCP\0", tcp_talk.VERSION, 3, len(data)) + data


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_strangers_are_turned_away_and_the_ranks_meet(address: str) -> None:
    try:
        TcpListener(address).close()
    except OSError as error:
        pytest.skip(f"no {address}: {error}")
    with ranks(3, address) as (listeners, cards):
        noise = random.Random(7)
        guests = [
            intrude(cards[2], data)
            for data in (
                hello(0, 2) + proof(bytes(48)),  # a proof without the token
                hello(0, 2) + proof(bytes(5)),
                hello(7, 2),  # no rank that is waited for
                hello(0, 1),  # not for this one
                hello(0, 2, version=9),
                b"GET / HTTP/1.1\r\n\r\n",
                HEAD.pack(b"DSX-TCP\0", tcp_talk.VERSION, 1, 1 << 30),
                *(noise.randbytes(noise.randrange(1, 90)) for _ in range(20)),
                b"",  # silent
            )
        ]
        everyone = dict(enumerate(cards))
        for rank, met in enumerate(meet_all(listeners, [everyone] * 3)):
            assert isinstance(met, dict) and set(met) == {0, 1, 2} - {rank}, met
            for peer, one in met.items():
                assert one.note == f"{peer} to {rank}".encode()
                one.socket.close()
        for guest in guests:
            guest.close()


def test_a_version_that_differs_is_named_on_the_side_that_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks(2) as (listeners, cards), monkeypatch.context() as patch:
        kept = tcp_talk._say

        def as_version_9(connection: socket.socket, kind: int, body: bytes) -> None:
            if kind == 1:
                connection.sendall(HEAD.pack(b"DSX-TCP\0", 9, kind, len(body)) + body)
            else:
                kept(connection, kind, body)

        patch.setattr(tcp_talk, "_say", as_version_9)
        first, second = meet_all(listeners, [dict(enumerate(cards))] * 2, timeout_s=2.0)
    assert (
        "rank 0: rank 1 is not met: it refuses: it speaks version 9 of the protocol, and this rank 1"
        in str(first)
    )
    assert "rank 0 (127.0.0.1) did not connect within 2 s; turned away: a guest (127.0.0.1: it speaks" in str(
        second
    )


def test_a_meeting_that_fails_leaves_no_file_open() -> None:
    before = open_files()
    with ranks(3) as (listeners, cards):
        stranger = replace(cards[1], token=secrets.token_bytes(16))
        wrong = {0: cards[0], 1: stranger, 2: cards[2]}
        right = dict(enumerate(cards))
        first, second, third = meet_all(listeners, [wrong, right, right], timeout_s=2.0)
        assert "rank 0: rank 1 is not met: what answers at its address does not know this job's token" in str(
            first
        )
        assert "rank 1 (listening at 127.0.0.1): rank 0 (127.0.0.1) did not connect within 2 s" in str(second)
        for met in third.values() if isinstance(third, dict) else ():
            met.socket.close()
        del listeners, cards
    assert open_files() <= before


def test_a_rank_that_is_gone_is_an_error() -> None:
    with ranks(2) as (listeners, cards):
        listeners[1].close()
        with pytest.raises(
            TransportError, match=r"cannot reach rank 1 at 127.0.0.1 port \d+: Connection refused"
        ):
            meet(listeners[0], 0, dict(enumerate(cards)), {1: b""}, 5.0)


def test_any_head_is_refused_or_sound() -> None:
    good = HEAD.pack(b"DSX-TCP\0", tcp_talk.VERSION, 2, 48)
    assert read_head(good) == (2, 48)
    draw = random.Random(3)
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        with suppress(ProtocolError):
            kind, size = read_head(bytes(data))
            assert 1 <= kind <= 5 and 0 <= size <= 5000


# --- addresses ---


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Four ranks on two hosts; this one is rank 2."""
    for name, value in {
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_addresses_are_given_by_host_or_by_rank(launched: pytest.MonkeyPatch) -> None:
    assert own_address(2, 4, ["203.0.113.9", "127.0.0.1"]) == "127.0.0.1"
    assert own_address(2, 4, ["203.0.113.9", "203.0.113.9", "127.0.0.1", "203.0.113.9"]) == "127.0.0.1"
    with pytest.raises(
        ConfigError, match=r"has 3 addresses; give one for each of the 4 ranks, or one .* 2 hosts"
    ):
        own_address(2, 4, ["127.0.0.1"] * 3)
    with pytest.raises(
        TransportError, match=r"gives rank 2 \(host 1, .*\) the address 203.0.113.9, which it cannot use"
    ):
        own_address(2, 4, ["127.0.0.1", "203.0.113.9"])


def test_without_addresses_it_is_the_way_to_the_master(launched: pytest.MonkeyPatch) -> None:
    launched.setattr(tcp_address, "_address_towards", {"127.0.0.1": "127.0.0.1", "192.0.2.1": "10.1.1.1"}.get)
    assert own_address(2, 4, None) == "10.1.1.1"  # the loopback address means nothing to the other host
    launched.setenv("LOCAL_WORLD_SIZE", "4")
    assert own_address(2, 4, None) == "127.0.0.1"


# --- who is linked how ---

KINDS = {"shm": ShmSetup.why_not, "tcp": TcpSetup.why_not}


def card(host: str, address: str = "10.0.0.1", **refusals: str) -> Card:
    offers = {kind: TcpCard(address, 1, b"") for kind in KINDS if kind not in refusals}
    return Card(host, f"{host}.example", offers, refusals)


def test_the_best_kind_for_every_pair() -> None:
    cards = [card("a"), card("a"), card("b"), card("b", shm="no memory")]
    pairs = {(0, 1): 2, (1, 0): 2, (1, 2): 2, (2, 3): 2, (3, 2): 2}
    matrix = choose(cards, pairs, KINDS)
    assert not isinstance(matrix, str)
    assert matrix.kinds == {(0, 1): "shm", (1, 0): "shm", (1, 2): "tcp", (2, 3): "tcp", (3, 2): "tcp"}
    assert matrix.pairs("shm", pairs) == {(0, 1): 2, (1, 0): 2}
    assert describe(matrix, cards).splitlines() == [
        "links: 2 by shm, 3 by tcp; a.example has ranks 0-1, b.example has ranks 2-3",
        "tcp between 1-2 (shm: the ranks are on different hosts)",
        "tcp between 2-3 (shm: rank 3 cannot: no memory)",
    ]
    after = choose(cards, pairs, KINDS, {"shm": "it broke"})
    assert not isinstance(after, str) and set(after.kinds.values()) == {"tcp"}
    assert "(shm: it broke)" in describe(after, cards)


def test_a_pair_without_any_kind() -> None:
    found = choose([card("a"), card("b", "127.0.0.1")], [(1, 0)], KINDS)
    assert isinstance(found, str) and found.startswith(
        "shm: rank 0 and rank 1, which exchange messages, are on diff"
    )
    assert "one listens at 127.0.0.1: give the hosts' addresses as transport_options.node_ips" in found
    assert "an IPv4 and an IPv6 address" in str(choose([card("a"), card("b", "fd00::1")], [(0, 1)], KINDS))
