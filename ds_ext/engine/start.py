"""Start of a rank: the precision of its device, its threads, and the process group."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from ..comm.groups import limit_waits, wait_for_threads_at_exit, watch_hosts, watch_start
from ..comm.spin import usable_cores
from ..config.deepspeed_json import precision, precision_section
from ..config.job import JobConfig
from ..environment import (
    agent_serves_store,
    find_launcher,
    local_rank,
    local_world_size,
    master_port,
    rank,
    world_size,
)
from ..errors import ConfigError
from ..launch import slurm
from ..launch.job_facts import code_facts
from ..launch.launcher import set_single_rank
from ..launch.process import has_logging, print_stacks_on_signal, set_up_logging
from ..launch.roll_call import Facts, RollCall, make_early_roll_call
from .deepspeed_api.device import announce_locks, select_device
from .deepspeed_api.names import require_names


def check_precision(job: JobConfig) -> None:
    """Raise ConfigError if this rank's device does not support the job's precision. Needs no process group."""
    dtype, accelerator = precision(job.deepspeed), get_accelerator()
    if dtype == "fp32":
        return
    select_device()  # the query may allocate on the current device
    supports = {"bf16": accelerator.is_bf16_supported, "fp16": accelerator.is_fp16_supported}
    if supports[dtype]():
        return
    other = "fp16" if dtype == "bf16" else "bf16"
    half = f'"{other}": {{"enabled": true}} or ' if supports[other]() else ""
    key = f"{precision_section(job.deepspeed)}.enabled"
    raise ConfigError(
        f"{job.flags.get(key, key)}: the device {accelerator.device_name()} on this host does not support {dtype} "
        f"(got true). Use {half}fp32, which needs no section."
    )


def init_distributed(timeout_s: float = 120.0, facts: Facts | None = None) -> None:
    """Start the process group, nccl on CUDA and gloo on CPU, unless it already exists, also by torch's own call.

    Before a start, all ranks compare versions, source code and ``facts``. Logging is set up as by
    :func:`ds_ext.launch.process.set_up_logging`, unless the script has done so. Under Slurm's `srun`, rank, world size
    and address of rank 0 come from Slurm's variables. A process without a launcher is the only rank.

    Args:
        timeout_s: time limit for the other ranks, in seconds.
        facts: key -> additional value that must be the same on all ranks.

    Raises:
        ConfigError: ranks differ, a rank failed, the port is in use, Slurm's variables contradict each other, or the
            installed DeepSpeed or torch lacks a name of :mod:`.deepspeed_api.names`.
        TransportError: a rank did not join in time.
    """
    require_names("deepspeed", "torch", "python")
    announce_locks()
    slurm.set_rank()
    set_single_rank()
    print_stacks_on_signal()
    if not has_logging():
        set_up_logging()
    if get_accelerator().device_name() == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_of_rank())
    select_device()
    if not torch.distributed.is_initialized():
        watch_start()
        try:
            # Rank 0 may serve the store. Keep the roll call until the process group shares the store.
            call = make_early_roll_call(rank(), world_size(), timeout_s)
            if call is not None:
                call.require_same({**code_facts(), **(facts or {})}, timeout_s)
                if agent_serves_store():
                    _join(call, timedelta(seconds=timeout_s))
            deepspeed.init_distributed(
                get_accelerator().communication_backend_name(),
                verbose=False,
                timeout=timedelta(seconds=timeout_s),
            )
            limit_waits(timeout_s)
        except torch.distributed.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise ConfigError(
                f"MASTER_PORT: already in use on this host (got {master_port()}). Stop the other job, "
                f"or pass the launcher another --master_port (with srun: export MASTER_PORT)."
            ) from None
    elif not dist.is_initialized():
        deepspeed.init_distributed(verbose=False)
    wait_for_threads_at_exit()
    watch_hosts()
    os.environ.setdefault("LOCAL_RANK", "0")


def _join(call: RollCall, timeout: timedelta) -> None:
    """Start the process group on the roll call's store: torchrun's own still has the keys of earlier starts."""
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

    accelerator = get_accelerator()
    device = accelerator.device(local_rank()) if accelerator.device_name() == "cuda" else None
    torch.distributed.init_process_group(
        accelerator.communication_backend_name(),
        store=PrefixStore("process_group", call.store),
        rank=call.rank,
        world_size=call.world_size,
        timeout=timeout,
        device_id=device,
    )


def threads_of_rank() -> int:
    """Return the number of torch's CPU threads: the usable cores divided by the ranks that share them."""
    ranks = local_world_size()
    launched = find_launcher()
    with contextlib.suppress(OSError):  # the launcher may have exited
        if launched is not None and os.sched_getaffinity(0) != os.sched_getaffinity(launched[1]):
            ranks = 1  # the launcher or a wrapper pinned this rank to separate cores
    return max(1, int(usable_cores() // ranks))
