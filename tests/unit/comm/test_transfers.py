"""Transfers that fail after they were started."""

from __future__ import annotations

import gc
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

from ds_ext.comm.failure_state import FailureState
from ds_ext.comm.transfers import Transfer, Transfers
from ds_ext.errors import TransportError


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
    transfers._unfinished.append(Transfer(failed_work(), torch.empty(0), "recv from", 1, 7))
    with pytest.raises(TransportError) as raised:
        transfers.await_receives()
    assert (raised.value.peer, raised.value.op, raised.value.tag) == (1, "recv from", 7)
