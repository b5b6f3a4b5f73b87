"""Device of this rank: its selection before anything allocates or communicates, and its memory."""

from __future__ import annotations

import os
import resource
import sys

import torch
from deepspeed.accelerator import get_accelerator

from ...environment import data_bytes, local_rank
from ...errors import ConfigError

# Hardware queues of a CUDA process, at most 32. By default there are 8, and streams that share one wait for each other.
# A rank has a stream per communicator, and a blocked receive must not hold up a send in the same queue.
_CUDA_QUEUES = "32"


def select_device() -> None:
    """Make the device of LOCAL_RANK the current one.

    DeepSpeed's engine does so too, but only after the first collectives. NCCL rejects these if all ranks of a host use
    device 0.

    Raises:
        ConfigError: the host has no such device.
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


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: torch's allocations on CUDA, resident memory on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
