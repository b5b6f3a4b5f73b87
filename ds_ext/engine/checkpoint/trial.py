"""Check of the checkpoint folder before the first step, to avoid an error on the first save."""

from __future__ import annotations

import logging
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.constants import PIPE_REPLICATED

from ...errors import CheckpointError, ConfigError
from ..state import RankState
from ..together import by_rank_0, together
from .file import pickle_plain
from .folder import require_tag, start_writing
from .save import require_plain_extra_states, state_of
from .states import Checkpointed, OptimizerStates, parameters_of

logger = logging.getLogger(__name__)

_TAG = "trial"
_MASTER_BYTES, _STATE_BYTES = 4, 4  # master weights and optimizer states are fp32


def try_folder(engine: Checkpointed, folder: Path, tags: Sequence[str] | None) -> None:
    """Write a small file on every rank and read it on rank 0. All ranks must call this together.

    A warning names the checkpoints of other runs in the folder; with ``tags``, only those of these names.

    Raises:
        ConfigError: on all ranks. A rank has a state that cannot be saved, cannot write, or sees another folder;
            another job saves there; or the free space is too small for a checkpoint.
    """
    try:
        _try(engine, folder.absolute(), tags)
    except (CheckpointError, ConfigError) as error:
        reported = ConfigError(f"checkpoints cannot be saved: {error}")
        reported.reported_by = 0
        raise reported from None


def _try(engine: Checkpointed, folder: Path, tags: Sequence[str] | None) -> None:
    def start() -> Path:
        engine.run.lock(folder, tags)
        for tag in tags or ():
            require_tag(folder, tag)
        return start_writing(folder, _TAG)

    written = by_rank_0(start, CheckpointError)
    try:
        needed = sum(together(lambda: _write(written, engine), CheckpointError))
        by_rank_0(lambda: _read(written, needed), CheckpointError)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(written, ignore_errors=True)


def require_states(optimizer: Any, recovers: bool) -> None:
    """Check that the optimizer's states can be saved. All ranks must call this together.

    Otherwise rank 0 logs a warning, or all ranks raise ConfigError if the job ``recovers`` from snapshots of them.
    """
    problems = together(OptimizerStates(optimizer).problem)
    if problem := next(filter(None, problems), ""):
        if recovers:
            raise ConfigError(problem)
        if dist.get_rank() == 0:
            logger.warning("no checkpoint can be saved: %s", problem)


def checkpoint_bytes(engine: Checkpointed) -> int:
    """Return the bytes of the weights and optimizer states that this rank counts toward a checkpoint.

    Replicas count once. The number of states follows from the optimizer: two for Adam, one for Lion and for momentum.
    """
    if not engine.role.in_checkpoints or engine.mpu.get_data_parallel_rank() != 0:
        return 0
    optimizer = OptimizerStates(engine.optimizer)
    num_states = {
        id(parameter): _num_states(optimizer.name or "", group)
        for group, parameters in optimizer.groups()
        for parameter in parameters
    }
    is_first_shard = engine.mpu.get_slice_parallel_rank() == 0
    total = 0
    for local in parameters_of(engine.module, engine.layout.tensor_parallel_size).values():
        parameter = local.parameter
        if getattr(parameter, PIPE_REPLICATED, False):
            continue
        bytes_per_element = parameter.element_size()
        is_sharded = local.shape.dim is not None
        if (is_first_shard or is_sharded) and id(parameter) in num_states:
            bytes_per_element += num_states[id(parameter)] * _STATE_BYTES
            if parameter.element_size() < _MASTER_BYTES:
                bytes_per_element += _MASTER_BYTES
        total += parameter.numel() * bytes_per_element
    return total


def _num_states(optimizer: str, group: Mapping[str, Any]) -> int:
    """Return the minimum number of states of an optimizer per element of a parameter group."""
    if any(name in optimizer.lower() for name in ("lion", "adagrad", "rmsprop")):
        return 1
    return 2 if "betas" in group else int(bool(group.get("momentum")))


def _write(written: Path, engine: Checkpointed) -> int:
    """Check this rank's states and write its small file. Returns the bytes of its part of a checkpoint.

    Raises CheckpointError if it does not see the folder, and ConfigError for a state that cannot be saved.
    """
    rank = dist.get_rank()
    if not written.is_dir():
        raise CheckpointError(
            f"rank {rank} (host {socket.gethostname()}) does not see what rank 0 created in {written.parent}. Use a "
            f"file system that all hosts share."
        )
    if problem := OptimizerStates(engine.optimizer).problem():
        raise ConfigError(problem)
    require_plain_extra_states(RankState(engine))
    if rank == engine.role.first_in_checkpoints:
        pickle_plain(state_of(engine, {}))
    (written / f"rank_{rank}").write_text(str(rank))
    return checkpoint_bytes(engine)


def _read(written: Path, needed: int) -> None:
    """Raise CheckpointError unless rank 0 sees the files of all ranks, and ``needed`` free bytes."""
    for rank in range(dist.get_world_size()):
        path = written / f"rank_{rank}"
        if not path.is_file() or path.read_text() != str(rank):
            raise CheckpointError(
                f"rank 0 does not see what rank {rank} wrote to {written.parent}. Use a file system that all hosts "
                f"share."
            )
    free = shutil.disk_usage(written).free
    if free < needed:
        raise CheckpointError(
            f"{written.parent}: a checkpoint needs {needed:,} bytes (got {free:,} free bytes). Free "
            f"{needed - free:,} more."
        )
