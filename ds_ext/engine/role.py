"""Role of a rank: what it does beside the passes of its stages. Forward and backward ranks (FBD) have their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.pipe import schedule as ds

from ..pipe_schedules.bridge import TimetableSchedule


class Role:
    """Role of a rank that trains its stages, as every rank does without FBD.

    Attributes:
        in_checkpoints: whether this rank writes and reads checkpoints; False if another one does so for its weights.
        first_in_checkpoints: rank that writes the values that are the same on all ranks.
        has_gradients: whether this rank has gradients and an optimizer.
        pipelines: pipelines whose micro-batches pass through this rank's pipeline, where DeepSpeed counts one.
        rates: learning rates of the last step; None: those of this rank's optimizer.
        handlers: handlers of instructions, which replace the engine's and get the arguments by name.
    """

    in_checkpoints = True
    first_in_checkpoints = 0
    has_gradients = True
    pipelines = 1
    rates: list[float] | None = None
    handlers: Mapping[type[ds.PipeInstruction], Callable[..., None]] = {}

    def max_held(self) -> dict[tuple[int, int], int]:
        """Return how many messages the receiver of each additional link may hold, by (sender, receiver) ranks."""
        return {}

    def start(self, engine: Any) -> None:
        """Start with a complete engine. All ranks call this together, as the methods below."""

    @contextmanager
    def executing(self, schedule: TimetableSchedule) -> Iterator[None]:
        yield

    def wait_for_step(self, schedule: TimetableSchedule) -> None:
        """Wait for the ranks that have not finished the step, before a gathering whose time limit is a message's."""

    def end_step(self) -> None:
        pass

    def optimizer_values(self) -> list[float]:
        """Return the optimizer's values that other ranks need after a step. Every rank returns as many."""
        return []

    def set_optimizer_values(self, rows: Sequence[Sequence[float]]) -> None:
        """Store the values of all ranks, one row per rank."""

    def weights_loaded(self) -> None:
        """Pass on weights that a checkpoint, a snapshot or another file has set."""

    def buffers_averaged(self, differed: bool) -> None:
        """Pass on buffers, which differed between the replicas."""

    def describe_ranks(self, text: str) -> str:
        """Return the roles of the ranks named in an error; empty if ranks have no roles."""
        return ""
