"""Random traffic among four ranks over every kind of link, and over two kinds at once: every byte is compared."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_ext.comm import native
from ds_ext.comm.native_transport import NativeTransport
from ds_ext.comm.tcp import setup as tcp_setup
from ds_ext.comm.transport import create_transport, make_tag
from tests.distributed.test_torch_p2p import CPU
from tests.ranks import RankPool
from tests.selection import EVERYTHING

MESSAGES = 100_000 if EVERYTHING else 1_500

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64, torch.float8_e5m2]
SHAPES = [(), (0,), (1,), (3, 5), (64, 17), (2, 1, 3, 4), (257, 33), (4, 5000), (3, 100_000)]
LARGE, LARGE_SHARE = (5, 1000, 1001), 0.002  # which a thread copies, with the sender or beside it


def content(seed: int) -> list[Tensor]:
    """What a message holds, from its number alone: one to three tensors of any bits."""
    draw = random.Random(seed)
    made = []
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        dtype = draw.choice(DTYPES)
        shape = SHAPES[min(int(draw.expovariate(0.7)), len(SHAPES) - 1)]
        shape = LARGE if draw.random() < LARGE_SHARE else shape
        flat = torch.empty(shape, dtype=dtype)
        if flat.numel():
            generator = torch.Generator().manual_seed(draw.getrandbits(30))
            bits = torch.randint(0, 256, (flat.nbytes,), dtype=torch.uint8, generator=generator)
            flat = bits.view(dtype).reshape(shape)
        made.append(flat.t() if flat.dim() == 2 and draw.random() < 0.3 else flat)
    return made


def as_bytes(tensors: tuple[Tensor, ...] | list[Tensor]) -> list[tuple[torch.dtype, torch.Size, bytes]]:
    return [
        (
            t.dtype,
            t.shape,
            t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"",
        )
        for t in tensors
    ]


@contextmanager
def as_two_hosts(rank: int) -> Iterator[None]:
    """Ranks 0 and 1 take themselves for one host, the others for another, and find that addresses lead there."""
    kept = native.host_id, tcp_setup.is_loopback
    native.host_id, tcp_setup.is_loopback = (lambda: f"host {rank // 2}"), (lambda address: False)
    try:
        yield
    finally:
        native.host_id, tcp_setup.is_loopback = kept


def make(rank: int, kind: str) -> NativeTransport:
    """A transport of one kind of links, or of both."""
    if kind == "shm+tcp":
        with as_two_hosts(rank):
            transport = create_transport("auto", timeout_s=60, device=CPU)
    else:
        transport = create_transport(kind, timeout_s=60, device=CPU)
    assert isinstance(transport, NativeTransport) and transport.name == kind
    return transport


def stress(rank: int, messages: int, seed: int, kind: str) -> tuple[int, int]:
    """Random tags, sizes, dtypes, orders and lifetimes among all ranks; (messages received, wrong ones)."""
    size = dist.get_world_size()
    plan = random.Random(seed)
    links = [(a, b, c) for a in range(size) for b in range(size) if a != b for c in (0, 1, 2)]
    lists: dict[tuple[int, int, int], int] = dict.fromkeys(links, 0)
    for _ in range(messages):
        lists[plan.choice(links)] += 1
    transport, own = make(rank, kind), random.Random(seed * 10 + rank)
    actions = [link for link, count in lists.items() if rank in link[:2] for _ in range(count)]
    own.shuffle(actions)
    position = dict.fromkeys(links, 0)
    tickets: list[tuple[Any, int]] = []
    kept: list[tuple[tuple[Tensor, ...], int]] = []
    received = wrong = 0

    def check(count: int) -> None:
        nonlocal wrong
        for _ in range(min(count, len(kept))):
            tensors, number = kept.pop(own.randrange(len(kept)))
            wrong += as_bytes(tensors) != as_bytes(content(number))

    for link in actions:
        source, target, channel = link
        item = position[link]
        position[link] += 1
        number = (links.index(link) * messages + item) * 7 + seed
        tag = make_tag(channel, item)
        if source == rank:
            sent = content(number)
            transport.send(sent, target, tag)
            for tensor in sent:  # which is the sender's again
                tensor.zero_()
        else:
            tickets.append((transport.recv(source, tag), number))
        # A rank that blocked here, before it has sent everything, could wait for one that waits for it.
        while tickets and own.random() < 0.7 and tickets[0][0].done():
            ticket, number = tickets.pop(0)
            kept.append((ticket.wait(), number))
            received += 1
        if len(kept) > 60:
            check(own.randrange(60))
    own.shuffle(tickets)
    for ticket, number in tickets:
        kept.append((ticket.wait(), number))
        received += 1
        check(own.choice([0, 0, 3]))
    check(len(kept))
    transport.close()
    return received, wrong


@pytest.mark.parametrize("kind", ["shm", "tcp", "shm+tcp"])
def test_every_byte_of_random_traffic(ranks4: RankPool, kind: str) -> None:
    results = ranks4.run(stress, MESSAGES, 1, kind, timeout_s=MESSAGES / 20)
    assert sum(received for received, _ in results) == MESSAGES
    assert [wrong for _, wrong in results] == [0] * 4
