"""Messages between real ranks: what every transport does, and what is particular to the one over gloo."""

from __future__ import annotations

import gc
import os
import random
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rank_pool import RankFailure
from ds_ext.comm import torch_p2p, wire
from ds_ext.comm.torch_split import SplitTransport
from ds_ext.comm.transport import Transport, create_transport, make_tag
from ds_ext.errors import TransportError
from tests.ranks import RankPool

CPU = torch.device("cpu")
TIMEOUT_S = 20.0


def make(kind: str, timeout_s: float = TIMEOUT_S) -> Transport:
    """Any transport; the one for GPUs ("split") runs its whole code, with gloo in the place of NCCL."""
    if kind != "split":
        return create_transport(kind, timeout_s=timeout_s, device=CPU)
    size = dist.get_world_size()
    pairs = [(i, j) for i in range(size) for j in range(size) if i != j]
    return SplitTransport.create(timeout_s, CPU, pairs, backend="gloo")


all_kinds = pytest.mark.parametrize("kind", ["torch", "split", "shm", "tcp"])
on_cpu = pytest.mark.parametrize("kind", ["torch", "shm", "tcp"])


def sample_messages() -> list[list[Tensor]]:
    """Every dtype, 0-d, empty, non-contiguous, several tensors, sizes that grow and shrink."""
    generator = torch.Generator().manual_seed(1)
    grid = torch.randn(8, 12, generator=generator)
    messages = [
        [grid, grid.bfloat16(), grid.half(), grid.double(), grid > 0, (grid * 9).to(torch.int8)],
        [(grid * 9).long(), (grid * 9).int(), (grid * 9).short(), (grid.abs() * 9).byte()],
        [torch.tensor(3.5)],
        [torch.empty(0, 7)],
        [torch.empty(0), torch.tensor(True), torch.empty(3, 0, dtype=torch.int32)],
        [grid.t(), grid[::2, 1::3], grid[:1].expand(5, 12), torch.complex(grid, grid).conj()],
        [torch.randn(300_000, generator=generator)],
        [torch.randn(7, generator=generator)],
        [torch.randn(2, 3, 1, 2, 1, 2, 1, 2, generator=generator)],
        [torch.randn(100_000, generator=generator, requires_grad=True)],
    ]
    return messages + messages[::-1]


def same(got: tuple[Tensor, ...], sent: list[Tensor]) -> bool:
    return len(got) == len(sent) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) and not a.requires_grad
        for a, b in zip(got, sent, strict=True)
    )


def exchange_samples(rank: int, kind: str) -> list[bool]:
    transport = make(kind)
    peer = 1 - rank
    messages = sample_messages()
    for item, message in enumerate(messages):
        transport.send(message, peer, make_tag(4, item))
    received = [transport.recv(peer, make_tag(4, item)).wait() for item in range(len(messages))]
    transport.close()
    return [same(got, sent) for got, sent in zip(received, messages, strict=True)]


@all_kinds
def test_every_kind_of_tensor_both_ways_at_once(ranks2: RankPool, kind: str) -> None:
    for result in ranks2.run(exchange_samples, kind):
        assert result == [True] * len(sample_messages())


def received_tensors_are_kept(rank: int, kind: str) -> list[float]:
    transport = make(kind)
    peer = 1 - rank
    kept = []
    for item in range(6):
        value = torch.full((1000,), float(10 * rank + item))
        transport.send([value], peer, item)
        value.fill_(-1.0)
        kept.append(transport.recv(peer, item).wait()[0])
    kept[0].fill_(-5.0)
    transport.close()
    assert len({tensor.untyped_storage().data_ptr() for tensor in kept}) == 6
    assert all(tensor.data_ptr() % 64 == 0 for tensor in kept)
    return [tensor[-1].item() for tensor in kept]


@on_cpu
def test_messages_do_not_alias(ranks2: RankPool, kind: str) -> None:
    assert ranks2.run(received_tensors_are_kept, kind) == [[-5, 11, 12, 13, 14, 15], [-5, 1, 2, 3, 4, 5]]


def many_outstanding(rank: int, kind: str) -> int:
    """300 sends per channel and direction before the first receive; channels are drained in another order."""
    transport = make(kind)
    peer = 1 - rank
    for item in range(300):
        for channel in (1, 2):
            transport.send([torch.full((item % 50,), item * channel)], peer, make_tag(channel, item))
    tickets = {
        (channel, item): transport.recv(peer, make_tag(channel, item))
        for item in range(300)
        for channel in (1, 2)
    }
    right = 0
    for channel in (2, 1):
        for item in reversed(range(300)):
            right += tickets[channel, item].wait()[0].tolist() == [item * channel] * (item % 50)
    transport.close()
    return right


@all_kinds
def test_hundreds_of_outstanding_sends(ranks2: RankPool, kind: str) -> None:
    assert ranks2.run(many_outstanding, kind) == [600, 600]


def random_traffic(rank: int, kind: str, seed: int) -> int:
    """All ranks draw the same sizes per directed channel; each interleaves the channels its own way."""
    plan = random.Random(seed)
    size = dist.get_world_size()
    lists = {
        (source, target, channel): [plan.choice([0, 1, 50, 5000]) for _ in range(plan.randrange(12))]
        for source in range(size)
        for target in range(size)
        if source != target
        for channel in (0, 3)
    }
    transport = make(kind)
    own = random.Random(seed * 100 + rank)
    actions = [key for key, sizes in lists.items() if rank in key[:2] for _ in sizes]
    own.shuffle(actions)
    position = dict.fromkeys(lists, 0)
    tickets = []
    for key in actions:
        source, target, channel = key
        item, count = position[key], lists[key][position[key]]
        position[key] += 1
        if source == rank:
            transport.send([torch.full((count,), item)], target, make_tag(channel, item))
        else:
            tickets.append((transport.recv(source, make_tag(channel, item)), [item] * count))
    own.shuffle(tickets)
    wrong = sum(ticket.wait()[0].tolist() != expected for ticket, expected in tickets)
    transport.close()
    return wrong


@all_kinds
@pytest.mark.parametrize("seed", range(3))
def test_random_interleavings_of_four_ranks(ranks4: RankPool, kind: str, seed: int) -> None:
    assert ranks4.run(random_traffic, kind, seed) == [0] * 4


def transfers_per_message(rank: int) -> list[int]:
    transport = torch_p2p.TorchTransport.create(TIMEOUT_S)
    counts = []
    if rank == 0:
        for item, count in enumerate([100, 100, 100, 20, 20, 200, 200]):
            counts.append(len(transport.send([torch.zeros(count)], 1, item).transfers))
    else:
        for item in range(7):
            transport.recv(0, item).wait()
    transport.close()
    return counts


def test_one_transfer_per_message_while_shapes_stay(ranks2: RankPool) -> None:
    assert ranks2.run(transfers_per_message)[0] == [2, 1, 1, 1, 1, 2, 1]


def polling(rank: int, kind: str) -> list[bool]:
    """done() and ready() see an arrival without waiting, although torch's own is_completed() does not."""
    transport = make(kind)
    seen = []
    if rank == 0:
        ticket, later = transport.recv(1, make_tag(1, 0)), transport.recv(1, make_tag(2, 0))
        seen.append(ticket.done())
        transport.send([torch.zeros(1)], 1, 0)
        deadline = time.monotonic() + TIMEOUT_S
        while not ticket.done() and time.monotonic() < deadline:
            time.sleep(0.001)
        seen += [ticket.done(), later.done(), transport.ready() == [(1, make_tag(1, 0))]]
        total = ticket.wait()[0].sum()
        seen.append(transport.ready() == [])
        transport.send([total], 1, 1)  # which the other rank answers at once
        seen.append(later.wait()[0].item() == 5.0)
    else:
        transport.recv(0, 0).wait()
        transport.send([torch.ones(100_000)], 0, make_tag(1, 0))
        total = transport.recv(0, 1).wait()[0].item()
        seen.append(total == 100_000.0)
        transport.send([torch.tensor(5.0)], 0, make_tag(2, 0))
    transport.close()
    return seen


@on_cpu
def test_polling(ranks2: RankPool, kind: str) -> None:
    assert ranks2.run(polling, kind) == [[False, True, False, True, True, True], [True]]


def frames_alive(rank: int) -> int:
    """How many sent frames are still held after 50 round trips."""
    transport = torch_p2p.TorchTransport.create(TIMEOUT_S)
    peer = 1 - rank
    frames = []
    for item in range(50):
        ticket = transport.send([torch.zeros(1000)], peer, make_tag(rank, item))
        frames += [weakref.ref(frame) for _, frame in ticket.transfers]
        del ticket
        transport.recv(peer, make_tag(peer, item)).wait()
    gc.collect()
    alive = sum(frame() is not None for frame in frames)
    transport.close()
    return alive


def test_finished_sends_are_let_go(ranks2: RankPool) -> None:
    assert max(ranks2.run(frames_alive)) <= 3


def one_way(rank: int, window: int) -> int:
    """A link without answers: what is kept stays within the window."""
    original, torch_p2p.SEND_WINDOW_BYTES = torch_p2p.SEND_WINDOW_BYTES, window
    try:
        transport = torch_p2p.TorchTransport.create(TIMEOUT_S)
        if rank == 1:
            return sum(int(transport.recv(0, item).wait()[0].sum()) for item in range(40))
        frames = []
        for item in range(40):
            ticket = transport.send([torch.ones(1000)], 1, item)
            frames += [weakref.ref(frame) for _, frame in ticket.transfers]
            del ticket
        gc.collect()
        alive = sum(frame() is not None for frame in frames)
        transport.close()
        return alive
    finally:
        torch_p2p.SEND_WINDOW_BYTES = original


def test_one_way_link_is_bounded(ranks2: RankPool) -> None:
    alive, total = ranks2.run(one_way, 5 * 4500)
    assert total == 40_000 and alive <= 6


def catch(action: object) -> str:
    assert callable(action)
    try:
        action()
    except TransportError as error:
        return str(error)
    return "no error"


def time_limit(rank: int, kind: str) -> tuple[str, str, float]:
    transport = make(kind, timeout_s=0.5)
    if rank == 1:
        dist.barrier()
        return "", "", 0.0
    start = time.monotonic()
    first = catch(lambda: transport.recv(1, make_tag(2, 7)).wait())
    elapsed = time.monotonic() - start
    dist.barrier()
    second = catch(lambda: transport.send([torch.zeros(1)], 1, 0))
    return first, second, elapsed


@on_cpu
def test_time_limit_names_everything(ranks2: RankPool, kind: str) -> None:
    first, second, elapsed_s = ranks2.run(time_limit, kind)[0]
    assert first.startswith(
        "rank 0: recv from rank 1 of tag 131079 (channel 2, item 7): no progress within the limit of"
    )
    assert "0.5 s" in first and "timeout_s" in first and 0.4 < elapsed_s < TIMEOUT_S
    assert "cannot be used" in second and "recv from rank 1 of tag 131079" in second


def send_time_limit(rank: int, kind: str) -> str:
    transport = make(kind, timeout_s=1.0)
    message = ""
    if rank == 0:
        transport.send([torch.zeros(10)], 1, 3)
        message = catch(transport.close)
    dist.barrier()
    return message


@on_cpu
def test_close_gives_up_on_a_send_that_nobody_takes(ranks2: RankPool, kind: str) -> None:
    message = ranks2.run(send_time_limit, kind)[0]
    assert message.startswith("rank 0: send to rank 1 of tag 3") and "limit" in message


def other_order(rank: int, kind: str) -> tuple[str, str]:
    transport = make(kind)
    if rank == 0:
        transport.send([torch.zeros(4)], 1, make_tag(1, 0))
        transport.send([torch.ones(4)], 1, make_tag(1, 1))
        dist.barrier()
        return "", ""
    late = transport.recv(0, make_tag(1, 1))
    first = catch(late.wait)
    second = catch(late.wait)
    dist.barrier()
    return first, second


@on_cpu
def test_wrong_order_is_an_error_and_never_a_wrong_tensor(ranks2: RankPool, kind: str) -> None:
    first, second = ranks2.run(other_order, kind)[1]
    assert "expected tag 65537 (channel 1, item 1) as message 0" in first and "got tag 65536" in first
    assert "cannot be used" in second


def damaged(rank: int, position: int) -> str:
    """Rank 0 plays a peer whose descriptor was changed on its way."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
    assert isinstance(group, dist.ProcessGroup)
    if rank == 0:
        frame = torch.zeros(wire.SEAL_BYTES, dtype=torch.uint8)
        made = wire.describe([torch.empty(0)], tag=9, seq=0, link_seq=0, acknowledged=0)
        wire.seal(made[0], frame)
        frame[position] ^= 0x10
        dist.send(frame, 1, group=group, tag=0)
        return ""
    transport = torch_p2p.TorchTransport(group, TIMEOUT_S)
    return catch(lambda: transport.recv(0, 9).wait())


@pytest.mark.parametrize("position", [0, 9, 15, 30, 75, 180, 255])
def test_damaged_descriptor_is_refused(ranks2: RankPool, position: int) -> None:
    assert (
        "rank 1: recv from rank 0 of tag 9 (channel 0, item 9): the checksum is wrong"
        in ranks2.run(damaged, position)[1]
    )


def peer_dies(rank: int, kind: str) -> None:
    transport = make(kind)
    if rank == 1:
        transport.recv(0, 0).wait()
        os._exit(7)
    transport.send([torch.zeros(1)], 1, 0)
    start = time.monotonic()
    message = catch(lambda: transport.recv(1, 5).wait())
    print(f"after {time.monotonic() - start:.1f} s: {message}", flush=True)
    assert message.startswith("rank 0: recv from rank 1 of tag 5") and "closed the connection" in message
    assert time.monotonic() - start < TIMEOUT_S / 2
    print("rank 0 noticed", flush=True)
    raise TransportError(message)


@on_cpu
def test_death_of_a_peer_ends_the_wait(ranks2: RankPool, kind: str) -> None:
    with pytest.raises((RankFailure, TransportError)) as caught:
        ranks2.run(peer_dies, kind)
    assert "closed the connection" in "\n".join([str(caught.value), *caught.value.__notes__])


def missing_pair(rank: int) -> str:
    transport = SplitTransport.create(TIMEOUT_S, CPU, [(0, 1)], backend="gloo")
    peer = 1 - rank
    return catch(lambda: transport.recv(peer, 0) if rank == 0 else transport.send([torch.zeros(1)], peer, 0))


def test_split_transport_refuses_an_unlisted_pair(ranks2: RankPool) -> None:
    for message in ranks2.run(missing_pair):
        assert "no communicator from rank 1 to rank 0" in message and "pairs=" in message
