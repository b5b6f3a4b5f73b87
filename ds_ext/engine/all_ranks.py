"""Calls that all ranks make together: all succeed, or all raise the same error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import ConfigError, DsExtError

_T = TypeVar("_T")


def on_all_ranks(function: Callable[[], _T], error_type: type[DsExtError] = DsExtError) -> list[_T]:
    """Return the results of ``function()`` on all ranks. If it fails on one rank, all ranks raise that error.

    An OSError becomes an ``error_type`` on all ranks. Any other exception, for example from a module's
    ``state_dict()``, becomes an ``error_type`` on the other ranks; its own rank raises it unchanged, with traceback.
    """
    outcome: tuple[_T | None, DsExtError | None]
    unexpected: Exception | None = None
    try:
        outcome = function(), None
    except (ConfigError, error_type) as error:
        outcome = None, error
    except OSError as error:
        outcome = None, error_type(f"{error_text(error)}.")
    except Exception as error:
        unexpected = error
        outcome = None, error_type(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
    outcomes: list[tuple[Any, DsExtError | None]] = [(None, None)] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    for rank, (_, error) in enumerate(outcomes):
        if error is not None:
            error.reported_by = rank
            raise unexpected or error
    return [result for result, _ in outcomes]


def from_rank_0(function: Callable[[], _T], error_type: type[DsExtError] = DsExtError) -> _T:
    """Return the result of rank 0's ``function()`` on all ranks, or raise its error on all ranks."""
    results: list[Any] = on_all_ranks(function if dist.get_rank() == 0 else lambda: None, error_type)
    return results[0]


def error_text(error: OSError) -> str:
    return f"rank {dist.get_rank()}: {error.strerror}: {error.filename}"


def gather_rows(numbers: Sequence[float], device: torch.device) -> list[list[float]]:
    """Return the numbers of all ranks, one row per rank. Every rank passes as many."""
    row = torch.tensor(numbers, dtype=torch.float64, device=collective_device(device))
    rows = row.new_empty(dist.get_world_size(), len(numbers))
    dist.all_gather(list(rows), row)
    return rows.tolist()


def collective_device(device: torch.device) -> torch.device:
    """Return the device of tensors in collectives of all ranks: the CPU with gloo, otherwise ``device``."""
    return torch.device("cpu") if dist.get_backend() == "gloo" else device
