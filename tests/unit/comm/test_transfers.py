"""Transfers that fail after they were started, and their time limit."""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

from ds_ext.comm import transfers as transfers_module
from ds_ext.comm.failure_state import FailureState
from ds_ext.comm.transfers import Transfer, Transfers
from ds_ext.errors import TransportError, TransportTimeout


def failed_work() -> dist.Work:
    """Return a complete operation that failed because its peer closed the connection."""
    store, groups = HashStore(), dict[int, Any]()

    def join(rank: int) -> None:
        groups[rank] = ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    work = groups[0].allreduce([torch.ones(1)])
    del groups[1]
    gc.collect()
    deadline = time.monotonic() + 30
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.01)
    return work


def test_a_failed_transfer_is_an_error() -> None:
    """On CUDA, a failed operation is complete, and only its exception shows the failure."""
    transfers = Transfers(FailureState(0), torch.device("cpu"), 5.0)
    transfers._on_cuda = True
    transfers._unfinished.append(
        Transfer(failed_work(), torch.empty(0), "recv from", 1, 7, time.monotonic() - 3.0)
    )
    with pytest.raises(TransportError) as raised:
        transfers.await_receives()
    assert (raised.value.peer, raised.value.op, raised.value.tag) == (1, "recv from", 7)
    assert re.search(r"waited 3\.\d s|after 3\.\d s", str(raised.value))


LIMIT_S = 0.3


@dataclass
class Clock:
    """Takes the place of the module ``time``: only sleep() passes time, 0.1 s at least."""

    now_s: float = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += max(0.1, seconds)


@dataclass
class TimedWork:
    """Operation of a group that is complete at ``end_s``."""

    clock: Clock
    end_s: float

    def is_completed(self) -> bool:
        return self.clock.now_s >= self.end_s - 1e-6

    def exception(self) -> None:
        return None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(transfers_module, "time", clock)
    return clock


def start_timed(transfers: Transfers, clock: Clock) -> Callable[[float], Transfer]:
    """Return a function that starts a transfer that is complete at a time."""
    transfers._on_cuda = True

    def start(end_s: float) -> Transfer:
        work = cast(dist.Work, TimedWork(clock, end_s))
        return transfers._start("send to", 1, 7, lambda: (torch.empty(0), work))

    return start


def test_each_completed_transfer_extends_the_time_limit(clock: Clock) -> None:
    """While transfers complete, it does not matter how many others start."""
    transfers = Transfers(FailureState(0), torch.device("cpu"), LIMIT_S)
    start = start_timed(transfers, clock)
    start(0.2)
    ends = [0.4, 0.6, 0.8, 1.0]

    def progress() -> None:
        while ends:
            start(ends.pop(0))

    transfers.await_all(progress)
    assert clock.now_s == pytest.approx(1.0)


def test_a_transfer_that_is_complete_when_another_starts_extends_the_time_limit(clock: Clock) -> None:
    transfers = Transfers(FailureState(0), torch.device("cpu"), LIMIT_S)
    start = start_timed(transfers, clock)
    last = [start(0.2)]

    def progress() -> None:
        if len(last) < 5 and last[-1].work.is_completed():
            last.append(start(clock.now_s + 0.2))

    transfers.await_all(progress)
    assert len(last) == 5 and clock.now_s == pytest.approx(1.0)


def test_the_time_limit_begins_again_after_a_completed_transfer(clock: Clock) -> None:
    transfers = Transfers(FailureState(0), torch.device("cpu"), LIMIT_S)
    start = start_timed(transfers, clock)
    start(100.0)
    start(0.2)
    with pytest.raises(TransportTimeout) as raised:
        transfers.await_all()
    assert (raised.value.peer, raised.value.op, raised.value.tag) == (1, "send to", 7)
    assert 0.2 + LIMIT_S < clock.now_s < 0.3 + LIMIT_S + 0.1
