"""Messages between GPUs: the protocol over streams that are late, in real ranks. tests/gpu/ has the tests on a GPU."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_ext.comm import native, wire
from ds_ext.comm.channels import GPU_CONTROL
from ds_ext.comm.cuda.header import Header, Route, packed
from ds_ext.comm.cuda.transport import GpuTransport
from ds_ext.comm.endpoints import both_ways
from ds_ext.comm.native_transport import NativeTransport
from ds_ext.comm.transport import create_transport, make_tag
from ds_ext.errors import PeerGone, ProtocolError, TransportError, TransportTimeout
from tests.distributed.test_torch_p2p import catch
from tests.engine_runs import MODEL, Job, train
from tests.late_device import InlineDevice, LateDevice
from tests.ranks import RankPool

CPU = torch.device("cpu")
SHAPES = [(4000,), (9, 441), (31, 129)]


def connect(device: LateDevice, direct: bool = True, max_held: int = 2) -> GpuTransport:
    host = create_transport("shm", timeout_s=20, device=CPU)
    assert isinstance(host, NativeTransport)
    peers = [rank for rank in range(host.world_size) if rank != host.rank]
    return GpuTransport(host, device, peers, dict.fromkeys(peers, max_held) if direct else {})


def message(number: int, sender: int, answers: bool) -> list[Tensor]:
    """What a message holds, from its number alone: one tensor for the host and others for the GPU.

    Where one rank only ``answers``, its messages have none for the GPU: its streams do not hold up the other's.
    """
    draw = torch.Generator().manual_seed(number * 2 + sender)
    shapes = [] if answers and sender == 1 else random.Random(number).choices(SHAPES, k=2 - number % 2)
    return [torch.tensor([number]), *(torch.randn(shape, generator=draw) for shape in shapes)]


def traffic(
    rank: int, device: LateDevice, messages: int, direct: bool, answers: bool = False
) -> tuple[int, dict[Route, int]]:
    """Both ranks send and receive, keep what they got for a while and read it late; wrong contents, and counts."""
    transport, own, peer = connect(device, direct), random.Random(rank), 1 - rank
    kept: deque[tuple[list[Tensor], int]] = deque()
    results: list[tuple[Any, bytes]] = []
    wrong = 0

    def use(tensors: list[Tensor], number: int) -> None:
        for tensor, expected in zip(tensors, message(number, peer, answers)[1:], strict=True):
            results.append((device.read(tensor), expected.numpy().tobytes()))

    for number in range(messages):
        tag = make_tag(number % 2, number // 2)
        host, *others = message(number, rank, answers)
        ours = [device.tensor(other) for other in others]
        transport.send([host, *ours], peer, tag)
        host.zero_()
        while ours:  # which are the sender's again
            device.fill(ours.pop(), 0x55)
        head, *tensors = transport.recv(peer, tag).wait()
        wrong += int(head) != number
        use(tensors, number)
        kept.append((tensors, number))
        del tensors
        while len(kept) > own.randrange(4):  # read again, as a backward would
            use(*kept.popleft())
        if number % 8 == 7:
            wrong += sum(result() != expected for result, expected in results)
            results.clear()
    while kept:
        use(*kept.popleft())
    wrong += sum(result() != expected for result, expected in results)
    dist.barrier()
    transport.close()
    return wrong, dict(transport.counts)


def all_waits(rank: int, folder: Path, messages: int, direct: bool) -> tuple[int, dict[Route, int]]:
    return traffic(rank, LateDevice(folder, rank), messages, direct)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "staged"])
def test_every_byte_although_streams_are_late(ranks2: RankPool, tmp_path: Path, direct: bool) -> None:
    for wrong, counts in ranks2.run(all_waits, tmp_path, 60, direct):
        assert wrong == 0
        assert counts[Route.DIRECT] > 10 if direct else counts[Route.STAGED] == 60


# What the transport must not leave out, by the way of the contents, and the stream of rank 1 whose delay shows it.
NEEDED = {
    True: {
        "outward follows main": "main",  # the message is made before it is copied
        "keep for outward": "outward",  # and its memory is used again after
        "main waits for their event": "outward",  # it is here before it is used
        "outward waits for their event": "main",  # the slot is free before it is written again
        "releases follows main": "main",  # and that is after its last use
    },
    False: {"done": "main"},  # the message is on the host before it is sent
}


def leave_out(rank: int, folder: Path, messages: int) -> list[tuple[bool, str]]:
    """Which of the waits can be left out without wrong contents, however late the streams are."""
    unnoticed = []
    for direct, needed in NEEDED.items():
        for skip, slow in needed.items():
            slower = slow if rank == (slow == "main" and direct) else ""
            for late_s in (0.002, 0.01, 0.05):  # a busy machine is late itself
                device = LateDevice(folder, rank, late_s, slower, skip)
                found = [0, 0]
                dist.all_gather_object(found, traffic(rank, device, messages, direct, answers=True)[0])
                if any(found):
                    break
            else:
                unnoticed.append((direct, skip))
    return unnoticed


def test_every_wait_is_needed(ranks2: RankPool, tmp_path: Path) -> None:
    """The streams of these tests notice each of the waits that a GPU needs."""
    assert ranks2.run(leave_out, tmp_path, 30, timeout_s=120) == [[], []]


# --- what else it promises ---


def promises(rank: int, folder: Path) -> None:
    """One conversation of two ranks, in which each part is a promise of the interface."""
    peer = 1 - rank
    device = LateDevice(folder, rank, reachable=rank == 0)  # so the other direction is refused
    transport = connect(device)
    large = torch.arange(1 << 16)
    # A rank that is in a collective after its send.
    if rank == 0:
        device.main.put(lambda: time.sleep(0.3))
        transport.send([device.tensor(large)], peer, 0)
    else:
        (tensor,) = transport.recv(peer, 0).wait(timeout_s=10)
        assert device.read(tensor)() == large.numpy().tobytes()
    dist.barrier()
    # Odd tensors, in one message with those of the host, in order.
    draw = torch.Generator().manual_seed(0)
    flat, pairs = torch.randn(4, 6, generator=draw), torch.randn(5, dtype=torch.complex64, generator=draw)
    odd = [device.tensor(flat).t(), torch.empty(0, 3), torch.tensor(True), device.tensor(pairs).conj()]
    for item in range(3):
        transport.send(odd, peer, 5 + item)
    for item in range(3):
        turned, empty, flag, conjugated = transport.recv(peer, 5 + item).wait()
        assert empty.shape == (0, 3) and bool(flag) and not device.owns(flag) and device.owns(turned)
        assert turned.shape == (6, 4) and device.read(turned)() == flat.t().contiguous().numpy().tobytes()
        assert device.read(conjugated)() == pairs.conj().resolve_conj().numpy().tobytes()
    # Polling: nothing of the transport's own is shown.
    assert transport.ready() == []
    dist.barrier()
    transport.send([device.tensor(torch.ones(4))], peer, 8)
    tickets = [transport.recv(peer, 1 << 20), transport.recv(peer, 8)]
    assert transport.wait_any(tickets) == 1 and tickets[1].done() and not tickets[0].done()
    assert transport.ready() == [(peer, 8)]
    assert device.read(tickets[1].wait()[0])() == torch.ones(4).numpy().tobytes() and transport.ready() == []
    # Limits and refusals.
    begin = time.monotonic()
    assert "no progress within" in catch(lambda: transport.recv(peer, 9 << 16).wait(timeout_s=0.2))
    assert time.monotonic() - begin < 15
    assert "reserved" in catch(lambda: transport.send([large], peer, GPU_CONTROL << 16))
    assert "reserved" in catch(lambda: transport.recv(peer, GPU_CONTROL << 16))
    assert "a peer must be another rank" in catch(lambda: transport.send([large], rank, 0))
    assert "no tensors" in catch(lambda: transport.send([], peer, 0))
    assert "got 9" in catch(lambda: transport.send([torch.ones([1] * 9)], peer, 0))
    assert "got 9" in catch(lambda: transport.send([device.tensor(torch.ones([1] * 9))], peer, 0))
    # The direct way is open in one direction only, and what opened it need not be taken by a rank that has closed.
    for item in range(9, 15):
        transport.send([device.tensor(large)], peer, item)
        assert device.read(transport.recv(peer, item).wait()[0])() == large.numpy().tobytes()
    assert transport.counts[Route.DIRECT] > 0 if rank == 1 else transport.counts[Route.DIRECT] == 0
    if rank == 1:
        transport.send([device.tensor(large)], peer, 15)
        transport.close()
        dist.barrier()
    else:
        held = transport.recv(peer, 15).wait()
        dist.barrier()
        del held
        transport.progress()  # gives the slot back, which nobody takes back any more
        begin = time.monotonic()
        transport.close()
        assert time.monotonic() - begin < 15
    assert "it is closed" in catch(lambda: transport.recv(peer, 0))


def test_promises_of_the_interface(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(promises, tmp_path)


def stuck(rank: int, folder: Path) -> tuple[type[TransportError], int | None, str | None, int | None]:
    """Rank 0's stream never gets to the copy; what either rank raises."""
    device = LateDevice(folder, rank)
    transport = connect(device, direct=False)
    go_on = threading.Event()
    with pytest.raises(TransportError) as caught:
        if rank == 0:
            transport.timeout_s = 0.2
            device.main.put(lambda: go_on.wait())
            transport.send([device.tensor(torch.ones(9))], 1, 7)
        transport.recv(1 - rank, 7).wait(timeout_s=10)
    go_on.set()
    transport.close()
    return caught.type, caught.value.peer, caught.value.op, caught.value.tag


def test_a_stuck_copy_ends_within_the_limit(ranks2: RankPool, tmp_path: Path) -> None:
    assert ranks2.run(stuck, tmp_path) == [
        (TransportTimeout, 1, "send to", 7),
        (PeerGone, 0, "recv from", 7),
    ]


def damage(rank: int, folder: Path, what: str) -> str:
    """Rank 0 sends over the links what no transport of GPUs sends; rank 1 receives it as if it was one's."""
    transport, text = connect(LateDevice(folder, rank)), ""
    if rank == 0:
        body = torch.zeros(64, dtype=torch.uint8)
        head = Header(
            Route.DIRECT if what == "place" else Route.STAGED,
            0,
            [True],
            wire.describe([body], tag=0, seq=0, link_seq=0, acknowledged=0),
        )
        tag, tensors = {
            "head": (0, (torch.zeros(3, dtype=torch.uint8),)),
            "place": (0, head.pack()),
            "body": (0, head.pack()),
            "short": (0, (*head.pack(), body[1:])),
            "control": (GPU_CONTROL << 16, (packed(b'{"freed": [0]}'),)),
            "words": (GPU_CONTROL << 16, (packed(b"\xff{"),)),
        }[what]
        transport._host.send(tensors, 1, tag)
    else:
        with pytest.raises(ProtocolError) as caught:
            transport.recv(0, 0).wait(timeout_s=5)
        text = str(caught.value)
    dist.barrier()
    transport.abort("the test is over")
    transport.close()
    return text


@pytest.mark.parametrize("what", ["head", "place", "body", "short", "control", "words"])
def test_what_cannot_be_right_is_refused(ranks2: RankPool, tmp_path: Path, what: str) -> None:
    assert ranks2.run(damage, tmp_path, what)[1].startswith("rank 1: ")


# --- the choice ---


def choose(rank: int, folder: Path, gpus: tuple[str, str], polled: bool) -> str:
    """What "auto" gives to ranks with these GPUs, whose properties and whose nccl are not here to ask."""
    properties, for_gpu, torch_create = (
        torch.cuda.get_device_properties,
        native._for_gpu,
        native.torch_split.create,
    )
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=gpus[rank])
    native._for_gpu = lambda made, _, *links: GpuTransport.over(made, InlineDevice(folder, rank), *links)
    native.torch_split.create = lambda **_: SimpleNamespace(name="torch", close=lambda: None)
    try:
        transport = create_transport(
            "auto", timeout_s=20, device=torch.device("cuda", 0), pairs={(0, 1): 2}, polled=polled
        )
    finally:
        torch.cuda.get_device_properties, native._for_gpu = properties, for_gpu
        native.torch_split.create = torch_create
    if rank == 0 and transport.name != "torch":
        transport.send([torch.ones(3)], 1, 0)
    elif transport.name != "torch":
        assert transport.recv(0, 0).wait()[0].tolist() == [1.0] * 3
    transport.close()
    return transport.name


def test_auto_takes_nccl_where_that_serves(ranks2: RankPool, tmp_path: Path) -> None:
    """Not for ranks of one GPU, which nccl refuses, nor for an order that is decided at run time."""
    assert ranks2.run(choose, tmp_path, ("a", "b"), False) == ["torch"] * 2
    assert ranks2.run(choose, tmp_path, ("a", "a"), False) == ["shm"] * 2
    assert ranks2.run(choose, tmp_path, ("a", "b"), True) == ["shm"] * 2


# --- the engine ---


def train_on(rank: int, job: Job, folder: Path) -> dict[str, Any]:
    """Train as if tensors with a fraction were on a GPU, with real lifetimes in autograd."""
    original = native._make_transport
    counts: dict[Route, int] = {}

    def on_gpu(kinds: Any, timeout_s: float, device: torch.device, pairs: Any, node_ips: Any) -> Any:
        made = original(kinds, timeout_s, device, both_ways(pairs), node_ips)
        assert isinstance(made, NativeTransport)
        links = both_ways(pairs)
        gpu = GpuTransport.over(made, InlineDevice(folder, rank), links, dict.fromkeys(links, made.name))
        nonlocal counts
        counts = gpu.counts
        return gpu

    native._make_transport = on_gpu
    try:
        return {**train(rank, job), "counts": dict(counts)}
    finally:
        native._make_transport = original


@pytest.mark.parametrize("schedule", ["bitpipe_zb", "dpp"])
def test_trains_bitwise_as_over_shared_memory(ranks4: RankPool, tmp_path: Path, schedule: str) -> None:
    job = Job(schedule, 4, 1, 1, micro_batches=8, model=MODEL, steps=3, transport="shm")
    on_host = ranks4.run(train, job, timeout_s=120)
    for kind in ("shm", "tcp"):
        on_gpu = ranks4.run(train_on, dataclasses.replace(job, transport=kind), tmp_path, timeout_s=120)
        for key in ("losses", "norms", "digests"):
            assert [one[key] for one in on_gpu] == [one[key] for one in on_host], kind
        used = Route.DIRECT if kind == "shm" else Route.STAGED
        assert all(one["counts"][used] > 10 for one in on_gpu)
