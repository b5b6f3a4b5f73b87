"""tcp between real ranks: two hosts, what becomes of a peer, first causes, and what is left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_ext.comm.native_transport import NativeTransport
from ds_ext.comm.transport import create_transport
from ds_ext.errors import ConfigError, PeerGone
from tests.distributed.test_shm import make
from tests.distributed.test_torch_p2p import CPU, catch
from tests.engine_runs import MODEL, Job, train
from tests.hosts.network import ADDRESSES, ADDRESSES_6, INTERFACE, NoHosts, inside, two_hosts
from tests.ranks import RankPool


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(two_hosts())
        except NoHosts as error:
            pytest.skip(f"no network namespaces: {error}")


@contextlib.contextmanager
def on_host(rank: int, hosts: tuple[str, str], master: str = ADDRESSES[0]) -> Iterator[None]:
    """Ranks 0 and 1 live on the first host, the others on the second, as a launcher sets them up."""
    settings = {"MASTER_ADDR": master, "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": INTERFACE}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        with inside(hosts[rank // 2]):
            yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """What the transport says at start-up."""
    lines: list[str] = []
    logger, handler = logging.getLogger("ds_ext.comm.native"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def train_on_hosts(rank: int, hosts: tuple[str, str], job: Job) -> tuple[dict[str, Any], list[str]]:
    with on_host(rank, hosts), told() as lines:
        return train(rank, job), lines


def test_auto_trains_over_shared_memory_inside_and_tcp_between_two_hosts(
    ranks4: RankPool, hosts: tuple[str, str]
) -> None:
    job = Job("bitpipe", 4, 1, 1, micro_batches=4, model=MODEL, steps=3)
    results = ranks4.run(train_on_hosts, hosts, job, timeout_s=120)
    lines = results[0][1]
    assert lines[0].startswith("transport: shm+tcp; links: ")
    assert "ranks 0-1" in lines[0] and "ranks 2-3" in lines[0] and "are on different hosts" in lines[0]
    expected = ranks4.run(train, dataclasses.replace(job, transport="torch"), timeout_s=120)
    for (got, _), wanted in zip(results, expected, strict=True):
        assert [got[key] for key in ("losses", "digests")] == [wanted[key] for key in ("losses", "digests")]


def by_given_addresses(rank: int, hosts: tuple[str, str]) -> tuple[str, str, str]:
    """IPv6 by one address for each host; an address that is another host's; too few of them."""
    pairs = dict.fromkeys([(0, 2), (2, 0), (1, 3)], 2)

    def over(node_ips: list[str], kind: str = "auto") -> NativeTransport:
        made = create_transport(kind, timeout_s=20, device=CPU, pairs=pairs, node_ips=node_ips)
        assert isinstance(made, NativeTransport)
        return made

    with on_host(rank, hosts, ADDRESSES_6[0]):
        transport = over(list(ADDRESSES_6))
        if rank == 0:
            transport.send([torch.tensor(6)], 2, 0)
        if rank == 2:
            assert transport.recv(0, 0).wait()[0].item() == 6
        transport.close()
        wrong = catch(lambda: over([ADDRESSES[1], ADDRESSES[0]]))
        try:
            over([*ADDRESSES, "10.77.0.3"])
        except ConfigError as error:
            return transport.name, wrong, str(error)
        return transport.name, wrong, "no error"


def silent(rank: int, hosts: tuple[str, str]) -> str:
    """The cable is pulled, so that nobody closes anything."""
    with on_host(rank, hosts):
        transport = create_transport("tcp", timeout_s=20, device=CPU, pairs={(0, 2): 2, (2, 0): 2})
    if rank == 0:
        transport.send([torch.tensor(1)], 2, 0)
        transport.recv(2, 0).wait()
        with inside(hosts[0]):
            os.system(f"ip link set {INTERFACE} down")
        text = catch(lambda: transport.recv(2, 1).wait())
        dist.barrier()
        return text
    if rank == 2:
        transport.recv(0, 0).wait()
        transport.send([torch.tensor(2)], 0, 0)
    dist.barrier()
    return ""


def test_addresses_that_are_given_and_a_host_that_is_silent(ranks4: RankPool, hosts: tuple[str, str]) -> None:
    for name, wrong, few in ranks4.run(by_given_addresses, hosts):
        assert name == "tcp"
        assert re.search(r"node_ips: rank 0 .* host 0 .*10\.77\.0\.2.* MASTER_ADDR is fd77::1", wrong)
        assert re.search(r"node_ips: .* 4 ranks or 2 hosts \(got 3\)", few)
    text = ranks4.run(silent, hosts)[0]
    assert (
        text.startswith("rank 0: recv from rank 2 of tag 1") and "its host has not answered for 2 s" in text
    )


def stopped_for_long(rank: int) -> tuple[float, str]:
    """A peer that is stopped for longer than a silent host is waited for goes on as if nothing had been."""
    transport = make("tcp")
    processes = [0, 0]
    dist.all_gather_object(processes, os.getpid())
    if rank == 1:
        for item in range(40):
            transport.recv(0, item).wait()
        transport.send([torch.tensor(7.0)], 0, 0)
        transport.close()
        return 0.0, ""
    os.kill(processes[1], signal.SIGSTOP)
    wake = threading.Timer(2.8, os.kill, (processes[1], signal.SIGCONT))
    wake.start()
    for item in range(40):  # more than the sockets hold
        transport.send([torch.zeros(1 << 20, dtype=torch.uint8)], 1, item)
    early = catch(lambda: transport.recv(1, 0).wait(timeout_s=20))
    wake.join()
    transport.close()
    return time.monotonic(), early


def test_a_stopped_process_is_no_silent_host(ranks2: RankPool) -> None:
    assert ranks2.run(stopped_for_long)[0][1] == "no error"


def first_cause(rank: int, kind: str) -> tuple[str, str]:
    """Rank 2 fails; rank 1 waits for it, rank 0 for rank 1."""
    transport = make(kind)
    text, cause = "", ""
    if rank == 2:
        transport.abort("ValueError: the loss is not a number")
    elif rank < 2:
        try:
            transport.recv(rank + 1, 0).wait()
        except PeerGone as error:
            text, cause = str(error), str(error.cause)
            assert (error.rank, error.peer, error.op, error.tag) == (rank, rank + 1, "recv from", 0)
    dist.barrier()
    return text, cause


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_the_first_cause_travels_along_a_chain(ranks4: RankPool, kind: str) -> None:
    for rank, (text, cause) in enumerate(ranks4.run(first_cause, kind)[:2]):
        assert cause == "rank 2: ValueError: the loss is not a number"
        assert text.startswith(f"rank {rank}: recv from rank {rank + 1} of tag 0") and text.endswith(cause)
