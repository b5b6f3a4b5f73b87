"""Common parts of the roles of forward and backward ranks (FBD).

A backward rank has the optimizer, ZeRO-1, clipping and loss scale. Its grid contains only backward ranks, so DeepSpeed
sees no others. A forward rank has no optimizer and no graphs, and its grid contains only forward ranks. Forward ranks
send outputs. Backward ranks send a credit for every output they receive, and new weights after each step that changed
them. The optimizer's values are gathered with the loss.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from datetime import timedelta

from deepspeed import comm as dist
from torch.distributed import ProcessGroup

from ...comm.groups import set_limit
from ...parallel.fbd import BACKWARD_ROLE, FORWARD_ROLE, DisaggregatedLayout
from ...pipe_schedules.bridge import TimetableSchedule
from ..all_ranks import gather_rows
from ..engine import PipelineEngine
from ..messages import SPARE
from ..role import Role
from .weights import WeightLink

_MAX_SHOWN = 16  # ranks per role in an error


class DisaggregatedRole(Role):
    """Role of a forward or backward rank. ``timeout_s`` is the time limit of a message."""

    engine: PipelineEngine
    link: WeightLink | None

    def __init__(self, layout: DisaggregatedLayout, timeout_s: float) -> None:
        self.layout, self._timeout_s = layout, timeout_s
        self.first_in_checkpoints = min(layout.groups()["backward"][0])
        self.backward_values: dict[str, float] = {}  # of the optimizers of the backward ranks
        self.group_rates: list[float] = []  # of all parameter groups of the backward ranks
        self._step_group: ProcessGroup | None = None

    def max_held(self) -> dict[tuple[int, int], int]:
        """Return how many messages the receiver of each FBD link may hold, by (sender, receiver) global ranks.

        A forward rank is at most ``most_ahead`` outputs ahead, which is at most the number of stages, and gets one
        credit for each output. Of the weights, the receiver holds one piece. Every link has room for ``SPARE`` more.
        """
        held: dict[tuple[int, int], int] = {}
        groups = self.layout.groups()
        for forward, backward in groups["hand-over"]:
            held[backward, forward] = held[forward, backward] = self.layout.placement.stages + SPARE
        for forward, backward in groups["weights"]:
            held[backward, forward] = 1 + SPARE
        return held

    def start(self, engine: PipelineEngine) -> None:
        self.engine = engine
        self.stage, self.pipe = self.layout.stage_and_pipe(engine.module.device_index)
        self.link = self._make_link()
        self.weights_loaded()

    @abstractmethod
    def _make_link(self) -> WeightLink | None:
        """Return this rank's end of the weight link; None for a backward rank that sends no weights."""

    @abstractmethod
    def sync_weights(self) -> None:
        """Send the weights of the backward ranks to the forward ranks. All ranks must call this together."""

    def weights_loaded(self) -> None:
        self.sync_weights()
        self.set_optimizer_values(gather_rows(self.optimizer_values(), self.engine.device))

    def set_optimizer_values(self, rows: Sequence[Sequence[float]]) -> None:
        """Store the optimizer's values of the first backward rank. All ranks call this together."""
        names = ("groups", "grad_norm", "skipped_steps", "loss_scale")
        row = rows[self.first_in_checkpoints]
        groups = int(row[0])
        if groups != len(self.group_rates):
            self.group_rates = [0.0] * groups
            return self.set_optimizer_values(gather_rows(self.optimizer_values(), self.engine.device))
        self.backward_values = dict(zip(names, row, strict=False))
        self.group_rates = list(row[len(names) :])

    def wait_for_step(self, schedule: TimetableSchedule) -> None:
        """Wait for all ranks, up to the limit for a step: some ranks have no work in it."""
        if self._step_group is None:
            self._step_group = dist.new_group(ranks=list(range(dist.get_world_size())))
        limit = timedelta(seconds=self.step_limit_s(schedule))
        set_limit(self._step_group, limit)
        dist.barrier(group=self._step_group)

    def step_limit_s(self, schedule: TimetableSchedule) -> float:
        """Return the limit on a wait for a whole step: the limit of a message times the number of micro-batches."""
        return self._timeout_s * schedule.program.timetable.micro_batches

    # --- failures ---

    def describe_ranks(self, text: str) -> str:
        """Return the roles of the ranks named in an error, or of all ranks for a collective, which names no rank."""
        ranks = [rank for rank in _ranks_in(text) if rank < self.layout.world_size]
        if ranks:
            return ", ".join(f"rank {rank} is {self._describe(rank)}" for rank in ranks)
        groups = self.layout.groups()
        return ", ".join(
            f"{role} ranks {_shorten(groups[role][0])}" for role in (FORWARD_ROLE, BACKWARD_ROLE)
        )

    def _describe(self, rank: int) -> str:
        """Return the rank as ``the forward rank of stage 0``, with pipeline, group and tensor-parallel rank if any."""
        device, group, tensor = self.layout.coordinates(rank)
        stage, pipe = self.layout.stage_and_pipe(device)
        position = [f"the {self.layout.role(rank)} rank of stage {stage}"]
        if pipe is not None and self.layout.placement.replicas > 1:
            position.append(f"pipeline {pipe}")
        if self.layout.data_parallel_size > 1:
            position.append(f"group {group}")
        if self.layout.tensor_ranks(device) > 1:
            position.append(f"tensor-parallel rank {tensor}")
        return ", ".join(position)


def _ranks_in(text: str) -> list[int]:
    return [*dict.fromkeys(int(number) for number in re.findall(r"\brank (\d+)", text))]


def _shorten(ranks: list[int]) -> str:
    """Return ranks, for example as ``0 2 4 6``; at most ``_MAX_SHOWN`` of them."""
    return " ".join(map(str, sorted(ranks)[:_MAX_SHOWN])) + (" ..." if len(ranks) > _MAX_SHOWN else "")
