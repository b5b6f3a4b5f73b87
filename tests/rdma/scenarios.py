"""Scenarios of two ranks in the guest. Each rank calls the function in a separate process (run_scenarios.py)."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator

from ds_ext.cli.hosts.rdma import RdmaProbe, try_rdma
from ds_ext.comm import _native
from ds_ext.comm.link_selection import LINK_KINDS, RankOffers, kind_class, select_links
from ds_ext.comm.rdma.devices import choose_port, device_ports
from ds_ext.comm.shm_handshake import host_id
from ds_ext.errors import TransportError
from tests.rdma.peer import UINT8, Context, Range, open_files


def all_types(context: Context) -> None:
    """Messages with every dtype, 0 to 8 dimensions, empty tensors, several tensors, or more than a slab are equal."""
    peer = context.peer()
    messages = list(_assorted())
    for tag, tensors in enumerate(messages):
        peer.send(tag, tensors)
        message = peer.recv()
        assert message.tag == tag
        peer.compare(message, tensors)
        del message
    peer.close()


def _assorted() -> Iterator[list[Range]]:
    chance = random.Random(1)
    for code, (_, size) in enumerate(_native.ELEMENT_TYPES):
        for shape in ([], [0], [3], [5, 0, 2], [2, 3, 4], [1, 2, 1, 2, 1, 2, 1, 3]):
            yield [(code, shape, chance.randrange(1000) * size)]
    yield [(UINT8, [i], i) for i in range(40)]
    for size in (1, 63, 64, 65, 4096, 65536, 1 << 20, (1 << 20) + 1, 5 << 20):
        yield [(UINT8, [size], 11), (UINT8, [], size)]


def random_order(context: Context, count: int = 5_000, most: int = 1 << 16) -> None:
    """10,000 messages in both directions at once, with random channels, sizes and lifetimes, are equal."""
    peer = context.peer()
    script, others = _script(peer.rank, count, most), _script(peer.other, count, most)
    expected = {rank_tag: tensors for rank_tag, tensors in others}
    chance = random.Random(peer.rank)
    kept: list[_native.Message] = []
    received = 0

    def handle(message: _native.Message) -> None:
        nonlocal received
        peer.compare(message, expected.pop((message.tag, message.seq)))
        received += 1
        kept.append(message)
        while len(kept) > 12 or (kept and chance.random() < 0.6):
            kept.pop(chance.randrange(len(kept)))

    for (tag, _), tensors in script:
        peer.send(tag, tensors)
        for message in [*peer.waiting, *peer.port.take()]:
            handle(message)
        peer.waiting.clear()
    while received < count:
        handle(peer.recv())
    kept.clear()
    peer.close()


def _script(rank: int, count: int, most: int) -> list[tuple[tuple[int, int], list[Range]]]:
    """Return the messages of a rank: ((tag, number on its channel), tensors)."""
    chance = random.Random(100 + rank)
    channels = [0] * 8
    made = []
    for _ in range(count):
        channel = chance.randrange(8)
        size = int(most ** chance.random()) if chance.random() < 0.2 else chance.randrange(200)
        tensors = [(UINT8, [size], chance.randrange(1 << 20)) for _ in range(chance.choice((1, 1, 1, 3)))]
        made.append(((channel << 16 | chance.randrange(1 << 16), channels[channel]), tensors))
        channels[channel] += 1
    return made


def no_credits(context: Context) -> None:
    """If the receiver takes no messages, the sender waits, and no message is lost."""
    peer = context.peer(window_bytes=1 << 20)
    if peer.rank == 0:
        sent = 0
        while peer.try_send(sent, [(UINT8, [10], sent)]):
            sent += 1
        assert sent == 256, sent  # the limit of slots
        try:
            peer.send(sent, [(UINT8, [10], 0)], limit_s=0.3)
            raise AssertionError("a message was sent without a link credit")
        except TimeoutError:
            pass
        peer.line.put(sent)
        peer.send(sent, [(UINT8, [10], sent)])
        peer.settle()
        large = 0
        while peer.try_send(large, [(UINT8, [300_000], large)]):
            large += 1
        assert large == 3, large  # 1 MiB of unreceived bytes
        peer.line.put(large)
    else:
        sent = peer.line.get()
        for number in range(sent + 1):
            message = peer.recv()
            assert message.tag == number
            peer.compare(message, [(UINT8, [10], number)])
            del message
        for number in range(peer.line.get()):
            peer.compare(peer.recv(), [(UINT8, [300_000], number)])
    peer.close()


def many_links(context: Context) -> None:
    """Links that are opened and closed leave no file, no thread and no memory."""
    files = memory = 0
    for cycle in range(10):
        peer = context.peer()
        peer.send(cycle, [(UINT8, [1000], cycle)])
        peer.compare(peer.recv(), [(UINT8, [1000], cycle)])
        peer.close()
        del peer
        if cycle == 4:
            time.sleep(0.3)
            files, memory = open_files(), _mapped_kib()
    deadline = time.monotonic() + 5
    while open_files() > files and time.monotonic() < deadline:
        time.sleep(0.1)
    assert open_files() <= files, (files, open_files())
    assert _mapped_kib() < memory + 8192, (memory, _mapped_kib())
    assert threading.active_count() == 1


def _mapped_kib() -> int:
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("VmRSS")).split()[1])


def forked_child(context: Context) -> None:
    """The exit of a forked child, such as a data loader's worker, does not affect the links."""
    peer = context.peer()
    for round_ in range(5):
        child = os.fork()
        if child == 0:
            os._exit(0)
        peer.send(round_, [(UINT8, [200_000], round_)])
        peer.compare(peer.recv(), [(UINT8, [200_000], round_)])
        os.waitpid(child, 0)
    peer.close()


def probed(context: Context) -> None:
    """`doctor --hostfile` writes from rank 0 to rank 1."""
    job = bytes(range(16))
    choice = choose_port(device_ports(), context.addresses[context.rank])
    probe = RdmaProbe(choice, sends=context.rank == 0)
    probe.connect(context.line.exchange(probe.greeting(job)), job)
    context.line.exchange("connected")
    if context.rank == 0:
        probe.send()
    else:
        gbit_s = probe.receive()
        assert 0.001 < gbit_s < 100, gbit_s
        print(f"{gbit_s:.3f} Gbit/s", flush=True)
    context.line.exchange("done")
    probe.close()


def itself(context: Context) -> None:
    """The trial of `doctor` works, and the device has the expected address."""
    if context.rank:
        return
    choice = choose_port(device_ports(), context.addresses[0], must_match=True)
    assert try_rdma(choice) == 1 << 20
    try:
        choose_port(device_ports(), "10.77.0.1", must_match=True)
        raise AssertionError("the address of another host was accepted")
    except TransportError as error:
        assert context.addresses[0] in str(error), error


def chosen(context: Context) -> None:
    """`auto` selects shm within a host, and between hosts rdma, or tcp without a device."""
    os.environ["MASTER_ADDR"] = context.addresses[0]
    port = _native.Port()
    classes = {kind: kind_class(kind) for kind in LINK_KINDS}
    setups = {kind: cls(context.rank, port, context.addresses) for kind, cls in classes.items()}
    try:
        offers = {kind: setup.offer() for kind, setup in setups.items()}
        # Two guests have booted from the same kernel, but not at the same moment.
        mine = RankOffers(host_id(), "guest", offers)
        theirs = context.line.exchange(mine)
        ranks = [mine, theirs] if context.rank == 0 else [theirs, mine]
        for missing, expected in (((), "rdma"), (("rdma",), "tcp")):
            refused = dict.fromkeys(missing, "it has no device")
            checks = {kind: cls.incompatibility for kind, cls in classes.items()}
            selection = select_links(ranks, [(0, 1), (1, 0)], checks, refused)
            one_host = context.addresses[0] == context.addresses[1]
            assert set(selection.kinds.values()) == {"shm" if one_host else expected}, selection
    finally:
        for setup in setups.values():
            setup.close()


def with_pyverbs(context: Context) -> None:
    """The native code and an independent rank with pyverbs exchange messages in both directions."""
    if context.rank == 1:
        return _pyverbs_side(context)
    peer = context.peer()
    float32, int64 = (
        next(c for c, (name, _) in enumerate(_native.ELEMENT_TYPES) if name == n)
        for n in ("float32", "int64")
    )
    peer.send(5 << 16 | 9, [(float32, [3, 5], 64), (int64, [], 1 << 12)])
    peer.send(5 << 16 | 10, [(UINT8, [0], 0)])
    peer.send(6 << 16, [(UINT8, [300_000], 77)])
    peer.settle()
    deadline = time.monotonic() + 10
    while peer.outgoing.in_flight() != (0, 0, 0) and time.monotonic() < deadline:
        peer.port.wait_credit(peer.outgoing, 0.03)
    assert peer.outgoing.in_flight() == (0, 0, 0)
    first = peer.recv()
    assert first.tag == 3 << 16 | 1
    peer.compare(first, [(float32, [4, 25], 100)])
    second = peer.recv()
    peer.compare(second, [(UINT8, [], 9)])
    del first, second
    while not peer.port.wait_arrival(0.03):  # asleep, so that receipts go out
        peer._check(peer.incoming, deadline, "recv")
    try:
        peer.port.take()
        raise AssertionError("a damaged descriptor was accepted")
    except _native.DescriptorError as error:
        assert "checksum" in str(error), error
    context.line.exchange(None)


def _pyverbs_side(context: Context) -> None:
    from tests.rdma.pyverbs_peer import PyverbsPeer, describe

    pool = context.pool.memory
    peer = PyverbsPeer(context.line, context.addresses[1], 1 << 20)
    (one, two), body = peer.next_message()
    # magic, version, size, dtype, dimensions, tag, index, count, seq, link_seq, acknowledged, offset, bytes, body
    assert one[1:5] == (1, 256, 8, 2) and one[5:10] == (5 << 16 | 9, 0, 2, 0, 0), one
    assert one[11:14] == (0, 60, 128) and one[14:16] == (3, 5), one
    assert two[3:10] == (5, 0, 5 << 16 | 9, 1, 2, 0, 0) and two[11:14] == (64, 8, 128), two
    assert body[:60] == pool[64:124] and body[64:72] == pool[1 << 12 : (1 << 12) + 8]
    (empty,), body = peer.next_message()
    assert (empty[8:10], empty[12:14], body) == ((1, 1), (0, 0), b""), empty
    (large,), body = peer.next_message()
    assert (large[8:10], large[12]) == ((0, 2), 300_000), large
    assert body[:300_000] == pool[77:300_077]
    peer.give_back(1, [])
    peer.give_back(3, [large[22], one[22], empty[22]])
    float32 = 8
    peer.send(bytes(pool[100:500]), 4096, describe(3 << 16 | 1, 0, float32, [4, 25], 400, 4096, 448))
    peer.send(bytes(pool[9:10]), 0, describe(3 << 16 | 2, 1, 1, [], 1, 0, 64))
    back: list[int] = []
    while len(back) < 2:
        taken, places = peer.next_receipt()
        assert 0 <= taken <= 2
        back += places
    assert sorted(back) == [0, 4096], back
    damaged = bytearray(describe(3 << 16 | 3, 2, 1, [], 1, 0, 64))
    damaged[40] ^= 1
    peer.send(b"x", 0, bytes(damaged))
    context.line.exchange(None)


def slight_loss(context: Context) -> None:
    """With 0.1 % packet loss, all messages pass."""
    netem("loss 0.1%")
    try:
        random_order(context, count=600, most=1 << 20)
    finally:
        netem(None)


def netem(rule: str | None) -> None:
    action = (
        ["add", "dev", "eth0", "root", "netem", *rule.split()] if rule else ["del", "dev", "eth0", "root"]
    )
    subprocess.run(["tc", "qdisc", *action], check=True)
