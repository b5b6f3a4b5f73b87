"""Device of this rank: its selection before anything allocates or communicates, its memory, and builds of its code."""

from __future__ import annotations

import logging
import os
import resource
import sys

import torch
from deepspeed.accelerator import get_accelerator
from torch.utils.file_baton import FileBaton

from ...environment import data_bytes, local_rank, started_s
from ...errors import ConfigError

logger = logging.getLogger(__name__)

# Hardware queues of a CUDA process, at most 32. By default there are 8, and streams that share one wait for each other.
# A rank has a stream per communicator, and a blocked receive must not hold up a send in the same queue.
_CUDA_QUEUES = "32"


def select_device() -> None:
    """Make the device of LOCAL_RANK the current one.

    DeepSpeed's engine does so too, but only after the first collectives. NCCL rejects these if all ranks of a host use
    device 0.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() == "cuda":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", _CUDA_QUEUES)  # read when CUDA starts
        if local_rank() >= torch.cuda.device_count():
            raise ConfigError(
                f"ranks: every one needs another GPU (got LOCAL_RANK {local_rank()} on a host with "
                f"{torch.cuda.device_count()}). Start fewer ranks per host, or set DS_ACCELERATOR=cpu."
            )
    accelerator.set_device(local_rank())


def free_bytes() -> int | None:
    """Return the bytes that this rank may still allocate: of its GPU, or on CPU under RLIMIT_DATA; None: no limit."""
    if get_accelerator().device_name() == "cuda":
        return torch.cuda.mem_get_info(local_rank())[0]
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit == resource.RLIM_INFINITY:
        return None
    return max(0, limit - data_bytes())


def current_device() -> torch.device:
    """Return the device of this rank, on which its groups communicate."""
    return torch.device(get_accelerator().current_device_name())


def read_peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: torch's allocations on CUDA, resident memory on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def announce_locks() -> None:
    """Log every lock of another build of a torch extension before torch waits for it.

    torch waits without a limit, also for the lock of a killed build. In a build by another rank of this job, only one
    rank of the host logs it.
    """
    FileBaton.wait = _wait_for_build


_wait = FileBaton.wait


def _wait_for_build(self: FileBaton) -> None:
    try:
        is_older = os.path.getmtime(self.lock_file_path) < started_s()
    except FileNotFoundError:
        return
    if is_older or local_rank() == 0:
        logger.warning(
            "%s: waiting for the build of a torch extension that holds this lock. If no build runs, delete the "
            "file and start again.",
            os.path.abspath(self.lock_file_path),
        )
    _wait(self)
