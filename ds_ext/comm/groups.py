"""What the transports over torch.distributed share: groups, time limits and the causes of failures."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from ds_ext.errors import TransportError


def new_group(ranks: list[int] | None, backend: str, timeout_s: float) -> dist.ProcessGroup | None:
    """A process group of `ranks` (None: of all); None on ranks outside it.

    Every rank of the world calls this, in the same order.
    """
    if not dist.is_initialized():
        raise TransportError(
            "torch.distributed is not initialized: call deepspeed.init_distributed() first, "
            "in processes that `deepspeed` or `torchrun` has started"
        )
    group = dist.new_group(ranks, backend=backend, timeout=timedelta(seconds=timeout_s))
    return group if isinstance(group, dist.ProcessGroup) else None


def limit_waits(timeout_s: float) -> None:
    """Give every process group of this rank the time limit, so that no collective waits longer for a silent rank.

    DeepSpeed makes its groups without one, and torch's is half an hour on CPU.
    """
    world = dist.distributed_c10d._world
    for group in list(world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def wait_time(deadline: float) -> timedelta:
    """The time left until `deadline` (of time.monotonic), as torch's Work.wait takes it."""
    # gloo takes zero as "no limit given", so the shortest wait is a millisecond.
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))


def explain(error: RuntimeError, peer: int, waited_s: float, limit_s: float) -> str:
    """Why a transfer with rank `peer` failed and what to do, from the text of torch's error."""
    text = str(error).lower()
    if "timed out" in text or "timeout" in text:
        return (
            f"nothing moved within the limit of {round(limit_s, 2):g} s. See what rank {peer} is doing; "
            "if it is only slow, raise transport_options.timeout_s"
        )
    if any(sign in text for sign in ("closed", "reset by peer", "broken pipe")):
        return (
            f"rank {peer} closed the connection after {waited_s:.1f} s of waiting. It has most likely "
            f"died or failed first: look for the first error in the output of rank {peer}"
        )
    return f"failed after {waited_s:.1f} s: {error}"
