"""Check of the checkpoint folder before the first step, to avoid an error on the first save."""

from __future__ import annotations

import logging
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from ...errors import CheckpointError, ConfigError
from ..all_ranks import from_rank_0, on_all_ranks
from ..engine_state import EngineState
from ..rank_state import RankState
from ..types import Optimizer
from .file import pickle_plain
from .folder import require_tag, start_writing
from .optimizer_states import OptimizerStates
from .save import checkpoint_bytes, require_plain_extra_states, state_of

logger = logging.getLogger(__name__)

_TAG = "trial"


def try_folder(engine: EngineState, folder: Path, tags: Sequence[str] | None) -> None:
    """Write a small file on every rank and read it on rank 0. All ranks must call this together.

    A warning names the checkpoints of other runs in the folder; with ``tags``, only those of these names.
    """
    try:
        _try(engine, folder.absolute(), tags)
    except (CheckpointError, ConfigError) as error:
        raise ConfigError(f"checkpoints cannot be saved: {error}").of_all_ranks() from None


def _try(engine: EngineState, folder: Path, tags: Sequence[str] | None) -> None:
    def start() -> Path:
        engine.run.lock(folder, tags)
        for tag in tags or ():
            require_tag(folder, tag)
        return start_writing(folder, _TAG)

    written = from_rank_0(start, CheckpointError)
    try:
        needed = sum(on_all_ranks(lambda: _write(written, engine), CheckpointError))
        from_rank_0(lambda: _read(written, needed), CheckpointError)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(written, ignore_errors=True)


def check_states(optimizer: Optimizer, recovers: bool) -> None:
    """Check that the optimizer's states can be saved. All ranks must call this together.

    Otherwise rank 0 logs a warning, or all ranks raise ConfigError if the job ``recovers`` from snapshots of them.
    """
    problems = on_all_ranks(OptimizerStates(optimizer).problem)
    if problem := next(filter(None, problems), ""):
        if recovers:
            raise ConfigError(problem)
        if dist.get_rank() == 0:
            logger.warning("no checkpoint can be saved: %s", problem)


def _write(written: Path, engine: EngineState) -> int:
    """Check this rank's states and write its small file. Returns the bytes of its part of a checkpoint."""
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
