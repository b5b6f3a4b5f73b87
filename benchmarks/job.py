"""Job of a benchmark's ranks: what the command passes to them, and what they build."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ds_ext.errors import DsExtError
from ds_ext.pipe_schedules import Timetable
from ds_ext.pipe_schedules.costs import Costs


class RankFailure(DsExtError):
    """A rank failed, died or did not answer in time; the text is one line."""


class Worker(Protocol):
    """One rank's part of an engine under test."""

    @property
    def timetable(self) -> Timetable | None:
        """Order of the ops, if the engine has one; only that of rank 0 is read."""
        ...

    def run(self) -> Any:
        """Measure once. All ranks call it after a barrier."""
        ...


@dataclass(frozen=True)
class Job:
    """Settings of all engines of a benchmark.

    Args:
        build: called on every rank with the name of the engine and this job.
        num_ranks: ranks of an engine.
        timeout_s: limit on every wait of an engine for its peers.
        micro_batches: N per step.
        costs: times of emulated passes in milliseconds.
        message_kb: size of an activation in KiB.
        modules: modules to import before the engines are built, because they register schedules.
        device: "cpu" or "cuda". Ranks share GPUs if they outnumber them.
    """

    build: Callable[[str, Any], Worker]
    num_ranks: int
    timeout_s: float
    micro_batches: int = 1
    costs: Costs = field(default_factory=Costs)
    message_kb: float = 4.0
    modules: tuple[str, ...] = ()
    device: str = "cpu"

    def torch_device(self) -> Any:
        """Return the torch.device of this rank."""
        import torch

        return (
            torch.device("cuda", torch.cuda.current_device())
            if self.device == "cuda"
            else torch.device("cpu")
        )
