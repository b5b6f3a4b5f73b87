"""Steps of a checkpoint that all ranks take: all succeed, or all raise the same error."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...errors import CheckpointError, ConfigError, DsExtError
from .folder import good_checkpoints


def together(act: Callable[[], Any], tag: str = "", written: Path | None = None) -> list[Any]:
    """Return the results of ``act()`` on all ranks; when it fails on one, every rank raises that rank's error.

    An unforeseen error (of a module's ``state_dict()``, say) is raised unchanged on its rank, for its traceback; on the
    others it is a CheckpointError.

    Args:
        tag, written: name and folder of the checkpoint to write; the folder is removed on an error.
    """
    outcome: tuple[Any, Exception | None]
    unforeseen: Exception | None = None
    try:
        outcome = act(), None
    except (OSError, ConfigError, CheckpointError) as error:
        outcome = None, _as_reported(error, tag, written)
    except Exception as error:
        unforeseen = error
        outcome = None, CheckpointError(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, outcome)
    for rank, (_, error) in enumerate(everyone):
        if isinstance(error, DsExtError):
            error.reported_by = rank
    _raise_first([error for _, error in everyone], written, unforeseen)
    return [result for result, _ in everyone]


def by_rank_0(act: Callable[[], Any], tag: str = "", written: Path | None = None) -> Any:
    """Return the result of ``act()`` on rank 0, on all ranks; raise its error on all ranks."""
    return together(act if dist.get_rank() == 0 else lambda: None, tag, written)[0]


def _raise_first(errors: list[Exception | None], written: Path | None, unforeseen: Exception | None) -> None:
    error = next((error for error in errors if error is not None), None)
    if error is None:
        return
    if written is not None and dist.get_rank() == 0:
        shutil.rmtree(written, ignore_errors=True)
    raise unforeseen or error


def _as_reported(error: Exception, tag: str, written: Path | None) -> Exception:
    """Return a failure to write as an error that names the last good checkpoint."""
    if not isinstance(error, OSError):
        return error
    rank = dist.get_rank()
    if not tag:
        return CheckpointError(f"rank {rank}: {error.strerror}: {error.filename}.")
    good = good_checkpoints(written.parent) if written is not None else []
    left = f"The last whole one is {good[-1]}, as it was." if good else "There is no other checkpoint here."
    return CheckpointError(
        f"the checkpoint {tag!r} was not saved: rank {rank}: {error.strerror}: {error.filename}. {left}"
    )
