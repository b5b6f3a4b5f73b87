"""Shared memory between real ranks: who uses it, what a dead or stopped peer does, and every byte under stress."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_ext.comm import _native, ends, native, native_transport
from ds_ext.comm.native_transport import NativeTransport
from ds_ext.comm.tickets import RecvTicket
from ds_ext.comm.transport import create_transport, make_tag
from ds_ext.engine.link_slots import link_slots
from ds_ext.errors import TransportError
from ds_ext.layout import ParallelLayout
from ds_ext.pipe_schedules import get_schedule
from ds_ext.pipe_schedules.lower import lower
from tests.distributed.test_torch_p2p import CPU, catch
from tests.engine_runs import MODEL, Job, train
from tests.ranks import RankError, RankPool

LARGE = native_transport.COPIED_BYTES  # floats: used where they arrive


both = pytest.mark.parametrize("kind", ["shm", "tcp"])


def make(kind: str = "shm", timeout_s: float = 20.0) -> NativeTransport:
    transport = create_transport(kind, timeout_s=timeout_s, device=CPU)
    assert isinstance(transport, NativeTransport)
    return transport


# --- who uses it ---


def choose(rank: int, other_host: int | None, pairs: dict[tuple[int, int], int]) -> tuple[str, str]:
    original = native.host_id
    if rank == other_host:
        native.host_id = lambda: "elsewhere"
    try:
        transport = create_transport("auto", timeout_s=20, device=CPU, pairs=pairs)
        refusal = catch(lambda: create_transport("shm", timeout_s=20, device=CPU, pairs=pairs).close())
    finally:
        native.host_id = original
    for source, target in pairs:
        if rank == source:
            transport.send([torch.tensor(5)], target, 0)
        if rank == target:
            assert transport.recv(source, 0).wait()[0].item() == 5
    transport.close()
    return transport.name, refusal


def test_auto_takes_it_where_all_links_stay_on_one_host(ranks4: RankPool) -> None:
    chain = dict.fromkeys([(0, 1), (1, 2), (2, 3), (3, 2)], 2)
    on_one_host = dict.fromkeys([(0, 1), (1, 2)], 2)
    assert ranks4.run(choose, None, chain) == [("shm", "no error")] * 4
    for pairs in (on_one_host, {}):
        assert ranks4.run(choose, 3, pairs) == [("shm", "no error")] * 4
    for name, refusal in ranks4.run(choose, 3, chain):
        assert name == "torch"
        assert refusal == (
            '"transport": "shm" cannot be used: rank 2 and rank 3, which exchange messages, are on different hosts. '
            'Use "auto" or "torch".'
        )


def unlisted(rank: int) -> str:
    transport = create_transport("shm", timeout_s=20, device=CPU, pairs=[(0, 1)])
    peer = 1 - rank
    return catch(lambda: transport.recv(peer, 0) if rank == 0 else transport.send([torch.zeros(1)], peer, 0))


def test_an_unlisted_pair_is_refused(ranks2: RankPool) -> None:
    for message in ranks2.run(unlisted):
        assert "no link from rank 1 to rank 0" in message and "pairs=" in message


# --- the engine ---


@dataclasses.dataclass(frozen=True)
class JobOver(Job):
    transport: str = "auto"

    def config(self, replicas: int) -> dict[str, Any]:
        made = super().config(replicas)
        made["ds_ext"]["transport"] = self.transport
        return made


def train_in_place(rank: int, job: JobOver) -> tuple[dict[str, Any], int]:
    """Train with messages, however small, that are used where they arrive; and how many were at most."""
    most, tensors, copied = 0, NativeTransport._tensors, native_transport.COPIED_BYTES

    def watched(self: NativeTransport, message: _native.Message, ticket: RecvTicket) -> tuple[Tensor, ...]:
        nonlocal most
        made = tensors(self, message, ticket)
        most = max(most, *self.held().values())
        return made

    NativeTransport._tensors, native_transport.COPIED_BYTES = watched, 0
    try:
        return train(rank, job), most
    finally:
        NativeTransport._tensors, native_transport.COPIED_BYTES = tensors, copied


@pytest.mark.parametrize("schedule", ["1f1b", "bitpipe_zb"])
def test_trains_bitwise_as_over_gloo(ranks4: RankPool, schedule: str) -> None:
    job = JobOver(schedule, 4, 1, 1, micro_batches=8, model=MODEL, steps=5)
    over_gloo = ranks4.run(train, dataclasses.replace(job, transport="torch"), timeout_s=120)
    for kind in ("shm", "tcp"):
        in_place, most = zip(
            *ranks4.run(train_in_place, dataclasses.replace(job, transport=kind), timeout_s=120), strict=True
        )
        for key in ("losses", "norms", "digests"):
            assert [one[key] for one in in_place] == [one[key] for one in over_gloo], kind
        assert max(most) > 1


def test_slots_are_those_of_the_timetable() -> None:
    """1F1B: a device holds as many activations as it has forwards before its first backward, and one more."""
    timetable = get_schedule("1f1b").timetable(4, 8, {})
    layout = ParallelLayout(timetable.placement, 1, 1)
    slots = link_slots(layout, [lower(timetable)])
    assert {pair: slots[pair] for pair in ((0, 1), (1, 2), (2, 3))} == {(0, 1): 4, (1, 2): 3, (2, 3): 2}
    assert {slots[pair] for pair in ((3, 2), (2, 1), (1, 0))} == {2}


# --- faults ---


def killed(rank: int, kind: str) -> None:
    """Rank 1 is killed while its forked child lives on; rank 0 waits for it, and rank 2 sends to it."""
    ends.SEND_WINDOW_BYTES = 1 << 20
    transport = make(kind)
    if rank == 1:
        transport.recv(2, 0).wait()
        if os.fork() == 0:
            time.sleep(4)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    if rank == 0:
        message = catch(lambda: transport.recv(1, 5).wait())
        assert message.startswith("rank 0: recv from rank 1 of tag 5")
    elif rank == 2:
        block = torch.zeros(1 << 19, dtype=torch.uint8)
        message = catch(lambda: [transport.send([block], 1, item) for item in range(9)])
        assert message.startswith("rank 2: send to rank 1 of tag ")
    else:
        return
    assert "rank 1 has ended, which closed the connection" in message and time.monotonic() - start < 2
    raise TransportError("noticed in time")


@both
def test_a_killed_rank_is_noticed_although_its_child_lives(ranks4: RankPool, kind: str) -> None:
    with pytest.raises((RankError, TransportError)) as caught:
        ranks4.run(killed, kind)
    told = "\n".join([str(caught.value), *caught.value.__notes__])
    assert told.count("noticed in time") >= 2 and "AssertionError" not in told


def stopped(rank: int, kind: str) -> list[str]:
    """Rank 1 is stopped, goes on in time, is stopped again and not waited for any longer."""
    transport, told = make(kind), []
    processes = [0, 0]
    dist.all_gather_object(processes, os.getpid())
    if rank == 1:
        for item in range(2):
            transport.recv(0, item).wait()
            transport.send([torch.tensor(item)], 0, item)
        dist.barrier()
        return told
    os.kill(processes[1], signal.SIGSTOP)
    wake = threading.Timer(0.3, os.kill, (processes[1], signal.SIGCONT))
    wake.start()
    transport.send([torch.zeros(1)], 1, 0)
    told.append(str(transport.recv(1, 0).wait()[0].item()))
    wake.join()
    os.kill(processes[1], signal.SIGSTOP)
    transport.send([torch.zeros(1)], 1, 1)
    told.append(catch(lambda: transport.recv(1, 1).wait(timeout_s=0.3)))
    os.kill(processes[1], signal.SIGCONT)
    dist.barrier()
    return told


@both
def test_a_stopped_rank_is_waited_for_within_the_limit(ranks2: RankPool, kind: str) -> None:
    first, second = ranks2.run(stopped, kind)[0]
    assert first == "0"
    assert second.startswith("rank 0: recv from rank 1 of tag 1 (channel 0, item 1): nothing moved within")


def closed(rank: int, kind: str) -> str:
    transport = make(kind)
    if rank == 1:
        transport.send([torch.tensor(3)], 0, 0)
        transport.close()
        dist.barrier()
        return ""
    first = transport.recv(1, 0).wait()[0].item()
    text = catch(lambda: transport.recv(1, 1).wait())
    dist.barrier()
    return f"{first} {text}"


@both
def test_a_peer_that_has_closed_is_not_waited_for(ranks2: RankPool, kind: str) -> None:
    text = ranks2.run(closed, kind)[0]
    assert (
        text.startswith("3 rank 0: recv from rank 1 of tag 1") and "rank 1 has closed its transport" in text
    )


# --- stress ---

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64, torch.float8_e5m2]
SHAPES = [(), (0,), (1,), (3, 5), (64, 17), (2, 1, 3, 4), (257, 33), (4, 5000), (3, 100_000)]


def content(seed: int) -> list[Tensor]:
    """What a message holds, from its number alone: one to three tensors of any bits."""
    draw = random.Random(seed)
    made = []
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        dtype = draw.choice(DTYPES)
        shape = SHAPES[min(int(draw.expovariate(0.7)), len(SHAPES) - 1)]
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


def stress(rank: int, messages: int, seed: int, kind: str = "shm") -> tuple[int, int]:
    """Random tags, sizes, dtypes, orders and lifetimes among all ranks; (messages received, wrong ones)."""
    size = dist.get_world_size()
    plan = random.Random(seed)
    links = [(a, b, c) for a in range(size) for b in range(size) if a != b for c in (0, 1, 2)]
    lists: dict[tuple[int, int, int], int] = dict.fromkeys(links, 0)
    for _ in range(messages):
        lists[plan.choice(links)] += 1
    transport, own = make(kind, 60), random.Random(seed * 10 + rank)
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


@both
def test_every_byte_of_random_traffic(ranks4: RankPool, kind: str) -> None:
    results = ranks4.run(stress, 2000, 1, kind, timeout_s=120)
    assert sum(received for received, _ in results) == 2000
    assert [wrong for _, wrong in results] == [0] * 4
