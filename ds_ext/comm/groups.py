"""Process groups, time limits and causes of failures, for the transports over torch.distributed."""

from __future__ import annotations

import atexit
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .. import environment
from ..errors import TransportError
from . import host_watch
from .rounds import Link

FIRST_STEP_FACTOR = 5  # the first step also compiles, loads kernels and connects NCCL
_WATCHDOG_MARGIN_S = 60.0
_IDLE_LIMIT_S, _IDLE_POLL_S = 2.0, 0.01
_CLOSED_SIGNS = ("closed", "reset by peer", "broken pipe", "unreachable", "no route to host", "host is down")


def require_initialized() -> None:
    if not dist.is_initialized():
        raise TransportError(
            "torch.distributed: not initialized. Call deepspeed.init_distributed() first, in processes started by "
            "`deepspeed` or `torchrun`."
        )


def first_step_limit_s(timeout_s: float) -> float:
    return FIRST_STEP_FACTOR * timeout_s


def watchdog_s(timeout_s: float) -> float:
    """Return the time limit of NCCL's watchdog, which ends the process without naming the peer.

    It is later than every limit of ds_ext, whose errors name the rank, the peer and the operation.
    """
    return first_step_limit_s(timeout_s) + _WATCHDOG_MARGIN_S


def backend_limit(backend: str, timeout_s: float) -> timedelta:
    """Return the time limit of a process group: ``timeout_s``, or the watchdog's for NCCL.

    ``backend`` is one backend, or one for each type of device, such as "cpu:gloo,cuda:nccl".
    """
    return timedelta(seconds=watchdog_s(timeout_s) if "nccl" in backend else timeout_s)


def new_group(ranks: list[int] | None, backend: str, timeout_s: float) -> dist.ProcessGroup | None:
    """Create a process group of ``ranks`` (None: all ranks). Return None on other ranks.

    A collective call of all ranks of the world.
    """
    require_initialized()
    group = dist.new_group(ranks, backend=backend, timeout=backend_limit(backend, timeout_s))
    return group if isinstance(group, dist.ProcessGroup) else None


def new_pair_groups(links: Sequence[Link], backend: str, timeout_s: float) -> dict[Link, dist.ProcessGroup]:
    """Create a process group for each link, and return those of this rank. All ranks call this with the same links.

    Only the two ranks of a link communicate.
    """
    require_initialized()
    with _without_splits():
        groups = {link: new_group(list(link), backend, timeout_s) for link in links}
    return {link: group for link, group in groups.items() if group is not None}


@contextmanager
def _without_splits() -> Iterator[None]:
    """Context in which NCCL groups are not split off the communicator of the world.

    DeepSpeed binds the world to a device. torch then makes every group by ncclCommSplit, in which all ranks of the
    world take part, one group after the other. Without the binding, two ranks connect at their first transfer.
    """
    world: Any = dist.group.WORLD
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


def limit_waits(timeout_s: float) -> None:
    """Set the time limit of all process groups of this rank.

    DeepSpeed creates its groups without a limit, and torch's default is 30 minutes on CPU.
    """
    world = dist.distributed_c10d._world
    for group in list(world.pg_map):
        limit = backend_limit(dist.get_backend_config(group), timeout_s)
        set_limit(group, limit)


def set_limit(group: Any, limit: timedelta) -> None:
    """Set the time limit of a process group. torch 2.14 has a public function for it."""
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(limit, group)


def wait_for_threads_at_exit() -> None:
    """Keep Python from exiting before torch's threads are idle; call this once the process group exists.

    A thread of gloo releases the tensors of a collective after its caller has continued, and needs Python's lock for
    it. If Python is exiting then, the process aborts: "terminate called without an active exception".
    """
    # Python calls the newest handler first: register again, so that the wait precedes those registered since.
    atexit.unregister(_wait_for_threads)
    atexit.register(_wait_for_threads)


def _wait_for_threads() -> None:
    deadline, idle = time.monotonic() + _IDLE_LIMIT_S, 0
    while idle < 2 and time.monotonic() < deadline:
        time.sleep(_IDLE_POLL_S)  # without Python's lock, so that they can take it
        idle = idle + 1 if _native_threads_sleep() else 0


def _native_threads_sleep() -> bool:
    of_python = {thread.native_id for thread in threading.enumerate()}
    return not any(
        state == "R" for thread, state in environment.thread_states().items() if thread not in of_python
    )


def watch_hosts() -> None:
    """Start the heartbeat for connections between hosts; a collective call of all ranks of the world.

    Ranks exchange their hosts' names and addresses through the rendezvous store.
    """
    earlier = host_watch.running()
    if dist.get_world_size() == 1 or (earlier is not None and earlier.knows_hosts):
        return
    store: Any = dist.distributed_c10d._get_default_store()
    store.set(_host_key(dist.get_rank()), json.dumps([socket.gethostname(), host_watch.own_addresses()]))
    host_watch.start(dist.get_rank(), job_hosts(), environment.master_port())


def watch_start() -> None:
    """Start the heartbeat before the hosts of the job are known, while the ranks meet and connect."""
    if environment.world_size() > 1 and dist.is_available():
        host_watch.start(environment.rank(), None, environment.master_port())


def job_hosts() -> list[host_watch.Host]:
    """Return the hosts of the job with their ranks. Wait until all ranks have called :func:`watch_hosts`."""
    world = dist.get_world_size()
    if world == 1:
        return [host_watch.Host(socket.gethostname(), frozenset(host_watch.own_addresses()), (0,))]
    store: Any = dist.distributed_c10d._get_default_store()
    keys = [_host_key(rank) for rank in range(world)]
    hosts: dict[tuple[str, frozenset[str]], list[int]] = {}
    answers = store.multi_get(keys) if store.has_extended_api() else map(store.get, keys)
    for rank, answer in enumerate(answers):
        name, addresses = json.loads(answer)
        hosts.setdefault((name, frozenset(addresses)), []).append(rank)
    return [host_watch.Host(*host, tuple(ranks)) for host, ranks in hosts.items()]


def _host_key(rank: int) -> str:
    return f"ds_ext/host_of_rank_{rank}"


def wait_time(deadline: float) -> timedelta:
    """Return the time until ``deadline`` (of time.monotonic), for torch's Work.wait."""
    # For gloo, zero means no limit.
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))


def explain(error: BaseException, peer: int, waited_s: float, limit_s: float) -> str:
    """Return why a transfer with rank ``peer`` failed and what to do, from the text of torch's error."""
    text = str(error).lower()
    if any(peer in host.ranks for host in host_watch.silent_hosts()):
        return f"rank {peer} or its host has not answered for {host_watch.SILENCE_S:g} s"
    if "timed out" in text or "timeout" in text:
        return (
            f"no progress within the limit of {round(limit_s, 2):g} s. Look for the first error in the output of "
            f"rank {peer}. If it is only slow, raise transport_options.timeout_s."
        )
    if any(sign in text for sign in _CLOSED_SIGNS):
        return (
            f"rank {peer} closed the connection (waited {waited_s:.1f} s). It probably failed first. Look for the "
            f"first error in the output of rank {peer}."
        )
    return f"failed after {waited_s:.1f} s: {error}"
