"""Shared memory between real ranks: who uses it, how many slots they need, and what becomes of a peer."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from ds_ext.comm import native, native_transport
from ds_ext.comm.native_transport import NativeTransport
from ds_ext.comm.transport import create_transport
from ds_ext.engine.messages import max_held
from ds_ext.parallel.layout import ParallelLayout
from ds_ext.pipe_schedules import get_schedule
from ds_ext.pipe_schedules.lowering import lower
from tests.distributed.test_torch_p2p import CPU, catch
from tests.ranks import RankPool

pytestmark = pytest.mark.quick

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
        assert refusal.startswith("transport: ") and "rank 2 and rank 3" in refusal


def unlisted(rank: int) -> str:
    transport = create_transport("shm", timeout_s=20, device=CPU, pairs=[(0, 1)])
    peer = 1 - rank
    return catch(lambda: transport.recv(peer, 0) if rank == 0 else transport.send([torch.zeros(1)], peer, 0))


def test_an_unlisted_pair_is_refused(ranks2: RankPool) -> None:
    for message in ranks2.run(unlisted):
        assert "no link from rank 1 to rank 0" in message and "pairs=" in message


# --- the engine ---


def test_slots_are_those_of_the_timetable() -> None:
    """1F1B: a device holds as many activations as it has forwards before its first backward, and one more."""
    timetable = get_schedule("1f1b").timetable(4, 8, {})
    layout = ParallelLayout(timetable.placement, 1, 1)
    slots = max_held(layout, [lower(timetable)])
    assert {pair: slots[pair] for pair in ((0, 1), (1, 2), (2, 3))} == {(0, 1): 4, (1, 2): 3, (2, 3): 2}
    assert {slots[pair] for pair in ((3, 2), (2, 1), (1, 0))} == {2}


# --- faults ---


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
    assert second.startswith("rank 0: recv from rank 1 of tag 1 (channel 0, item 1): no progress within")


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
