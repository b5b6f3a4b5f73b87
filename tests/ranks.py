"""Pools of real ranks, joined by gloo, that many tests share.

A pool (see benchmarks/rank_pool.py) is started at its first use, and anew after some calls and after any failure,
because a failed rank leaves messages behind.

    def sum_of_ranks(rank: int, offset: int) -> float:          # a module-level function: it is sent by name
        value = torch.tensor(float(rank + offset))
        torch.distributed.all_reduce(value)
        return value.item()

    def test_sum(ranks: Ranks) -> None:
        assert ranks(4).run(sum_of_ranks, 10) == [46.0] * 4
"""

from __future__ import annotations

import copy
import faulthandler
import gc
import os
import random
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

import benchmarks.rank_pool as base
from ds_ext.comm.spin import usable_cores

START_LIMIT_S = 180.0
BUSY = 2.0  # times as long as on a host that does nothing else
CALLS_PER_START = 200  # bounds what tests and libraries leave in the memory of a rank
MOST_THREADS = 150  # of a rank after a call


def fork_server() -> ForkServerContext:
    """Return the context whose processes are forked from a server that has imported torch and DeepSpeed."""
    # Optimizers import torch's compiler in part, and models of transformers peft: 2 s of CPU time on every rank each.
    libraries = ["torch", "torch._dynamo", "deepspeed", "peft", "pytest", "hypothesis"]
    return base.fork_server(
        [*libraries, "ds_ext.engine", "ds_ext.observe.metrics", "ds_ext.recipes.models.gpt"]
    )


class RankPool(base.RankPool):
    """`world_size` processes in one gloo world."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size, fork_server())
        self._calls = 0

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Call `fn(rank, *args)` on every rank and return the results by rank. Seeds are 0 before the call.

        Args:
            timeout_s: limit of a host with one core a rank. Ranks that share a core get more time.
        """
        if "<locals>" in fn.__qualname__ or fn.__name__ == "<lambda>":
            raise TypeError(f"{fn.__qualname__} is sent to the ranks by name: move it to module level")
        if self._calls >= CALLS_PER_START or self._has_many_threads():
            self.close()
        busy = BUSY * max(1.0, self.world_size / usable_cores())
        if not self.pids:
            self._calls = 0
            super().run(join_world, timeout_s=START_LIMIT_S * busy)
        self._calls += 1
        return super().run(call_in_test, fn, args, timeout_s=timeout_s * busy)

    def _has_many_threads(self) -> bool:
        """Return whether a rank has the threads of many process groups, which wake 100 times a second each."""
        try:
            return any(len(os.listdir(f"/proc/{pid}/task")) > MOST_THREADS for pid in self.pids)
        except OSError:  # a rank has ended, which the next call reports
            return False


class Ranks:
    """The pools of a session, one per world size, each started at its first use."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world_size: int) -> RankPool:
        return self._pools.setdefault(world_size, RankPool(world_size))

    def close(self) -> None:
        """End every rank of every pool."""
        for pool in self._pools.values():
            pool.close()


def join_world(rank: int) -> None:
    """Join the gloo world on a new rank."""
    faulthandler.enable(2)
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    import deepspeed
    import deepspeed.ops
    import torch

    torch.set_num_threads(1)
    # Otherwise DeepSpeed compiles this op when the world is made: 30 s, for a collective not used here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    # torch.manual_seed formats the stack for each kind of device, in case it starts later.
    for devices in (torch.cuda, torch.mtia, torch.xpu):
        if not devices.is_available():
            devices.manual_seed_all = _ignore_seed  # pyright: ignore[reportAttributeAccessIssue]
    tables = vars(deepspeed.utils.groups).items()
    _first_groups.update(
        copy.deepcopy(
            {name: value for name, value in tables if value is None or name.endswith(("_GROUP", "_RANKS"))}
        )
    )
    gc.freeze()  # what is imported by now never becomes garbage: the collection after each call stays cheap


_first_groups: dict[str, Any] = {}  # variables in which DeepSpeed keeps process groups, before the first call


def _ignore_seed(seed: int) -> None:
    """Replace ``manual_seed_all`` of devices that this host does not have."""


def destroy_groups() -> None:
    """Destroy the groups of earlier calls: each has three threads, which wake 100 times a second."""
    import torch.distributed as dist
    from deepspeed.utils import groups

    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    vars(groups).update(copy.deepcopy(_first_groups))


def call_in_test(rank: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Set all seeds to 0, call `fn(rank, *args)`, and clean up what would end with the process of a real job."""
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    destroy_groups()  # only now, when no rank waits for a message of the last call
    try:
        if os.environ.get("DS_EXT_TEST_TYPES"):
            from tests.layout_types import checked

            with checked():
                return fn(rank, *args)
        return fn(rank, *args)
    finally:
        gc.collect()
        # DeepSpeed keeps engines alive, and with them the locks of their folders.
        for lock in [one for one in gc.get_objects() if type(one).__name__ == "FolderLock"]:
            lock.release()
        if run := sys.modules.get("ds_ext.engine.checkpoint.run"):
            run.this_run.cache_clear()
