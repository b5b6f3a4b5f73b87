"""Calls that all ranks make together: all succeed, or all raise the same error."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..errors import CheckpointError, ConfigError, DsExtError
from .checkpoint.folder import good_checkpoints


def together(function: Callable[[], Any], tag: str = "", written: Path | None = None) -> list[Any]:
    """Return the results of ``function()`` on all ranks. If it fails on one rank, all ranks raise that error.

    An unexpected exception, for example of a module's ``state_dict()``, is a CheckpointError on the other ranks. The
    rank of the exception raises it unchanged, for the traceback.

    Args:
        function: function that each rank calls.
        tag, written: name and folder of the checkpoint that is being written; an error removes the folder.
    """
    outcome: tuple[Any, Exception | None]
    unexpected: Exception | None = None
    try:
        outcome = function(), None
    except OSError as error:
        outcome = None, _os_error(error, tag, written)
    except (ConfigError, CheckpointError) as error:
        outcome = None, error
    except Exception as error:
        unexpected = error
        outcome = None, CheckpointError(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    for rank, (_, error) in enumerate(outcomes):
        if isinstance(error, DsExtError):
            error.reported_by = rank
    error = next((error for _, error in outcomes if error is not None), None)
    if error is not None:
        if written is not None and dist.get_rank() == 0:
            shutil.rmtree(written, ignore_errors=True)
        raise unexpected or error
    return [result for result, _ in outcomes]


def by_rank_0(function: Callable[[], Any], tag: str = "", written: Path | None = None) -> Any:
    """Return the result of rank 0's ``function()`` on all ranks, or raise its error on all ranks."""
    return together(function if dist.get_rank() == 0 else lambda: None, tag, written)[0]


def _os_error(error: OSError, tag: str, written: Path | None) -> CheckpointError:
    """Return an error that names the last complete checkpoint if one is being written."""
    problem = f"rank {dist.get_rank()}: {error.strerror}: {error.filename}."
    if not tag:
        return CheckpointError(problem)
    complete = good_checkpoints(written.parent) if written is not None else []
    last = (
        f"The last complete one is {complete[-1]}."
        if complete
        else "The folder contains no other checkpoint."
    )
    return CheckpointError(f"the checkpoint {tag!r} was not saved: {problem} {last}")
