"""Handshake over tcp: check of the job token, and clean-up after a failure. Addresses and link selection."""

from __future__ import annotations

import random
import re
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from ds_ext.comm.link_selection import NoLinkError, RankOffers, describe, select_links
from ds_ext.comm.shm_setup import ShmSetup
from ds_ext.comm.tcp import address as tcp_address
from ds_ext.comm.tcp import handshake
from ds_ext.comm.tcp.address import own_address
from ds_ext.comm.tcp.connect import PeerConnection, TcpListener, TcpOffer, connect_peers
from ds_ext.comm.tcp.handshake import read_header
from ds_ext.comm.tcp.setup import TcpSetup
from ds_ext.errors import ConfigError, ProtocolError, TransportError
from tests.unit.comm.test_shm_handshake import open_files

HEAD = struct.Struct("<8sHHI")


@contextmanager
def ranks(count: int, address: str = "127.0.0.1") -> Iterator[tuple[list[TcpListener], list[TcpOffer]]]:
    listeners = [TcpListener(address) for _ in range(count)]
    yield listeners, [listener.offer() for listener in listeners]
    for listener in listeners:
        listener.close()


def connect_all(
    listeners: list[TcpListener], offers: list[dict[int, TcpOffer]], timeout_s: float = 20.0
) -> list[dict[int, PeerConnection] | str]:
    """Run every rank in a thread. Its note for each peer contains both ranks."""
    results: list[dict[int, PeerConnection] | str] = [""] * len(listeners)

    def one(rank: int) -> None:
        notes = {peer: f"{rank} to {peer}".encode() for peer in offers[rank] if peer != rank}
        try:
            results[rank] = connect_peers(listeners[rank], rank, offers[rank], notes, timeout_s)
        except TransportError as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(listeners))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def intrude(offer: TcpOffer, data: bytes) -> socket.socket:
    connection = socket.create_connection((offer.address, offer.port))
    connection.sendall(data)
    return connection


def hello(rank: int, peer: int, version: int = handshake.VERSION) -> bytes:
    return HEAD.pack(b"DSX-TCP\0", version, 1, 24) + struct.pack("<II", rank, peer) + bytes(16)


def proof(data: bytes) -> bytes:
    return HEAD.pack(b"DSX-TCP\0", handshake.VERSION, 3, len(data)) + data


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_unknown_processes_are_rejected(address: str) -> None:
    try:
        TcpListener(address).close()
    except OSError as error:
        pytest.skip(f"no {address}: {error}")
    with ranks(3, address) as (listeners, offers):
        noise = random.Random(7)
        intruders = [
            intrude(offers[2], data)
            for data in (
                hello(0, 2) + proof(bytes(48)),  # HMAC with a wrong key
                hello(0, 2) + proof(bytes(5)),
                hello(7, 2),  # unexpected rank
                hello(0, 1),  # for another rank
                hello(0, 2, version=9),
                b"GET / HTTP/1.1\r\n\r\n",
                HEAD.pack(b"DSX-TCP\0", handshake.VERSION, 1, 1 << 30),
                *(noise.randbytes(noise.randrange(1, 90)) for _ in range(20)),
                b"",  # silent
            )
        ]
        everyone = dict(enumerate(offers))
        for rank, connected in enumerate(connect_all(listeners, [everyone] * 3)):
            assert isinstance(connected, dict) and set(connected) == {0, 1, 2} - {rank}, connected
            for peer, one in connected.items():
                assert one.note == f"{peer} to {rank}".encode()
                one.socket.close()
        for intruder in intruders:
            intruder.close()


def test_other_version_is_reported_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks(2) as (listeners, offers), monkeypatch.context() as patch:
        kept = handshake._send

        def as_version_9(connection: socket.socket, kind: int, body: bytes) -> None:
            if kind == 1:
                connection.sendall(HEAD.pack(b"DSX-TCP\0", 9, kind, len(body)) + body)
            else:
                kept(connection, kind, body)

        patch.setattr(handshake, "_send", as_version_9)
        first, second = connect_all(listeners, [dict(enumerate(offers))] * 2, timeout_s=2.0)
    assert re.match(r"rank 0: .* rank 1 .* version: .* 1 \(got 9\)", str(first))
    assert re.match(
        r"rank 1 .* rank 0 \(127\.0\.0\.1\) .* 2 s.*127\.0\.0\.1: .* version: .* 1 \(got 9\)", str(second)
    )


def test_failed_handshake_leaves_no_file_open() -> None:
    before = open_files()
    with ranks(3) as (listeners, offers):
        stranger = replace(offers[1], token=secrets.token_bytes(16))
        wrong = {0: offers[0], 1: stranger, 2: offers[2]}
        right = dict(enumerate(offers))
        first, second, third = connect_all(listeners, [wrong, right, right], timeout_s=2.0)
        assert re.match(r"rank 0: .* rank 1 .* token", str(first))
        assert re.match(r"rank 1 .*127\.0\.0\.1.* rank 0 \(127\.0\.0\.1\) .* 2 s", str(second))
        for connected in third.values() if isinstance(third, dict) else ():
            connected.socket.close()
        del listeners, offers
    assert open_files() <= before


def test_exited_rank_is_an_error() -> None:
    with ranks(2) as (listeners, offers):
        listeners[1].close()
        with pytest.raises(TransportError, match=r"rank 1 .*127\.0\.0\.1 .*Connection refused"):
            connect_peers(listeners[0], 0, dict(enumerate(offers)), {1: b""}, 5.0)


def test_random_header_is_refused_or_valid() -> None:
    good = HEAD.pack(b"DSX-TCP\0", handshake.VERSION, 2, 48)
    assert read_header(good) == (2, 48)
    draw = random.Random(3)
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        with suppress(ProtocolError):
            kind, size = read_header(bytes(data))
            assert 1 <= kind <= 5 and 0 <= size <= 5000


# --- addresses ---


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Environment of rank 2 of four ranks on two hosts."""
    for name, value in {
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_addresses_per_host_or_per_rank(launched: pytest.MonkeyPatch) -> None:
    assert own_address(2, 4, ["203.0.113.9", "127.0.0.1"]) == "127.0.0.1"
    assert own_address(2, 4, ["203.0.113.9", "203.0.113.9", "127.0.0.1", "203.0.113.9"]) == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"node_ips.* 4 .* 2 .*got 3"):
        own_address(2, 4, ["127.0.0.1"] * 3)
    with pytest.raises(TransportError, match=r"node_ips.*rank 2 .*host 1 .*203\.0\.113\.9"):
        own_address(2, 4, ["127.0.0.1", "203.0.113.9"])


@pytest.mark.parametrize(
    ("size", "index"), [("CROSS_SIZE", "CROSS_RANK"), ("GROUP_WORLD_SIZE", "GROUP_RANK")]
)
@pytest.mark.parametrize(("host", "rank", "ranks_here"), [(0, 0, 2), (0, 1, 2), (1, 2, 1), (2, 3, 1)])
def test_addresses_of_hosts_with_different_numbers_of_ranks(
    launched: pytest.MonkeyPatch, size: str, index: str, host: int, rank: int, ranks_here: int
) -> None:
    launched.delenv("GROUP_RANK")
    for name, value in ((size, 3), (index, host), ("LOCAL_WORLD_SIZE", ranks_here)):
        launched.setenv(name, str(value))
    addresses = [f"127.0.0.{number + 1}" for number in range(3)]
    assert own_address(rank, 4, addresses) == addresses[host]


def test_default_address_is_on_the_route_to_the_master(launched: pytest.MonkeyPatch) -> None:
    launched.setattr(tcp_address, "_address_towards", {"127.0.0.1": "127.0.0.1", "192.0.2.1": "10.1.1.1"}.get)
    assert own_address(2, 4, None) == "10.1.1.1"  # the other host cannot reach a loopback address
    launched.setenv("LOCAL_WORLD_SIZE", "4")
    assert own_address(2, 4, None) == "127.0.0.1"


# --- link selection ---

KINDS = {"shm": ShmSetup.incompatibility, "tcp": TcpSetup.incompatibility}


def offers_of(host: str, address: str = "10.0.0.1", **refusals: str) -> RankOffers:
    offers = {kind: TcpOffer(address, 1, b"") for kind in KINDS if kind not in refusals}
    return RankOffers(host, f"{host}.example", offers, refusals)


def test_best_kind_for_every_pair() -> None:
    ranks = [offers_of("a"), offers_of("a"), offers_of("b"), offers_of("b", shm="no memory")]
    pairs = {(0, 1): 2, (1, 0): 2, (1, 2): 2, (2, 3): 2, (3, 2): 2}
    selection = select_links(ranks, pairs, KINDS)
    assert selection.kinds == {(0, 1): "shm", (1, 0): "shm", (1, 2): "tcp", (2, 3): "tcp", (3, 2): "tcp"}
    assert selection.pairs("shm", pairs) == {(0, 1): 2, (1, 0): 2}
    counts, *fallbacks = describe(selection, ranks).splitlines()
    assert re.search(r"2 by shm, 3 by tcp.*ranks 0-1 on a\.example, ranks 2-3 on b\.example", counts)
    assert [re.findall(r"tcp between (\S+) \(shm: .*", line) for line in fallbacks] == [["1-2"], ["2-3"]]
    assert "rank 3" in fallbacks[1] and "no memory" in fallbacks[1]
    after = select_links(ranks, pairs, KINDS, {"shm": "it broke"})
    assert set(after.kinds.values()) == {"tcp"}
    assert "it broke" in describe(after, ranks)


def test_pair_without_any_kind() -> None:
    with pytest.raises(NoLinkError, match=r"shm: rank 0 and rank 1.* tcp: .*127\.0\.0\.1.*node_ips"):
        select_links([offers_of("a"), offers_of("b", "127.0.0.1")], [(1, 0)], KINDS)
    with pytest.raises(NoLinkError, match=r"IPv4 .* IPv6"):
        select_links([offers_of("a"), offers_of("b", "fd00::1")], [(0, 1)], KINDS)
